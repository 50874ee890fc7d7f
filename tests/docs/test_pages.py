"""The pages of the site are true: their Python runs, and their links and commands exist."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from osciformer.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# A block in ```py needs a network, and is compiled only; of ```bash, lines of osciformer are run.
BLOCK = re.compile(r"^```(python|py|bash)\n(.*?)^```", re.M | re.S)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks_of(path: Path) -> list[tuple[int, str, str]]:
    """Return line, language and code of each block."""
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in BLOCK.finditer(text)]


PAGES = sorted(path for path in DOCS.rglob("*.md") if blocks_of(path))


def run_block(code: str, name: str, line: int, names: dict[str, Any]) -> None:
    """Run a block: a session with prompts must print what it says, a script must not fail."""
    if not code.lstrip().startswith(">>>"):
        exec(compile("\n" * (line - 1) + code, name, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(code, names, name, name, line - 1)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def run_commands(code: str) -> None:
    """Run the lines of a shell block that call this package; none may fail."""
    for command in code.splitlines():
        if command.startswith("osciformer "):
            arguments = shlex.split(command, comments=True)[1:]
            assert main(arguments) == 0, command


def test_pages_have_blocks() -> None:
    assert len(PAGES) >= 9


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_blocks_of_a_page_run_in_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for line, language, code in blocks_of(path):
        if language == "py":
            compile(code, path.name, "exec")
        elif language == "bash":
            run_commands(code)
        else:
            run_block(code, path.name, line, names)


def test_code_of_pages_passes_the_linter(tmp_path: Path) -> None:
    for number, path in enumerate(PAGES):
        code = [
            "".join(e.source for e in doctest.DocTestParser().get_examples(block))
            if block.startswith(">>>")
            else block
            for _, language, block in blocks_of(path)
            if language != "bash"
        ]
        (tmp_path / f"page{number}_{path.stem}.py").write_text("\n".join(code), encoding="utf-8")
    # Pages show expressions and import where they need to; docstrings are for the package.
    ignored = "--ignore=B015,B018,D,E402,I001"
    command = [sys.executable, "-m", "ruff", "check", f"--config={ROOT / 'pyproject.toml'}"]
    done = subprocess.run(
        [*command, ignored, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
