"""The folder of a run: configuration, seed, versions, metrics, history, checkpoint and model."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from osciformer.cli.config import read_yaml, write_yaml
from osciformer.cli.errors import CommandError
from osciformer.cli.output import write_json, write_text

CONFIG, RUN, METRICS, MODEL = "config.yaml", "run.json", "metrics.json", "model.safetensors"
CHECKPOINT, HISTORY = "last.ckpt", "history.csv"
_PACKAGES = ("torch", "numpy", "pytorch-lightning", "scikit-learn", "pyarrow")


def is_first_process() -> bool:
    """Return whether this process writes and prints, of those that train together."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))


def find_versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that matter."""
    from osciformer import __version__

    found = {"osciformer": __version__, "python": platform.python_version()}
    found["system"] = platform.platform()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def find_model(run: Path) -> Path:
    """Return the model file that a run folder, or a path, names."""
    if not run.exists():
        raise CommandError(f"there is no run folder or model file {run}; check the path")
    if run.is_file():
        return run
    model = run / MODEL
    if not model.is_file():
        hint = (
            f"its training was not finished; go on with: osciformer fit --resume -o {run}"
            if (run / CONFIG).is_file()
            else "it is no folder that `osciformer fit` wrote"
        )
        raise CommandError(f"{run} holds no {MODEL}: {hint}")
    return model


class RunFolder:
    """A run folder that is there as a whole, can be resumed, or is not there.

    Args:
        path: The folder.
        is_overwriting: Whether another run in it may be replaced.
        is_resuming: Whether a run in it is continued.
    """

    def __init__(self, path: Path, *, is_overwriting: bool, is_resuming: bool) -> None:
        self.path, self.is_resuming = path, is_resuming
        self._is_first = is_first_process()
        self._aside: Path | None = None
        self._is_made = False
        self._before: dict[str, str] = {}
        if not self._is_first or is_resuming:
            return
        if path.exists() and not path.is_dir():
            raise CommandError(f"{path} is a file; choose a folder with -o")
        if not path.is_dir() or not any(path.iterdir()):
            return
        if not is_overwriting:
            raise CommandError(
                f"{path} exists and is not empty; choose another folder, pass --overwrite to "
                "replace the run in it, or --resume to go on with it"
            )
        if not (path / CONFIG).is_file():
            raise CommandError(
                f"{path} was not written by osciformer, so --overwrite leaves it alone; choose "
                "another folder"
            )

    def open(self, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write configuration, seed and versions; a run that is replaced is put aside.

        Args:
            settings: The settings that were given.
            facts: What is known of the data.
        """
        if not self._is_first:
            return
        if self.is_resuming:
            _check_same_data(self.path, facts)
            files = (self.path / name for name in (CONFIG, RUN))
            self._before = {f.name: f.read_text(encoding="utf-8") for f in files if f.is_file()}
        if not self.is_resuming and self.path.is_dir() and any(self.path.iterdir()):
            self._aside = Path(tempfile.mkdtemp(dir=self.path.parent, prefix=f".{self.path.name}."))
            self.path.rename(self._aside / self.path.name)
        self._is_made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / CONFIG, write_yaml(settings))
        content = {"seed": settings.get("seed", 0), "versions": find_versions(), "data": facts}
        write_json(self.path / RUN, content)

    def close(self) -> None:
        """Let go of the run that was replaced."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    def abandon(self) -> None:
        """Leave what can be resumed, and otherwise what was there before."""
        if not self._is_first or not self.path.is_dir():
            return
        for part in (*self.path.glob("*.part"), *self.path.glob(".*")):
            if part.is_file():
                part.unlink()
        # A run that is not continued after all, with other settings, keeps its own.
        for name, text in self._before.items():
            write_text(self.path / name, text)
        if (self.path / CHECKPOINT).is_file():
            self.close()
        elif not self.is_resuming:
            self._remove_content()
            if self._aside is not None:
                self.path.rmdir()
                (self._aside / self.path.name).rename(self.path)
                self.close()
            elif self._is_made:
                self.path.rmdir()

    def _remove_content(self) -> None:
        for item in self.path.iterdir():
            if item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink()


def _check_same_data(path: Path, facts: Mapping[str, Any]) -> None:
    """Refuse to go on with a run on other data than it began with."""
    if not (path / CHECKPOINT).is_file() or not (path / RUN).is_file():
        return
    before = json.loads((path / RUN).read_text(encoding="utf-8")).get("data", {})
    for name in ("series", "features", "events", "types"):
        had, has = before.get(name), facts.get(name)
        if had != (list(has) if isinstance(has, tuple) else has):
            raise CommandError(
                f"the run in {path} was begun with other {name}: {had}, not {has}; give it the "
                "same table, or start another run"
            )


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings of a run that is to be continued; none if there is no such run."""
    config = path / CONFIG
    return read_yaml(config) if config.is_file() else {}
