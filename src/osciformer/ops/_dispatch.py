"""Which backend runs a call, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from osciformer.ops._checks import BACKENDS, check_choice
from osciformer.ops.attention import blocked, oracle, reference, short, triton
from osciformer.ops.attention.drive import Drive, Role

#: Environment variable that replaces ``backend="auto"``.
BACKEND_VARIABLE = "OSCIFORMER_BACKEND"

#: Each has a function `attend`.
MODULES = dict(oracle=oracle, reference=reference, blocked=blocked, short=short, triton=triton)


def choose_backend(
    backend: str,
    drive: Drive | None,
    spectra: Mapping[Role, tuple[Tensor, Tensor]],
    dtype: torch.dtype = torch.float32,
    length: int | None = None,
) -> tuple[str, str]:
    """Return the backend that `backend` stands for and the reason in words.

    Args:
        backend: What the caller asked for.
        drive: The drive of the call.
        spectra: (omega, zeta) of "key" and "value", on the device of the tokens.
        dtype: Of the tokens.
        length: Number of rows or of keys, the larger; None is a long series.

    Raises:
        RuntimeError: For "triton" where its kernels cannot run, with the remedy.
    """
    check_choice("backend", backend, BACKENDS)
    reason, device = "asked for", spectra["key"][0].device
    if backend == "auto" and os.environ.get(BACKEND_VARIABLE):
        backend = os.environ[BACKEND_VARIABLE]
        check_choice(f"the environment variable {BACKEND_VARIABLE}", backend, BACKENDS)
        reason = f"{BACKEND_VARIABLE} is set"
    if backend == "triton":
        trouble = triton.missing(device)
        if trouble is not None:
            raise RuntimeError(f"backend='triton' cannot run here: {trouble}")
    if backend != "auto":
        return backend, reason
    # A compiled graph cannot look at values; it must not be fed a resonance.
    if drive is not None and not torch.compiler.is_compiling():
        for role, (omega, zeta) in spectra.items():
            if drive.loses_digits(role, omega, zeta, dtype):
                return "reference", f"the drive is too near resonance with a {role} channel"
    if device.type == "cuda" and dtype in triton.DTYPES and triton.missing(device) is None:
        return "triton", "kernels for CUDA; what they do not serve runs on 'blocked'"
    if length is not None and short.is_for(spectra["key"][0], dtype, length):
        return "short", "one product for short series; what it does not serve runs on 'blocked'"
    return "blocked", "exact and fast on any device"
