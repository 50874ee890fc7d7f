"""Pictures of trained models as matplotlib figures, on screen in a notebook, or saved to a file."""

from osciformer.plots.attention import (
    plot_attention,
    plot_class_attention,
    plot_trajectories,
)
from osciformer.plots.predictions import plot_predictions
from osciformer.plots.resonators import plot_resonators
from osciformer.plots.spectra import plot_probe, plot_spectra

__all__ = [
    "plot_attention",
    "plot_class_attention",
    "plot_predictions",
    "plot_probe",
    "plot_resonators",
    "plot_spectra",
    "plot_trajectories",
]
