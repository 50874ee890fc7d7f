"""Static columns that the table of labels holds, in place of the table of observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osciformer.cli import tables
from osciformer.cli.errors import MISUSED, CommandError

if TYPE_CHECKING:
    from osciformer.data import IrregularSeries, ParquetSeries


def static_elsewhere(given: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the static columns that come from `--labels`, for want of them in the table.

    Args:
        given: The settings of the run.
        path: The table.
    """
    static, labels = given.get("static"), given.get("labels")
    if not static or not labels:
        return ()
    from osciformer.data.tables import check_columns

    here = () if tables.is_self_describing(path) else tuple(tables.column_names(path))
    there = tables.column_names(Path(labels))
    if given.get("variable") is None:  # else it may be the name of a variable
        check_columns((*here, *there), static)
    return tuple(name for name in static if name not in here and name in there)


def join_static(
    data: IrregularSeries | ParquetSeries,
    names: Sequence[str],
    *,
    labels: str | Path | None,
    labels_id: str | None,
) -> IrregularSeries | ParquetSeries:
    """Return the series with static features from a table with a row per series.

    Args:
        data: The series.
        names: Columns of that table.
        labels: The table.
        labels_id: Its column of ids.
    """
    if not names:
        return data
    if labels is None:
        raise CommandError(
            f"the table lacks {', '.join(names)}, one value per series, which the model was "
            "trained with; pass --labels with a table that has a row per series and these columns",
            MISUSED,
        )
    if labels_id is None:
        raise CommandError("--labels-id is needed: the column of ids in --labels", MISUSED)
    from osciformer.data import join_frame
    from osciformer.data.series import add_static

    frame = tables.read_frame(Path(labels))
    found = join_frame(tables.without_rows(data), frame, id=labels_id, static=names).static
    assert found is not None
    if tables.is_streamed(data):
        return data.with_static(found, names)  # type: ignore[union-attr]
    return add_static(data, found, names)  # type: ignore[arg-type]
