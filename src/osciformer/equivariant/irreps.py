r"""Kinds of features, and how a key of one kind and a direction make a query of another.

A channel holds one tensor of each kind: `0e+1o` is a scalar and a vector, four numbers. Features
are ``[..., U, S]``, U channels of S components. A rotation R, proper or not, acts on the components
alone, as a matrix D(R) that is block diagonal in the kinds. Whatever touches only the channels, or
weighs all components of a kind alike, therefore commutes with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from osciformer._optional import need
from osciformer._types import Float, Int, Tensor

o3 = need("e3nn.o3", extra="equivariant")


class Kinds:
    """The kinds (degree l, parity p) of the tensors in a channel.

    Args:
        kinds: Irreps of e3nn, each once, with the scalar `0e` first: `0e+1o` or `0e+1o+1e+2e`.

    Example:
        >>> kinds = Kinds("0e+1o")
        >>> kinds.size, kinds.of_component.tolist(), str(kinds.irreps(8))
        (4, [0, 1, 1, 1], '8x0e+8x1o')
    """

    def __init__(self, kinds: Any = "0e+1o") -> None:
        irreps = o3.Irreps(kinds)
        self.all: tuple[Any, ...] = tuple(kind for _, kind in irreps)
        is_once = all(mul == 1 for mul, _ in irreps) and len(set(self.all)) == len(self.all)
        if not is_once or not self.all or self.all[0] != o3.Irrep("0e"):
            raise ValueError(
                f"kinds must name each irrep once and the scalar 0e first, as in '0e+1o'; got"
                f" {str(irreps)!r}. The number of copies is `channels`"
            )
        self.dims = [kind.dim for kind in self.all]
        self.size = sum(self.dims)  #: Components S of a channel.
        #: Kind of each component ``[S]``.
        self.of_component: Int[Tensor, "S"] = torch.repeat_interleave(torch.tensor(self.dims))

    def __len__(self) -> int:
        return len(self.all)

    def irreps(self, channels: int) -> Any:
        """Return the irreps, in e3nn's sense, of that many channels."""
        return o3.Irreps([(channels, kind) for kind in self.all])

    def stack(self, flat: Float[Tensor, "*B F"]) -> Float[Tensor, "*B U S"]:
        """Return channels and components of features in e3nn's order, `irreps(U)`."""
        channels = flat.shape[-1] // self.size
        blocks = flat.split([channels * dim for dim in self.dims], dim=-1)
        return torch.cat([x.unflatten(-1, (channels, -1)) for x in blocks], dim=-1)

    def flatten(self, x: Float[Tensor, "*B U S"]) -> Float[Tensor, "*B F"]:
        """Return features in e3nn's order; the inverse of `stack`."""
        return torch.cat([block.flatten(-2) for block in x.split(self.dims, dim=-1)], dim=-1)


def is_allowed(query: Any, key: Any, degree: int) -> bool:
    """Return whether a key and a harmonic of that degree can make a query, parity included.

    Without the parity a query, a key and a direction could form the triple product of three
    vectors, which is invariant under rotations and changes its sign under reflections.
    """
    is_triangle = abs(query.l - key.l) <= degree <= query.l + key.l
    return is_triangle and query.p == key.p * (-1) ** degree


class Coupling(NamedTuple):
    r"""All ways $[K \otimes Y_l]$ to make each kind from each kind: P paths with J columns in all.

    A column is a path and one component of its harmonic. With a weight a path and the harmonics,
    the weighted columns of `matrices` add up to the matrix that takes a key to its place in the
    query's space, given the direction.
    """

    matrices: Float[Tensor, "J S S"]
    path: Int[Tensor, "J"]  #: Path of each column.
    harmonic: Int[Tensor, "J"]  #: Its harmonic, among the (L + 1)^2 of all degrees.
    degree: Int[Tensor, "P"]  #: Degree of the harmonic of each path.


def couple(kinds: Kinds) -> Coupling:
    """Return the paths between kinds, scaled so that unit variance stays unit variance.

    Example:
        >>> couple(Kinds("0e+1o")).degree.tolist()  # a vector and a vector make no vector
        [0, 1, 1, 0, 2]
    """
    stops = torch.tensor(kinds.dims).cumsum(0).tolist()
    spans = [slice(stop - dim, stop) for stop, dim in zip(stops, kinds.dims, strict=True)]
    matrices: list[Tensor] = []
    path: list[int] = []
    harmonic: list[int] = []
    degree: list[int] = []
    for a, to in zip(kinds.all, spans, strict=True):
        for b, origin in zip(kinds.all, spans, strict=True):
            for l in range(abs(a.l - b.l), a.l + b.l + 1):
                if not is_allowed(a, b, l):
                    continue
                coefficients = o3.wigner_3j(a.l, b.l, l, dtype=torch.float64) * a.dim**0.5
                for m in range(2 * l + 1):
                    matrix = torch.zeros(kinds.size, kinds.size, dtype=torch.float64)
                    matrix[to, origin] = coefficients[:, :, m]
                    matrices.append(matrix)
                    path.append(len(degree))
                    harmonic.append(l * l + m)
                degree.append(l)
    return Coupling(torch.stack(matrices), *map(torch.tensor, (path, harmonic, degree)))
