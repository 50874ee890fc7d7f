from __future__ import annotations

import numpy as np
import pytest
import torch

from osciformer.ops.attention.query import (
    ConstantPath,
    LinearPath,
    SinusoidPath,
    resolve_query,
)

DOUBLE = torch.float64
B, M, H, C, J = 2, 6, 2, 3, 4
MODES = ["hold", "linear", "ridge", "ridge_causal", "anchored", "learned"]


def tokens():
    return torch.randn(B, M, H, C, dtype=DOUBLE)


def increasing_times():
    return torch.rand(B, M, dtype=DOUBLE).cumsum(1)


def trajectory():
    return {
        "omega": torch.tensor([0.5, 1.0, 3.0, 9.0], dtype=DOUBLE),
        "cos": torch.randn(H, J, C, dtype=DOUBLE),
        "sin": torch.randn(H, J, C, dtype=DOUBLE),
        "constant": torch.randn(H, C, dtype=DOUBLE),
    }


def params_of(mode):
    return trajectory() if mode in ("anchored", "learned") else None


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("hold", ConstantPath),
        ("linear", LinearPath),
        ("ridge", SinusoidPath),
        ("ridge_causal", SinusoidPath),
        ("anchored", SinusoidPath),
        ("learned", SinusoidPath),
    ],
)
def test_mode_resolves_to_its_path(mode, kind):
    path = resolve_query(mode, tokens(), increasing_times(), params_of(mode))
    assert isinstance(path, kind)
    assert path.evaluate(torch.rand(B, M, 5, 2, dtype=DOUBLE)).shape == (B, M, 5, 2, H, C)


def test_hold_reads_its_own_token_at_any_time():
    q = tokens()
    path = resolve_query("hold", q, increasing_times())
    assert torch.equal(path.evaluate(torch.rand(B, M, 3, dtype=DOUBLE))[:, :, 2], q)


def test_linear_interpolates_and_is_constant_outside():
    q, times = tokens(), increasing_times()
    tau = torch.linspace(-1, 8, 40, dtype=DOUBLE).expand(B, 1, -1)
    got = resolve_query("linear", q, times).evaluate(tau)
    for b in range(B):
        want = np.interp(tau[b, 0].numpy(), times[b].numpy(), q[b, :, 1, 2].numpy())
        np.testing.assert_allclose(got[b, 0, :, 1, 2].numpy(), want, rtol=0, atol=1e-13)


def test_linear_leaves_a_tie_from_its_last_token():
    q, times = tokens(), increasing_times()
    times[:, 3] = times[:, 2]
    path = resolve_query("linear", q, times)
    assert torch.equal(path.evaluate(times[:, 2:3, None])[:, 0, 0], q[:, 3])
    just_before = path.evaluate((times[:, 2:3] - 1e-12)[..., None])[:, 0, 0]
    torch.testing.assert_close(just_before, q[:, 2], rtol=1e-9, atol=1e-9)


def test_linear_is_not_bent_by_absent_tokens():
    q, times = tokens(), increasing_times()
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 1, 1]], dtype=torch.bool)
    path = resolve_query("linear", q, times, {"mask": mask})
    tau = torch.linspace(-1, 8, 40, dtype=DOUBLE).expand(1, 1, -1)
    for b in range(B):
        kept = mask[b]
        alone = LinearPath(q[b : b + 1, kept], times[b : b + 1, kept]).evaluate(tau)
        both = LinearPath(path.q[b : b + 1], path.times[b : b + 1]).evaluate(tau)
        torch.testing.assert_close(both, alone, rtol=1e-12, atol=1e-12)


def test_linear_with_no_token_present_is_finite():
    mask = torch.zeros(B, M, dtype=torch.bool)
    path = resolve_query("linear", tokens(), increasing_times(), {"mask": mask})
    assert torch.isfinite(path.q).all()


def test_ridge_recovers_a_trajectory_of_its_bank():
    times = torch.linspace(0, 7, 60, dtype=DOUBLE).expand(1, -1)
    omega = torch.tensor([1.0, 2.5], dtype=DOUBLE)
    truth = SinusoidPath(
        omega, None, torch.randn(1, 1, H, 2, C).double(), torch.randn(1, 1, H, 2, C).double(),
        torch.zeros(1, 1, dtype=DOUBLE),
    )  # fmt: skip
    q = truth.evaluate(times[:, None])[:, 0]
    path = resolve_query("ridge", q, times, {"omega": omega, "ridge": 1e-12})
    tau = torch.rand(1, 1, 20, dtype=DOUBLE) * 7
    torch.testing.assert_close(path.evaluate(tau), truth.evaluate(tau), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mode", ["ridge", "ridge_causal"])
def test_ridge_curve_moves_with_the_times(mode):
    q, times = tokens(), increasing_times()
    tau = torch.rand(B, M, 7, dtype=DOUBLE)
    here = resolve_query(mode, q, times).evaluate(tau)
    there = resolve_query(mode, q, times + 100.0).evaluate(tau + 100.0)
    torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-9)


def test_ridge_causal_rows_ignore_later_tokens():
    q, times = tokens(), increasing_times()
    changed_q, changed_times = q.clone(), times.clone()
    changed_q[:, 4:] = 7.0
    changed_times[:, 4:] += 1.0
    before = resolve_query("ridge_causal", q, times)
    after = resolve_query("ridge_causal", changed_q, changed_times)
    assert torch.equal(before.cos[:, :4], after.cos[:, :4])
    assert torch.equal(before.sin[:, :4], after.sin[:, :4])
    assert not torch.equal(before.cos[:, 4:], after.cos[:, 4:])


def test_last_causal_row_is_the_global_fit():
    q, times = tokens(), increasing_times()
    causal, whole = (resolve_query(mode, q, times) for mode in ("ridge_causal", "ridge"))
    torch.testing.assert_close(causal.cos[:, -1], whole.cos[:, 0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mode", ["ridge", "ridge_causal"])
def test_absent_tokens_take_no_part_in_a_fit(mode):
    q, times = tokens(), increasing_times()
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]] * B, dtype=torch.bool)
    changed = torch.where(mask[..., None, None], q, 1e6)
    tau = torch.rand(B, M, 3, dtype=DOUBLE)
    before = resolve_query(mode, q, times, {"mask": mask}).evaluate(tau)
    after = resolve_query(mode, changed, times, None, mask).evaluate(tau)
    assert torch.equal(before, after)


def test_anchored_scales_its_token_by_the_learned_factor():
    q, times, params = tokens(), increasing_times(), trajectory()
    path = resolve_query("anchored", q, times, params)
    here = path.evaluate(times[..., None])[:, :, 0]
    torch.testing.assert_close(here, q * (params["constant"] + params["cos"].sum(1)))
    late = path.evaluate((times + 0.3)[..., None])[:, :, 0]
    phase = params["omega"][:, None] * 0.3
    factor = (params["cos"] * phase.cos() + params["sin"] * phase.sin()).sum(1)
    torch.testing.assert_close(late, q * (params["constant"] + factor))


def test_anchored_without_constant_holds_its_token():
    q, times, params = tokens(), increasing_times(), trajectory()
    del params["constant"]
    params["cos"], params["sin"] = torch.zeros(H, J, C), torch.zeros(H, J, C)
    path = resolve_query("anchored", q, times, params)
    torch.testing.assert_close(path.evaluate(times[..., None])[:, :, 0], q)


def test_learned_needs_no_tokens_and_is_one_for_all_rows():
    times = increasing_times()
    path = resolve_query("learned", None, times, trajectory())
    tau = torch.rand(1, 1, 4, dtype=DOUBLE).expand(B, M, -1)
    out = path.evaluate(tau)
    assert torch.equal(out, out[:1, :1].expand_as(out))


@pytest.mark.parametrize("mode", MODES)
def test_mirrored_path_is_the_path_backwards(mode):
    path = resolve_query(mode, tokens(), increasing_times(), params_of(mode))
    tau = torch.rand(B, M, 5, dtype=DOUBLE) * 4
    there = path.mirrored().evaluate(-tau.flip(1)).flip(1)
    torch.testing.assert_close(there, path.evaluate(tau), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["linear", "ridge", "ridge_causal", "anchored"])
def test_gradients_reach_tokens_and_times(mode):
    q, times = tokens().requires_grad_(), increasing_times().requires_grad_()
    tau = torch.rand(B, M, 2, dtype=DOUBLE) * 3
    # A firm ridge keeps finite differences of the fit accurate.
    params = {"ridge": 0.1} if mode.startswith("ridge") else params_of(mode)

    def curve(q, times):
        return resolve_query(mode, q, times, params).evaluate(tau)

    assert torch.autograd.gradcheck(curve, (q, times), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "params", "message"),
    [
        ("cubic", None, "query must be one of hold, linear, ridge.*got 'cubic'"),
        ("hold", {"ridge": 1.0}, r"unknown keys \['ridge'\].*no parameters"),
        ("ridge", {"modes": 3}, r"unknown keys \['modes'\].*allowed: omega, ridge, mask"),
        ("ridge", {"omega": torch.ones(2, 2)}, r"'omega'.*shape \[any\], got \[2, 2\]"),
        ("ridge", {"mask": torch.ones(1, 1).bool()}, r"'mask'.*\[2, 6\], got \[1, 1\]"),
        ("anchored", None, r"needs query_params\['omega'\]"),
        (
            "anchored",
            {"omega": torch.ones(J), "cos": torch.ones(J, C), "sin": torch.ones(J, C)},
            r"'cos'.*shape \[2, 4, 3\], got \[4, 3\]",
        ),
    ],
)
def test_bad_parameters_are_named(mode, params, message):
    with pytest.raises(ValueError, match=message):
        resolve_query(mode, tokens(), increasing_times(), params)


def test_only_learned_goes_without_tokens():
    with pytest.raises(ValueError, match="q is None"):
        resolve_query("hold", None, increasing_times())
