"""Bad input is refused at the door, with the argument, the index and the values in the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

QUERIES = ("hold", "linear", "ridge", "ridge_causal", "anchored", "learned")
VALUES = ("average", "point")
DIRECTIONS = ("causal", "bidirectional")
BACKENDS = ("auto", "oracle", "reference", "blocked", "triton")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a mode that does not exist."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def check_float(name: str, x: Any) -> None:
    """Refuse what is no floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point tensor, got {x.dtype}; convert it with .float() or"
            " .double()"
        )


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], letters: str) -> None:
    """Refuse a tensor of another shape."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {letters} = {list(shape)}, got {list(x.shape)}")


def can_look(x: Tensor) -> bool:
    """Return whether values may be read: not while compiling, exporting or capturing a graph."""
    if torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_times(name: str, times: Tensor, mask: Tensor | None) -> None:
    """Refuse times of present tokens that are not finite or that decrease.

    Args:
        name: Argument to name in the message.
        times: ``[B, N]``.
        mask: ``[B, N]`` bool, True = present, or None. Absent tokens may hold anything.
    """
    if not can_look(times) or times.numel() == 0:
        return
    t = times.detach()
    present = torch.ones_like(t, dtype=torch.bool) if mask is None else mask
    is_strange = present & ~torch.isfinite(t)
    # The largest present time so far, shifted by one, is what each present time must reach.
    filled = torch.where(present, t, float("-inf"))
    before = torch.nn.functional.pad(
        filled.cummax(dim=1).values[:, :-1], (1, 0), value=float("-inf")
    )
    is_early = present & (t < before)
    # One look at the device where all is well.
    if not bool((is_strange | is_early).any()):
        return
    if bool(is_strange.any()):
        b, n = _first(is_strange)
        raise ValueError(
            f"{name} must be finite; series {b} has {name}[{b}, {n}] = {t[b, n].item()}. Drop the"
            " observation or mask it out"
        )
    b, n = _first(is_early)
    earlier = int((filled[b, :n] == before[b, n]).nonzero()[-1])
    raise ValueError(
        f"{name} must not decrease within a series; series {b} has {name}[{b}, {n}] ="
        f" {t[b, n].item()} < {name}[{b}, {earlier}] = {before[b, n].item()}."
        " Sort the observations by time"
    )


def check_spectra(spectra: Mapping[str, Tensor], heads: int, channels: int) -> None:
    """Refuse frequencies and damping ratios that are negative, NaN or infinite.

    Args:
        spectra: Tensors ``[H, C]`` by the name of their argument.
        heads: H.
        channels: C.
    """
    for name, x in spectra.items():
        check_float(name, x)
        check_shape(name, x, (heads, channels), "[H, C]")
    tensors = [x.detach() for x in spectra.values()]
    if not all(map(can_look, tensors)) or heads * channels == 0:
        return
    together = torch.stack([x.double() for x in tensors])
    is_fine = (together >= 0) & torch.isfinite(together)
    # One look at the device where all is well.
    if bool(is_fine.all()):
        return
    for (name, x), fine in zip(spectra.items(), is_fine, strict=True):
        if not bool(fine.all()):
            h, c = _first(~fine)
            is_omega = name.endswith("omega")
            what = "a frequency above 0 (or 0, a free particle)" if is_omega else "at least 0"
            raise ValueError(
                f"{name} must be finite and {what}; {name}[{h}, {c}] = {x[h, c].item()}"
            )


def check_mask(name: str, mask: Tensor, shape: tuple[int, int]) -> None:
    """Refuse a mask that is not boolean or of another shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor with True = present, got {kind}")
    check_shape(name, mask, shape, "[B, N]")


def _first(bad: Tensor) -> tuple[int, int]:
    b, n = bad.nonzero()[0].tolist()
    return b, n
