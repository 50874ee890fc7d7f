"""The only place where packages that are not dependencies get imported."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType


def need(name: str, *, extra: str) -> ModuleType:
    """Return the optional module `name`, or say which extra of this package brings it.

    An error inside an installed package is passed on: installing it again would not help.

    Example:
        >>> need("json", extra="plot").dumps([1, 2])
        '[1, 2]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(
            f'{name!r} is needed here and is not installed; run: pip install "osciformer[{extra}]"'
        ) from error


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
