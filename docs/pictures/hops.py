"""Trace the way of the rows of a CSV file to the model, and draw it.

    python docs/pictures/hops.py           # list the hops
    python docs/pictures/hops.py --draw    # and draw docs/pictures/hops.png

A hop is a function of the package that passes the rows on: it returns them (as a table, as series,
as an array of all times or values, as a batch), or it waits for the model that gets them. The way
begins with `osciformer fit table.csv` and ends where `SeriesModel.forward` gets the first batch.
Each function counts once. Functions that only look at the rows (checks, statistics) do not count.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

NUM_SERIES, NUM_ROWS = 12, 6
# Arrays at least this long hold the rows of most series.
FEWEST_ROWS = 50
# Types of the package that hold rows.
HOLDERS = ("IrregularSeries", "Batch", "SeriesSource", "Rows", "SortedRows")
END = ("SeriesModel.forward", "SeriesModel.learn")


def write_table(path: Path) -> None:
    """Write a small table of two classes."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "time", "a", "b", "y"])
        for number in range(NUM_SERIES):
            for time in np.sort(rng.uniform(0, 10, NUM_ROWS)):
                a, b = rng.normal(size=2)
                writer.writerow([f"s{number}", f"{time:.4f}", f"{a:.4f}", f"{b:.4f}", number % 2])


def trace() -> list[str]:
    """Return the hops in the order of the first call, as `module.function`."""
    import pandas as pd
    import pyarrow as pa
    import torch

    import osciformer.estimators
    from osciformer.cli import main

    root = os.path.dirname(osciformer.__file__) + os.sep
    tables = (pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Array, pd.DataFrame, pd.Series)
    hops: dict[str, None] = {}
    is_over = False

    def holds_rows(item: Any, depth: int = 0) -> bool:
        if isinstance(item, tables) or type(item).__name__ in HOLDERS:
            return True
        if isinstance(item, np.ndarray | torch.Tensor):
            return "float" in str(item.dtype) and len(item) >= FEWEST_ROWS if item.shape else False
        if depth < 2 and isinstance(item, list | tuple):
            return any(holds_rows(part, depth + 1) for part in item[:50])
        if depth < 2 and isinstance(item, dict):
            return any(holds_rows(part, depth + 1) for part in item.values())
        return False

    def name_of(code: CodeType) -> str:
        """Return the name of a function of the package; nothing for others."""
        if not code.co_filename.startswith(root) or code.co_name.startswith("<"):
            return ""
        place = code.co_filename.removeprefix(root).removesuffix(".py").replace(os.sep, ".")
        return f"{place}.{code.co_qualname}"

    def look(frame: FrameType | None, event: str, result: Any) -> None:
        nonlocal is_over
        assert frame is not None
        name = name_of(frame.f_code)
        if is_over or not name:
            return
        if event == "call" and name.endswith(END):
            is_over = True
            waiting = []
            while frame is not None:
                waiting.append(name_of(frame.f_code))
                frame = frame.f_back
            hops.update(dict.fromkeys(filter(None, reversed(waiting))))
        elif event == "return" and holds_rows(result):
            hops[name] = None

    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder, "table.csv"))
        command = "fit {0}/table.csv --task classification --id id --time time --target y --dim 8"
        command += " --max-epochs 1 --no-resonators --accelerator cpu -o {0}/run"
        sys.setprofile(look)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                status = main(command.format(folder).split())
        finally:
            sys.setprofile(None)
    assert status == 0
    assert is_over, "the model was not reached"
    return list(hops)


def draw(hops: list[str], path: Path) -> None:
    """Draw the hops as a path through the packages, one column for each package."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    packages = list(dict.fromkeys(hop.split(".")[0] for hop in hops))
    colours = plt.get_cmap("tab10").colors
    x = [packages.index(hop.split(".")[0]) for hop in hops]
    y = np.arange(len(hops))
    figure, axis = plt.subplots(figsize=(11, 0.235 * len(hops) + 1), layout="constrained")
    axis.plot(x, y, color="#d1d5db", lw=1, zorder=0)
    axis.scatter(x, y, c=[colours[i] for i in x], s=28)
    for place, row, hop in zip(x, y, hops, strict=True):
        axis.annotate(
            hop.split(".", 1)[1], (place, row), (6, -3), textcoords="offset points", size=8
        )
    axis.set_xticks(range(len(packages)), [f"osciformer.{name}" for name in packages])
    axis.xaxis.tick_top()
    axis.set_yticks(y[::5], [str(row + 1) for row in y[::5]])
    axis.set_xlim(-0.3, len(packages) - 0.2)
    axis.invert_yaxis()
    axis.spines[["right", "bottom", "left", "top"]].set_visible(False)
    axis.set_ylabel("hop")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    found = trace()
    for number, hop in enumerate(found, 1):
        print(f"{number:3d} {hop}")
    if "--draw" in sys.argv:
        draw(found, Path(__file__).with_name("hops.png"))
