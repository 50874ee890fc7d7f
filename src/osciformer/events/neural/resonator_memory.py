"""A memory of events: oscillators that each of them kicks."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.nn.spectrum import Spectrum
from osciformer.ops.attention.after import Transition, accumulate

# Slow and creeping modes too: the traces that events leave are often no oscillations at all.
MEMORY_ZETA = (0.2, 2.0)


class ResonatorMemory(nn.Module):
    r"""One oscillator per channel that every event kicks, and that swings freely in between.

    $$m(t) = \sum_{t_k \le t} e^{A (t - t_k)} B x_k$$
    It adds where attention takes means: how many events there were, and how fresh they are, is
    what a self-exciting process depends on. With damping above 1 it contains exponential kernels.

    Args:
        dim: Number of channels, and width of the tokens.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.kick = nn.Linear(dim, 2 * dim)
        self.spectrum = Spectrum(1, dim, omega_range=(0.1, 10.0), zeta_range=MEMORY_ZETA)

    def forward(
        self, tokens: Float[Tensor, "B N D"], over: Transition
    ) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B N D"]]:
        """Return positions and velocities just after each event.

        Args:
            tokens: What kicks.
            over: Transitions from the event before to each event, [B, N, D].
        """
        position, velocity = self.kick(tokens).chunk(2, dim=-1)
        return accumulate(position, self.spectrum.omega[0] * velocity, over)

    def columns(self, position: Tensor, velocity: Tensor) -> Float[Tensor, "*S 2D"]:
        """Return both as columns of one size."""
        return torch.cat((position, velocity / self.spectrum.omega[0]), dim=-1)

    def later(self, trace: tuple[Tensor, ...], over: Transition) -> Float[Tensor, "B N G 2D"]:
        """Return the columns some gaps after each event, given the transitions over these."""
        position, velocity = (x[:, :, None] for x in trace)
        return self.columns(
            over.g11 * position + over.g12 * velocity, over.g21 * position + over.g22 * velocity
        )
