"""Points in space, each observed at its own times, and read at any time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from osciformer._types import Bool, Float, Int, Tensor
from osciformer.equivariant.attention import EquivariantAttention
from osciformer.equivariant.irreps import Kinds, o3
from osciformer.equivariant.layers import ChannelNorm, GatedFeedForward
from osciformer.equivariant.neighbours import (
    Neighbours,
    Observations,
    check_reach,
    find_neighbours,
)
from osciformer.equivariant.radial import RadialBasis
from osciformer.ops._checks import (
    DeferredChecks,
    can_look,
    check_float,
    check_mask,
    check_shape,
)


class EquivariantBlock(nn.Module):
    """Attention and a gated feed-forward net, each behind a norm and added to what came in."""

    def __init__(self, kinds: Kinds, channels: int, num_heads: int, **settings: Any) -> None:
        super().__init__()
        self.attention_norm = ChannelNorm(kinds, channels)
        self.attention = EquivariantAttention(kinds, channels, num_heads, **settings)
        self.feedforward_norm = ChannelNorm(kinds, channels)
        self.feedforward = GatedFeedForward(kinds, channels, 2 * channels)

    def forward(self, rows: Tensor, tokens: Tensor, pairs: Neighbours) -> Tensor:
        """Return the rows ``[B, M, U, S]`` after the block, given tokens ``[B, N, U, S]``."""
        normed = self.attention_norm(rows), self.attention_norm(tokens)
        rows = rows + self.attention(*normed, pairs)
        return rows + self.feedforward(self.feedforward_norm(rows))


class EquivariantOsciFormer(nn.Module):
    r"""An encoder of points in space that are observed at irregular times, each at its own.

    An observation is a token: a position, a time, the number of its point, and features in e3nn's
    order. A read is a point and a time. It starts from the point's last observation at or before
    that time, at the place of that observation, sees all observations up to its time, and is seen
    by none. Results turn and mirror with the input; a shift of all positions or of all times
    changes nothing, nor does the order of observations or the numbering of points.

    Args:
        irreps_in: Irreps of the features, such as `1x0e+1x1o`, a charge and a velocity.
        irreps_out: Irreps of the result.
        kinds: Kinds of the tensors inside, each once, scalar first.
        channels: Tensors of each kind inside.
        num_layers: Number of blocks.
        num_heads: Heads of a block; divides `channels`.
        cutoff: Distance at which observations are out of sight, in the unit of positions.
        window: Time after which they are; infinite by default.
        basis: Functions of the distance: `bessel` or `gaussian`.
        num_radial: Number of these for each degree.
        omega_range: Ends of the initial frequencies, in radians per unit of time.
        zeta_range: Ends of the initial damping ratios.
        drive_modes: Sinusoids that force keys and values.

    Example:
        >>> model = EquivariantOsciFormer("0e+1o", "1o", channels=8, cutoff=5.0)
        >>> points = torch.tensor([[0, 1, 0, 1]])
        >>> x, positions, times = torch.randn(1, 4, 4), torch.randn(1, 4, 3), torch.rand(1, 4)
        >>> reads = {"query_points": torch.tensor([[1]]), "query_times": torch.tensor([[2.0]])}
        >>> model(x, positions, times, points, **reads).shape
        torch.Size([1, 1, 3])
    """

    def __init__(
        self,
        irreps_in: Any,
        irreps_out: Any,
        *,
        kinds: Any = "0e+1o",
        channels: int = 16,
        num_layers: int = 2,
        num_heads: int = 4,
        cutoff: float,
        window: float = math.inf,
        basis: str = "bessel",
        num_radial: int = 8,
        omega_range: tuple[float, float] = (0.1, 200.0),
        zeta_range: tuple[float, float] = (0.05, 0.4),
        drive_modes: int = 0,
    ) -> None:
        super().__init__()
        self.kinds = Kinds(kinds)
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        for name, irreps in (("irreps_in", self.irreps_in), ("irreps_out", self.irreps_out)):
            unknown = [str(kind) for _, kind in irreps if kind not in self.kinds.all]
            if unknown:
                known = "+".join(map(str, self.kinds.all))
                raise ValueError(
                    f"{name} has {', '.join(unknown)}, which is not among kinds={known!r}; add it"
                )
        check_reach(cutoff, window)
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1; got {num_layers}")
        self.cutoff, self.window = cutoff, window
        degree = 2 * max(kind.l for kind in self.kinds.all)
        self.basis = RadialBasis(basis, num_radial, degree)
        inside = self.kinds.irreps(channels)
        self.embedding = o3.Linear(self.irreps_in, inside, biases=True)
        settings: dict[str, Any] = {"num_radial": num_radial, "omega_range": omega_range}
        settings |= {"zeta_range": zeta_range, "drive_modes": drive_modes}
        self.blocks = nn.ModuleList(
            EquivariantBlock(self.kinds, channels, num_heads, **settings) for _ in range(num_layers)
        )
        self.norm = ChannelNorm(self.kinds, channels)
        self.head = o3.Linear(inside, self.irreps_out, biases=True)

    def forward(
        self,
        x: Float[Tensor, "B N F"],
        positions: Float[Tensor, "B N 3"],
        times: Float[Tensor, "B N"],
        points: Int[Tensor, "B N"],
        mask: Bool[Tensor, "B N"] | None = None,
        *,
        query_points: Int[Tensor, "B M"] | None = None,
        query_times: Float[Tensor, "B M"] | None = None,
    ) -> Float[Tensor, "B M G"]:
        """Return a result of `irreps_out` for each read, or for each observation without reads.

        Args:
            x: Features of the observations, of `irreps_in`.
            positions: Their places.
            times: Their times, in any order.
            points: Numbers of the points they are of; any integers.
            mask: True where an observation is present; elsewhere the rest may hold anything.
            query_points: Points to read.
            query_times: Times to read them at. A read before its point's first observation is zero.
        """
        x, seen = self._clean(x, positions, times, points, mask)
        if (query_points is None) != (query_times is None):
            raise ValueError("query_points and query_times must be given together")
        tokens = self.kinds.stack(self.embedding(x))
        if query_points is None or query_times is None:
            among = self._neighbours(seen, seen)
            for block in self.blocks:
                tokens = block(tokens, tokens, among)
            return self._result(tokens, seen.mask)

        check_shape("query_times", query_times, tuple(query_points.shape), "[B, M]")
        last = last_of_point(seen, query_points, query_times)
        from_first = last.clamp(min=0)
        places = seen.positions.take_along_dim(from_first[..., None], dim=1)
        asked = Observations(places, query_times, query_points, last >= 0)
        rows = tokens.take_along_dim(from_first[..., None, None], dim=1)
        if len(self.blocks) > 1:
            both = Observations(*(torch.cat(x, dim=1) for x in zip(seen, asked, strict=True)))
            sizes, pairs = (tokens.shape[1], rows.shape[1]), self._neighbours(both, seen)
            for block in self.blocks[:-1]:
                tokens, rows = block(torch.cat([tokens, rows], dim=1), tokens, pairs).split(
                    sizes, dim=1
                )
        # No read sees what the last block would make of the observations.
        rows = self.blocks[-1](rows, tokens, self._neighbours(asked, seen))
        return self._result(rows, asked.mask)

    def _neighbours(self, rows: Observations, keys: Observations) -> Neighbours:
        return find_neighbours(rows, keys, self.basis, cutoff=self.cutoff, window=self.window)

    def _result(self, rows: Tensor, is_there: Tensor) -> Tensor:
        found = self.head(self.kinds.flatten(self.norm(rows)))
        return torch.where(is_there[..., None], found, 0.0)

    def _clean(
        self, x: Tensor, positions: Tensor, times: Tensor, points: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Observations]:
        """Return features and observations, checked, with zeros where there is none."""
        for name, tensor in (("x", x), ("positions", positions), ("times", times)):
            check_float(name, tensor)
        if times.ndim != 2:
            raise ValueError(f"times must have shape [B, N]; got {list(times.shape)}")
        shape = times.shape[0], times.shape[1]
        check_shape("x", x, (*shape, self.irreps_in.dim), f"[B, N, {self.irreps_in}]")
        check_shape("positions", positions, (*shape, 3), "[B, N, 3]")
        check_shape("points", points, shape, "[B, N]")
        if mask is None:
            mask = torch.ones_like(times, dtype=torch.bool)
        check_mask("mask", mask, shape)
        absent = ~mask[..., None]
        x, positions = x.masked_fill(absent, 0.0), positions.masked_fill(absent, 0.0)
        times = times.masked_fill(~mask, 0.0)
        checks = DeferredChecks()
        for name, tensor in (("x", x), ("positions", positions), ("times", times)):
            check_finite(name, tensor, checks)
        checks.finish()
        return x, Observations(positions, times, points, mask)


def check_finite(name: str, x: Tensor, checks: DeferredChecks) -> None:
    """Refuse NaN and infinity, which would reach every neighbour."""
    if not can_look(x):
        return
    is_bad = ~x.detach().isfinite()

    def refuse() -> None:
        where = is_bad.nonzero()[0].tolist()
        found = f"{name}{where} = {x[tuple(where)].item()}"
        raise ValueError(f"{name} must be finite; {found}. Mask the observation out")

    checks.add(is_bad.any(), refuse)


def last_of_point(
    seen: Observations, query_points: Int[Tensor, "B M"], query_times: Float[Tensor, "B M"]
) -> Int[Tensor, "B M"]:
    """Return the number of each point's last observation at or before a time; -1 for none."""
    is_before = seen.times[:, None, :] <= query_times[:, :, None]
    is_own = (seen.points[:, None, :] == query_points[:, :, None]) & seen.mask[:, None, :]
    times = torch.where(is_before & is_own, seen.times[:, None, :], -torch.inf)
    latest, index = times.max(dim=-1)
    return torch.where(latest > -torch.inf, index, -1)
