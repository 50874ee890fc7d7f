"""Keys at a row's own time: plain attention among them, and the union of partial softmaxes."""

from __future__ import annotations

import math

import pytest
import torch

from osciformer.ops.attention.ties import attend_tied, find_ties, merge

from .cases import DOUBLE, tensor

ROWS = tensor([[0.0, 1.0, 1.0, 2.5, 3.0], [0.0, 0.5, 0.5, 0.5, 9.0]])
KEYS = tensor([[0.0, 0.0, 1.0, 2.0, 3.0, 3.0], [0.5, 0.5, 0.5, 0.7, 0.7, 9.0]])
MASK = torch.tensor([[1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]], dtype=torch.bool)


def dense(q, k, v, tied):
    """The same by a softmax over all pairs."""
    score = torch.einsum("bmhc,bnhc->bmhn", q, k).masked_fill(~tied[:, :, None], -math.inf)
    lse = score.logsumexp(-1)
    weight = (score - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp()
    return torch.einsum("bmhn,bnhc->bmhc", weight, v), lse


def tokens(width=4):
    return torch.randn(2, 5, 2, 3).double(), *(
        torch.randn(2, 6, 2, c, dtype=DOUBLE) for c in (3, width)
    )


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_find_ties_names_the_present_keys_at_each_time(mask):
    order, end, count = find_ties(ROWS, KEYS, mask)
    present = torch.ones_like(MASK) if mask is None else mask
    for b in range(2):
        for j in range(ROWS.shape[1]):
            want = ((KEYS[b] == ROWS[b, j]) & present[b]).nonzero()[:, 0].tolist()
            stop = end[b, j].item()
            found = order[b, stop - count[b, j] : stop].tolist()
            assert sorted(found) == want


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_attention_over_ties_is_dot_product_attention(mask):
    q, k, v = tokens()
    out, lse = attend_tied(q, k, v, find_ties(ROWS, KEYS, mask))
    tied = ROWS[:, :, None] == KEYS[:, None]
    tied = tied if mask is None else tied & mask[:, None]
    want, want_lse = dense(q, k, v, tied)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert (lse == -math.inf).any()


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_gradcheck_of_output_and_logsumexp(mask):
    ties = find_ties(ROWS, KEYS, mask)

    def function(q, k, v):
        out, lse = attend_tied(q, k, v, ties)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    inputs = tuple(x.requires_grad_() for x in tokens())
    assert torch.autograd.gradcheck(function, inputs)


def test_rows_without_ties_are_zero_and_pull_back_nothing():
    q, k, v = (x.requires_grad_() for x in tokens())
    ties = find_ties(ROWS + 0.01, KEYS, None)
    out, lse = attend_tied(q, k, v, ties)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient == 0).all()


def test_large_logits_do_not_overflow():
    q, k, v = tokens()
    out, lse = attend_tied(1e4 * q, k, v, find_ties(ROWS, KEYS, None))
    assert torch.isfinite(out).all()
    assert not torch.isnan(lse).any()


def halves(split):
    q, k, v = tokens(width=3)
    tied = torch.ones(2, 5, 6, dtype=torch.bool)
    first, second = tied.clone(), tied.clone()
    first[..., split:], second[..., :split] = False, False
    return dense(q, k, v, tied), dense(q, k, v, first), dense(q, k, v, second)


@pytest.mark.parametrize("split", [0, 1, 3, 6], ids=lambda n: f"{n} of 6 keys first")
def test_merge_is_the_softmax_over_the_union(split):
    whole, first, second = halves(split)
    torch.testing.assert_close(merge(*first, *second), whole)
    torch.testing.assert_close(merge(*second, *first), whole)


def test_merge_of_two_empty_sets_is_empty_with_zero_gradient():
    out, other = (torch.zeros(1, 2, 1, 3, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    empty = torch.full((1, 2, 1), -math.inf, dtype=DOUBLE, requires_grad=True)
    merged, lse = merge(out, empty, other, empty.detach())
    assert torch.equal(merged, torch.zeros_like(merged))
    assert (lse == -math.inf).all()
    for gradient in torch.autograd.grad(merged.sum(), (out, other)):
        assert (gradient == 0).all()


def test_merge_with_an_empty_set_has_finite_gradients():
    _, (out, lse), (other, empty) = halves(6)
    leaves = [x.requires_grad_() for x in (out, lse, other)]
    merged, total = merge(out, lse, other, empty)
    for gradient in torch.autograd.grad(merged.sum() + total.sum(), leaves):
        assert torch.isfinite(gradient).all()


def test_gradcheck_of_merge():
    _, (out, lse), (other, other_lse) = halves(2)
    inputs = tuple(x.requires_grad_() for x in (out, lse, other, other_lse))
    assert torch.autograd.gradcheck(merge, inputs)
