"""What the page draws, as plain values: charts of lines and points, bars, and heat maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from osciformer._text import printable

Plain = dict[str, Any]
_DIGITS = 4
_LONGEST = 60  # letters of a name


def text(name: Any) -> str:
    """Return a name of the data as it is shown."""
    found = printable(str(name)).replace("\n", " ")
    return found if len(found) <= _LONGEST else found[: _LONGEST - 1] + "…"


def numbers(values: Any, digits: int = _DIGITS) -> Any:
    """Return numbers with few digits, in lists of the same shape; None for what is not finite.

    Example:
        >>> numbers([[1.23456, float("nan")], [20000.0, 1e-9]])
        [[1.235, None], [20000, 1e-09]]
    """
    if np.ndim(values):
        return [numbers(item, digits) for item in values]
    value = float(values)
    if not np.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def short(value: float) -> str:
    """Return a number of three digits or more, without an exponent if it is of usual size.

    Example:
        >>> short(0.12345), short(18912.3), short(2.5e9)
        ('0.123', '18,912', '2.5e+09')
    """
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.3g}"


def length(value: float, unit: Any) -> str:
    """Return a length of time.

    Example:
        >>> length(1234.5, "min"), length(2.0, None)
        ('1,234 min', '2')
    """
    return f"{short(value)} {text(unit)}" if unit else short(value)


def axis(label: str, **options: Any) -> Plain:
    """Return an axis: `log`, `date`, `min` and `max` where they matter."""
    return {"label": label, **options}


def line(name: Any, x: Any, y: Any, **style: Any) -> Plain:
    """Return a line, or points if `dots` is "only"; `colour` counts from 0."""
    return {"name": text(name), "x": numbers(x, 8), "y": numbers(y), **style}


def chart(
    title: str, x: Plain, y: Plain, lines: Iterable[Plain], about: str = "", **options: Any
) -> Plain:
    """Return a chart of lines; `bars` draws them as bars, `rules` are vertical lines."""
    found = {"kind": "lines", "title": title, "x": x, "y": y, "lines": list(lines)}
    return {**found, "about": about, **options}


def heat(
    title: str,
    x: Plain,
    y: Plain,
    z: Any,
    label: str,
    about: str = "",
    **options: Any,
) -> Plain:
    """Return a heat map of z [X, Y]; x and y have the names of their cells in `cells`."""
    found = {"kind": "heat", "title": title, "x": x, "y": y, "about": about}
    return {**found, "z": numbers(z, 3), "label": label, **options}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> Plain:
    """Return a table of text."""
    cells = [[item if isinstance(item, str) else short(item) for item in row] for row in rows]
    return {"title": title, "head": list(head), "rows": cells}


def section(
    id: str,
    title: str,
    about: str,
    views: Mapping[tuple[int, ...], Plain],
    choices: Sequence[tuple[str, Sequence[str]]] = (),
) -> Plain:
    """Return a section: a view (`charts` and `tables`) for each combination of choices."""
    listed = [{"label": name, "options": [text(item) for item in some]} for name, some in choices]
    named = {",".join(map(str, key)): view for key, view in views.items()}
    return {"id": id, "title": title, "about": about, "choices": listed, "views": named}
