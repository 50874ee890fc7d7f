"""Marked temporal point processes: events in continuous time, their likelihood and prediction."""

from osciformer.events.blending import BlendedProcess, fit_weights
from osciformer.events.classical import (
    GapDensity,
    HawkesFit,
    HawkesProcess,
    InhomogeneousPoissonProcess,
    PoissonProcess,
    RenewalProcess,
    fit_hawkes,
    simulate_hawkes,
)
from osciformer.events.likelihood import (
    Integral,
    LikelihoodTerms,
    LogLikelihood,
    integrate_intensity,
    likelihood_terms,
    log_likelihood,
    summarise,
)
from osciformer.events.pictures import plot_calibration, plot_intensity
from osciformer.events.prediction import (
    Futures,
    InvalidBoundError,
    NextEvent,
    predict_last,
    predict_next,
    sample,
    type_probabilities_at,
)
from osciformer.events.process import EventProcess
from osciformer.events.scores import (
    Calibration,
    EventScores,
    SequenceScores,
    calibrate,
    rescaled_gaps,
    score,
    score_sequences,
)
from osciformer.events.sequences import (
    EventBatch,
    EventSequence,
    EventSequences,
    events_from_frame,
    events_from_parquet,
)
from osciformer.events.stream import EventStream

__all__ = [
    "BlendedProcess",
    "Calibration",
    "EventBatch",
    "EventProcess",
    "EventScores",
    "EventSequence",
    "EventSequences",
    "EventStream",
    "Futures",
    "GapDensity",
    "HawkesFit",
    "HawkesProcess",
    "InhomogeneousPoissonProcess",
    "Integral",
    "InvalidBoundError",
    "LikelihoodTerms",
    "LogLikelihood",
    "NextEvent",
    "PoissonProcess",
    "RenewalProcess",
    "SequenceScores",
    "calibrate",
    "events_from_frame",
    "events_from_parquet",
    "fit_hawkes",
    "fit_weights",
    "integrate_intensity",
    "likelihood_terms",
    "log_likelihood",
    "plot_calibration",
    "plot_intensity",
    "predict_last",
    "predict_next",
    "rescaled_gaps",
    "sample",
    "score",
    "score_sequences",
    "simulate_hawkes",
    "summarise",
    "type_probabilities_at",
]
