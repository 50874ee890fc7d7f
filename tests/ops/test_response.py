"""The response operator against matrix exponentials: values, gradients, edges and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from osciformer.ops import Response, oscillator_response
from osciformer.ops.response import operators, scan

from .response_cases import DOUBLE, MODES, ZETAS, make_case, oracle, relative_error

BACKENDS = ["reference", "chunked"]


@pytest.fixture(params=["whole", "chunks"])
def cut(request, monkeypatch):
    """Run the scan as a whole, or in chunks and segments so small that all borders are met."""
    if request.param == "chunks":
        monkeypatch.setattr(scan.Block, "segment_size", 50)
        monkeypatch.setattr(operators, "plan", lambda batch, rows, width: (batch, 4))


@pytest.mark.parametrize(("drive", "of"), MODES)
def test_rows_agree_with_the_oracle(drive, of, cut):
    values, times, omega, zeta = make_case()
    wanted = oracle(values, times, omega, zeta, drive=drive, of=of)
    # Each row as the last of its ties: the oracle reads just after a time.
    last = torch.searchsorted(times, times, right=True) - 1
    for backend in BACKENDS:
        found = oscillator_response(values, times, omega, zeta, drive=drive, of=of, backend=backend)
        at_last = [z.gather(1, last[..., None, None].expand(z.shape)) for z in found]
        assert relative_error(at_last, wanted) < 1e-10
    single = oscillator_response(values.float(), times, omega, zeta, drive=drive, of=of)
    at_last = [z.gather(1, last[..., None, None].expand(z.shape)) for z in single]
    wanted = oracle(values.float(), times, omega, zeta, drive=drive, of=of)
    assert single.position.dtype == torch.float32
    assert relative_error(at_last, wanted) < 1e-5


@pytest.mark.parametrize(("drive", "of"), MODES)
def test_query_times_agree_with_the_oracle(drive, of):
    values, times, omega, zeta = make_case(seed=1)
    query = torch.tensor([[-1.0, 0.2, 1.7, 0.9, 30.0]], dtype=DOUBLE).repeat(2, 1) + times[:, :1]
    query[:, 3] = times[:, 7]
    start = torch.randn(2, 2, 2, len(ZETAS), dtype=DOUBLE)
    wanted = oracle(values, times, omega, zeta, drive=drive, of=of, start=start, query=query)
    found = oscillator_response(
        *(values, times, omega, zeta),
        **dict(drive=drive, of=of, initial=Response(*start), query_times=query),
    )
    assert relative_error(found, wanted) < 1e-10


@pytest.mark.parametrize("rows", [1000])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_equal_gaps_do_not_add_up_rounding_errors(rows, dtype):
    # Undamped: nothing is forgotten, and each step errs alike.
    omega = torch.tensor([1e-3, 0.5, 3.0, 200.0], dtype=DOUBLE)
    times = torch.arange(rows, dtype=DOUBLE)[None] * 0.37
    values = torch.randn(1, rows, 1).to(dtype)
    query = times[:, -1:]
    zeta = torch.zeros(4, dtype=DOUBLE)
    wanted = oracle(values, times, omega, zeta, drive="linear", of="value", query=query)
    found = oscillator_response(values, times, omega, zeta, query_times=query)
    assert relative_error(found, wanted) < (1e-10 if dtype == DOUBLE else 1e-5)


@pytest.mark.parametrize("of_variables", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize(("drive", "of"), MODES)
def test_adjoint_agrees_with_autograd(drive, of, of_variables, cut):
    values, times, omega, zeta = make_case(rows=10, smallest=1e-4, seed=2)
    if of_variables:
        omega = omega * torch.tensor([[1.0], [0.3]], dtype=DOUBLE)
    query = times[:, :1] + torch.tensor([[-0.5, 0.1, 0.8, 3.0]], dtype=DOUBLE)
    start = torch.randn(2, 2, 2, len(ZETAS), dtype=DOUBLE)
    found = []
    for backend in BACKENDS:
        given = [x.clone().requires_grad_() for x in (values, times, omega, zeta, start, query)]
        results = []
        for initial, asked in (("steady", None), (Response(*given[4]), given[5])):
            options = dict(drive=drive, of=of, initial=initial, query_times=asked)
            results += oscillator_response(*given[:4], backend=backend, **options)
        g = torch.Generator().manual_seed(3)
        loss = sum((torch.randn(z.shape, generator=g, dtype=DOUBLE) * z).sum() for z in results)
        found.append(torch.autograd.grad(loss, given))
    for mine, wanted in zip(*found, strict=True):
        # An undamped oscillator of 200 radians has large gradients, a slow one small ones.
        assert torch.allclose(mine, wanted, rtol=1e-8, atol=1e-10 * float(wanted.abs().max()))


@pytest.mark.parametrize(("drive", "of"), MODES)
def test_gradcheck(drive, of):
    values, times, omega, zeta = make_case(1, 4, 2, smallest=0.1, missing=0.2)
    omega, zeta = omega[3:6].clamp(0.5, 3.0), zeta[2:7:2] + 0.1

    def response(*given):
        return oscillator_response(*given, drive=drive, of=of)

    given = [x.clone().requires_grad_() for x in (values.nan_to_num(0.3), times, omega, zeta)]
    assert torch.autograd.gradcheck(response, given)


def test_undamped_impulses_give_the_periodogram():
    values, times, omega, _ = make_case(missing=0.0)
    found = oscillator_response(
        values, times, omega, torch.zeros_like(omega), drive="impulse", query_times=times[:, -1:]
    )
    power = (found.position**2 + (found.velocity / omega) ** 2).squeeze(1)
    phases = torch.exp(1j * omega * times[..., None])
    wanted = torch.einsum("bnf,bnk->bfk", values.to(torch.complex128), phases).abs() ** 2
    assert torch.allclose(power, wanted, rtol=1e-10)


def test_rate_is_the_scaled_derivative_of_the_response_to_values():
    values, times, omega, zeta = make_case()
    for drive in ("linear", "hold"):
        x, v = oscillator_response(values, times, omega, zeta, drive=drive)
        rate = oscillator_response(values, times, omega, zeta, drive=drive, of="rate")
        assert torch.allclose(rate.position, v / omega, atol=1e-11)
        # Far from rest, u = x + 2 zeta v / omega + v' / omega^2 tells the drive.
        u = x + 2 * zeta * v / omega + rate.velocity / omega
        assert torch.allclose(u, u[..., :1].expand_as(u), atol=1e-9)


def test_a_variable_never_observed_does_not_respond():
    values, times, omega, zeta = make_case()
    values[0, :, 1] = torch.nan
    for drive, of in MODES:
        found = oscillator_response(values, times, omega, zeta, drive=drive, of=of)
        assert not any(z[0, :, 1].any() for z in found)
        assert all(z.isfinite().all() for z in found)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    values, times, omega, zeta = make_case(rows=rows, missing=0.0)
    query = torch.tensor([[0.0, 5.0]], dtype=DOUBLE).repeat(2, 1)
    for drive, of in MODES:
        options = dict(drive=drive, of=of)
        found = oscillator_response(values, times, omega, zeta, **options)
        assert found.position.shape == (2, rows, 2, len(ZETAS))
        read = oscillator_response(values, times, omega, zeta, query_times=query, **options)
        assert read.velocity.shape == (2, 2, 2, len(ZETAS))
        if rows == 0:
            assert not any(z.any() for z in read)


def test_no_series_and_no_variable():
    *_, omega, zeta = make_case()
    empty = oscillator_response(torch.ones(0, 3, 2), torch.ones(0, 3), omega, zeta)
    assert empty.position.shape == (0, 3, 2, len(ZETAS))
    empty = oscillator_response(torch.ones(2, 3, 0), torch.ones(2, 3), omega, zeta)
    assert empty.position.shape == (2, 3, 0, len(ZETAS))


def test_padding_may_hold_anything_and_changes_nothing():
    values, times, omega, zeta = make_case(rows=9)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[:, [0, 4, 11, 12, 13]] = False
    padded = torch.full((2, 14, 2), math.inf, dtype=DOUBLE)
    padded_times = torch.full((2, 14), torch.nan, dtype=DOUBLE)
    padded[mask], padded_times[mask] = values.flatten(0, 1), times.flatten()
    padded.requires_grad_()
    for drive, of in MODES:
        options = dict(drive=drive, of=of)
        plain = oscillator_response(values, times, omega, zeta, **options)
        found = oscillator_response(padded, padded_times, omega, zeta, mask=mask, **options)
        for a, b in zip(found, plain, strict=True):
            assert torch.allclose(a[mask].view_as(b), b, atol=1e-12)
            assert a.isfinite().all()
        (grad,) = torch.autograd.grad(found.position.sum(), padded)
        assert not grad[~mask].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(drive="cubic"), "drive must be one of linear, hold, impulse; got 'cubic'"),
        (dict(of="slope"), "of must be one of value, rate; got 'slope'"),
        (dict(backend="cuda"), "backend must be one of .*; got 'cuda'"),
        (dict(initial="zero"), "initial must be one of steady, rest; got 'zero'"),
        (dict(drive="impulse", of="rate"), "of='rate' needs a path"),
        (dict(omega=torch.tensor([1.0, 0.0])), "omega must be finite and above 0; got 0.0"),
        (dict(zeta=torch.tensor([0.1, -0.5])), "zeta must be finite and at least 0; got -0.5"),
        (dict(omega=torch.ones(5, 2)), r"broadcast to \[K\] or \[F, K\] with F = 3"),
        (dict(zeta=torch.ones(4)), r"got \[2\] and \[4\]"),
        (dict(values=torch.ones(2, 4)), r"values must have shape \[B, N, F\]"),
        (dict(values=torch.full((2, 4, 3), torch.inf)), r"values\[0, 0, 0\] = inf"),
        (dict(times=torch.ones(2, 5)), r"times must have shape \[B, N\] = \[2, 4\]"),
        (dict(times=torch.tensor([[0.0, 2, 1, 3]] * 2)), "must not decrease"),
        (dict(times=torch.full((2, 4), torch.nan)), "times must be finite"),
        (dict(query_times=torch.ones(3, 1)), r"query_times must have shape \[B, M\] with B = 2"),
        (dict(query_times=torch.full((2, 1), torch.nan)), r"query_times\[0, 0\] = nan"),
        (dict(initial=Response(torch.ones(2, 3), torch.ones(2, 3))), r"initial.position must have"),
    ],
)
def test_refusals_name_what_is_wrong(change, message):
    given = dict(
        values=torch.ones(2, 4, 3),
        times=torch.arange(4.0).repeat(2, 1),
        omega=torch.ones(2),
        zeta=torch.ones(2),
    )
    with pytest.raises(ValueError, match=message):
        oscillator_response(**given | change)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="values must be a floating-point tensor"):
        oscillator_response(
            torch.ones(1, 2, 1, dtype=torch.long), torch.ones(1, 2), torch.ones(1), torch.ones(1)
        )
