"""The response of driven oscillators, one row after the other, with a state of fixed size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from osciformer._types import Float, Tensor
from osciformer.ops._checks import check_shape
from osciformer.ops.response.settings import DriveMode, DrivenBy, check_bank, resolve_push
from osciformer.ops.response.step import Response, advance


class ResponseStream:
    """Oscillators driven by rows as they come: `oscillator_response`, at O(1) a row.

    After a row its variables have the same states as in a batch. Variables that the row lacks are
    read as `read` does: held at their last value. With drives ``hold`` and ``impulse`` that is what
    a batch does; a ``linear`` path is known only when the next value is. No gradients are kept.

    Args:
        omega: Natural frequencies `[K]`, or `[F, K]`.
        zeta: Damping ratios, alike.
        num_variables: Number of variables F.
        batch_size: Number of series B that are fed side by side.
        drive: As in `oscillator_response`.
        of: As in `oscillator_response`.
        initial: States `[F, K]` at the first observation of each variable; None is ``steady``.

    Example:
        >>> stream = ResponseStream(torch.tensor([0.5, 2.0]), torch.tensor(0.1), 1)
        >>> stream.step(0.0, torch.tensor([[3.0]])).position
        tensor([[[3., 3.]]])
        >>> stream.step(0.4, torch.tensor([[4.0]])).velocity.shape, stream.read(1.5).position.shape
        (torch.Size([1, 1, 2]), torch.Size([1, 1, 2]))
    """

    def __init__(
        self,
        omega: Float[Tensor, "*#F K"],
        zeta: Float[Tensor, "*#F K"],
        num_variables: int,
        *,
        batch_size: int = 1,
        drive: DriveMode = "linear",
        of: DrivenBy = "value",
        initial: Response | None = None,
    ) -> None:
        self._push = resolve_push(drive, of)
        self._spectrum = check_bank(omega.detach(), zeta.detach(), num_variables)
        self._is_path = drive != "impulse"
        self._start = initial
        # Each variable has a clock of its own: that of its last observation.
        bank = self._spectrum[0]
        shape = (batch_size, num_variables)
        self._state = {
            "now": bank.new_full((batch_size,), -torch.inf),
            "time": bank.new_full(shape, torch.nan),
            "level": bank.new_zeros(shape),
            "position": bank.new_zeros(*shape, bank.shape[-1]),
            "velocity": bank.new_zeros(*shape, bank.shape[-1]),
        }

    @property
    def state(self) -> dict[str, Tensor]:
        """All there is to know of the past, float64: copy it to go on elsewhere.

        `now [B]` is the time of the last row; of the last observation of each variable, `time`
        (NaN for none) and `level` are `[B, F]`, `position` and `velocity` after it `[B, F, K]`.
        """
        return dict(self._state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` was in another stream of the same oscillators."""
        if state.keys() != self._state.keys():
            names = ", ".join(self._state)
            raise ValueError(f"state must have the entries {names}; got {', '.join(state)}")
        for name, own in self._state.items():
            check_shape(f"state[{name!r}]", state[name], tuple(own.shape), "[B, ...]")
        self._state = {name: state[name].to(own).clone() for name, own in self._state.items()}

    @torch.no_grad()
    def step(self, time: float | Float[Tensor, " B"], values: Float[Tensor, "B F"]) -> Response:
        """Add a row and return the states `[B, F, K]` after it, of the dtype of the values.

        Args:
            time: Its time, one for all series or one each; it must not decrease.
            values: Its values; NaN is a missing one.
        """
        last = self._state
        check_shape("values", values, tuple(last["level"].shape), "[B, F]")
        now = self._checked(time)
        measured = ~values.isnan()
        value = torch.where(measured, values.double(), 0.0)
        is_first = measured & last["time"].isnan()
        # The change until now is known where there is a value.
        change = torch.where(measured & ~is_first, value - last["level"], 0.0)
        x, v = self._moved(now, change)
        if self._start is not None:
            x, v = (
                torch.where(is_first[..., None], start.to(z), z)
                for start, z in zip(self._start, (x, v), strict=True)
            )
        elif self._push.has_level:
            x = torch.where(is_first[..., None], value[..., None], x)
        if self._push.has_kicks:
            kick = change if self._is_path else value
            v = v + self._spectrum[0] * kick[..., None]
        found = Response(x.to(values.dtype), v.to(values.dtype))
        keep = measured[..., None]
        self._state = {
            "now": now,
            "time": torch.where(measured, now[:, None], last["time"]),
            "level": torch.where(measured, value, last["level"]),
            "position": torch.where(keep, x, last["position"]),
            "velocity": torch.where(keep, v, last["velocity"]),
        }
        return found

    @torch.no_grad()
    def read(self, time: float | Float[Tensor, " B"]) -> Response:
        """Return the states `[B, F, K]` at a time from the last row on, float64; store nothing."""
        return self._moved(self._checked(time), torch.zeros_like(self._state["level"]))

    def _moved(self, now: Tensor, change: Tensor) -> Response:
        """Return the states of all variables at a time, from those after their last observation."""
        state, since = self._state, now[:, None] - self._state["time"]
        given = Response(state["position"], state["velocity"])
        drive = (state["level"][..., None], change[..., None])
        return advance(given, *drive, since.nan_to_num(0.0)[..., None], *self._spectrum, self._push)

    def _checked(self, time: float | Tensor) -> Tensor:
        last = self._state["now"]
        now = torch.as_tensor(time, dtype=last.dtype, device=last.device).expand(last.shape)
        bad = (~now.isfinite() | (now < last)).nonzero().flatten().tolist()
        if bad:
            b = bad[0]
            raise ValueError(
                f"time must be finite and must not decrease; series {b} has {now[b].item()} after"
                f" {last[b].item()}"
            )
        return now
