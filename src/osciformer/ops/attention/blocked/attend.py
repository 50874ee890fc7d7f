"""From a query path and tokens to the inputs of the quadratic part, and back to rows."""

from __future__ import annotations

import torch

from osciformer._types import Bool, Float, Tensor
from osciformer.ops.attention.blocked.core import CoreInputs, forward
from osciformer.ops.attention.blocked.operator import attend_strictly_before
from osciformer.ops.attention.blocked.paths import (
    BlockedPath,
    PathSpans,
    blocked_path,
    query_at_rows,
)
from osciformer.ops.attention.blocked.side import SideInputs
from osciformer.ops.attention.blocked.spans import constant_spans
from osciformer.ops.attention.blocked.timeline import CrossTimeline, SelfTimeline, Timeline
from osciformer.ops.attention.drive import Drive, Role
from osciformer.ops.attention.expansion import (
    Oscillators,
    expand_channels,
    expand_path,
    is_resonant,
)
from osciformer.ops.attention.query import QueryPath
from osciformer.ops.attention.ties import attend_tied, find_ties, merge


def attend(
    path: QueryPath,
    k: Float[Tensor, "B N H C"],
    v: Float[Tensor, "B N H C"],
    query_times: Float[Tensor, "B M"],
    key_times: Float[Tensor, "B N"],
    *,
    key_omega: Float[Tensor, "H C"],
    key_zeta: Float[Tensor, "H C"],
    value_omega: Float[Tensor, "H C"],
    value_zeta: Float[Tensor, "H C"],
    key_velocity: Float[Tensor, "B N H C"] | None = None,
    value_velocity: Float[Tensor, "B N H C"] | None = None,
    value: str = "average",
    drive: Drive | None = None,
    mask: Bool[Tensor, "B N"] | None = None,
    scale: float = 1.0,
    strict: bool = False,
    key_equilibrium: Float[Tensor, "B N H C"] | None = None,
    value_equilibrium: Float[Tensor, "B N H C"] | None = None,
    return_weights: bool = False,
) -> tuple[Float[Tensor, "B M H C"], Float[Tensor, "B H M"], Float[Tensor, "B H M N"] | None]:
    """Return output, logsumexp and (detached) weights of causal oscillator attention, exactly.

    Closed forms are evaluated once per gap in float64; the quadratic part runs in the dtype of the
    tokens (float32 for half-precision tokens, float64 where times want gradients or keys are
    driven), in memory linear in N and M.

    Args:
        path: The query of every row as a function of time.
        k: Keys at their own times.
        v: Values at their own times.
        query_times: Sorted times of the rows.
        key_times: Sorted times of the keys.
        key_omega: Natural frequencies of the keys.
        key_zeta: Damping ratios of the keys.
        value_omega: Natural frequencies of the values.
        value_zeta: Damping ratios of the values.
        key_velocity: Initial velocities of the keys; None is 0.
        value_velocity: Initial velocities of the values; None is 0.
        value: "average" over [t_i, t_j] or "point" at t_j.
        drive: Sinusoidal forces on keys and values.
        mask: Which keys are present; None is all.
        scale: Factor of the logits.
        strict: Leave out keys at a row's own time.
        key_equilibrium: Rest position of each key; None is 0.
        value_equilibrium: Rest position of each value; None is 0.
        return_weights: Also return the weights; this alone takes memory M times N.
    """
    spectra: tuple[tuple[Role, Tensor, Tensor], ...] = (
        ("key", key_omega, key_zeta),
        ("value", value_omega, value_zeta),
    )
    for role, omega, zeta in spectra:
        if not torch.compiler.is_compiling() and is_resonant(drive, role, omega, zeta):
            raise ValueError(
                f"drive.omega hits an undamped {role} channel at its own frequency, where the split"
                " into steady state and free oscillation has a pole; use backend='reference' or a"
                f" {role}_zeta above 0 there"
            )
    keys = expand_channels(k, key_velocity, key_omega, key_zeta, key_equilibrium, drive, "key")
    values = expand_channels(
        v, value_velocity, value_omega, value_zeta, value_equilibrium, drive, "value"
    )
    is_drift = query_times.requires_grad or key_times.requires_grad
    dtype = _compute_dtype(k, drive, is_drift=is_drift)
    rows, cols = query_times.double(), key_times.double()
    line = _timeline(query_times, key_times, rows, cols, mask)
    inputs = None
    if line is None:
        out = v.new_zeros(*query_times.shape, *v.shape[2:], dtype=dtype)
        lse = out.new_full(out.shape[:3], float("-inf"))
    else:
        seen = blocked_path(expand_path(path, keys.groups), line, scale, dtype, is_drift=is_drift)
        inputs = CoreInputs(
            _key_side(seen, line, keys),
            _value_side(line, values, dtype, is_average=value == "average", is_drift=is_drift),
            line.gaps.to(dtype),
            line.age.to(dtype),
            line.present,
            k.shape[2],
            line.levels.num_slots,
            line.levels.fan,
            is_drift,
        )
        by_position, lse = attend_strictly_before(inputs)
        out = values.collapse(line.positions_to_rows(by_position.transpose(1, 2)))
        lse = line.positions_to_rows(lse.transpose(1, 2))
    ties = find_ties(rows, cols, mask)
    own = (query_at_rows(path, rows, cols, ties) * scale).to(dtype)
    if not strict:
        out, lse = merge(out, lse, *attend_tied(own, k.to(dtype), v.to(dtype), *ties))
    weights = None
    if return_weights:
        is_tied = None if strict else rows[:, None, :, None] == cols[:, None, None, :]
        weights = _weights(line, inputs, lse, own, k.to(dtype), is_tied, mask).to(v.dtype)
    return out.to(v.dtype), lse.transpose(1, 2), weights


def _compute_dtype(k: Tensor, drive: Drive | None, *, is_drift: bool) -> torch.dtype:
    """Return float64 where it is asked for or needed, else float32."""
    # The derivative in time of an average over a gap is a difference divided by the gap, and a
    # driven oscillator is a difference of oscillators that are larger than it.
    if k.dtype == torch.float64 or is_drift or drive is not None:
        return torch.float64
    return torch.float32


def _timeline(
    query_times: Tensor, key_times: Tensor, rows: Tensor, cols: Tensor, mask: Tensor | None
) -> Timeline | None:
    """Return the time line, or None where no row can see a key of an earlier time."""
    is_self = query_times is key_times
    if not is_self and not torch.compiler.is_compiling() and rows.shape == cols.shape:
        is_self = torch.equal(rows, cols)
    if not is_self:
        return CrossTimeline(rows, cols, mask)
    if rows.shape[1] < 2:
        return None
    has_gradient = query_times.requires_grad or key_times.requires_grad
    # Two tensors of equal times keep their own gradients.
    return SelfTimeline(rows, cols if query_times is not key_times and has_gradient else rows, mask)


def _aged(line: Timeline, tokens: Oscillators, spans: PathSpans) -> Tensor:
    """Return states and integrals of the keys at their slots, from their own spans.

    The same as `chain.append_to_key` from a key that has just begun.
    """
    dtype, matrix = spans.matrix.dtype, spans.matrix
    x1 = line.keys_to_places(tokens.start.flatten(-2)).to(dtype)
    moved = x1 * matrix[:, 0]
    if tokens.velocity is not None:
        x2 = line.keys_to_places(tokens.velocity.flatten(-2)).to(dtype)
        moved = torch.addcmul(moved, x2, matrix[:, 1])
        moved[1] += x2
    if spans.is_drift and matrix.shape[0] > 2:
        growth = moved[:1] if spans.end is None else spans.end * moved[0]
        if spans.step is not None:
            growth = torch.addcmul(growth, spans.step, x1)
        moved = torch.cat([moved[:2], moved[2:] - line.age.to(dtype).unsqueeze(-1) * growth])
    moved[0] += x1
    return moved


def _key_side(seen: BlockedPath, line: Timeline, keys: Oscillators) -> SideInputs:
    omega, zeta = keys.omega.double().flatten(), keys.zeta.double().flatten()
    over = seen.spans(omega, zeta, of_keys=False)
    own = over if line.age is line.gaps else seen.spans(omega, zeta, of_keys=True)
    base = None
    if over.end is not None and over.step is not None:
        start = over.end[..., :1, :] - over.step[..., :1, :]
        base = torch.cat([start, over.end], dim=-2)  # positions 0 .. X
    return SideInputs(over.matrix, _aged(line, keys, own), seen.amplitude, base, over.step)


def _value_side(
    line: Timeline, values: Oscillators, dtype: torch.dtype, *, is_average: bool, is_drift: bool
) -> SideInputs:
    omega, zeta = values.omega.double().flatten(), values.zeta.double().flatten()

    def spans(gap: Tensor) -> PathSpans:
        gap = gap.unsqueeze(-1)
        matrix = constant_spans(
            gap, omega, zeta, dtype, is_drift=is_drift, with_integral=is_average
        )
        return PathSpans(matrix, is_drift)

    over = spans(line.gaps)
    own = over if line.age is line.gaps else spans(line.age)
    return SideInputs(over.matrix, _aged(line, values, own), None, None, None)


@torch.no_grad()
def _weights(
    line: Timeline | None,
    inputs: CoreInputs | None,
    lse: Tensor,
    own: Tensor,
    k: Tensor,
    is_tied: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Return ``[B, H, M, N]``, the weights, from logits recorded on a second run."""
    tied = torch.einsum("bmhc,bnhc->bhmn", own, k)
    logits = torch.full_like(tied, float("-inf"))
    if line is not None and inputs is not None:
        (batch, positions), places = inputs.span.shape, inputs.age.shape[1]
        dense = logits.new_full((batch, inputs.num_heads, positions, places), float("-inf"))
        forward(inputs, dense)
        by_row = line.positions_to_rows(dense.transpose(1, 2))  # [B, M, H, K]
        logits = line.places_to_keys(by_row, k.shape[1]).transpose(1, 2)
    if is_tied is not None:
        is_tied = is_tied if mask is None else is_tied & mask[:, None, None]
        logits = torch.where(is_tied, tied, logits)
    return (logits - torch.where(lse == float("-inf"), 0.0, lse).transpose(1, 2)[..., None]).exp()
