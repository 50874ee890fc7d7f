"""Inputs and comparisons that the tests of the operator share."""

from __future__ import annotations

import torch

from osciformer.ops import Drive, oscillator_attention
from osciformer.ops.attention.inputs import AttentionInputs, Oscillators

DOUBLE = torch.float64
MODES = ("hold", "linear", "ridge", "ridge_causal", "anchored", "learned")
CAUSAL_MODES = ("hold", "linear", "ridge_causal", "anchored", "learned")
SPECTRA = ("key_omega", "key_zeta", "value_omega", "value_zeta")
GAINS = ("key_cos", "key_sin", "value_cos", "value_sin")
H, C = 2, 3
# Channels of different regimes side by side: slow, undamped, critical, fast, stiff, overdamped.
OMEGA = (1e-3, 3.0, 2.0, 200.0, 20.0, 0.7)
ZETA = (0.3, 0.0, 1.0, 0.05, 20.0, 1.7)


def tensor(data):
    return torch.tensor(data, dtype=DOUBLE)


def spread_times(batch, length, *, generator, smallest=1e-9, window=1.5):
    """Sorted times with gaps from `smallest` to about the window, a quarter of them tiny."""
    times = torch.rand(batch, length, generator=generator, dtype=DOUBLE) * window
    times = times.sort(1).values
    for n in range(2, length, 4):
        times[:, n] = times[:, n - 1] + smallest * 10.0 ** (n % 7)
    return times.sort(1).values


def make_case(
    batch=2,
    num_keys=5,
    num_rows=None,
    *,
    ties=False,
    extras=True,
    channels=C,
    smallest=1e-9,
    seed=0,
):
    """Return all inputs as one flat dict. Without `num_rows` it is self-attention.

    Args:
        batch: B.
        num_keys: N.
        num_rows: M, with query times of their own; None for the times of the keys.
        ties: Let some keys share a time, and (with `num_rows`) some rows share one with keys.
        extras: Velocities and rest positions too.
        channels: C; the spectra are those of `OMEGA` and `ZETA`, repeated.
        smallest: The smallest gap.
        seed: Seed of the draws.
    """
    g = torch.Generator().manual_seed(seed)
    omega, zeta = (tensor(r).repeat(channels // C).reshape(H, channels) for r in (OMEGA, ZETA))

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=DOUBLE)

    key_times = spread_times(batch, num_keys, generator=g, smallest=smallest)
    if ties:
        key_times[:, 1::3] = key_times[:, 0::3][:, : key_times[:, 1::3].shape[1]]
    query_times = key_times.clone()
    if num_rows is not None:
        query_times = torch.rand(batch, num_rows, generator=g, dtype=DOUBLE) * 1.8 - 0.1
        if ties:
            query_times[:, ::3] = key_times[:, torch.arange(num_rows)[::3] % num_keys]
        query_times = query_times.sort(1).values
    x = {
        "q": normal(batch, query_times.shape[1], H, channels),
        "k": normal(batch, num_keys, H, channels),
        "v": normal(batch, num_keys, H, channels),
        "query_times": query_times,
        "key_times": key_times,
        "key_omega": omega,
        "key_zeta": zeta,
        "value_omega": omega.flip(0, 1),
        "value_zeta": zeta.flip(0, 1),
    }
    if extras:
        for name in ("key_velocity", "value_velocity"):
            x[name] = normal(batch, num_keys, H, channels)
        for name in ("key_equilibrium", "value_equilibrium"):
            x[name] = normal(batch, num_keys, H, channels)
    return x


def with_mode(x, query, seed=1):
    """Return the inputs with those that the query mode needs."""
    g = torch.Generator().manual_seed(seed)
    if query in ("hold", "linear"):
        return x
    x = x | {"bank": tensor([0.0, 0.8, 3.0, 9.0])}
    channels = x["k"].shape[-1]
    if query in ("anchored", "learned"):
        x["mode_cos"] = torch.randn(H, 4, channels, generator=g, dtype=DOUBLE)
        x["mode_sin"] = torch.randn(H, 4, channels, generator=g, dtype=DOUBLE)
        x["mode_constant"] = torch.randn(H, channels, generator=g, dtype=DOUBLE)
    if query == "learned":
        x = {name: t for name, t in x.items() if name != "q"}
    return x


def with_drive(x, seed=2):
    """Return the inputs with a drive of two modes, off the frequencies of undamped channels."""
    g = torch.Generator().manual_seed(seed)
    gains = {name: torch.randn(H, 2, C, generator=g, dtype=DOUBLE) for name in GAINS}
    return x | {"drive_omega": tensor([1.3, 7.0])} | gains


def call(x, *, query="hold", ridge=1e-3, rows=(), keys=(), **options):
    """Call the operator on a flat dict.

    `times` in the dict stands for both times; `instants` for distinct times, of which `rows` and
    `keys` name those of each row and key, so that tied tokens have one time to differentiate.
    """
    x = dict(x)
    if "times" in x:
        x["query_times"] = x["key_times"] = x.pop("times")
    if "instants" in x:
        instants = x.pop("instants")
        x["query_times"] = instants[:, list(rows)]
        x["key_times"] = instants[:, list(keys)]
    params = {}
    for name in ("bank", "mode_cos", "mode_sin", "mode_constant"):
        if name in x:
            params[name.removeprefix("mode_").replace("bank", "omega")] = x.pop(name)
    if query.startswith("ridge"):
        params["ridge"] = ridge
    drive = None
    if "drive_omega" in x:
        drive = Drive(x.pop("drive_omega"), **{name: x.pop(name) for name in GAINS if name in x})
    tokens = (x.pop("q", None), x.pop("k"), x.pop("v"), x.pop("query_times"), x.pop("key_times"))
    return oscillator_attention(
        *tokens, **x, query=query, query_params=params or None, drive=drive, **options
    )


def attention_inputs(path, k, v, query_times, key_times, **flat):
    """Return the inputs of a backend from flat arguments, named as those of the operator."""
    parts = ("omega", "zeta", "velocity", "equilibrium")
    keys, values = (
        Oscillators(start, *(flat.pop(f"{role}_{part}", None) for part in parts))
        for role, start in (("key", k), ("value", v))
    )
    return AttentionInputs(path, query_times, key_times, keys, values, **flat)


TIMES = ("query_times", "key_times", "times", "instants")


def outputs_and_gradients(x, *, of_times=True, **options):
    """Return the output and the gradient of every input along one random direction.

    Times without a gradient take another way through `blocked`: `of_times` says which.
    """
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    fixed = {name: leaves.pop(name).detach() for name in TIMES if name in leaves and not of_times}
    out = call(leaves | fixed, **options)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE)
    loss = (out.double() * direction).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results = {"out": out.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"gradient of {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def errors(got, want):
    """Return the largest error of each tensor relative to its largest entry."""
    assert got.keys() == want.keys()
    found = {}
    for name, expected in want.items():
        assert got[name].shape == expected.shape, name
        if expected.numel() == 0:
            continue
        difference = (got[name].double() - expected.double()).abs().max().item()
        size = expected.double().abs().max().item()
        found[name] = difference / size if size > 0 else difference
        if difference != difference:
            found[name] = float("inf")
    return found


def assert_agree(got, want, tolerance):
    wrong = {name: f"{e:.1e}" for name, e in errors(got, want).items() if not e <= tolerance}
    assert not wrong, f"errors above {tolerance:g}: {wrong}"
