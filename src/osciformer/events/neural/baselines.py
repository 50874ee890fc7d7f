"""Deprecated: the baselines are in `osciformer.baselines`."""

from osciformer.models.baselines import __getattr__ as __getattr__
