"""What is measured: inputs, and the calls of each implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from osciformer._types import Tensor
from osciformer.bench.speed import SPECTRA, TOKENS, attention
from osciformer.math.banks import frequency_bank
from osciformer.math.spectrum import init_omega, init_zeta

from .rows import BOTH, Row, make_row

MEAN_GAP = 1 / 64
LARGEST_OMEGA = 200.0  # of the range in which errors are promised
ZETA_RANGE = (0.05, 0.4)
DEFAULT_NUM_MODES = 8
# Share of the tokens that follow another one almost at once, and their gaps in units of the mean.
_TINY_SHARE = 1 / 64
_TINY_DECADES = (-9.0, -4.0)
_MODES = {"ridge": ("mode_omega",), "learned": ("mode_omega", "mode_cos", "mode_sin")}


#: Ways to run ContiFormer, and the options of `contiformer_attention` that they stand for. States
#: are float32 in all of them; ``autocast`` computes the linear maps of its fields in bfloat16, and
#: ``adjoint`` is how the released code computes gradients.
CONTIFORMERS: dict[str, dict[str, Any]] = {
    "contiformer": {},
    "contiformer_autocast": {"autocast": True},
    "contiformer_recompute": {"recompute": True},
    "contiformer_adjoint": {"solver": "torchdiffeq", "adjoint": True},
}


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        implementation: A backend of the operator, "sdpa", or one of `CONTIFORMERS`.
        query: A query mode, "dot" for "sdpa", "hermite" for ContiFormer.
        pass_: "forward" or "forward+backward".
        n: N.
        batch: B.
        heads: H.
        c: C.
        dtype: Dtype of the tokens.
        num_modes: J, for queries with modes.
        horizon: Length of the longest series in time, None for N / 64 but at least 1.
    """

    implementation: str
    query: str
    pass_: str
    n: int
    batch: int
    heads: int
    c: int
    dtype: torch.dtype = torch.bfloat16
    num_modes: int = DEFAULT_NUM_MODES
    horizon: float | None = None

    def row(self, part: str, device: torch.device) -> Row:
        """Return the row of this case, without results."""
        is_sdpa = self.implementation == "sdpa"
        return make_row(
            part=part,
            implementation="sdpa_flash"
            if is_sdpa and device.type == "cuda"
            else self.implementation,
            query=self.query,
            pass_=self.pass_,
            n=self.n,
            batch=self.batch,
            heads=self.heads,
            c=self.c,
            j=self.num_modes if self.query in _MODES else None,
            horizon=None if is_sdpa else self.longest,
            dtype=str(self.dtype).removeprefix("torch."),
            device=device.type,
        )

    @property
    def longest(self) -> float:
        """Length of the longest series in time."""
        return max(1.0, self.n * MEAN_GAP) if self.horizon is None else self.horizon


def make_inputs(case: Case, device: torch.device, *, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs of the operator under the names of `osciformer.bench.speed`, on the device.

    Times are float64: uniform, and one token in 64 follows another after 1e-9 to 1e-4 mean gaps.
    The series of a batch have lengths in time from 1 to N / 64. Natural frequencies are log-uniform
    from half a turn over the longest series to half a turn in its mean gap, at most 200; damping
    ratios are uniform in [0.05, 0.4]. Tokens, spectra and learned trajectories require gradients
    if the case has a backward pass.
    """
    generator = torch.Generator(device).manual_seed(seed)
    on_cpu = torch.Generator().manual_seed(seed)
    x: dict[str, Tensor] = {}
    for name in TOKENS:
        if name == "q" and case.query == "learned":
            continue  # its trajectory stands for the tokens
        shape = (case.batch, case.n, case.heads, case.c)
        x[name] = torch.randn(shape, generator=generator, device=device, dtype=case.dtype)
    exact = torch.promote_types(case.dtype, torch.float32)
    low = math.pi / case.longest
    high = max(low, min(LARGEST_OMEGA, math.pi * case.n / case.longest))
    for role in ("key", "value"):
        per_head = (case.heads, case.c)
        x[f"{role}_omega"] = init_omega(per_head, low, high, on_cpu).to(device, exact)
        x[f"{role}_zeta"] = init_zeta(per_head, *ZETA_RANGE, on_cpu).to(device, exact)
    if case.query in _MODES:
        x["mode_omega"] = frequency_bank("log_spaced", case.num_modes).to(device, exact)
        for name in _MODES[case.query][1:]:
            drawn = torch.randn(case.heads, case.num_modes, case.c, generator=on_cpu)
            x[name] = drawn.to(device, exact)
    if case.pass_ == BOTH:
        for name in leaf_names(x):
            x[name].requires_grad_()
    x["query_times"] = x["key_times"] = irregular_times(case, generator)
    return x


def irregular_times(case: Case, generator: torch.Generator) -> Tensor:
    """Return increasing float64 times `[B, N]` on the device of the generator."""
    num_tiny = int(case.n * _TINY_SHARE)

    def uniform(length: int) -> Tensor:
        shape = (case.batch, length)
        return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)

    ordinary = uniform(case.n - num_tiny)
    low, high = _TINY_DECADES
    tiny = 10.0 ** (low + (high - low) * uniform(num_tiny)) / case.n
    times = torch.cat([ordinary, ordinary[:, :num_tiny] + tiny], dim=1).sort(dim=1).values
    # From the longest series to one of length 1, in equal ratios.
    steps = torch.linspace(1.0, 0.0, case.batch, dtype=torch.float64, device=generator.device)
    return times * (case.longest**steps)[:, None]


def leaf_names(x: dict[str, Tensor]) -> list[str]:
    """Return the names of the inputs that get a gradient: all but times and mode frequencies."""
    return [name for name in (*TOKENS, *SPECTRA, "mode_cos", "mode_sin") if name in x]


def maker(case: Case, device: torch.device) -> Callable[[], Callable[[], object]]:
    """Return a function that makes the inputs of a case and returns its call."""
    makers = {"sdpa": _sdpa, **dict.fromkeys(CONTIFORMERS, _contiformer)}
    make = makers.get(case.implementation, _operator)

    def made() -> Callable[[], object]:
        forward, leaves = make(case, device)
        return with_pass(forward, leaves, case, device)

    return made


def with_pass(
    forward: Callable[[], Tensor], leaves: list[Tensor], case: Case, device: torch.device
) -> Callable[[], object]:
    """Return the call of the forward pass without a graph, or of both passes."""
    if case.pass_ != BOTH:

        def without_graph() -> Tensor:
            with torch.no_grad():
                return forward()

        return without_graph
    direction: list[Tensor] = []

    def both() -> tuple[Tensor, ...]:
        out = forward()
        if not direction:  # the first call is a warm-up
            generator = torch.Generator(device).manual_seed(1)
            direction.append(torch.empty_like(out).normal_(generator=generator).detach())
        return torch.autograd.grad(out, leaves, direction[0])

    return both


def _operator(case: Case, device: torch.device) -> tuple[Callable[[], Tensor], list[Tensor]]:
    x = make_inputs(case, device)

    def forward() -> Tensor:
        return attention(x, query=case.query, backend=case.implementation)

    return forward, [x[name] for name in leaf_names(x)]


def _sdpa(case: Case, device: torch.device) -> tuple[Callable[[], Tensor], list[Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.heads, case.n, case.c)
    leaves = [
        torch.randn(shape, generator=generator, device=device, dtype=case.dtype) for _ in TOKENS
    ]
    if case.pass_ == BOTH:
        for leaf in leaves:
            leaf.requires_grad_()

    def forward() -> Tensor:
        return scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)

    return forward, leaves


def flash_only(device: torch.device) -> AbstractContextManager[object]:
    """Let SDPA run its flash kernel or fail; on a CPU it is free to choose."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()


def _contiformer(case: Case, device: torch.device) -> tuple[Callable[[], Tensor], list[Tensor]]:
    from osciformer.baselines import VectorField, contiformer_attention

    x = make_inputs(case, device)
    fields = [VectorField(case.heads * case.c).to(device) for _ in range(2)]
    options = dict(CONTIFORMERS[case.implementation])
    is_autocast = options.pop("autocast", False)

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
            return contiformer_attention(
                x["q"],
                x["k"],
                x["v"],
                x["key_times"],
                key_field=fields[0],
                value_field=fields[1],
                **options,
            )

    weights = [weight for field in fields for weight in field.parameters()]
    return forward, [*(x[name] for name in TOKENS), *weights]
