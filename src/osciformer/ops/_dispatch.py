"""Which backend runs a call, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from osciformer.ops._checks import BACKENDS, check_choice
from osciformer.ops.attention import blocked, oracle, reference
from osciformer.ops.attention.drive import Drive, Role
from osciformer.ops.attention.expansion import is_resonant

#: Environment variable that replaces ``backend="auto"``.
BACKEND_VARIABLE = "OSCIFORMER_BACKEND"

_MODULES: dict[str, ModuleType] = {"oracle": oracle, "reference": reference, "blocked": blocked}


def choose_backend(
    backend: str,
    drive: Drive | None,
    spectra: Mapping[Role, tuple[Tensor, Tensor]],
) -> tuple[str, str]:
    """Return the backend that `backend` stands for and the reason in words.

    Args:
        backend: What the caller asked for.
        drive: The drive of the call.
        spectra: (omega, zeta) of "key" and "value".
    """
    check_choice("backend", backend, BACKENDS)
    reason = "asked for"
    if backend == "auto" and os.environ.get(BACKEND_VARIABLE):
        backend = os.environ[BACKEND_VARIABLE]
        check_choice(f"the environment variable {BACKEND_VARIABLE}", backend, BACKENDS)
        reason = f"{BACKEND_VARIABLE} is set"
    if backend == "triton":
        raise NotImplementedError(
            "backend='triton' is not part of this version; use backend='auto', which runs 'blocked'"
            " on any device"
        )
    if backend != "auto":
        return backend, reason
    # A compiled graph cannot look at values; it must not be fed a resonance of an undamped channel.
    if drive is not None and not torch.compiler.is_compiling():
        for role, (omega, zeta) in spectra.items():
            if is_resonant(drive, role, omega, zeta):
                return "reference", f"the drive is in undamped resonance with a {role} channel"
    return "blocked", "exact and fast on any device"


def backend_module(name: str) -> ModuleType:
    """Return the module whose `attend` is the backend `name`."""
    return _MODULES[name]
