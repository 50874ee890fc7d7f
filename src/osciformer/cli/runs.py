"""Run folders: who may write to one, what in it is ours, and how a new run takes its place.

A first run is written in its place. One that is to replace another is built in a folder of its own,
`NEXT`, within it. Results are put together beside the old ones and become `READY` by renaming one
folder; what follows, moving each file to its place, is completed by the next `fit` if it is killed,
and `located` finds each file meanwhile. Only files that a manifest names are ever removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from osciformer._files import PART_MARK, write_bytes, write_json
from osciformer._optional import need
from osciformer._processes import is_first_process
from osciformer._text import name_some
from osciformer.cli.errors import CommandError, Misuse
from osciformer.cli.settings import CONFIG

RUN, METRICS, MODEL, CARD = "run.json", "metrics.json", "model.safetensors", "model-card.md"
CHECKPOINT, HISTORY, LOG = "last.ckpt", "history.csv", "tensorboard"
MANIFEST, LOCK = "manifest.json", ".osciformer.lock"
NEXT, PART, READY = ".osciformer-next", ".osciformer-part", ".osciformer-ready"
# Every name that any version has given to a file of a run; nothing else is ever removed, whatever a
# manifest says. Runs of versions that kept no manifest, and wrote no card, are known by it alone.
_OF_TRAINING = (CONFIG, RUN, METRICS, MODEL, CARD, CHECKPOINT, HISTORY, LOG, "last.part")
_PICTURES = ("training.png", "calibration.png", "intensity.png", "curves.png")
_OF_DEMO = (
    "stays-train.parquet",
    "stays-test.parquet",
    "ATTRIBUTION.txt",
    "test_metrics.json",
    "report.html",
)
WRITTEN = frozenset({*_OF_TRAINING, *_PICTURES, *_OF_DEMO, MANIFEST})
_OF_LOG = re.compile(r"events\.out\.tfevents\..*|hparams\.yaml")
_TEMPORARY = re.compile(rf"\.(?P<stem>.+)\.[0-9a-f]{{16}}{re.escape(PART_MARK)}(?P<ending>\.\w+)")


@dataclass
class RunFolder:
    """A run folder that this process may write to."""

    path: Path  #: As the user gave it; a link stays one.
    work: Path  #: Where training writes.
    before: dict[str, bytes] = field(default_factory=dict)  #: What `begin` wrote over, by name.
    begun: set[str] = field(default_factory=set)  #: Files that came after `begin`.
    has_result: bool = False  #: Whether the files of the result are in their place.

    @property
    def is_replacing(self) -> bool:
        """Whether another run stays in its place until this one is finished."""
        return self.work != self.path

    def begin(self, write: Callable[[Path], None]) -> None:
        """Let `write` make the first files of a run that has no checkpoint yet."""
        self.work.mkdir(exist_ok=True)
        there, names = set(os.listdir(self.work)), {CONFIG, RUN, CHECKPOINT, HISTORY, LOG}
        kept = there & {CONFIG, RUN, MANIFEST}
        self.before = {name: (self.work / name).read_bytes() for name in kept}
        self.begun = (names | {MANIFEST}) - there
        _write_manifest(self.work, names | _ours(self.work))
        write(self.work)

    def finish(self, write: Callable[[Path], None]) -> None:
        """Let `write` make the files of the result, and put all of them in their place at once."""
        stage, staying = self.work, set[str]()
        if not self.is_replacing:
            stage, staying = self.path / PART, _ours(self.path)
            _discard(stage)
            stage.mkdir()
        try:
            write(stage)
            _write_manifest(stage, staying | WRITTEN.intersection(os.listdir(stage)))
            os.rename(stage, self.path / READY)
            self._settle()
        except BaseException:
            if not stage.is_dir():  # there is no way back
                self._settle()
            elif not self.is_replacing:
                _discard(stage)
            raise

    def _settle(self) -> None:
        self.work, self.before, self.begun, self.has_result = self.path, {}, set(), True
        _move_in(self.path)

    def abandon(self) -> None:
        """Remove the beginnings of a run from which nothing can be continued."""
        if (self.work / CHECKPOINT).exists():
            return
        _remove(self.work, self.begun)
        for name, content in self.before.items():
            write_bytes(self.work / name, content)
        if self.is_replacing and not self.before:
            _discard(self.work)

    def read_facts(self) -> Mapping[str, Any]:
        """Return what the run says of its data; nothing if it does not say it."""
        path = self.work / RUN
        if not path.is_file():
            return {}
        facts: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("data", {})
        return facts

    def record(self, *names: str) -> None:
        """Say that further files, about to be written, are ours."""
        _refuse_conflict(self.path, names)
        _write_manifest(self.path, _ours(self.path) | set(names))

    def refuse_inputs(self, paths: Iterable[Path]) -> None:
        """Refuse to replace a run by one that is trained on a file of it."""
        for path in paths if self.is_replacing else ():
            if path.parent.resolve() == self.path.resolve() and path.name in _ours(self.path):
                raise CommandError(
                    f"{path} is a file of the run that --overwrite would replace; copy it to "
                    "another folder first"
                )


def located(run: Path, name: str) -> Path:
    """Return where a file of a run is, also after a kill while a new run took its place."""
    ready = run / READY / name
    return ready if ready.is_file() else run / name


def refuse_replacing(output: Path | None, run: Path, *inputs: Path | None) -> None:
    """Refuse to write to a file that is read, or that belongs to the run."""
    if output is None:
        return
    for path in (run if run.is_file() else None, *inputs):
        if path is None:
            continue
        is_within = path.is_dir() and path.resolve() in output.resolve().parents
        if is_within or (output.exists() and path.exists() and output.samefile(path)):
            what = "lies in" if is_within else "is"
            raise Misuse(f"{output} {what} the input {path}, which stays; choose another name")
    if run.is_dir() and output.parent.resolve() == run.resolve() and output.name in _ours(run):
        raise Misuse(f"{output} is a file of the run, which stays; choose another name")


@contextlib.contextmanager
def hold(path: Path, *, is_resuming: bool, is_overwriting: bool) -> Iterator[RunFolder]:
    """Lock a run folder, which is created if need be, and settle what an earlier death left.

    Raises:
        Misuse: If another process holds it.
        CommandError: If it holds what is not ours, or a run that is neither resumed nor replaced.
    """
    if not is_first_process():
        # Others read what the first one has, and write nothing.
        has_next = is_resuming and (path / NEXT / CONFIG).is_file()
        yield RunFolder(path, path / NEXT if has_next else path)
        return
    if path.exists() and not path.is_dir():
        raise CommandError(f"{path} is a file; choose a folder with -o")
    if path.is_symlink() and not path.exists():
        raise CommandError(f"{path} is a link to a folder that is not there; make it, or use -o")
    if path.is_dir() and not is_resuming:
        _refuse_foreign(path, is_overwriting=is_overwriting)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        with locked(path):
            yield _settle(path, is_resuming=is_resuming, is_overwriting=is_overwriting)
    finally:
        with contextlib.suppress(OSError):  # not empty: the run is there
            for folder in made:
                folder.rmdir()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a folder against other processes; none waits, the second is refused."""
    filelock = need("filelock", extra="data")
    lock = filelock.FileLock(path / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise Misuse(
            f"another osciformer is writing to {path}; wait until it has ended, or choose another "
            "folder with -o"
        ) from error
    try:
        yield
    finally:
        (path / LOCK).unlink(missing_ok=True)  # nobody waits for it
        lock.release()


def _refuse_foreign(path: Path, *, is_overwriting: bool) -> None:
    ours = _ours(path) | _ours(path / READY, are_there=False)
    ours |= {name for name in (LOCK, NEXT, PART, READY) if not (path / name).is_symlink()}
    others = sorted(n for n in os.listdir(path) if n not in ours and not _is_temporary(path / n))
    if not others:
        return
    named = name_some(others)
    if is_overwriting:
        raise CommandError(
            f"{path} holds what osciformer did not write, or links: {named}; --overwrite leaves it "
            "alone. Move that elsewhere, or choose another folder"
        )
    raise CommandError(
        f"{path} exists and is not empty; it holds {named}. Choose another folder with -o"
    )


def _refuse_conflict(path: Path, names: Iterable[str]) -> None:
    ours = _ours(path)
    taken = [n for n in names if n not in ours and ((path / n).exists() or (path / n).is_symlink())]
    if taken:
        raise CommandError(
            f"{path} holds files that osciformer did not write under names that it would use: "
            f"{name_some(taken)}; move them elsewhere, or choose another folder"
        )


def _settle(path: Path, *, is_resuming: bool, is_overwriting: bool) -> RunFolder:
    """Clean up after an earlier death, and say where to write."""
    for name in (NEXT, PART, READY, LOG, f"{NEXT}/{LOG}"):
        if (path / name).is_symlink():
            raise CommandError(f"{path / name} is a link, which is not followed; remove it")
    if (path / READY).is_dir():
        _move_in(path)
        _say(f"{path}: an earlier fit was killed while its files were put in place; done now")
    left = [part for part in path.iterdir() if _is_temporary(part)]
    for part in left:
        part.unlink()
    is_barely_begun = (path / NEXT).is_dir() and not (path / NEXT / CONFIG).exists()
    for part in (path / PART, *([path / NEXT] if is_barely_begun else [])):
        if part.is_dir():
            _discard(part)
            left.append(part)
    if left:
        _say(f"{path}: removed what a killed fit left: {name_some([x.name for x in left])}")
    has_run, next_run = bool(_ours(path)), path / NEXT
    if is_resuming:
        if (next_run / CONFIG).is_file():
            _say(f"{path}: going on with the run that is to replace the one in it")
            return RunFolder(path, next_run)
        # A script's training may have left a checkpoint to go on from.
        _refuse_conflict(path, {*_OF_TRAINING} - {CHECKPOINT, HISTORY, LOG})
        return RunFolder(path, path)
    if (has_run or next_run.is_dir()) and not is_overwriting:
        raise CommandError(
            f"{path} exists and is not empty; choose another folder, pass --overwrite to "
            "replace the run in it, or --resume to go on with it"
        )
    if next_run.is_dir():
        _discard(next_run)
        _say(f"{path}: removed the unfinished run that was to replace the one in it")
    return RunFolder(path, next_run if has_run else path)


def _move_in(path: Path) -> None:
    """Put the files of the folder that is ready in their place; may be repeated after a kill."""
    ready = path / READY
    # The manifest is last, so that the old one names what is to go until all is done.
    if (ready / MANIFEST).is_file():
        names = _ours(ready, are_there=False)
        _remove(path, _ours(path) - names)
        for name in sorted(names - {MANIFEST}):
            if (ready / name).exists():
                if name == LOG:
                    _remove(path, {LOG})
                os.replace(ready / name, path / name)
        os.replace(ready / MANIFEST, path / MANIFEST)
    _discard(ready)


def _ours(folder: Path, *, are_there: bool = True) -> set[str]:
    """Return the names of files of a run that we wrote, links excepted."""
    try:
        named = set(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
        found = (named | {MANIFEST}) & WRITTEN
    except FileNotFoundError:
        found = set(WRITTEN - {CARD}) if _is_old_run(folder) else set()
    except (OSError, ValueError, TypeError, KeyError):
        found = set()
    return {name for name in found if _is_own(folder / name)} if are_there else found


def _is_old_run(folder: Path) -> bool:
    """Return whether a version that kept no manifest wrote the folder."""
    try:
        content = json.loads((folder / RUN).read_text(encoding="utf-8"))
        return "osciformer" in content["versions"] and (folder / CONFIG).is_file()
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _is_own(path: Path) -> bool:
    if path.name == LOG and path.is_dir() and not path.is_symlink():
        return all(_OF_LOG.fullmatch(log.name) and not log.is_symlink() for log in path.iterdir())
    return path.is_file() and not path.is_symlink()


def _is_temporary(path: Path) -> bool:
    """Return whether the path is what a kill leaves of writing one of our files."""
    found = _TEMPORARY.fullmatch(path.name)
    if found is None or path.is_symlink():
        return False
    return found["stem"] + found["ending"] in WRITTEN


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if name == LOG and (folder / LOG).is_dir():
            for log in (folder / LOG).iterdir():
                log.unlink()
            (folder / LOG).rmdir()
        else:
            (folder / name).unlink(missing_ok=True)


def _discard(folder: Path) -> None:
    """Remove a folder that we made, unless there is something in it that we did not write."""
    if not folder.is_dir():
        return
    found = [name for name in WRITTEN - {MANIFEST} if _is_own(folder / name)]
    _remove(folder, [*found, *(p.name for p in folder.iterdir() if _is_temporary(p))])
    _remove(folder, [MANIFEST])
    try:
        folder.rmdir()
    except OSError as error:
        raise CommandError(
            f"{folder} holds what osciformer did not write: {name_some(os.listdir(folder))}; move "
            "that elsewhere"
        ) from error


def _write_manifest(folder: Path, names: Iterable[str]) -> None:
    about = "files that osciformer wrote; --overwrite removes no others"
    write_json(folder / MANIFEST, {"about": about, "files": sorted({*names, MANIFEST})})


def _say(text: str) -> None:
    typer.echo(text, err=True)
