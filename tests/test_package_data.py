"""What belongs to an installed package besides its modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = (
    "cli/report/page.css",
    "cli/report/page.html",
    "cli/report/page.js",
    "cli/report/vendor/LICENSES.txt",
    "cli/report/vendor/chart.umd.min.js",
    "cli/report/vendor/chartjs-chart-matrix.min.js",
    "py.typed",
    "data/datasets/catalog.toml",
    "demo_data/ATTRIBUTION.txt",
    "demo_data/stays-test.parquet",
    "demo_data/stays-train.parquet",
)


@pytest.mark.parametrize("name", DATA)
def test_package_has_its_data(name: str) -> None:
    assert files("osciformer").joinpath(name).is_file()


def test_program_is_where_the_project_file_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["osciformer"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_wheel_holds_modules_data_licence_and_program(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needed to build")
    program = f"from hatchling.build import build_wheel; build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"osciformer/{name}" for name in DATA} <= names
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert modules <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]
