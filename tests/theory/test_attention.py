"""The theorem: attention of continuous paths by one bank, and certificates that are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor

from osciformer.theory import (
    Certificate,
    Evidence,
    OscillatorBank,
    approximate_attention,
    damping_bound,
    fejer_states,
    gap_means,
)
from osciformer.theory.realisation import Path

from .cases import NUM_CASES, sup, uniform, waves, whole

TIMES = torch.tensor([-0.5, -0.1, 0.45, 1.2, 2.3], dtype=torch.float64)
END = float(TIMES[-1])
SEEN = torch.ones(5, 5).tril().bool()


def query(t: Tensor) -> Tensor:
    return torch.stack((torch.cos(3 * t), 1 - t, 0.5 * torch.sin(7 * t)), dim=-1)


def key(index: int) -> Path:
    anchor = float(TIMES[index])

    def path(t: Tensor) -> Tensor:
        s = t - anchor
        assert (s >= 0).all(), "a key has no value before its own time"
        first = (index + 1) * torch.exp(-s) * torch.cos(4 * s)
        return torch.stack((first, torch.tanh(s) - 0.2 * index, torch.sin(s * s + index)), dim=-1)

    return path


KEYS = [key(i) for i in range(5)]


def product(q: Path, k: Path) -> Path:
    return lambda t: (q(t) * k(t)).sum(dim=-1, keepdim=True)


def simpson_weights(q: Path, keys: Sequence[Path], times: Tensor) -> Tensor:
    """Return the attention matrix by Simpson's rule, which nothing in the package uses."""
    share = torch.linspace(0.0, 1.0, 401, dtype=torch.float64)
    rule = torch.full((401,), 2.0, dtype=torch.float64)
    rule[1::2], rule[0], rule[-1] = 4.0, 1.0, 1.0
    alpha = torch.full((len(times), len(times)), -torch.inf, dtype=torch.float64)
    for j, end in enumerate(times.tolist()):
        for i, start in enumerate(times.tolist()):
            if start <= end:
                tau = start + (end - start) * share
                alpha[j, i] = rule @ (q(tau) * keys[i](tau)).sum(dim=-1) / 1200
    return (alpha / math.sqrt(q(times).shape[-1])).softmax(dim=-1)


class TestGapMeans:
    def test_are_integrals_over_gaps(self) -> None:
        found = gap_means([product(query, k) for k in KEYS], TIMES)[..., 0]
        for j, i in ((3, 0), (4, 2), (4, 4), (1, 1)):
            start, end = TIMES[i].item(), TIMES[j].item()

            def value(t: float, i: int = i) -> float:
                return float(product(query, KEYS[i])(torch.tensor([t], dtype=torch.float64)))

            wanted = value(start) if i == j else quad(value, start, end)[0] / (end - start)
            assert float(found[j, i]) == pytest.approx(wanted, abs=1e-10)
        assert (found[~SEEN] == 0).all()

    def test_tied_times_read_the_start(self) -> None:
        times = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
        means = gap_means([lambda t, i=i: (t + i)[:, None] for i in range(3)], times)[..., 0]
        wanted = torch.tensor([[0, 0, 0], [0.5, 2, 3], [0.5, 2, 3]], dtype=torch.float64)
        torch.testing.assert_close(means, wanted)


class TestTheorem:
    def test_both_inequalities_hold_for_every_pair_and_the_error_vanishes(self) -> None:
        start, length = float(TIMES[0]), END - float(TIMES[0])
        grid = torch.linspace(start, END, 801, dtype=torch.float64)
        size, ideal = sup(query(grid)), gap_means([product(query, k) for k in KEYS], TIMES)
        errors = []
        for num_modes in (4, 16, 64, 256):
            bank = OscillatorBank.on_grid(num_modes, length)
            near, epsilon = [], 0.0
            for path, anchor in zip(KEYS, TIMES.tolist(), strict=True):
                states = fejer_states(path, bank, anchor, start=start, end=END)
                near.append(lambda t, z=states, a=anchor, b=bank: b.path(z, t - a))
                own = torch.linspace(anchor, END, 801, dtype=torch.float64)
                epsilon = max(epsilon, sup(path(own) - near[-1](own)))
            phase = 4 * math.pi * max(num_modes, 16)
            actual = gap_means([product(query, k) for k in near], TIMES, max_phase=phase)
            off = (ideal - actual)[..., 0][SEEN].abs()
            assert (off <= size * epsilon).all()
            assert off.max() > 1e-3 * size * epsilon
            w, near_w = (
                torch.where(SEEN, x[..., 0] / math.sqrt(3), -torch.inf).softmax(-1)
                for x in (ideal, actual)
            )
            assert ((w - near_w).abs().sum(-1) <= size * epsilon / math.sqrt(3)).all()
            errors.append(epsilon)
        assert errors[0] > errors[1] > errors[2] > errors[3]
        assert errors[3] < errors[2] / 2.5  # log M / M tends to a quarter, slowly

    def test_corollary_small_damping_keeps_the_approximation(self) -> None:
        found = approximate_attention(query, KEYS, TIMES, 1e-2)
        anchors = TIMES.tolist()
        effects = []
        for gamma in (1e-3, 5e-4):
            damped, effect = found.bank.damped(gamma), 0.0
            for states, anchor, path in zip(found.keys, anchors, KEYS, strict=True):
                times = torch.linspace(anchor, END, 401, dtype=torch.float64)
                moved = damped.path(states, times - anchor)
                step = sup(moved - found.bank.path(states, times - anchor))
                bound = float(damping_bound(damped, states, END - anchor))
                assert step <= bound * (1 + 1e-9)
                assert sup(moved - path(times)) <= found.certificate.key_error + bound
                effect = max(effect, step)
            effects.append(effect)
        assert effects[1] / effects[0] == pytest.approx(0.5, rel=0.02)


class TestCertificate:
    @pytest.mark.parametrize("count", NUM_CASES)
    def test_is_never_violated(self, count: int, generator: torch.Generator) -> None:
        for _ in range(count):
            size, width = whole(generator, 1, 5), whole(generator, 1, 3)
            has_corner = uniform(generator, 0, 1) < 0.2
            times = 2.0 * torch.rand(size, generator=generator, dtype=torch.float64).sort().values
            if uniform(generator, 0, 1) < 0.2:
                times[-1] = times[0]
                times = times.sort().values
            made = [
                waves(generator, width, has_corner=has_corner and i == 0) for i in range(2 * size)
            ]
            keys, values = [path for path, _ in made[:size]], [path for path, _ in made[size:]]
            q, steepest = waves(generator, width)
            steepest = max([steepest] + [constant for _, constant in made])
            tol = 10.0 ** uniform(generator, *((-1.0, -0.3) if has_corner else (-6.0, -0.5)))
            is_proof = tol > 0.1 and uniform(generator, 0, 1) < 0.5
            found = approximate_attention(
                *(q, keys, times, tol),
                values=values,
                lipschitz=steepest if is_proof else None,
            )
            certificate = found.certificate
            assert certificate.holds
            assert certificate.is_proof == is_proof
            assert certificate.outputs is not None
            assert max(certificate.weights.proved, certificate.outputs.proved) <= tol
            # The operator's weights against a rule that the certificate does not know.
            out, weights = found.attend()
            wanted = simpson_weights(q, keys, times)
            off = (weights - wanted).abs().sum(dim=-1).max().item()
            noise = 1e-4 if has_corner else 1e-7  # of Simpson's rule
            assert off <= certificate.weights.proved + noise
            assert off == pytest.approx(certificate.weights.measured, abs=noise)
            assert out.shape == (size, width)

    def test_measures_what_the_operator_computes(self) -> None:
        values = [lambda t, i=i: torch.stack((t, (t - i).cos()), dim=-1) for i in range(5)]
        found = approximate_attention(query, KEYS, TIMES, 1e-4, values=values)
        weights = simpson_weights(query, KEYS, TIMES)
        rows = (weights[..., None] * gap_means(values, TIMES)).sum(dim=1)
        out, near = found.attend()
        assert found.certificate.outputs is not None
        error = (weights - near).abs().sum(dim=-1).max().item()
        assert error == pytest.approx(found.certificate.weights.measured, abs=1e-9)
        error = (rows - out).norm(dim=-1).max().item()
        assert error == pytest.approx(found.certificate.outputs.measured, abs=1e-8)

    def test_modes_grow_slowly_with_the_digits(self) -> None:
        modes = [
            approximate_attention(query, KEYS, TIMES, tol).certificate.num_modes
            for tol in (1e-1, 1e-3, 1e-5, 1e-7)
        ]
        assert modes == sorted(modes)
        assert modes[-1] < 40
        with pytest.raises(
            ValueError, match=r"tol=0.001, and with 64 modes the bound is .*least_s"
        ):
            approximate_attention(query, KEYS, TIMES, 1e-3, method="fejer", max_modes=64)

    def test_fejer_is_the_proof_and_needs_many_modes(self) -> None:
        fejer = approximate_attention(query, KEYS, TIMES, 0.5, method="fejer").certificate
        fitted = approximate_attention(query, KEYS, TIMES, 0.5).certificate
        assert fejer.holds
        assert fejer.num_modes > 5 * fitted.num_modes

    def test_one_mode_less_would_not_do(self) -> None:
        found = approximate_attention(query, KEYS, TIMES, 1e-3).certificate
        with pytest.raises(ValueError, match="Raise one of them"):
            approximate_attention(query, KEYS, TIMES, 1e-3, max_modes=found.num_modes - 1)

    def test_a_lipschitz_constant_costs_little(self) -> None:
        trusted = approximate_attention(query, KEYS, TIMES, 3e-2).certificate
        proved = approximate_attention(query, KEYS, TIMES, 3e-2, lipschitz=25.0).certificate
        assert proved.is_proof
        assert not trusted.is_proof
        assert trusted.num_modes <= proved.num_modes <= trusted.num_modes + 4

    def test_an_exact_query_may_be_rough(self) -> None:
        def rough(t: Tensor) -> Tensor:
            return torch.stack((torch.sign(torch.sin(40 * t)),) * 3, dim=-1)

        found = approximate_attention(rough, KEYS, TIMES, 1e-2, exact_query=True)
        assert found.certificate.num_modes < 20
        assert found.certificate.query_error == 0.0
        assert found.certificate.holds
        assert found.query is None
        with pytest.raises(ValueError, match="no query on the bank"):
            found.attend()
        with pytest.raises(ValueError, match="Raise one of them"):
            approximate_attention(rough, KEYS, TIMES, 1e-2, max_modes=64)

    def test_a_proof_for_large_values_and_small_keys(self) -> None:
        keys = [lambda t, k=k: 0.01 * k(t) for k in KEYS]
        values = [lambda t, k=k: 3.0 * k(t) for k in KEYS]
        options = {"values": values, "lipschitz": 75.0}
        found = approximate_attention(query, keys, TIMES, 0.2, **options).certificate
        assert found.outputs is not None
        assert found.outputs.measured <= found.outputs.proved <= 0.2
        assert found.num_modes < 40

    def test_holds_looks_at_every_pair(self) -> None:
        good, bad = Evidence(1.0, 2.0), Evidence(2.0, 1.0)

        def holds(*pairs: Evidence | None) -> bool:
            return Certificate(1, 0.0, 0.0, None, *pairs, False).holds  # type: ignore[arg-type]

        assert holds(good, good, None)
        assert holds(good, good, good)
        assert not any((holds(bad, good, None), holds(good, bad, None), holds(good, good, bad)))

    @pytest.mark.parametrize("method", ["least_squares", "fejer"])
    def test_all_keys_at_one_time(self, method: str) -> None:
        times = torch.full((5,), END, dtype=torch.float64)
        found = approximate_attention(query, KEYS, times, 1e-6, method=method)
        assert found.certificate.holds
        wanted = torch.stack([product(query, k)(times[:1])[0, 0] for k in KEYS])
        wanted = (wanted / math.sqrt(3)).softmax(-1).expand(5, 5)
        torch.testing.assert_close(found.attend()[1], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"times": TIMES[:4]}, r"one time for each of the 5 keys, at least one; got \[4\]"),
        ({"times": TIMES.flip(0)}, "times must not decrease within a series"),
        ({"tol": 0.0}, "tol must be positive; got 0.0"),
        ({"values": KEYS[:2]}, "values must be 5, one for each key; got 2"),
        ({"method": "spline"}, "method must be one of"),
        ({"q": lambda t: t}, r"must map times \[257\] to finite .*starts at -0.5 returned \[257\]"),
        ({"q": lambda t: query(t).log()}, "returned .* with NaN or infinity"),
        ({"keys": [lambda t: t[:, None]] * 5}, "keys must have the channels of the query, 3"),
    ],
)
def test_refuses_what_it_cannot_use(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"q": query, "keys": KEYS, "times": TIMES, "tol": 0.1}
    with pytest.raises(ValueError, match=message):
        approximate_attention(**{**arguments, **changes})  # type: ignore[arg-type]
