"""`osciformer._files` writes a file completely or leaves the earlier one alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osciformer._files import replacing, write_bytes, write_json, write_text


def test_failure_keeps_the_earlier_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report.csv"
    write_text(target, "old")

    def interrupted() -> None:
        with replacing(target) as part:
            part.write_text("half of the ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_files_get_the_permissions_of_an_ordinary_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "ours", b"1")
    (tmp_path / "ordinary").write_bytes(b"1")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [np.float32(1.5), float("inf")], 2: np.int64(3)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [1.5, None], "2": 3}


def test_ctrl_c_as_the_temporary_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.open

    def make_and_stop(*args: Any, **kwargs: Any) -> int:
        os.close(make(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "open", make_and_stop)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "report.csv", "new")
    assert not list(tmp_path.iterdir())
