"""Every python block of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def test_readme_has_python_blocks() -> None:
    assert BLOCKS


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: f"block{n + 1}")
def test_readme_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README block {number + 1}", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")))
def test_readme_link_points_to_a_file(path: str) -> None:
    assert (README.parent / path).exists()
