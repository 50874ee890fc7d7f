"""Marked temporal point processes: events in continuous time, their likelihood and prediction."""

from osciformer.events.batch import EventBatch
from osciformer.events.blending import BlendedProcess, fit_weights
from osciformer.events.calibration import Calibration, calibrate, rescaled_gaps
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
    LikelihoodTerms,
    LogLikelihood,
    likelihood_terms,
    log_likelihood,
    summarise,
)
from osciformer.events.pictures import plot_calibration, plot_intensity
from osciformer.events.prediction import (
    NextEvent,
    predict_last,
    predict_next,
    type_probabilities_at,
)
from osciformer.events.process import EventProcess
from osciformer.events.quadrature import Integral, integrate_intensity
from osciformer.events.reading import events_from_frame, events_from_parquet
from osciformer.events.sampling import Futures, InvalidBoundError, sample
from osciformer.events.scores import EventScores, SequenceScores, score, score_sequences
from osciformer.events.sequences import EventSequence, EventSequences
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
