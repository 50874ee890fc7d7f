"""Which modules are collected. A module that does not import is an error, never a skip."""

from __future__ import annotations

import importlib.util

# Kernels import Triton, which is optional.
collect_ignore_glob = (
    [] if importlib.util.find_spec("triton") else ["src/osciformer/ops/*/triton/*.py"]
)
