"""Gauss-Legendre rules on [0, 1] for the oracles: slow, accurate, free of closed forms."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from osciformer._types import Float, Tensor

_Rule = tuple[Float[Tensor, "n"], Float[Tensor, "n"]]

_legendre = lru_cache(maxsize=64)(np.polynomial.legendre.leggauss)  # on [-1, 1]


def gauss_legendre(num_nodes: int) -> _Rule:
    r"""Return the nodes and weights of the Gauss-Legendre rule on [0, 1].

    $$\int_0^1 f(x)\,dx \approx \sum_k w_k f(x_k)$$
    Exact for polynomials up to degree `2 * num_nodes - 1`. Nodes increase inside (0, 1); weights
    are positive and add up to 1; both are float64.

    Example:
        >>> nodes, weights = gauss_legendre(2)
        >>> float((weights * nodes**3).sum())
        0.25
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1; got {num_nodes}")
    nodes, weights = _legendre(int(num_nodes))
    return torch.tensor(0.5 * (nodes + 1.0)), torch.tensor(0.5 * weights)


def graded_panels(
    max_phase: float,
    *,
    max_decay: float = 0.0,
    num_nodes: int = 16,
    phase_per_panel: float = math.pi,
) -> _Rule:
    r"""Return a composite Gauss-Legendre rule on [0, 1], graded towards 0.

    Meant for $f(x) = e^{-d x} \cos(p x)$ and its like with $|p|$ up to `max_phase` and any
    $0 \le d$ up to `max_decay`. Panels halve towards 0 until the first is no wider than
    `1 / max_decay`, because a fast decay lives there; each panel is then cut so that no piece
    turns through more than `phase_per_panel` radians. The cost is logarithmic in the decay and
    linear in the phase.

    Args:
        max_phase: Largest phase over [0, 1], in radians: (sum of frequencies) * gap.
        max_decay: Largest decay exponent over [0, 1]: rate * gap.
        num_nodes: Nodes of each piece.
        phase_per_panel: Largest phase over one piece, in radians.

    Example:
        >>> nodes, weights = graded_panels(200.0, max_decay=1e4)
        >>> exact = (1e4 + 0.0) / (1e8 + 4e4)  # integral of exp(-1e4 x) cos(200 x)
        >>> value = (weights * torch.exp(-1e4 * nodes) * torch.cos(200 * nodes)).sum()
        >>> bool(abs(value - exact) < 1e-14)
        True
    """
    for name, value in (("max_phase", max_phase), ("max_decay", max_decay)):
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} must be finite and not negative; got {value}")
    if not phase_per_panel > 0.0:
        raise ValueError(f"phase_per_panel must be positive; got {phase_per_panel}")
    halvings = max(0, math.ceil(math.log2(max(max_decay, 1.0))))
    edges = [0.0] + [2.0**-k for k in range(halvings, -1, -1)]
    cuts = [np.zeros(1)]
    for left, right in pairwise(edges):
        pieces = max(1, math.ceil((right - left) * max_phase / phase_per_panel))
        cuts.append(np.linspace(left, right, pieces + 1)[1:])
    knots = torch.tensor(np.concatenate(cuts))
    nodes, weights = gauss_legendre(num_nodes)
    width = knots.diff()[:, None]
    return (knots[:-1, None] + width * nodes).flatten(), (width * weights).flatten()
