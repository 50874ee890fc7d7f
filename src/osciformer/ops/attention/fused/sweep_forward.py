"""Keys of earlier spans: flash attention with row factors moved from span to span."""

from __future__ import annotations

import triton
import triton.language as tl

from osciformer.ops.attention.fused.pieces import load_plane, load_tokens, product, soften, time_at


@triton.jit
def moved_factors(factor, matrix, rows, size, C: tl.constexpr):
    """Return the row factors with their reference time moved back over the span `matrix`."""
    c = matrix + tl.arange(0, C)[None, :]
    f1 = load_plane(factor, rows, C).to(tl.float32)
    f2 = load_plane(factor + size, rows, C).to(tl.float32)
    first = f1 * tl.load(c) + f2 * tl.load(c + 2 * C) + tl.load(c + 4 * C)
    second = f1 * tl.load(c + C) + f2 * tl.load(c + 3 * C) + tl.load(c + 5 * C)
    return first, second


@triton.jit
def inverse_gaps(late, early, HAS_ZERO: tl.constexpr):
    """Return 1 / (late + early), and 0 for zero gaps."""
    gap = late[:, None] + early[None, :]
    root = tl.rsqrt(gap)
    inverse = root * root
    if HAS_ZERO:
        inverse = tl.where(gap > 0, inverse, 0.0)
    return inverse


@triton.jit
def add_spans(
    state,
    first,
    last,
    own,
    q,
    t,
    rows,
    plane,
    size,
    times,
    rest,
    mask,
    key_state,
    value_state,
    key_factor,
    value_factor,
    key_matrix,
    value_matrix,
    bias,
    logit_scale,
    SHARED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the spans own - 1 - first, ..., own - last to (top, mass, acc)."""
    top, mass, acc = state
    qo = q.to(OPERAND)
    ks = key_state + 3 * plane * C
    vs = value_state + 3 * plane * C
    for back in range(first, last):
        span = own - 1 - back
        at = (span % GROUP) * (PLANES * C)
        f1, f2 = moved_factors(key_factor + 2 * plane * C, key_matrix + at, rows, size, C)
        if not SHARED:
            f1 *= q
            f2 *= q
        q1 = f1.to(OPERAND)
        q2 = f2.to(OPERAND)
        r = tl.load(times + (span + 1) * SPAN)
        # Inverse gaps carry the scale of the logits; averages are divided by it at the end.
        late = (t - r).to(tl.float32) * (1.0 / logit_scale)
        y1 = tl.zeros([ROWS, C], tl.float32)
        y2 = tl.zeros([ROWS, C], tl.float32)
        for step in tl.range(0, SPAN // STEP, num_stages=STAGES):
            keys = span * SPAN + step * STEP + tl.arange(0, STEP)
            early = tl.load(rest + keys)
            raw = product(q1, tl.trans(load_plane(ks, keys, C)), PREC)
            raw += product(q2, tl.trans(load_plane(ks + size, keys, C)), PREC)
            if SHARED:
                raw += tl.load(bias + keys)[None, :]
            else:
                raw += product(qo, tl.trans(load_plane(ks + 2 * size, keys, C)), PREC)
            inverse = inverse_gaps(late, early, HAS_ZERO)
            logits = raw * inverse
            if HAS_MASK:
                logits = tl.where((tl.load(mask + keys) != 0)[None, :], logits, float("-inf"))
            if HAS_ZERO:
                logits = tl.where(inverse > 0, logits, float("-inf"))
            top, mass, weights, keep = soften(top, mass, logits)
            if AVERAGE:
                weights *= inverse
            weights = weights.to(OPERAND)
            y1 = y1 * keep[:, None] + product(weights, load_plane(vs, keys, C), PREC)
            y2 = y2 * keep[:, None] + product(weights, load_plane(vs + size, keys, C), PREC)
            acc *= keep[:, None]
            if AVERAGE:
                acc += product(weights, load_plane(vs + 2 * size, keys, C), PREC)
        f1, f2 = moved_factors(value_factor + 2 * plane * C, value_matrix + at, rows, size, C)
        acc += f1 * y1 + f2 * y2
    return top, mass, acc


@triton.jit
def tied_spans(times, own, low, first_time, SPAN: tl.constexpr):
    """Return how many of the spans before `own` end at the time of the first row."""
    count = 0
    while tl.load(times + (own - count) * SPAN) == first_time and own - count > low:
        count += 1
    return count


@triton.jit(do_not_specialize=["GROUP"])
def sweep_forward(
    q_ptr,
    times_ptr,
    rest_ptr,
    mask_ptr,
    key_state,
    value_state,
    key_factor,
    value_factor,
    key_matrix,
    value_matrix,
    bias_ptr,
    acc_ptr,
    lse_ptr,
    out_ptr,
    length,
    padded,
    heads,
    logit_scale,
    SHARED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    AVERAGE: tl.constexpr,
    IS_LAST: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PREC: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add to each row the keys of the earlier spans of its group of GROUP spans.

    One program takes ROWS rows of one span. `acc_ptr` ``[B H, padded, C]`` and `lse_ptr`
    ``[B H, padded]`` hold output and logsumexp over nearer keys; they are updated, or the output
    is written to `out_ptr` ``[B, N, H, C]`` by the last stage. Where rows share the query's path
    (SHARED), the key factors are integrals of the path itself, and the integrals of the keys
    against it, one number a key, are `bias_ptr` ``[B H, padded]``.
    """
    # The longest rows first.
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    series, head = tl.program_id(2), tl.program_id(1)
    plane = (series * heads + head).to(tl.int64) * padded
    size = padded.to(tl.int64) * C
    times = times_ptr + series.to(tl.int64) * length
    first_token = series.to(tl.int64) * length
    rows = chunk * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    own = chunk * ROWS // SPAN
    low = (own // GROUP) * GROUP
    first_time = time_at(times, chunk * ROWS, length)
    t = time_at(times, rows, length)
    q = load_tokens(q_ptr, first_token + rows, inside, head, heads, C, tl.arange(0, C))
    num_spans = (length + SPAN - 1) // SPAN
    matrix = ((series * heads + head).to(tl.int64) * num_spans + own) * (GROUP * PLANES * C)
    mask = mask_ptr + first_token
    rest = rest_ptr + series.to(tl.int64) * padded

    top = tl.load(lse_ptr + plane + rows)
    acc = load_plane(acc_ptr + plane * C, rows, C)
    unit = 1.0
    if AVERAGE:
        unit = logit_scale
    acc *= unit
    mass = tl.where(top == float("-inf"), 0.0, 1.0)
    tied = tied_spans(times, own, low, first_time, SPAN)
    state = (top, mass, acc)
    # fmt: off
    state = add_spans(
        state, 0, tied, own, q, t, rows, plane, size, times, rest, mask, key_state,
        value_state, key_factor, value_factor, key_matrix + matrix, value_matrix + matrix,
        bias_ptr + plane, logit_scale, SHARED, True, HAS_MASK, AVERAGE, SPAN, GROUP, PLANES, STEP,
        ROWS, C, PREC, OPERAND, STAGES,
    )
    state = add_spans(
        state, tied, own - low, own, q, t, rows, plane, size, times, rest, mask, key_state,
        value_state, key_factor, value_factor, key_matrix + matrix, value_matrix + matrix,
        bias_ptr + plane, logit_scale, SHARED, False, HAS_MASK, AVERAGE, SPAN, GROUP, PLANES, STEP,
        ROWS, C, PREC, OPERAND, STAGES,
    )
    # fmt: on
    top, mass, acc = state

    safe = tl.where(mass > 0, mass, 1.0)
    acc = acc / (safe * unit)[:, None]
    if IS_LAST:
        to = ((first_token + rows) * heads + head)[:, None] * C + tl.arange(0, C)[None, :]
        tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        at = acc_ptr + plane * C + rows.to(tl.int64)[:, None] * C + tl.arange(0, C)[None, :]
        tl.store(at, acc)
    tl.store(lse_ptr + plane + rows, tl.where(mass > 0, top + tl.log2(safe), float("-inf")))
