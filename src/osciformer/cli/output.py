"""Files that appear as a whole or not at all, and what is printed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from osciformer._optional import need
from osciformer.cli.errors import MISUSED, CommandError

TABLE_ENDINGS = (".parquet", ".csv")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, and put that file in place of `path` if all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)  # mkstemp lets the owner alone read
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, as a whole or not at all."""
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def to_json(content: Any) -> str:
    """Return JSON; a number that is not finite becomes null.

    Example:
        >>> to_json({"a": float("nan")})
        '{"a": null}'
    """
    return json.dumps(_finite(content), allow_nan=False, indent=None)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, as a whole or not at all."""
    write_text(path, json.dumps(_finite(content), allow_nan=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_table_name(path: Path) -> None:
    """Refuse a name of a table that has another ending than those that can be written."""
    if path.suffix.lower() not in TABLE_ENDINGS:
        raise CommandError(
            f"{path} must end in {' or '.join(TABLE_ENDINGS)}, which says the format", MISUSED
        )


class TableWriter:
    """Writes a table part by part, as Parquet or CSV.

    Args:
        path: The file, whose ending says the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append rows; all parts must have the same columns.

        Args:
            columns: Arrays by name.
        """
        pa = need("pyarrow", extra="data")
        table = pa.table({name: pa.array(array) for name, array in columns.items()})
        if self._writer is None:
            if self.path.suffix.lower() == ".csv":
                make = need("pyarrow.csv", extra="data").CSVWriter
            else:
                make = need("pyarrow.parquet", extra="data").ParquetWriter
            self._writer = make(self.path, table.schema)
        self._writer.write_table(table.cast(self._writer.schema) if self._is_parquet else table)

    @property
    def _is_parquet(self) -> bool:
        return hasattr(self._writer, "schema")


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to standard output; all but the first column are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A file or a pipe has no width at which something would have to be cut off.
        unbound = console.options.update(max_width=1000)
        width = max(console.measure(table, options=unbound).maximum, len(title))
        console = Console(highlight=False, markup=False, width=width)
    console.print(title)
    console.print(table)


def print_scores(title: str, scores: Mapping[str, Any]) -> None:
    """Print scores with their intervals."""
    rows = [(name, f"{s.value:.4f}", f"{s.low:.4f} to {s.high:.4f}") for name, s in scores.items()]
    print_table(title, ("metric", "value", "95 % interval"), rows)
