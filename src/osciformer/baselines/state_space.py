"""Linear recurrences with a state per channel: one scan, and LRU, S5, LinOSS and Mamba on it.

Time is in typical gaps (the median of the training set), so a regular series takes the steps of the
published models; a gap g is g such steps. A read is the last row's state after the time since, with
no input. S5 and Mamba hold an input over the gap before it: of rows at one time the first counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn import functional

from osciformer._text import check_choice
from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.baselines.directions import DirectedBackbone, rows_before
from osciformer.models.backbones import register_backbone
from osciformer.nn.encoder import SeriesEmbedding
from osciformer.ops.attention.ties import take_rows
from osciformer.ops.padding import clean_times

_CHUNK = 16
# Ends of the first moduli of LRU, and of the first steps of S5 and Mamba in typical gaps.
_MODULI, _STEPS = (0.01, 0.999), (1e-3, 1e-1)
# LinOSS: the least stiffness, and the largest angle of a step (`imex` is unstable from 2 on).
_SOFTEST, _STEEPEST = 1e-4, 1.99
_CONVOLUTION = 4


def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    r"""Return $h_n = a_n h_{n-1} + b_n$ along dimension 1 with $h_{-1} = 0$, element by element.

    Real or complex, of shapes that broadcast. Chunks of rows are taken side by side, their ends by
    the same scan: work and memory are O(N), and few steps follow one another. The adjoint is the
    scan backwards.

    Example:
        >>> linear_scan(torch.tensor([[[0.5]]]), torch.ones(1, 4, 1)).flatten()
        tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    dtype = torch.promote_types(a.dtype, b.dtype)
    return cast("Tensor", _Scan.apply(*torch.broadcast_tensors(a.to(dtype), b.to(dtype))))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        states = _scan(a, b)
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, states = ctx.saved_tensors
        after = torch.cat((a[:, 1:], torch.zeros_like(a[:, :1])), dim=1).conj()
        of_b = _scan(after.flip(1), grad.flip(1)).flip(1)
        before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)
        return of_b * before.conj(), of_b


def _scan(a: Tensor, b: Tensor) -> Tensor:
    width = a.shape[1]
    size = min(width, _CHUNK)
    filled = (0, 0) * (a.ndim - 2) + (0, -width % max(1, size))
    a, b = (functional.pad(x, filled).unflatten(1, (-1, max(1, size))).clone() for x in (a, b))
    for n in range(1, size):  # within chunks from rest: states, and products of factors
        b[:, :, n] += a[:, :, n] * b[:, :, n - 1]
        a[:, :, n] *= a[:, :, n - 1]
    if a.shape[1] > 1:
        starts = _scan(a[:, :-1, -1], b[:, :-1, -1])
        b[:, 1:] += a[:, 1:] * starts[:, :, None]
    return b.flatten(1, 2)[:, :width]


class DiagonalRecurrence(nn.Module):
    r"""A layer of complex modes, from rates $\lambda$ and a gain that a subclass gives.

    $$h_n = e^{\lambda g_n} h_{n-1} + c(\lambda, g_n)\, B u_n, \qquad
    y_n = \mathrm{Re}(C h_n) + d \odot u_n$$

    with $g_n$ the gap before row n, 1 before the first.
    """

    def __init__(self, dim: int, state_dim: int) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, 2 * state_dim, bias=False)
        self.leave = nn.Linear(2 * state_dim, dim, bias=False)
        self.skip = nn.Parameter(torch.randn(dim))

    def rates(self) -> Tensor:
        """Return the exponents over a typical gap, complex `[P]`."""
        raise NotImplementedError

    def gain(self, rates: Tensor, gaps: Tensor) -> Tensor:
        """Return the factor of inputs, `[P]` or for gaps `[*S, 1]` `[*S, P]`."""
        raise NotImplementedError

    def drive(self, u: Tensor) -> Tensor:
        """Return B u."""
        parts = self.enter(u).unflatten(-1, (-1, 2))
        return torch.view_as_complex(parts.to(self.skip.dtype))  # no complex half precision

    def observe(self, states: Tensor) -> Tensor:
        """Return Re(C h)."""
        return cast("Tensor", self.leave(torch.view_as_real(states).flatten(-2)))

    def forward(self, u: Tokens, gaps: Times, mask: Mask) -> tuple[Tokens, Tensor]:
        """Return the outputs, and what `read` needs of each row."""
        rates, gaps = self.rates(), gaps[..., None]
        inputs = (self.gain(rates, gaps) * self.drive(u)).masked_fill(~mask[..., None], 0.0)
        states = linear_scan((rates * gaps).exp(), inputs)
        return self.observe(states) + self.skip * u, states

    def read(self, u: Reads, elapsed: Times, held: Tensor) -> Reads:
        """Return the outputs some time after rows with states `held`."""
        states = (self.rates() * elapsed[..., None]).exp() * held
        return self.observe(states) + self.skip * u


class LinearRecurrentUnit(DiagonalRecurrence):
    """Modes of a ring in the complex plane.

    Orvieto et al., "Resurrecting Recurrent Neural Networks for Long Sequences", ICML 2023.
    """

    no_weight_decay = ("log_decay", "log_angle", "log_gain")

    def __init__(self, dim: int, state_dim: int) -> None:
        super().__init__(dim, state_dim)
        low, high = (modulus**2 for modulus in _MODULI)
        squared = low + (high - low) * torch.rand(state_dim)
        self.log_decay = nn.Parameter((-0.5 * squared.log()).log())
        self.log_angle = nn.Parameter((2.0 * math.pi * torch.rand(state_dim)).log())
        self.log_gain = nn.Parameter(0.5 * (1.0 - squared).log())

    def rates(self) -> Tensor:
        """Return the exponents."""
        return torch.complex(-self.log_decay.exp(), self.log_angle.exp())

    def gain(self, rates: Tensor, gaps: Tensor) -> Tensor:
        """Return a learned gain, which starts where it keeps the size of white noise."""
        return self.log_gain.exp()


class S5Layer(DiagonalRecurrence):
    """Modes of the normal part of HiPPO-LegS; all inputs drive them, held over each gap.

    Smith et al., "Simplified State Space Layers for Sequence Modeling", ICLR 2023. One mode of each
    conjugate pair is kept. Real parts stay negative.
    """

    no_weight_decay = ("log_decay", "angle", "log_step")

    def __init__(self, dim: int, state_dim: int) -> None:
        super().__init__(dim, state_dim)
        n = torch.arange(2 * state_dim, dtype=torch.float64)
        root = (2.0 * n + 1.0).sqrt()
        skew = 0.5 * torch.outer(root, root) * (n - n[:, None]).sign()  # and -1/2 on the diagonal
        angle, basis = torch.linalg.eigh(-1j * skew)  # ascending: positive ones come last
        self.log_decay = nn.Parameter(torch.full((state_dim,), math.log(0.5)))
        self.angle = nn.Parameter(angle[state_dim:].float())
        low, high = (math.log(step) for step in _STEPS)
        self.log_step = nn.Parameter(low + (high - low) * torch.rand(state_dim))
        with torch.no_grad():
            modes = basis[:, state_dim:]
            real = torch.randn(2 * state_dim, dim, dtype=torch.float64) / dim**0.5
            enter = torch.view_as_real(modes.mH @ real.to(modes.dtype))  # [P, D, 2]
            self.enter.weight.copy_(enter.movedim(2, 1).flatten(0, 1))
            real = torch.randn(dim, 2 * state_dim, dtype=torch.float64) / (2 * state_dim) ** 0.5
            leave = 2.0 * torch.view_as_real((real.to(modes.dtype) @ modes).conj().resolve_conj())
            self.leave.weight.copy_(leave.flatten(1))  # Re(c h) = Re c Re h - Im c Im h

    def rates(self) -> Tensor:
        """Return the exponents."""
        return torch.complex(-self.log_decay.exp(), self.angle) * self.log_step.exp()

    def gain(self, rates: Tensor, gaps: Tensor) -> Tensor:
        """Return the integral of the modes over the gaps."""
        return torch.expm1(rates * gaps) / rates * self.log_step.exp()


class OscillatoryStateSpace(DiagonalRecurrence):
    r"""Forced undamped oscillators, $x'' = -A x + B u$, by an implicit or a symplectic scheme.

    Rusch and Rus, "Oscillatory State-Space Models", ICLR 2025. With a learned step s scheme `im` is
    $z_n = z_{n-1} + s(B u_n - A x_n)$ and `imex` $z_n = z_{n-1} + s(B u_n - A x_{n-1})$; then
    $x_n = x_{n-1} + s z_n$. Both turn $h = z + c x$ by a constant factor a,
    $h_n = a\,(h_{n-1} + s B u_n)$: with $\omega = \sqrt A$, $a = 1/(1 - i\omega s)$ and
    $c = i\omega$, or $a = e^{i\varphi}$, $\sin(\varphi/2) = \omega s/2$ and $c = (a - 1)/s$.
    A gap g is $a^g$: whole gaps are steps without input, and no gap makes `imex` unstable.
    """

    no_weight_decay = ("stiffness", "raw_step")

    def __init__(self, dim: int, state_dim: int, *, scheme: str = "im") -> None:
        super().__init__(dim, state_dim)
        check_choice("scheme", scheme, ("im", "imex"))
        self.scheme = scheme
        self.enter = nn.Linear(dim, state_dim, bias=False)
        self.leave = nn.Linear(state_dim, dim, bias=False)
        self.stiffness = nn.Parameter(torch.rand(state_dim))
        self.raw_step = nn.Parameter(torch.rand(state_dim))

    def _angles(self) -> tuple[Tensor, Tensor]:
        """Return the frequencies times the step, and the step."""
        step = self.raw_step.sigmoid()
        angle = self.stiffness.clamp(min=_SOFTEST).sqrt() * step
        return angle if self.scheme == "im" else angle.clamp(max=_STEEPEST), step

    def rates(self) -> Tensor:
        """Return log a."""
        angle, zero = self._angles()[0], torch.zeros_like(self.stiffness)
        if self.scheme == "im":
            return -torch.complex(zero + 1.0, -angle).log()
        return torch.complex(zero, 2.0 * (0.5 * angle).asin())

    def gain(self, rates: Tensor, gaps: Tensor) -> Tensor:
        """Return s a."""
        return self._angles()[1] * rates.exp()

    def drive(self, u: Tensor) -> Tensor:
        """Return B u, real."""
        return cast("Tensor", self.enter(u))

    def observe(self, states: Tensor) -> Tensor:
        """Return C x, where x = Im h / Im c."""
        angle, step = self._angles()
        scale = angle / step
        if self.scheme == "imex":
            scale = scale * (1.0 - (0.5 * angle).square()).sqrt()
        return cast("Tensor", self.leave(states.imag / scale))


class SelectiveStateSpace(nn.Module):
    r"""The mixer of Mamba: a short convolution, a selective recurrence (S6), and a gate.

    Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", COLM 2024. Each
    of E = 2 D channels has S real modes; step, input and output maps depend on the row, and a gap
    multiplies the step. Inputs are held over it exactly: an Euler step, as in the released code,
    would grow with the gap.
    """

    no_weight_decay = ("log_decay", "skip", "taps", "bias")

    def __init__(self, dim: int, state_dim: int) -> None:
        super().__init__()
        inner, self.state_dim, self.rank = 2 * dim, state_dim, -(-dim // 16)
        self.enter = nn.Linear(dim, 2 * inner, bias=False)
        bound = _CONVOLUTION**-0.5
        self.taps = nn.Parameter(torch.empty(inner, _CONVOLUTION).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(inner).uniform_(-bound, bound))
        self.select = nn.Linear(inner, self.rank + 2 * state_dim, bias=False)
        self.step = nn.Linear(self.rank, inner)
        low, high = (math.log(step) for step in _STEPS)
        with torch.no_grad():  # so that softplus gives these steps
            self.step.bias.copy_((low + (high - low) * torch.rand(inner)).exp().expm1().log())
        decay = torch.arange(1.0, state_dim + 1.0).log()
        self.log_decay = nn.Parameter(decay.repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, dim, bias=False)

    def forward(self, u: Tokens, gaps: Times, mask: Mask) -> tuple[Tokens, Tensor]:
        """Return the outputs, and what `read` needs of each row."""
        x, gate = self.enter(u).masked_fill(~mask[..., None], 0.0).chunk(2, dim=-1)
        padded = functional.pad(x, (0, 0, _CONVOLUTION - 1, 0)).unfold(1, _CONVOLUTION, 1)
        past = (padded[..., :-1] * self.taps[:, :-1]).sum(-1) + self.bias
        x = functional.silu(past + self.taps[:, -1] * x)
        exponent, enter, leave = self._selected(x, gaps)
        inputs = torch.expm1(exponent) / -self.log_decay.exp() * (enter * x[..., None])
        states = linear_scan(exponent.exp(), inputs.masked_fill(~mask[..., None, None], 0.0))
        out = self._finish(states, leave, x, gate)
        return out, torch.cat((states, past[..., None]), dim=-1)

    def read(self, u: Reads, elapsed: Times, held: Tensor) -> Reads:
        """Return the outputs some time after rows with states and past inputs `held`."""
        x, gate = self.enter(u).chunk(2, dim=-1)
        x = functional.silu(held[..., -1] + self.taps[:, -1] * x)
        exponent, _, leave = self._selected(x, elapsed)
        return self._finish(exponent.exp() * held[..., :-1], leave, x, gate)

    def _selected(self, x: Tensor, gaps: Times) -> tuple[Tensor, Tensor, Tensor]:
        """Return the exponents `[*S, E, S]` over gaps, and input and output maps `[*S, 1, S]`."""
        sizes = (self.rank, self.state_dim, self.state_dim)
        low_rank, enter, leave = self.select(x).split(sizes, dim=-1)
        step = functional.softplus(self.step(low_rank)) * gaps[..., None]
        return -step[..., None] * self.log_decay.exp(), enter[..., None, :], leave[..., None, :]

    def _finish(self, states: Tensor, leave: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        y = (states * leave).sum(-1) + self.skip * x
        return cast("Tensor", self.leave(y * functional.silu(gate)))


class _Block(nn.Module):
    """Pre-norm residual block; all but Mamba, which has its own, end in a gated linear map."""

    def __init__(self, dim: int, layer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(dim), layer
        self.mix: nn.Module = nn.Dropout(dropout)
        if isinstance(layer, DiagonalRecurrence):
            gated = nn.Linear(dim, 2 * dim), nn.GLU(), nn.Dropout(dropout)
            self.mix = nn.Sequential(nn.GELU(), nn.Dropout(dropout), *gated)


@dataclass(frozen=True)
class _EncodedStack:
    states: Tokens
    times: Times
    mask: Mask
    tokens: Tokens
    memories: tuple[Tensor, ...]  # of each block: what its layer needs of each row


class _Stack(nn.Module):
    """Embedding and blocks over one direction of time."""

    def __init__(
        self, embedding: SeriesEmbedding, layers: list[nn.Module], dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding, self.norm = embedding, nn.LayerNorm(dim)
        self.blocks: Any = nn.ModuleList(_Block(dim, layer, dropout) for layer in layers)

    def forward(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> _EncodedStack:
        times = clean_times(times, mask)
        is_first = mask & (mask.cumsum(dim=1) == 1)
        gaps = torch.where(is_first, 1.0, functional.pad(times.diff(dim=1), (1, 0)))
        tokens = self.embedding(values, static=static).masked_fill(~mask[..., None], 0.0)
        x, memories, gaps = tokens, [], gaps.to(tokens.dtype)
        for block in self.blocks:
            y, memory = block.layer(block.norm(x), gaps, mask)
            x = x + block.mix(y)
            memories.append(memory)
        return _EncodedStack(self.norm(x), times, mask, tokens, tuple(memories))

    def read(self, encoded: _EncodedStack, query_times: QueryTimes) -> Reads:
        row, elapsed, is_before = rows_before(encoded.times, query_times, encoded.mask)
        x = take_rows(encoded.tokens, row)
        for block, memory in zip(self.blocks, encoded.memories, strict=True):
            y = block.layer.read(block.norm(x), elapsed.to(x.dtype), take_rows(memory, row))
            x = x + block.mix(y)
        return cast("Tensor", self.norm(x)).masked_fill(is_before, 0.0)


class StateSpaceModel(DirectedBackbone):
    """A stack of linear recurrences as a backbone; see the layer of the subclass.

    Args:
        input_dim: Number of input columns.
        static_dim: Number of static features S.
        dim: Width D.
        num_layers: Number of blocks.
        direction: `causal`, or `bidirectional`: half of the width runs backwards in time.
        dropout: Dropout of the blocks.
        options: Further settings of the layer; `state_dim` is the number of its modes.
    """

    _layer: ClassVar[type[nn.Module]]
    _state_dim: ClassVar[int] = 32

    def __init__(
        self,
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        num_layers: int = 2,
        direction: str = "causal",
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        options = {"state_dim": self._state_dim, **options}

        def make(width: int) -> _Stack:
            layers = [self._layer(width, **options) for _ in range(num_layers)]
            embedding = SeriesEmbedding(input_dim, width, static_dim=static_dim)
            return _Stack(embedding, layers, width, dropout)

        super().__init__(make, dim, direction)

    def _unit(self, gaps: Float[Tensor, "G"]) -> Tensor:
        return gaps.median()


_SETTINGS, _OPTIONS = ("num_layers", "dropout"), ("direction", "state_dim")


@register_backbone("lru", settings=_SETTINGS, options=_OPTIONS)
class LRU(StateSpaceModel):
    """A stack of `LinearRecurrentUnit` layers."""

    _layer = LinearRecurrentUnit


@register_backbone("s5", settings=_SETTINGS, options=_OPTIONS)
class S5(StateSpaceModel):
    """A stack of `S5Layer` layers."""

    _layer = S5Layer


@register_backbone("linoss", settings=_SETTINGS, options=(*_OPTIONS, "scheme"))
class LinOSS(StateSpaceModel):
    """A stack of `OscillatoryStateSpace` layers, of which `scheme` is an option."""

    _layer = OscillatoryStateSpace


@register_backbone("mamba", settings=_SETTINGS, options=_OPTIONS)
class Mamba(StateSpaceModel):
    """A stack of `SelectiveStateSpace` layers."""

    _layer, _state_dim = SelectiveStateSpace, 16
