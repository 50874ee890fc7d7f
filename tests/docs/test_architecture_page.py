"""The list of hops on the architecture page is what a run takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_HOPS = 45


def test_the_page_lists_the_hops_of_a_run() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/pictures/hops.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    traced = re.findall(r"^ *\d+ (\S+)$", done.stdout, re.M)
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d+\. `osciformer\.(\S+)`", page, re.M)
    assert traced == listed
    assert len(traced) <= MOST_HOPS
