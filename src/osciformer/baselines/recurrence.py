"""Recurrent networks over the rows of a series: the loop, and reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from osciformer._types import Float, Mask, QueryTimes, Reads, Static, Tensor, Times, Tokens, Values
from osciformer.baselines.directions import DirectedBackbone
from osciformer.models.backbones import register_backbone
from osciformer.nn.encoder import with_indicators
from osciformer.nn.timeline import last_observation, take_tokens
from osciformer.ops.padding import clean_times

_Cell = TypeVar("_Cell", bound="type[Cell]")


class Cell(nn.Module):
    """What a row does to a state, and what time does to it; the state is one tensor of S columns.

    Gaps are in mean gaps of the training series. Before the first row, which comes after a gap of
    1, the state is zero. A cell has `step`, or `run` if all rows can be done at once.
    """

    sees_gap = False  #: Whether the gap is one of the inputs.
    no_weight_decay: tuple[str, ...] = ("raw_rate",)

    def __init__(self, dim: int, state_dim: int | None = None) -> None:
        super().__init__()
        self.dim, self.state_dim = dim, state_dim or dim

    def step(
        self, state: Float[Tensor, "B S"], inputs: Float[Tensor, "B I"], gap: Float[Tensor, "B 1"]
    ) -> Float[Tensor, "B S"]:
        """Return the state just after a row that comes a gap after the row of `state`."""
        raise NotImplementedError

    def evolve(self, state: Tensor, gap: Float[Tensor, "*A 1"]) -> Float[Tensor, "*A S"]:
        """Return the state a gap later if no row has come; by default it stands still."""
        return state

    def hidden(self, state: Float[Tensor, "*A S"]) -> Float[Tensor, "*A D"]:
        """Return the hidden state; by default the first columns of the state."""
        return state[..., : self.dim]

    def run(
        self, inputs: Float[Tensor, "B N I"], gaps: Float[Tensor, "B N 1"]
    ) -> Float[Tensor, "B N S"]:
        """Return the states after all rows."""
        state = inputs.new_zeros(len(inputs), self.state_dim)
        states = []
        for row, gap in zip(inputs.unbind(1), gaps.unbind(1), strict=True):
            state = self.step(state, row, gap)
            states.append(state)
        return torch.stack(states, dim=1)


@dataclass(frozen=True)
class EncodedRecurrence:
    """States of one recurrence and what a read needs besides."""

    states: Tokens
    carried: Tokens  # whole states of a cell; of GRU-D the ages of the last measurements
    times: Times
    mask: Mask


class CellRecurrence(nn.Module):
    """A cell that goes over the rows in one direction of time.

    Its inputs are values and static features, each with an indicator of what is missing, and the
    gap if the cell sees it.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, values: Values, times: Times, mask: Mask, static: Static | None = None
    ) -> EncodedRecurrence:
        """Return the states of the series; times are in mean gaps."""
        times = clean_times(times, mask)
        # Present rows move to the front, so that absent ones come after all that is read.
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        gaps = times.gather(1, order).diff(dim=1).clamp(min=0.0)
        gaps = functional.pad(gaps, (1, 0), value=1.0)[..., None].to(values.dtype)
        inputs = with_indicators(values, mask[..., None]).take_along_dim(order[..., None], dim=1)
        columns = [inputs, gaps] if self.cell.sees_gap else [inputs]
        if static is not None:
            known = with_indicators(static).to(values.dtype)
            columns.append(known[:, None].expand(-1, values.shape[1], -1))
        states = self.cell.run(torch.cat(columns, dim=-1), gaps)
        states = take_tokens(states, mask.cumsum(dim=1) - 1)
        return EncodedRecurrence(self.cell.hidden(states), states, times, mask)

    def read(self, encoded: EncodedRecurrence, query_times: QueryTimes) -> Reads:
        """Return the hidden states at any times, evolved since the row before; zeros before all."""
        held = last_observation(encoded.times, query_times, encoded.mask)
        gap = query_times[..., None] - take_tokens(encoded.times[..., None], held)
        state = take_tokens(encoded.carried, held)
        reads = self.cell.hidden(self.cell.evolve(state, gap.clamp(min=0.0).to(state.dtype)))
        return reads.masked_fill((held < 0)[..., None], 0.0)


class RecurrentBackbone(DirectedBackbone):
    """A `Cell` as a backbone: one layer. A read is the state as it evolves after the last row.

    Args:
        cell: Class of the cell.
        input_dim: Number of input columns.
        static_dim: Number of static features S.
        dim: Width D.
        direction: `causal`, or `bidirectional`: half of the width runs backwards in time.
        options: Further settings of the cell.
    """

    def __init__(
        self,
        cell: type[Cell],
        input_dim: int,
        *,
        static_dim: int = 0,
        dim: int = 64,
        direction: str = "causal",
        **options: Any,
    ) -> None:
        width = 2 * input_dim + 2 * static_dim + cell.sees_gap
        super().__init__(lambda dim: CellRecurrence(cell(width, dim, **options)), dim, direction)

    def _unit(self, gaps: Float[Tensor, "G"]) -> Tensor:
        return gaps.mean()


def register_cell(name: str) -> Callable[[_Cell], _Cell]:
    """Return a class decorator that registers a cell, made from its sizes `I, D`, as a backbone.

    Further parameters of the class are options of the backbone.
    """

    def register(cell: _Cell) -> _Cell:
        options = [*list(signature(cell).parameters)[2:], "direction"]
        make: Any = partial(RecurrentBackbone, cell)
        register_backbone(name, settings=(), options=options)(make)
        return cell

    return register
