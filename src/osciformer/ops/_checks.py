"""Bad input is refused at the door, with the argument, the index and the values in the message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Doubts:
    """Questions about values, answered by one look at the device.

    Reading a value makes the host wait for the device. Where what follows bears bad values, `send`
    asks before it and `settle` reads the answer after it: meanwhile the host went on.
    """

    def __init__(self) -> None:
        self._questions: list[tuple[Tensor, Callable[[], None]]] = []
        self._answer: tuple[Tensor, torch.cuda.Event | None] | None = None

    def ask(self, is_bad: Tensor, complain: Callable[[], None]) -> None:
        """Note a question: if `is_bad`, a bool scalar on any device, `complain` shall raise."""
        self._questions.append((is_bad, complain))

    def send(self) -> None:
        """Let the device answer without waiting for it."""
        if not self._questions:
            return
        answer = torch.stack([is_bad for is_bad, _ in self._questions])
        if not answer.is_cuda:
            self._answer = answer, None
            return
        answer = answer.to("cpu", non_blocking=True)
        is_there = torch.cuda.Event()
        is_there.record()
        self._answer = answer, is_there

    def settle(self) -> None:
        """Wait for the answers; complain if one of them is bad."""
        if self._answer is None:
            self.send()
        if self._answer is None:
            return
        answer, is_there = self._answer
        if is_there is not None:
            is_there.synchronize()
        for is_bad, (_, complain) in zip(answer.tolist(), self._questions, strict=True):
            if is_bad:
                complain()


def check_times(
    name: str, times: Tensor, mask: Tensor | None, doubts: Doubts | None = None
) -> None:
    """Refuse times of present tokens that are not finite or that decrease.

    Args:
        name: Argument to name in the message.
        times: ``[B, N]``.
        mask: ``[B, N]`` bool, True = present, or None. Absent tokens may hold anything.
        doubts: Where to put the question; None refuses at once.
    """
    if not can_look(times) or times.numel() == 0:
        return
    t = times.detach()
    if mask is None:
        is_good = torch.isfinite(t).all() & (t[:, 1:] >= t[:, :-1]).all()
    else:
        is_good = ~torch.stack(_strange_and_early(t, mask)[:2]).any()
    asked = Doubts() if doubts is None else doubts
    asked.ask(~is_good, lambda: _refuse_times(name, t, mask))
    if doubts is None:
        asked.settle()


def _strange_and_early(t: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which times are not finite, which are too early, present times, what they must reach.

    All are ``[B, N]``.
    """
    present = torch.ones_like(t, dtype=torch.bool) if mask is None else mask
    # The largest present time so far, shifted by one, is what each present time must reach.
    filled = torch.where(present, t, float("-inf"))
    before = torch.nn.functional.pad(
        filled.cummax(dim=1).values[:, :-1], (1, 0), value=float("-inf")
    )
    return present & ~torch.isfinite(t), present & (t < before), filled, before


def _refuse_times(name: str, t: Tensor, mask: Tensor | None) -> None:
    is_strange, is_early, filled, before = _strange_and_early(t, mask)
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


def check_spectra(spectra: Mapping[str, Tensor], heads: int, channels: int, doubts: Doubts) -> None:
    """Refuse frequencies and damping ratios that are negative, NaN or infinite.

    Args:
        spectra: Tensors ``[H, C]`` by the name of their argument.
        heads: H.
        channels: C.
        doubts: Where to put the question.
    """
    for name, x in spectra.items():
        check_float(name, x)
        check_shape(name, x, (heads, channels), "[H, C]")
    tensors = [x.detach() for x in spectra.values()]
    if not all(map(can_look, tensors)) or heads * channels == 0:
        return
    together = torch.stack([x.double() for x in tensors])
    is_fine = (together >= 0) & torch.isfinite(together)

    def complain() -> None:
        for (name, x), fine in zip(spectra.items(), is_fine, strict=True):
            if not bool(fine.all()):
                h, c = _first(~fine)
                is_omega = name.endswith("omega")
                what = "a frequency above 0 (or 0, a free particle)" if is_omega else "at least 0"
                raise ValueError(
                    f"{name} must be finite and {what}; {name}[{h}, {c}] = {x[h, c].item()}"
                )

    doubts.ask(~is_fine.all(), complain)


def check_mask(name: str, mask: Tensor, shape: tuple[int, int]) -> None:
    """Refuse a mask that is not boolean or of another shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor with True = present, got {kind}")
    check_shape(name, mask, shape, "[B, N]")


def _first(bad: Tensor) -> tuple[int, int]:
    b, n = bad.nonzero()[0].tolist()
    return b, n
