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
from osciformer.events.horizons import (
    EventsAhead,
    HorizonForecast,
    HorizonScores,
    average_precision,
    draw_next,
    forecast_from_draws,
    score_horizon,
    split_last,
    temporal_average_precision,
    transport_distance,
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

__all__ = ["EventBatch", "EventSequence", "EventSequences", "EventStream"]
__all__ += ["events_from_frame", "events_from_parquet"]
__all__ += ["BlendedProcess", "EventProcess", "GapDensity", "HawkesFit", "HawkesProcess"]
__all__ += ["InhomogeneousPoissonProcess", "PoissonProcess", "RenewalProcess"]
__all__ += ["fit_hawkes", "fit_weights", "simulate_hawkes"]
__all__ += ["Integral", "LikelihoodTerms", "LogLikelihood"]
__all__ += ["integrate_intensity", "likelihood_terms", "log_likelihood", "summarise"]
__all__ += ["Futures", "InvalidBoundError", "NextEvent"]
__all__ += ["predict_last", "predict_next", "sample", "type_probabilities_at"]
__all__ += ["EventsAhead", "HorizonForecast", "HorizonScores", "average_precision", "draw_next"]
__all__ += ["forecast_from_draws", "score_horizon", "split_last"]
__all__ += ["temporal_average_precision", "transport_distance"]
__all__ += ["Calibration", "EventScores", "SequenceScores"]
__all__ += ["calibrate", "rescaled_gaps", "score", "score_sequences"]
__all__ += ["plot_calibration", "plot_intensity"]
