"""Conformal prediction: answers wide enough to be right as often as is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from osciformer._types import Float, Int

#: Points that are kept of a distribution of scores; of more, coverage is up to 1 / 2000 too high.
NUM_KEPT = 2000
# Sums of shares are rounded; a share of one series is far above it.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ScoreLevels:
    """How large scores of unseen series are: with chance `levels[k]` at most `scores[k]`.

    If the calibration series and a new one are exchangeable, that is, any order of them is as
    likely, the score of the new one is among the `ceil((n + 1) c)` smallest with chance c or more.
    Several scores of a series share its part 1 / (n + 1), and then the law holds for one of the
    new series' scores, drawn at random (Lee, Barber and Willett 2023).
    """

    scores: Float[np.ndarray, "m"]  # rising
    levels: Float[np.ndarray, "m"]  # rising, the last is n / (n + 1)
    count: int  # number of series n

    @classmethod
    def of(cls, scores: Float[np.ndarray, "q"], owner: Int[np.ndarray, "q"] | None = None) -> Self:
        """Return the levels of scores: one per series, or each that of the series `owner`.

        Example:
            >>> ScoreLevels.of(np.array([3.0, 1.0, 2.0])).at(0.75)
            3.0
        """
        owner = np.arange(len(scores)) if owner is None else owner
        _, series, sizes = np.unique(owner, return_inverse=True, return_counts=True)
        order = np.argsort(scores, kind="stable")
        shares = 1.0 / sizes[series[order]]
        levels = np.cumsum(shares) / (len(sizes) + 1)
        kept = np.arange(len(levels))
        if len(levels) > NUM_KEPT:
            # The first score at or above each step of the level, so that rounding is upwards.
            steps = np.linspace(0.0, levels[-1], NUM_KEPT + 1)[1:]
            kept = np.unique(np.searchsorted(levels, steps - _ROUNDING))
        return cls(scores[order][kept].astype(np.float64), levels[kept], len(sizes))

    def at(self, coverage: float, what: str = "series") -> float:
        """Return the smallest score that a new one does not exceed with this chance."""
        check_coverage(coverage)
        place = int(np.searchsorted(self.levels, coverage - _ROUNDING))
        if place == len(self.levels):
            needed = int(np.ceil(coverage / (1.0 - coverage) - _ROUNDING))
            raise ValueError(
                f"coverage={coverage:g} needs at least {needed} calibration {what}; calibrate had "
                f"{self.count}. Give it more, or ask for less"
            )
        return float(self.scores[place])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        scores, levels = self.scores.tolist(), self.levels.tolist()
        return {"scores": scores, "levels": levels, "count": self.count}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return what `to_dict` described."""
        scores, levels = (np.array(state[name], dtype=np.float64) for name in ("scores", "levels"))
        rising = all(
            bool((np.diff(x) >= 0).all() and np.isfinite(x).all()) for x in (scores, levels)
        )
        if scores.ndim != 1 or scores.shape != levels.shape or not rising:
            raise ValueError("scores and levels of its calibration must be finite, rise and match")
        return cls(scores, levels, int(state["count"]))


def check_coverage(coverage: float) -> None:
    """Refuse what is no chance."""
    if not 0.0 < coverage < 1.0:
        raise ValueError(f"coverage must be between 0 and 1, such as 0.9; got {coverage!r}")


class Conformal:
    """What estimators keep of calibration series: levels of scores, one per output.

    Attributes:
        conformal_: A `ScoreLevels` per target (of a classifier one for all classes, then one per
            class), or None before `calibrate`. A new `fit` drops them.
    """

    conformal_: tuple[ScoreLevels, ...] | None = None

    def _score_levels(self) -> tuple[ScoreLevels, ...]:
        if self.conformal_ is None:
            raise ValueError(
                f"this {type(self).__name__} is not calibrated; call calibrate with series that it "
                "was not fitted to"
            )
        return self.conformal_

    def _conformal_state(self) -> dict[str, Any]:
        """Return what a file holds of it."""
        found = self.conformal_
        return {} if found is None else {"conformal": [item.to_dict() for item in found]}

    def _restore_conformal(self, state: Mapping[str, Any]) -> None:
        saved = state.get("conformal")
        self.conformal_ = saved and tuple(map(ScoreLevels.from_dict, saved))
