"""Query paths that all rows share: `blocked` within spans, the kernels between them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from osciformer.math.oscillator import propagator
from osciformer.ops.attention import blocked
from osciformer.ops.attention.blocked.paths import blocked_path, query_at_rows
from osciformer.ops.attention.blocked.timeline import SelfTimeline
from osciformer.ops.attention.fused.launch import SPAN, SharedPath, padded_length, precision
from osciformer.ops.attention.fused.shared_operator import attend_far, scan_path
from osciformer.ops.attention.query import LinearPath, SinusoidPath
from osciformer.ops.attention.ties import attend_tied, find_ties, merge


def attend_shared(
    path: LinearPath | SinusoidPath,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    *,
    key_omega: Tensor,
    key_zeta: Tensor,
    value_omega: Tensor,
    value_zeta: Tensor,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    value: str,
    mask: Tensor | None,
    scale: float,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, N, H, C]`` and logsumexp ``[B, H, N]`` for rows that share their path.

    Pairs within a span of tokens are left to `blocked`, span by span; all others go to the far
    kernels, which need the path's integrals from each span's start to its rows, from its keys to
    its end, and over the spans between.
    """
    times = times.double()
    spectra = {
        side: torch.stack([omega.double() * zeta.double(), omega.double() ** 2])
        for side, omega, zeta in (
            ("key", key_omega, key_zeta),
            ("value", value_omega, value_zeta),
        )
    }
    shared = _integrals(path, k, key_velocity, times, key_omega, key_zeta, spectra["key"])
    out, lse = attend_far(
        shared,
        k,
        v,
        key_velocity,
        value_velocity,
        spectra["key"],
        spectra["value"],
        times,
        mask,
        scale,
        is_average=value == "average",
    )
    batch, length, heads, _ = k.shape
    out = out.float()
    lse = lse.view(batch, heads, -1)[..., :length].transpose(1, 2) * math.log(2.0)
    near = _within_spans(
        path,
        k,
        v,
        times,
        mask,
        key_velocity,
        value_velocity,
        key_omega=key_omega,
        key_zeta=key_zeta,
        value_omega=value_omega,
        value_zeta=value_zeta,
        value=value,
        scale=scale,
    )
    out, lse = merge(out, lse, *near)
    if not strict:
        ties = find_ties(times, times, mask)
        own = (query_at_rows(path, times, times, ties) * scale).float()
        out, lse = merge(out, lse, *attend_tied(own, k.float(), v.float(), *ties))
    return out.to(v.dtype), lse.transpose(1, 2)


def _integrals(
    path: LinearPath | SinusoidPath,
    k: Tensor,
    velocity: Tensor | None,
    times: Tensor,
    omega: Tensor,
    zeta: Tensor,
    spectrum: Tensor,
) -> SharedPath:
    """Return the integrals of the path that the far kernels need."""
    batch, length, heads, channels = k.shape
    padded = padded_length(length, channels, k.dtype)
    line = SelfTimeline(times, times, None)
    seen = blocked_path(path, line, 1.0, torch.float32, is_drift=False)
    spans = seen.spans(omega.double().flatten(), zeta.double().flatten(), of_keys=False)
    gaps = spans.matrix[2][:, :, : length - 1].unflatten(-1, (heads, channels))
    gaps = functional.pad(gaps, (0, 0, 0, 0, 0, padded - length + 1))  # [2, B, padded, H, C]
    moment = gaps.permute(1, 3, 0, 2, 4).flatten(0, 1)
    factor, suffix = scan_path(moment, spectrum, times, k.dtype)
    whole = suffix.unflatten(0, (batch, heads))[:, :, :, :length]  # [B, H, 2, N, C]
    bias = torch.einsum("bhnc,bnhc->bhn", whole[:, :, 0], k.float())
    if velocity is not None:
        bias = bias + torch.einsum("bhnc,bnhc->bhn", whole[:, :, 1], velocity.float())
    bias = functional.pad(bias.flatten(0, 1), (0, padded - length))
    between = _between(suffix[:, :, ::SPAN], times[:, ::SPAN], omega, zeta)
    return SharedPath(factor.to(precision(k.dtype).operand), bias, between)


def _between(whole: Tensor, starts: Tensor, omega: Tensor, zeta: Tensor) -> Tensor:
    """Return the path's integrals from the end of span i to the start of span j.

    Args:
        whole: ``[B H, 2, spans, C]``, integrals over the spans.
        starts: ``[B, spans]``, the times where they start.
        omega: ``[H, C]``.
        zeta: ``[H, C]``.

    Returns:
        ``[B H, j, i, 2, C]`` float32, 0 where i >= j.
    """
    num_spans = starts.shape[1]
    whole = whole[:, :, :num_spans].double().transpose(1, 2)  # [B H, spans, 2, C]
    length = torch.diff(starts, dim=1, append=starts[:, -1:])[:, None, :, None]
    p11, p12, p21, p22 = (
        p.flatten(0, 1) for p in propagator(length, omega.double()[:, None], zeta.double()[:, None])
    )
    spans = torch.arange(num_spans, device=starts.device)
    current = torch.zeros_like(whole)
    columns = [current]
    for distance in range(2, num_spans):
        # Prepend the span j - distance + 1 to what reaches from its end to the start of span j.
        early = (spans - distance + 1).clamp(min=0)
        first, second = current.unbind(2)
        moved = (
            first * p11[:, early] + second * p21[:, early],
            first * p12[:, early] + second * p22[:, early],
        )
        current = whole[:, early] + torch.stack(moved, dim=2)
        columns.append(current)
    table = torch.stack(columns, dim=2)  # [B H, j, distance - 1, 2, C]
    away = spans[:, None] - spans[None, :] - 1
    found = table[:, spans[:, None], away.clamp(min=0, max=len(columns) - 1)]
    return torch.where((away >= 0)[:, :, None, None], found, 0.0).float()


def _within_spans(
    path: LinearPath | SinusoidPath,
    k: Tensor,
    v: Tensor,
    times: Tensor,
    mask: Tensor | None,
    key_velocity: Tensor | None,
    value_velocity: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp ``[B, N, H]`` over earlier keys of each row's own span."""
    batch, length = times.shape
    count = -(-length // SPAN)
    missing = count * SPAN - length

    def cut(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if missing:
            x = torch.cat([x, x[:, -1:].expand(-1, missing, *x.shape[2:])], dim=1)
        return x.reshape(batch * count, SPAN, *x.shape[2:])

    present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
    if missing:
        present = functional.pad(present, (0, missing))
    pieces = cut(times)
    assert pieces is not None
    if isinstance(path, LinearPath):
        part: LinearPath | SinusoidPath = LinearPath(cut(path.q), pieces)  # type: ignore[arg-type]
    else:
        repeated = {
            name: None if x is None else x.repeat_interleave(count, dim=0)
            for name, x in (
                ("constant", path.constant),
                ("cos", path.cos),
                ("sin", path.sin),
                ("origin", path.origin),
            )
        }
        part = replace(path, **repeated)  # type: ignore[arg-type]
    out, lse, _ = blocked.attend(
        part,
        cut(k),  # type: ignore[arg-type]
        cut(v),  # type: ignore[arg-type]
        pieces,
        pieces,
        key_velocity=cut(key_velocity),
        value_velocity=cut(value_velocity),
        mask=None if mask is None and not missing else present.reshape(-1, SPAN),
        strict=True,
        **options,
    )
    out = out.float().reshape(batch, count * SPAN, *out.shape[2:])[:, :length]
    lse = lse.transpose(1, 2).float().reshape(batch, count * SPAN, -1)[:, :length]
    return out, lse
