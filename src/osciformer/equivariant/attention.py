"""Attention between observations in space and time that turns with them."""

from __future__ import annotations

import torch
from torch import nn

from osciformer._types import Float, Tensor
from osciformer.equivariant.irreps import Kinds, couple
from osciformer.equivariant.layers import ChannelLinear
from osciformer.equivariant.neighbours import Neighbours
from osciformer.math.driven import driven_averages
from osciformer.nn.parameters import ExactBuffers, FrequencyBank, Spectrum
from osciformer.ops.attention.gap import transition


class AveragedOscillators(nn.Module):
    r"""Oscillators that tokens start, averaged from their own time to that of a row.

    One $(\omega, \zeta)$ and one set of drive gains for all components of a kind: then a turned
    start gives a turned trajectory. The drive is $\sum_m x_i (g_m \cos\varpi_m s + h_m
    \sin\varpi_m s)$, with $x_i$ the position at the start and s the time since.

    Args:
        kinds: Kinds of a channel.
        channels: Number U of channels.
        omega_range: Ends of the initial frequencies, in radians per unit of time.
        zeta_range: Ends of the initial damping ratios.
        drive_modes: Number of sinusoids of the drive, on a fixed bank over `omega_range`.
    """

    of_component: Tensor

    def __init__(
        self,
        kinds: Kinds,
        channels: int,
        *,
        omega_range: tuple[float, float],
        zeta_range: tuple[float, float],
        drive_modes: int,
    ) -> None:
        super().__init__()
        self.spectrum = Spectrum(
            channels, len(kinds), omega_range=omega_range, zeta_range=zeta_range
        )
        self.bank = None
        if drive_modes:
            self.bank = FrequencyBank("log_spaced", drive_modes, omega_range=omega_range)
            self.gains = nn.Parameter(torch.zeros(2, drive_modes, channels, len(kinds)))
        self.register_buffer("of_component", kinds.of_component, persistent=False)

    def coefficients(self, gaps: Float[Tensor, "E"]) -> tuple[Tensor, Tensor]:
        """Return the averages of position from position and from velocity, each ``[E, U, K]``."""
        shape = self.spectrum.omega.shape
        omega, zeta = self.spectrum.omega.flatten(), self.spectrum.zeta.flatten()
        over = transition(gaps, omega.to(gaps.dtype), zeta.to(gaps.dtype))
        is_zero = (gaps == 0)[:, None]
        length = torch.where(is_zero, 1.0, gaps[:, None])
        position = torch.where(is_zero, 1.0, over.i11 / length)
        if self.bank is not None:
            drive = self.bank.omega[:, None]
            pushed = driven_averages(gaps[:, None, None], 0.0 * drive, drive, omega, zeta)
            cos, sin = self.gains.flatten(-2)
            turned = cos * pushed.real + sin * pushed.imag  # [E, Md, U * K]
            position = position + turned.sum(dim=-2).to(position.dtype)
        return position.unflatten(-1, shape), (over.i12 / length).unflatten(-1, shape)

    def forward(
        self, start: Float[Tensor, "N U S"], velocity: Float[Tensor, "N U S"], pairs: Neighbours
    ) -> Float[Tensor, "E U S"]:
        """Return the average of each pair's key from the key's time to the row's."""
        averages = self.coefficients(pairs.gaps)
        from_start, from_velocity = (x.index_select(-1, self.of_component) for x in averages)
        # index_select, here and below, has a much faster gradient than plain indexing.
        start, velocity = (x.index_select(0, pairs.keys) for x in (start, velocity))
        return torch.addcmul(from_start * start, from_velocity, velocity)


class Bridge(ExactBuffers):
    r"""The matrix of each pair and head that takes features over the offset r between them.

    $$A_h(r) = \sum_p f_{hp}(|r|)\, C_p Y_l(\hat r), \qquad A(Rr) = D(R)\, A(r)\, D(R)^T$$

    over the paths p, with Clebsch-Gordan coefficients C and learned radial weights f, which are
    linear in the radial basis.

    Args:
        kinds: Kinds of a channel.
        num_heads: Number of heads H.
        num_radial: Radial functions n of each degree; there are 2n weights, n for pairs of
            different points and n for pairs of one point.
    """

    matrices: Tensor
    path: Tensor
    harmonic: Tensor
    degree: Tensor

    def __init__(self, kinds: Kinds, num_heads: int, num_radial: int) -> None:
        super().__init__()
        coupling = couple(kinds)
        for name, x in coupling._asdict().items():
            self.register_buffer(name, x, persistent=False)
        # As many paths end at each kind as there are kinds or a few more.
        scale = (num_radial * len(kinds)) ** -0.5
        self.weight = nn.Parameter(
            scale * torch.randn(num_heads, len(coupling.degree), 2 * num_radial)
        )

    def forward(self, pairs: Neighbours) -> Float[Tensor, "E H S S"]:
        """Return the matrices of all pairs."""
        weights = torch.einsum("epn,hpn->ehp", pairs.radial[:, self.degree], self.weight)
        columns = weights.index_select(-1, self.path) * pairs.harmonics[:, None, self.harmonic]
        return torch.einsum("ehj,jst->ehst", columns, self.matrices.to(columns.dtype))


class EquivariantAttention(nn.Module):
    r"""Attention of rows to tokens in their neighbourhood of space and time.

    $$\alpha_{ji} = \frac{1}{t_j - t_i}\int_{t_i}^{t_j} \langle Q_j, A(r_{ji})\,k_i(\tau)\rangle
    \,d\tau, \qquad o_j = \sum_i p_{ji}\,B(r_{ji})\,\bar v_i(t_j)$$

    with keys and values that are damped oscillators, see `AveragedOscillators`, whose starts and
    velocities are linear in the token, $r_{ji}$ the place of the row minus that of the token, and
    matrices A, B of a `Bridge`. p is the softmax of $\alpha / \sqrt{C S}$, each term weighted by
    how much the token is in sight. A row that sees nothing gathers nothing.

    Args:
        kinds: Kinds of a channel.
        channels: Number U of channels, a multiple of `num_heads`.
        num_heads: Number of heads H.
        num_radial: Radial functions of each degree.
        omega_range: Ends of the initial frequencies, in radians per unit of time.
        zeta_range: Ends of the initial damping ratios.
        drive_modes: Sinusoids that force keys and values (from zero).
    """

    def __init__(
        self,
        kinds: Kinds,
        channels: int,
        num_heads: int = 4,
        *,
        num_radial: int = 8,
        omega_range: tuple[float, float] = (0.1, 200.0),
        zeta_range: tuple[float, float] = (0.05, 0.4),
        drive_modes: int = 0,
    ) -> None:
        super().__init__()
        if channels < 1 or num_heads < 1 or channels % num_heads:
            got = f"{channels=}, {num_heads=}"
            raise ValueError(f"channels must be a positive multiple of num_heads; got {got}")
        self.num_heads = num_heads
        self.scale = (channels // num_heads * kinds.size) ** -0.5

        self.query = ChannelLinear(kinds, channels, channels)
        # Keys and values are made, and oscillate, together.
        self.start = ChannelLinear(kinds, channels, 2 * channels)
        self.velocity = ChannelLinear(kinds, channels, 2 * channels, bias=False, zero=True)
        self.oscillators = AveragedOscillators(
            kinds,
            2 * channels,
            omega_range=omega_range,
            zeta_range=zeta_range,
            drive_modes=drive_modes,
        )
        self.bridge = Bridge(kinds, 2 * num_heads, num_radial)
        self.output = ChannelLinear(kinds, channels, channels)

    def forward(
        self, rows: Float[Tensor, "B M U S"], tokens: Float[Tensor, "B N U S"], pairs: Neighbours
    ) -> Float[Tensor, "B M U S"]:
        """Return what each row gathers.

        Args:
            rows: Features of what attends.
            tokens: Features of what is attended to.
            pairs: Who sees whom, of `find_neighbours`.
        """
        logits, values = self._attend(rows, tokens, pairs)
        num_rows = pairs.shape[0] * pairs.shape[1]
        weights = _softmax(logits, pairs, num_rows)
        messages = (weights[..., None, None] * values).flatten(1, 2)
        gathered = messages.new_zeros(num_rows, *messages.shape[1:])
        gathered = gathered.index_add(0, pairs.rows, messages)
        return self.output(gathered.unflatten(0, pairs.shape))

    def logits(
        self, rows: Float[Tensor, "B M U S"], tokens: Float[Tensor, "B N U S"], pairs: Neighbours
    ) -> Float[Tensor, "E H"]:
        """Return the logit of each pair and head; arguments are those of `forward`."""
        return self._attend(rows, tokens, pairs)[0]

    def _attend(self, rows: Tensor, tokens: Tensor, pairs: Neighbours) -> tuple[Tensor, Tensor]:
        """Return logits ``[E, H]`` and values at the row's place ``[E, H, C, S]``."""
        tokens = tokens.flatten(0, 1)
        averaged = self.oscillators(self.start(tokens), self.velocity(tokens), pairs)
        heads = averaged.unflatten(1, (2 * self.num_heads, -1))
        keys, values = torch.einsum("ehst,ehct->ehcs", self.bridge(pairs), heads).chunk(2, dim=1)
        query = self.query(rows).flatten(0, 1).index_select(0, pairs.rows)
        logits = (query.unflatten(1, (self.num_heads, -1)) * keys).sum(dim=(-2, -1))
        return self.scale * logits, values


def _softmax(logits: Tensor, pairs: Neighbours, num_rows: int) -> Tensor:
    """Return weights ``[E, H]`` that add up to 1 over the pairs of a row."""
    index = pairs.rows[:, None].expand_as(logits)
    blank = logits.new_full((num_rows, logits.shape[1]), -torch.inf)
    largest = blank.scatter_reduce(0, index, logits.detach(), "amax")
    terms = pairs.weight[:, None] * torch.exp(logits - largest.index_select(0, pairs.rows))
    total = torch.zeros_like(blank).index_add(0, pairs.rows, terms)
    # The sight of the only neighbour may underflow on the edge of the neighbourhood.
    return terms / total.index_select(0, pairs.rows).clamp(min=torch.finfo(terms.dtype).tiny)
