"""The data package needs numpy and torch until a table is read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from osciformer.data import IrregularSeries, from_frame

PROGRAM = """
import sys
import numpy, torch
before = set(sys.modules)
import osciformer.data
print([name for name in ("pandas", "polars", "pyarrow") if name in set(sys.modules) - before])
"""


def test_import_does_not_bring_table_libraries() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_tables_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install \"osciformer\[data\]\""):
        from_frame({"id": [1], "time": [0.0], "x": [1.0]}, id="id", time="time")
    with pytest.raises(ImportError, match=r"osciformer\[data\]"):
        IrregularSeries.from_arrays([[0.0]], [[1.0]]).to_frame()
