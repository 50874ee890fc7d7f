"""How the site is built: `make docs`, or `python -m sphinx -W -n docs build/docs`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

from myst_parser.parsers.sphinx_ import MystParser

import osciformer

ROOT = Path(__file__).resolve().parents[1]

project = "OsciFormer"
author = "The OsciFormer developers"
project_copyright = author
release = version = osciformer.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
html_theme = "furo"
html_title = "OsciFormer"

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

# Docstrings write code in single backticks.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
strip_signature_backslash = True  # keeps the last underscore of classes_
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
nitpicky = True
# Types of other packages, and shape strings such as "B N H C", have no page here.
nitpick_ignore_regex = [(r"py:.*", r"(?!osciformer\.).*")]
# Internal types in the signatures of public methods.
nitpick_ignore_regex += [(r"py:class", r"osciformer\.(\w+\.)*_\w+(\.\w+)?")]
nitpick_ignore = [
    ("py:class", "osciformer.baselines.contiformer.Motion"),
    ("py:class", "osciformer.baselines.recurrence.EncodedDirections"),
    ("py:class", "osciformer.data.transforms.Array"),
    ("py:class", "osciformer.events.scores.QuantileBand"),
]

# READMEs that are shown as pages, so that links between them lead to pages too.
PAGES = {
    "benchmarks/results/README.md": "benchmarks.md",
    "docs/results.md": "results.md",
    "src/osciformer/math/README.md": "mathematics.md",
    "src/osciformer/ops/attention/README.md": "backends.md",
    "src/osciformer/ops/attention/triton/README.md": "backends.md#the-triton-backend",
}


def point_links_at_pages(app: Any, path: Path, parent: str, content: list[str]) -> None:
    """Turn the relative links of an included file into links between pages, or into plain text."""

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        found = (Path(app.srcdir, path).parent / target).resolve()
        name = found.relative_to(ROOT).as_posix() if found.is_relative_to(ROOT) else target
        return f"[{text}]({PAGES[name]})" if name in PAGES else f"{text} (`{name}`)"

    content[0] = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)\)", replace, content[0])


class NotebookParser(MystParser):
    """Reads notebooks as Markdown with their outputs; `docs/run_notebooks.py` has run them."""

    supported: ClassVar[tuple[str, ...]] = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        """Parse a notebook."""
        name = Path(document["source"]).name
        parts = [_show(cell) for cell in json.loads(inputstring)["cells"]]
        parts.append(f"This page is a notebook to run and to change: {{download}}`{name}`.")
        super().parse("\n\n".join(parts), document)


def _show(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook, and below it what it printed and drew."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [f"```python\n{source.removesuffix(';')}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            image = data["image/png"]
            parts.append(f"![{cell['metadata']['alt']}](data:image/png;base64,{image})")
        elif "text/html" in data:
            table = data["text/html"].replace('border="1" class="dataframe"', 'class="docutils"')
            parts.append(f"```{{raw}} html\n{table}\n```")
        else:
            text = output.get("text") or data["text/plain"]
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def write_formulas_as_rst(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn the dollars of docstrings into reStructuredText."""
    text = "\n".join(lines)
    text = re.sub(r"^( *)\$\$(.+?)\$\$(.*)$", _display, text, flags=re.M | re.S)
    text = re.sub(r"(?<!\$)\$([^$\n]+(?:\n[^$\n]+)?)\$(?!\$)", _inline, text)
    lines[:] = text.split("\n")


def leave_out(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the methods that scikit-learn adds for metadata routing."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def _display(match: re.Match[str]) -> str:
    indent, formula, rest = match.groups()
    body = "\n".join(f"{indent}   {line.strip()}" for line in formula.split("\n"))
    return f"\n{indent}.. math::\n\n{body}\n\n{indent}{rest.strip(' .,')}\n"


def _inline(match: re.Match[str]) -> str:
    return ":math:`" + " ".join(match[1].split()) + "`"


def setup(app: Any) -> None:
    """Connect these to the build."""
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("include-read", point_links_at_pages)
    app.connect("autodoc-process-docstring", write_formulas_as_rst, priority=400)
