"""Run the notebooks of the site, and keep what they print and draw.

    python docs/run_notebooks.py              # all, some minutes on one core
    python docs/run_notebooks.py events.ipynb

The site and GitHub show the outputs as they are in the files. A fingerprint of the code is kept
with them: a test compares it, so that outputs are never those of other code.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import sys
import tempfile
import time
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

NOTEBOOKS = Path(__file__).parent / "notebooks"


def fingerprint(notebook: dict[str, Any]) -> str:
    """Return a digest of the code cells."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def execute(notebook: dict[str, Any], toy: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the code cells, put outputs into them, and return the names they define.

    Args:
        notebook: A notebook as JSON has it.
        toy: Settings that take the place of those of the first code cell.
    """
    names: dict[str, Any] = {"__name__": "notebook"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        cell["outputs"] = run_cell("".join(cell["source"]), f"cell {number}", names)
        cell["execution_count"] = number
        if number == 1 and toy:
            unknown = [name for name in toy if name not in names]
            if unknown:
                raise ValueError(f"the first code cell has no settings {unknown}")
            names.update(toy)
    notebook["metadata"]["code_sha256"] = fingerprint(notebook)
    return names


def run_cell(code: str, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run code as Jupyter does; return its text, its last value and open figures."""
    body = ast.parse(code, name)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(body, name, "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if isinstance(shown, Figure):
        outputs.append(picture(shown))
    elif shown is not None and not code.rstrip().endswith(";"):
        data = {"text/plain": repr(shown)}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = shown._repr_html_()
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    outputs += [picture(plt.figure(number)) for number in plt.get_fignums()]
    plt.close("all")
    return outputs


def picture(figure: Figure) -> dict[str, Any]:
    """Return an output that shows a figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=90)
    data = {"image/png": base64.b64encode(file.getvalue()).decode()}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def main(names: list[str]) -> None:
    """Run notebooks, and write them with their outputs."""
    for path in [NOTEBOOKS / name for name in names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        started, notebook = time.perf_counter(), json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            execute(notebook)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
        seconds, size = time.perf_counter() - started, len(text) / 1000
        print(f"{path.name}: {seconds:.0f} s, {size:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
