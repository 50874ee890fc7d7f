"""Sinusoidal design matrix and the ridge fits that turn query tokens into a query path."""

from __future__ import annotations

import torch

from osciformer._types import Bool, Float, Tensor

_Tokens = Float[Tensor, "B M H C"]
_Times = Float[Tensor, "B M"]
_Bank = Float[Tensor, "J"]
_Mask = Bool[Tensor, "B M"] | None

# The Gram matrix has largest eigenvalue at most J, so its condition number is at most J / ridge;
# below this ridge a float64 Cholesky factor may not exist.
_MIN_RIDGE = 1e-12


def design_matrix(
    times: Float[Tensor, "B N"], omega: Float[Tensor, "J"]
) -> Float[Tensor, "B N 2*J"]:
    r"""Return the J columns $\cos(\omega_m t)$, then the J of $\sin(\omega_m t)$ (eq. `query`).

    Args:
        times: Times t.
        omega: Frequencies of the bank, in radians per unit of time.

    Example:
        >>> design_matrix(torch.zeros(1, 1), torch.tensor([1.0, 2.0]))
        tensor([[[1., 1., 0., 0.]]])
    """
    phase = times[..., None] * omega
    return torch.cat((phase.cos(), phase.sin()), dim=-1)


def _prepare(
    q: Tensor, times: Tensor, omega: Tensor, ridge: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return float64 (design, targets, times, mask) in which padding is exact zeros."""
    if q.ndim != 4 or times.ndim != 2 or q.shape[:2] != times.shape:
        raise ValueError(
            "q must be [B, M, H, C] and times [B, M] with equal B and M; "
            f"got q {tuple(q.shape)} and times {tuple(times.shape)}"
        )
    if omega.ndim != 1 or omega.shape[0] == 0:
        raise ValueError(f"omega must be [J] with at least one frequency; got {tuple(omega.shape)}")
    if mask is not None and mask.shape != times.shape:
        raise ValueError(
            f"mask must have the shape of times, {tuple(times.shape)}; got {tuple(mask.shape)}"
        )
    if not ridge >= _MIN_RIDGE:
        raise ValueError(
            f"ridge must be at least {_MIN_RIDGE:g} (1e-4 is a good choice: the Gram matrix of "
            f"slow modes is numerically singular); got {ridge}"
        )
    if mask is None:
        mask = torch.ones(times.shape, dtype=torch.bool, device=times.device)
    # Padding may hold anything, NaN included, so it is replaced and not multiplied by zero.
    times = torch.where(mask, times.double(), 0.0)
    targets = torch.where(mask[..., None], q.double().flatten(2), 0.0)  # [B, M, H*C]
    design = torch.where(mask[..., None], design_matrix(times, omega.double()), 0.0)  # [B, M, 2J]
    return design, targets, times, mask


def solve_ridge(gram: Tensor, targets: Tensor, count: Tensor, ridge: float) -> Tensor:
    """Return (gram / count + ridge I)^-1 targets / count, and 0 if count is 0."""
    count = count.clamp(min=1).to(gram.dtype)[..., None, None]
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(gram / count + ridge * identity)
    return torch.cholesky_solve(targets / count, factor)


def _split(theta: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Split [..., 2J, H*C] coefficients into cosine and sine parts [..., H, J, C]."""
    theta = theta.unflatten(-1, (num_heads, -1)).movedim(-2, -3)  # [..., H, 2J, C]
    cos, sin = theta.chunk(2, dim=-2)
    return cos, sin


def ridge_fit(
    q: _Tokens, times: _Times, omega: _Bank, *, ridge: float = 1e-4, mask: _Mask = None
) -> tuple[Float[Tensor, "B H J C"], Float[Tensor, "B H J C"]]:
    r"""Return the coefficients of $q(t) = \sum_m A_m \cos\omega_m t + B_m \sin\omega_m t$.

    $$\Theta = \Big(\tfrac1n \Phi^\top \Phi + \rho I\Big)^{-1} \tfrac1n \Phi^\top Q$$
    over the n present tokens of each series: the paper's ridge fit of eq. `query`, with the ridge
    on the mean Gram matrix so that its strength does not depend on the length. Every token enters
    every coefficient, so a path fitted this way is not causal; see `prefix_ridge_fit`.

    Args:
        q: Query tokens.
        times: Their times, in the same unit as `1 / omega`, in any order.
        omega: Frequencies of the bank.
        ridge: The ridge $\rho$, at least 1e-12.
        mask: True where a token is present. Absent tokens may hold any value, NaN included.

    Returns:
        Cosine and sine coefficients, float64. A series without tokens gets zeros.

    Example:
        >>> times = torch.linspace(0, 6, 50, dtype=torch.float64)[None]
        >>> q = 3 * torch.cos(2 * times)[..., None, None]
        >>> cos, sin = ridge_fit(q, times, torch.tensor([2.0]), ridge=1e-9)
        >>> round(cos.item(), 4), abs(round(sin.item(), 4))
        (3.0, 0.0)
    """
    design, targets, _, mask = _prepare(q, times, omega, ridge, mask)
    theta = solve_ridge(design.mT @ design, design.mT @ targets, mask.sum(-1), ridge)
    return _split(theta, q.shape[2])


def prefix_ridge_fit(
    q: _Tokens, times: _Times, omega: _Bank, *, ridge: float = 1e-4, mask: _Mask = None
) -> tuple[Float[Tensor, "B M H J C"], Float[Tensor, "B M H J C"]]:
    r"""Return, for every row j, the ridge fit to the tokens that row j may see.

    $$\Theta_j = \Big(\tfrac1{n_j} \sum_{t_k \le t_j} \phi_k \phi_k^\top + \rho I\Big)^{-1}
    \tfrac1{n_j} \sum_{t_k \le t_j} \phi_k Q_k^\top$$
    The paper's per-token coefficients $A_{j,\cdot}$, read causally. Tokens with equal times see
    each other. Costs $O(M J^2 (J + H C))$ time and $O(M J (J + H C))$ memory per series.

    Arguments are those of `ridge_fit`; `times` must not decrease among the present tokens of a
    series.

    Returns:
        Cosine and sine coefficients, float64. A row whose prefix has no present token gets zeros;
        an absent row has the fit of the present tokens before it and of those tied with them.
        Later tokens never change a row, not even by rounding.
    """
    design, targets, times, mask = _prepare(q, times, omega, ridge, mask)
    gram = (design[..., :, None] * design[..., None, :]).cumsum(1)  # [B, M, 2J, 2J]
    moment = (design[..., :, None] * targets[..., None, :]).cumsum(1)  # [B, M, 2J, H*C]
    count = mask.cumsum(-1)
    # Rows with equal times share the sums at the last of them; absent rows repeat the time before.
    clock = torch.where(mask, times.detach(), -torch.inf).cummax(-1).values
    last = torch.searchsorted(clock, clock, right=True) - 1  # [B, M]
    # Not `take_along_dim`, whose broadcasting fixes the batch size in an exported program.
    gram, moment = (
        x.gather(1, last[..., None, None].expand(-1, -1, *x.shape[2:])) for x in (gram, moment)
    )
    return _split(solve_ridge(gram, moment, count.gather(1, last), ridge), q.shape[2])
