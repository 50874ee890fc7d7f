"""Which observation sees which, and the geometry between them: once a batch, for all layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from osciformer._types import Bool, Float, Int, Tensor
from osciformer.equivariant.irreps import o3
from osciformer.equivariant.radial import RadialBasis, envelope


class Observations(NamedTuple):
    """Where, when and of which point; a read is one, too, at the place that it is read from."""

    positions: Float[Tensor, "B N 3"]
    times: Float[Tensor, "B N"]
    points: Int[Tensor, "B N"]
    mask: Bool[Tensor, "B N"]


class Neighbours(NamedTuple):
    """The E pairs of a row and a key that it sees."""

    rows: Int[Tensor, "E"]  #: Number of the row among the B * M of the batch.
    keys: Int[Tensor, "E"]  #: Number of the key among the B * N of the batch.
    gaps: Float[Tensor, "E"]  #: Time from the key to the row, at least 0.
    harmonics: Float[Tensor, "E Y"]  #: r^l Y_l of row minus key, all degrees up to L.
    radial: Float[Tensor, "E L 2n"]  #: R / r^l; n functions for other points, n for the same one.
    weight: Float[Tensor, "E"]  #: 1 near by, 0 at the cut-off and at the end of the window.
    shape: tuple[int, int]  #: Rows B, M.


def check_reach(cutoff: float, window: float) -> None:
    """Refuse a reach that is not positive."""
    for name, value in (("cutoff", cutoff), ("window", window)):
        if not value > 0.0:
            raise ValueError(f"{name} must be positive; got {value}")


def find_neighbours(
    rows: Observations,
    keys: Observations,
    basis: RadialBasis,
    *,
    cutoff: float,
    window: float = math.inf,
) -> Neighbours:
    """Return the pairs with the key not later than the row, near by and not too long ago.

    Args:
        rows: What attends.
        keys: What is attended to.
        basis: Functions of the distance in units of `cutoff`.
        cutoff: Distance at which a key is out of sight.
        window: Time after which it is.
    """
    check_reach(cutoff, window)
    dtype = rows.positions.dtype
    # In double precision: seconds since 1970 have a resolution of two minutes in single precision.
    gaps = rows.times.double()[:, :, None] - keys.times.double()[:, None, :]
    offsets = (rows.positions[:, :, None] - keys.positions[:, None, :]) / cutoff  # [B, M, N, 3]
    squared = offsets.detach().square().sum(dim=-1)
    sees = (gaps >= 0) & (gaps < window) & (squared < 1.0)
    batch, row, key = (sees & rows.mask[:, :, None] & keys.mask[:, None, :]).nonzero().unbind(-1)

    offset, gap = offsets[batch, row, key], gaps[batch, row, key].to(dtype)
    squared = offset.square().sum(dim=-1)
    is_same = rows.points[batch, row] == keys.points[batch, key]
    functions = basis(squared)
    weight = envelope(squared) * envelope((gap / window) ** 2)
    # A lone neighbour has all of a row's attention until it is out of sight, so its message fades.
    radial = weight[:, None, None] * torch.cat(
        [functions * (is_same == same)[:, None, None] for same in (False, True)], dim=-1
    )
    degrees = list(range(basis.degree + 1))
    harmonics = o3.spherical_harmonics(degrees, offset, False, normalization="component")
    (size, num_rows), num_keys = rows.times.shape, keys.times.shape[1]
    pairs = batch * num_rows + row, batch * num_keys + key
    return Neighbours(*pairs, gap, harmonics, radial, weight, (size, num_rows))
