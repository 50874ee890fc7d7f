"""The only place where packages that are not dependencies get imported."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(name: str, *, extra: str) -> ModuleType:
    """Return the optional module `name`, or say how to install it.

    Args:
        name: Dotted name of the module, such as `"matplotlib.pyplot"`.
        extra: The extra of this package that brings it, such as `"plot"`.

    Returns:
        The imported module.

    Raises:
        ImportError: If the package is not installed. An error inside an installed package is passed
            on as it is, since installing again would not mend it.

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
