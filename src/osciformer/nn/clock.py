"""A clock that the series itself drives: how fast it runs depends on the last token."""

from __future__ import annotations

import math

from torch import nn
from torch.nn import functional

from osciformer._types import Float, Int, Mask, QueryTimes, Tensor, Times, Tokens
from osciformer.nn.timeline import last_observation, take_tokens
from osciformer.ops.padding import last_present_index


class Clock(nn.Module):
    r"""Readings of a clock whose speed each token sets until the next one.

    $$\tau(t) = \int_{t_1}^t s(t')\,dt', \qquad s(t) = \mathrm{softplus}(w X_j + b)
    \quad\text{for } t_j \le t < t_{j+1}.$$

    An oscillator on such a clock has a frequency and a damping that depend on the data, by the same
    factor, and a closed form as before. At first the clock runs as time does.

    Args:
        dim: Width D of the tokens.

    Example:
        >>> import torch
        >>> clock, times = Clock(8), torch.tensor([[0.0, 1.0, 3.0]])
        >>> clock(torch.randn(1, 3, 8), times)[0].detach().round(decimals=3)
        tensor([[0., 1., 3.]], dtype=torch.float64)
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.speed_projection = nn.Linear(dim, 1)
        nn.init.zeros_(self.speed_projection.weight)
        nn.init.constant_(self.speed_projection.bias, math.log(math.e - 1.0))

    def forward(
        self,
        x: Tokens,
        times: Times,
        mask: Mask | None = None,
        query_times: QueryTimes | None = None,
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B M"] | None]:
        """Return what the clock shows at the tokens and at query times, float64.

        Arguments are those of `ResonatorLayer.forward`, times those of `clean_times`. Before the
        first token the clock runs as after it.
        """
        speed = self.speed(x)
        if mask is not None:  # an absent token sets no speed
            speed = _pick(speed, last_present_index(mask))
        steps = speed[:, :-1] * times.double().diff(dim=1)
        shown = functional.pad(steps.cumsum(dim=1), (1, 0))[:, : x.shape[1]]
        if query_times is None:
            return shown, None
        held = last_observation(times, query_times, mask, backfill=True)
        since = query_times.double() - _pick(times.double(), held)
        return shown, _pick(shown, held) + _pick(speed, held) * since

    def speed(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S"]:
        """Return the speed that each token sets, float64 and above 0."""
        return functional.softplus(self.speed_projection(x)[..., 0].double())


def _pick(x: Float[Tensor, "B N"], index: Int[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    return take_tokens(x[..., None], index)[..., 0]
