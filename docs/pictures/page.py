"""Take pictures of a page that `osciformer inspect` or `osciformer demo` wrote, and time it.

Run `osciformer demo`, then `python docs/pictures/page.py outputs/demo/report.html`. It needs a
chromium on the path, writes `page.png` and, in a narrow window, `page_phone.png` beside this file,
and prints the size of the page and how long it takes to open; a second argument names a JSON file
for these.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from osciformer._files import write_json

HERE = Path(__file__).parent
ROUNDS = 5
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
WINDOWS = {"page": (1200, 1180), "page_phone": (500, 1180)}


def call(page: Path, *flags: str) -> str:
    """Return what a fresh chromium prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["chromium", *FLAGS, *flags, f"--user-data-dir={folder}", page.resolve().as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(page: Path, result: Path | None = None) -> None:
    """Take both pictures, and time the page."""
    for name, (width, height) in WINDOWS.items():
        call(page, f"--window-size={width},{height}", f"--screenshot={HERE / name}.png")
        print(f"taken: {name}.png")
    found = [re.search(r'data-drawn="(\d+)"', call(page, "--dump-dom")) for _ in range(ROUNDS)]
    times = [int(item[1]) for item in found if item]
    print(f"{page.stat().st_size / 1e6:.2f} MB; all charts are drawn after {times} ms, median")
    print(f"{statistics.median(times):.0f} ms, of {len(times)} starts of chromium")
    if result is not None:
        version = subprocess.run(["chromium", "--version"], capture_output=True, text=True)
        meta = {"command": "python docs/pictures/page.py outputs/demo/report.html RESULT"}
        meta |= {"date": str(datetime.date.today()), "browser": version.stdout.strip()}
        meta |= {"system": platform.platform(), "cores": os.cpu_count()}
        meta |= {"load": [round(x, 1) for x in os.getloadavg()]}
        found = {"bytes": page.stat().st_size, "ms_until_drawn": times}
        write_json(result, {"meta": meta, **found})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
