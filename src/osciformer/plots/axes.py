"""What pictures share: colours, panels, and names of the data as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from osciformer._optional import need
from osciformer._text import printable

# Of Okabe and Ito: told apart by the colour-blind. Line styles tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
STYLES = ("-", "--", "-.", ":") * 2
SEEN = "#374151"  # what was observed
_LONGEST_NAME = 36  # letters


def panels(
    rows: int, columns: int, heights: Sequence[float] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Return a figure and its axes [rows, columns], which share time and units."""
    heights = [1.9] * rows if heights is None else heights
    size = (6.8 if columns == 1 else 4.6 * columns, 0.9 + sum(heights))
    figure = need("matplotlib.figure", extra="plot").Figure(figsize=size, layout="constrained")
    options = {"sharex": "col", "sharey": "row", **options}
    grid = {"height_ratios": heights}
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plain(name: Any) -> str:
    """Return a name of the data as text that matplotlib draws as it is, and that has room."""
    text = printable(str(name)).replace("\n", " ")
    text = text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
    # A dollar begins a formula, and a legend leaves out what begins with an underscore.
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def with_unit(what: str, unit: str | None) -> str:
    """Return the label of an axis.

    Example:
        >>> with_unit("period", "h"), with_unit("period", None)
        ('period, h', 'period')
    """
    return f"{what}, {plain(unit)}" if unit else what


def legend_below(figure: Any, axis: Any) -> None:
    """Explain the lines of an axis below the figure, if there are several."""
    lines, names = axis.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(
            lines, names, loc="outside lower center", ncols=min(len(names), 4), frameon=False
        )
