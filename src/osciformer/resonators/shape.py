"""Shapes: random mixes of oscillators that the series drives forwards and backwards in time.

An oscillator that runs forwards hears what was before, one that runs backwards what comes after.
A random mix of a few of them at one time scale is a filter of random shape, exact at irregular
times: what a random convolution is on a grid. How long and how far the filtered series stays above
a level, when it does, and which filter of a group answers most say what shapes a series has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from osciformer._types import Float, Tensor
from osciformer.data.batches import collate
from osciformer.data.series import IrregularSeries
from osciformer.ops import oscillator_response
from osciformer.ops.response.path import fill, read_times
from osciformer.resonators.families import Family, FeatureName, similar_lengths, time_scales

#: Time scales, and oscillators at each of them.
NUM_SCALES, NUM_OSCILLATORS = 8, 3
#: Quality factors of oscillators: from a smooth bump to ringing for a few periods.
QUALITIES = (0.4, 4.0)
#: Filters of values and as many of rates, and how many of them compete.
NUM_FILTERS, GROUP = 1024, 8
#: Variables that a filter mixes, at most, and those that neighbouring filters choose from.
MOST_VARIABLES, POOL = 9, 16
#: Times at which a series is read, evenly from its first to its last row; fewer if it has many
#: variables.
READINGS, ALL_READINGS = (32, 256), 4096
STATISTICS = (
    "share of time above",
    "mean height above",
    "mean time above",
    "response where it is the largest of its group",
    "share of time as the smallest of its group",
)
DRIVES = ("values", "rates")
# Series from which spreads and levels are learned.
_SAMPLE = 100
# Filters that choose from the same variables.
_NEIGHBOURS = 2 * GROUP
# Numbers that are pooled at a time, and those of a response: they stay in the processor's cache.
_TILE, _RESPONSE = 1 << 18, 1 << 19
# Part of its terms below which a difference is rounding.
_ROUNDING = 1e-5


class Shape(Family):
    """Pooled responses of random filters, made of oscillators of similar period."""

    name: ClassVar[str] = "shape"
    group: ClassVar[str] = "shape"

    def _learn(
        self, sample: IrregularSeries, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        gap, span = time_scales(sample)
        scales = np.geomspace(max(span, 4.0 * gap), 3.0 * gap, NUM_SCALES)[:, None]
        size, (low, high) = (NUM_SCALES, NUM_OSCILLATORS), np.log(QUALITIES)
        count = NUM_FILTERS // NUM_SCALES
        most = int(np.clip(ALL_READINGS // sample.num_features, *READINGS))
        readings = int(np.clip(2.0 * np.median(sample.lengths), READINGS[0], most))
        self.arrays = arrays = {
            "period": scales * np.exp(generator.uniform(-0.5, 0.5, size)),
            "q": np.exp(generator.uniform(low, high, size)),
            "readings": np.array(readings),
            "mix": _draw_mixes(generator, (len(DRIVES), NUM_SCALES, count), sample.num_features),
        }
        shape = (len(DRIVES), NUM_SCALES, count, 4 * NUM_OSCILLATORS)
        arrays["weight"] = generator.standard_normal(shape).astype(np.float32)
        arrays["weight"] /= np.linalg.norm(arrays["weight"], axis=-1, keepdims=True)
        chosen = np.sort(generator.permutation(len(sample))[:_SAMPLE])
        few = sample.take(chosen)
        spreads, levels = np.ones(shape[:2] + shape[3:]), np.zeros(shape[:3])
        for number, basis in self._bases(few):
            spread = basis.std(dim=(1, 2, 3)).double().numpy()
            spreads[number] = np.where(spread > 1e-6, spread, np.inf)
        arrays["weight"] = (arrays["weight"] / spreads[:, :, None]).astype(np.float32)
        for number, basis in self._bases(few):
            # A level is a quantile of the response of one series: where others differ from it.
            whose = torch.from_numpy(generator.integers(len(few), size=count))
            responses = self._filtered(basis, number, slice(None))
            own = responses[torch.arange(count), whose].sort(dim=1).values
            place = generator.integers(own.shape[1], size=(count, 1))
            levels[number] = own.gather(1, torch.from_numpy(place))[:, 0].numpy()
        arrays["level"] = levels.astype(np.float32)
        return arrays

    def transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        """Return the statistics of all filters."""
        width = self.arrays["level"].size * len(STATISTICS)
        found = np.empty((len(series), width), dtype=np.float32)
        most, least = _RESPONSE // max(1, series.num_features), int(self.arrays["readings"])
        for index in similar_lengths(series, most, least=least):
            found[index] = self._transform(series.take(index))
        return found

    def _transform(self, series: IrregularSeries) -> Float[np.ndarray, "n p"]:
        shape = self.arrays["level"].shape
        found = torch.empty(*shape, len(STATISTICS), len(series))
        for number, basis in self._bases(series):
            level = torch.from_numpy(self.arrays["level"][number])
            rows = basis.shape[2] * basis.shape[3]
            step = _NEIGHBOURS * max(1, _TILE // (_NEIGHBOURS * rows))
            step = step if series.num_features <= POOL else _NEIGHBOURS
            for start in range(0, shape[2], step):
                part = slice(start, start + step)
                found[number][part] = _pool(self._filtered(basis, number, part), level[part])
        return found.flatten(0, -2).T.numpy()

    def names(self) -> list[FeatureName]:
        """Return names in the order drive, time scale, filter, statistic."""
        found, unit = [], self.columns.unit
        middles = [np.exp(np.log(self.arrays[x]).mean(axis=1)).tolist() for x in ("period", "q")]
        for drive, mixes in zip(DRIVES, self.arrays["mix"], strict=True):
            for period, q, scale in zip(*middles, mixes, strict=True):
                for number, mix in enumerate(scale, 1):
                    used = tuple(self.columns.features[k] for k in np.flatnonzero(mix))
                    parts = (f"filter {number} of {drive}, {kind}" for kind in STATISTICS)
                    found += [FeatureName(self.name, used, x, period, q, unit) for x in parts]
        return found

    def _filtered(
        self, basis: Float[Tensor, "b F n M"], number: tuple[int, int], part: slice
    ) -> Float[Tensor, "k n M"]:
        """Return the responses of some filters of a drive and time scale."""
        weight, mix = (torch.from_numpy(self.arrays[x][number][part]) for x in ("weight", "mix"))
        used = mix.any(dim=0).nonzero()[:, 0]
        if len(used) < len(basis[0]):
            basis, mix = basis[:, used], mix[:, used]
        outer = torch.einsum("kb,kf->kbf", weight, mix).flatten(1)
        return (outer @ basis.flatten(2).flatten(0, 1)).unflatten(1, basis.shape[2:])

    def _bases(
        self, series: IrregularSeries
    ) -> Iterator[tuple[tuple[int, int], Float[Tensor, "b F n M"]]]:
        """Yield, for each drive and time scale, the responses that its filters mix."""
        omega = torch.from_numpy(2.0 * np.pi / self.arrays["period"])
        zeta = torch.from_numpy(0.5 / self.arrays["q"])
        runs = [_Run.of(series, int(self.arrays["readings"]), back) for back in (False, True)]
        for scale in range(len(omega)):
            states = [run.respond(omega[scale], zeta[scale]) for run in runs]
            yield (0, scale), torch.cat([x for pair in states for x in pair])
            damping = (2.0 * zeta[scale]).float()[:, None, None, None]
            pairs = zip(runs, states, strict=True)
            rates = [x for run, state in pairs for x in _of_rates(run.drive, *state, damping)]
            yield (1, scale), torch.cat(rates)


def _of_rates(drive: Tensor, x: Tensor, v: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return position and velocity of oscillators driven by rates, from those driven by values.

    Along a constant stretch both are differences of equal numbers. What rounding leaves of them is
    set to 0: no filter is to win by the last bit.
    """
    floor = _ROUNDING * (drive.abs() + x.abs())
    parts = (v, drive - x - damping * v)
    first, second = (torch.where(part.abs() > floor, part, 0.0) for part in parts)
    return first, second


class _Run(NamedTuple):
    """Series in one direction of time, and the times at which they are read."""

    values: Float[Tensor, "n N F"]
    times: Float[Tensor, "n N"]
    mask: Tensor
    readings: Float[Tensor, "n M"]
    drive: Float[Tensor, "F n M"]  # at the readings
    is_backward: bool

    @classmethod
    def of(cls, series: IrregularSeries, count: int, is_backward: bool) -> _Run:
        """Return the run; readings of both directions are at the same moments."""
        batch = collate(series)
        values, times, mask = batch.values, batch.times, batch.mask
        first, last = times[:, :1], times[:, -1:]  # padding repeats the last time
        readings = first + (last - first) * torch.linspace(0.0, 1.0, count, dtype=times.dtype)
        if is_backward:
            values, mask = values.flip(1), mask.flip(1)
            times, readings = -times.flip(1), -readings.flip(1)
        measured = ~values.isnan() & mask.unsqueeze(-1)
        path = fill(values, times, measured, is_straight=True)
        _, _, level, change = read_times(path, times, readings)
        drive = (level + change).permute(2, 0, 1).to(values.dtype)
        return cls(
            values, times, mask, readings, drive.flip(-1) if is_backward else drive, is_backward
        )

    def respond(self, omega: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
        """Return position and velocity / omega at the readings, [K, F, n, M] each."""
        found = oscillator_response(
            self.values, self.times, omega, zeta, mask=self.mask, query_times=self.readings
        )
        x, v = (z.permute(3, 2, 0, 1) for z in found)
        v = v / omega.to(v.dtype)[:, None, None, None]
        return (x.flip(-1), v.flip(-1)) if self.is_backward else (x, v)


def _draw_mixes(
    generator: np.random.Generator, shape: tuple[int, ...], variables: int
) -> Float[np.ndarray, "*S F"]:
    """Return mixes of few variables, of length 1 each."""
    mixes = generator.standard_normal((*shape, variables))
    most = min(variables, MOST_VARIABLES)
    counts = np.floor(2.0 ** generator.uniform(0.0, np.log2(most + 1.0), (*shape, 1)))
    order = generator.random(mixes.shape)
    if variables > POOL:  # neighbours share their variables: what they mix is then small
        blocks = generator.random((*shape[:-1], -(-shape[-1] // _NEIGHBOURS), variables))
        outside = blocks.argsort(axis=-1).argsort(axis=-1) >= POOL
        order += outside.repeat(_NEIGHBOURS, axis=-2)[..., : shape[-1], :]
    rank = order.argsort(axis=-1).argsort(axis=-1)
    mixes = np.where(rank < counts, mixes, 0.0)
    mixes /= np.linalg.norm(mixes, axis=-1, keepdims=True)
    return mixes.astype(np.float32)


def _pool(responses: Float[Tensor, "k n M"], level: Float[Tensor, "k"]) -> Float[Tensor, "k S n"]:
    """Return the statistics of filtered series; those of rates are of the same kind."""
    above = responses - level[:, None, None]
    is_above = (above > 0).to(responses.dtype)
    count = is_above.sum(-1)
    safe = count.clamp(min=1.0)
    place = torch.linspace(0.0, 1.0, responses.shape[-1])
    groups = responses.unflatten(0, (-1, GROUP))
    wins = (groups == groups.amax(1, keepdim=True)).flatten(0, 1)
    defeats = (groups == groups.amin(1, keepdim=True)).flatten(0, 1)
    parts = (
        count / responses.shape[-1],
        above.clamp_(min=0.0).sum(-1) / safe,
        (is_above @ place) / safe,
        (responses * wins).mean(-1).clamp(min=0.0).sqrt(),
        defeats.to(responses.dtype).mean(-1).sqrt(),
    )
    return torch.stack(parts, dim=1)
