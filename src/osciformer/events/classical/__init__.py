"""Processes with known likelihoods: baselines, and oracles of the tests."""

from osciformer.events.classical.hawkes import HawkesProcess
from osciformer.events.classical.hawkes_fit import HawkesFit, fit_hawkes, simulate_hawkes
from osciformer.events.classical.poisson import InhomogeneousPoissonProcess, PoissonProcess
from osciformer.events.classical.renewal import GapDensity, RenewalProcess

__all__ = [
    "GapDensity",
    "HawkesFit",
    "HawkesProcess",
    "InhomogeneousPoissonProcess",
    "PoissonProcess",
    "RenewalProcess",
    "fit_hawkes",
    "simulate_hawkes",
]
