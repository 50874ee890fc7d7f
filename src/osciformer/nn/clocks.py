"""Clocks that the series itself drives: how fast one runs depends on the last token."""

from __future__ import annotations

import math

from torch import nn
from torch.nn import functional

from osciformer._types import Float, Mask, QueryTimes, Tensor, Times, Tokens
from osciformer.nn.timeline import last_observation, take_tokens
from osciformer.ops.padding import last_present_index


class Clocks(nn.Module):
    r"""Readings of clocks whose speed each token sets until the next one.

    $$\tau_h(t) = \int_{t_1}^t s_h(t')\,dt', \qquad s_h(t) = \mathrm{softplus}(w_h X_j + b_h)
    \quad\text{for } t_j \le t < t_{j+1}.$$

    An oscillator on such a clock has a frequency and a damping that depend on the data, by the same
    factor, and a closed form as before. At first all clocks run as time does.

    Args:
        dim: Width D of the tokens.
        count: Number H of clocks.

    Example:
        >>> clocks, times = Clocks(8, 2), torch.tensor([[0.0, 1.0, 3.0]])
        >>> clocks(torch.randn(1, 3, 8), times)[0][0, :, 0].round(decimals=3)
        tensor([0., 1., 3.], dtype=torch.float64)
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.speed_projection = nn.Linear(dim, count)
        nn.init.zeros_(self.speed_projection.weight)
        nn.init.constant_(self.speed_projection.bias, math.log(math.e - 1.0))

    def forward(
        self,
        x: Tokens,
        times: Times,
        mask: Mask | None = None,
        query_times: QueryTimes | None = None,
    ) -> tuple[Float[Tensor, "B N H"], Float[Tensor, "B M H"] | None]:
        """Return what the clocks show at the tokens and at query times, float64.

        Arguments are those of `ResonatorLayer.forward`, times those of `clean_times`. Before the
        first token clocks run as after it.
        """
        speeds = self.speeds(x)
        if mask is not None:  # an absent token sets no speed
            speeds = take_tokens(speeds, last_present_index(mask))
        steps = speeds[:, :-1] * times.double().diff(dim=1)[..., None]
        shown = functional.pad(steps.cumsum(dim=1), (0, 0, 1, 0))[:, : x.shape[1]]
        if query_times is None:
            return shown, None
        held = last_observation(times, query_times, mask, backfill=True)
        since = query_times.double() - take_tokens(times.double()[..., None], held)[..., 0]
        return shown, take_tokens(shown, held) + take_tokens(speeds, held) * since[..., None]

    def speeds(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S H"]:
        """Return the speeds that tokens set, float64 and above 0."""
        return functional.softplus(self.speed_projection(x).double())
