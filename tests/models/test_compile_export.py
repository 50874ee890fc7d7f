from __future__ import annotations

import pytest
import torch

from osciformer.models import OsciFormer
from osciformer.testing import irregular_batch, relative_error

FEATURES = 3
# Tracing the sinusoidal queries takes half a minute each.
SOME_QUERIES = (
    "hold",
    *(
        pytest.param(query, marks=pytest.mark.slow)
        for query in ("linear", "ridge", "ridge_causal", "anchored", "learned")
    ),
)


class States(torch.nn.Module):
    """The model as a function of tensors."""

    def __init__(self, model: OsciFormer) -> None:
        super().__init__()
        self.model = model

    def forward(self, values, times, mask):
        return self.model(values, times, mask).states


def make(query: str) -> States:
    return States(OsciFormer(FEATURES, dim=16, num_heads=2, num_layers=1, query=query)).eval()


def sample(batch_size: int):
    batch = irregular_batch(batch_size, 10, FEATURES, dtype=torch.float32, seed=batch_size)
    return batch.x, batch.times, batch.mask


@pytest.mark.parametrize("query", SOME_QUERIES)
def test_export_gives_the_same_states_for_any_batch_size(query):
    model = make(query)
    size = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, sample(3), dynamic_shapes=({0: size},) * 3)
    for batch_size in (2, 5):
        args = sample(batch_size)
        assert relative_error(program.module()(*args), model(*args)) < 1e-5


@pytest.mark.parametrize("kind", ["attention", "resonator"])
def test_export_gives_the_whole_encoded_dataclass(kind):
    model = OsciFormer(FEATURES, dim=16, num_heads=2, blocks=(kind,)).eval()
    program = torch.export.export(model, sample(3))
    encoded = program.module()(*sample(3))
    assert relative_error(encoded.states, model(*sample(3)).states) < 1e-5


@pytest.mark.slow
def test_export_of_a_model_that_is_read():
    model = OsciFormer(FEATURES, dim=16, num_heads=2, num_layers=1).eval()
    query_times = torch.tensor([[0.7, 1.5]]).repeat(3, 1)
    program = torch.export.export(model, sample(3), {"query_times": query_times})
    args, later = sample(3), query_times + 0.2
    expected = model(*args, query_times=later).reads
    assert relative_error(program.module()(*args, query_times=later).reads, expected) < 1e-5


def assert_compiles(query: str, backend: str) -> None:
    model = make(query)
    args = sample(3)
    direction = torch.randn(3, 10, 16)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        states = run(*args)
        (states * direction).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append((states, gradients))
    (expected, wanted), (states, gradients) = results
    assert relative_error(states, expected) < 1e-5
    for name, gradient in gradients.items():
        assert relative_error(gradient, wanted[name]) < 1e-4, name


@pytest.mark.parametrize("query", SOME_QUERIES)
def test_the_whole_model_is_one_graph(query):
    assert_compiles(query, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("query", ["hold", "ridge"])
def test_the_compiled_model_gives_the_same_states_and_gradients(query):
    assert_compiles(query, "inductor")
