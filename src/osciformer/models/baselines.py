"""Deprecated: the baselines are in `osciformer.baselines`."""

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # asked for by import and by tools, not by users
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # By name, so that no module of the core depends on the baselines.
    found = getattr(importlib.import_module("osciformer.baselines"), name)
    warnings.warn(f"import {name} from osciformer.baselines", DeprecationWarning, stacklevel=2)
    return found
