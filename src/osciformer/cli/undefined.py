"""Why a score may have no value; files have null in its place, and say this beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import typer

_TWO_CLASSES = "it needs series of a class and series of others among those that are scored"
_SKILL = "there is no value to score, or the baseline makes no error on them"
_REASONS = {"auroc": _TWO_CLASSES, "auprc": _TWO_CLASSES, "skill": _SKILL}
_REASONS["r2"] = "it needs true values that differ from each other, of each target"
_OTHERS = "there is nothing to score"
_INFINITE = "it is too large for a number"


def undefined(scores: Mapping[str, float]) -> dict[str, str]:
    """Return the reason for each score that is not finite, by name.

    Example:
        >>> undefined({"mae": 1.0, "r2": float("nan")})
        {'r2': 'it needs true values that differ from each other, of each target'}
    """
    wrong = {name: value for name, value in scores.items() if not math.isfinite(value)}
    return {
        name: _REASONS.get(name, _OTHERS) if math.isnan(value) else _INFINITE
        for name, value in wrong.items()
    }


def shown(value: float) -> str:
    """Return a score as text."""
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def print_reasons(reasons: Mapping[str, str]) -> None:
    """Print a line for each score that is undefined."""
    for name, reason in reasons.items():
        typer.echo(f"{name} is undefined: {reason}")
