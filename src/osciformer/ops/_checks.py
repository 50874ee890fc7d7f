"""Checks of the operator's arguments; errors name the argument, the index and the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

QUERIES = ("hold", "linear", "ridge", "ridge_causal", "anchored", "learned")
VALUES = ("average", "point")
DIRECTIONS = ("causal", "bidirectional")
BACKENDS = ("auto", "oracle", "reference", "blocked", "short", "triton")


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
    """Return whether values can be read: not while compiling, exporting or capturing a graph."""
    if torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


class DeferredChecks:
    """Checks of values on a device, read by the host all at once, since each read makes it wait.

    If later work tolerates bad values, call `start` before it and `finish` after it.
    """

    def __init__(self) -> None:
        self._checks: list[tuple[Tensor, Callable[[], None]]] = []
        self._started: tuple[Tensor, torch.cuda.Event | None] | None = None

    def add(self, is_bad: Tensor, refuse: Callable[[], None]) -> None:
        """Add a check: `refuse` raises an error, if `is_bad`, a bool scalar on any device."""
        self._checks.append((is_bad, refuse))

    def start(self) -> None:
        """Copy the results to the host without waiting for them."""
        if not self._checks:
            return
        results, copied = torch.stack([is_bad for is_bad, _ in self._checks]), None
        if results.is_cuda:
            results, copied = results.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record()
        self._started = results, copied

    def finish(self) -> None:
        """Wait for the results; raise the error of the first check that failed."""
        if self._started is None:
            self.start()
        if self._started is None:
            return
        results, copied = self._started
        if copied is not None:
            copied.synchronize()
        for is_bad, (_, refuse) in zip(results.tolist(), self._checks, strict=True):
            if is_bad:
                refuse()


def check_times(
    name: str, times: Tensor, mask: Tensor | None, checks: DeferredChecks | None = None
) -> None:
    """Refuse ``[B, N]`` times of present tokens that are not finite or that decrease.

    `name` is the argument to name in the message; `checks` defers the check, None refuses at once.
    """
    if not can_look(times) or times.numel() == 0:
        return
    t = times.detach()
    # NaN fails both. What the message needs is worked out if there is one.
    is_fine = (t.abs() < torch.inf) & (t >= _times_before(t, mask))
    if mask is not None:
        is_fine = is_fine | ~mask

    def refuse() -> None:
        present = torch.ones_like(t, dtype=torch.bool) if mask is None else mask
        is_bad, before = present & ~torch.isfinite(t), _times_before(t, mask)
        b, n = (is_bad if bool(is_bad.any()) else ~is_fine).nonzero()[0].tolist()
        found = f"series {b} has {name}[{b}, {n}] = {t[b, n].item()}"
        if bool(is_bad[b, n]):
            raise ValueError(f"{name} must be finite; {found}. Drop the observation or mask it out")
        earlier = int((present[b, :n] & (t[b, :n] == before[b, n])).nonzero()[-1])
        raise ValueError(
            f"{name} must not decrease within a series; {found} < {name}[{b}, {earlier}] ="
            f" {before[b, n].item()}. Sort the observations by time"
        )

    pending = DeferredChecks() if checks is None else checks
    pending.add(~is_fine.all(), refuse)
    if checks is None:
        pending.finish()


def _times_before(t: Tensor, mask: Tensor | None) -> Tensor:
    """Return what each present time must reach: the largest present time before it."""
    filled = t if mask is None else torch.where(mask, t, -torch.inf)
    return pad(filled.cummax(dim=1).values[:, :-1], (1, 0), value=-torch.inf)


def check_spectra(
    spectra: Mapping[str, Tensor], heads: int, channels: int, checks: DeferredChecks
) -> None:
    """Refuse ``[H, C]`` spectra, by the name of their argument, below 0, NaN or infinite."""
    for name, x in spectra.items():
        check_float(name, x)
        check_shape(name, x, (heads, channels), "[H, C]")
    tensors = [x.detach() for x in spectra.values()]
    if not all(map(can_look, tensors)) or heads * channels == 0:
        return
    if len({x.dtype for x in tensors}) > 1:
        tensors = [x.double() for x in tensors]
    together = torch.stack(tensors)
    is_fine = (together >= 0) & (together < torch.inf)

    def refuse() -> None:
        for (name, x), fine in zip(spectra.items(), is_fine, strict=True):
            if not bool(fine.all()):
                h, c = (~fine).nonzero()[0].tolist()
                is_omega = name.endswith("omega")
                what = "a frequency above 0 (or 0, a free particle)" if is_omega else "at least 0"
                raise ValueError(
                    f"{name} must be finite and {what}; {name}[{h}, {c}] = {x[h, c].item()}"
                )

    checks.add(~is_fine.all(), refuse)


def check_mask(name: str, mask: Tensor, shape: tuple[int, int]) -> None:
    """Refuse a mask that is not boolean or of another shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor with True = present, got {kind}")
    check_shape(name, mask, shape, "[B, N]")
