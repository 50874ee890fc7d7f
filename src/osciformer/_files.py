"""Files that appear complete or not at all; the whole package writes through here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PART_MARK = ".osciformer-part"  # in the names of temporary files, which a kill may leave


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to, and move it there if the block succeeds.

    If the block fails, `path` stays as it was and the temporary file is deleted. Missing folders
    are created. The temporary file is a fresh one, never one that a link of its name leads to, and
    its name keeps the ending of `path`, because some writers look at it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     target = Path(folder, "a", "numbers.txt")
        ...     with replacing(target) as part:
        ...         _ = part.write_text("1 2 3")
        ...     target.read_text(), [path.name for path in target.parent.iterdir()]
        ('1 2 3', ['numbers.txt'])
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named before it is made, so that Ctrl-C in between leaves nothing; 64 random bits are unique.
    part = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{PART_MARK}{path.suffix}")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # never by a link
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)  # until now only the owner can read it
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a binary file atomically."""
    with replacing(path) as part:
        part.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically, with line ends as they are in `text`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, content: Any, *, indent: int | None = 2) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    text = json.dumps(finite_json(content), allow_nan=False, indent=indent)
    write_text(path, text + "\n")


def finite_json(value: Any) -> Any:
    """Return plain values for JSON: NumPy scalars as numbers, NaN and infinity as None.

    Example:
        >>> finite_json({1: (2.0, float("nan"))})
        {'1': [2.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(name): finite_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
