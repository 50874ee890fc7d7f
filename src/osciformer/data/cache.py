r"""Where data sets lie on this machine, and how two processes share the place.

Two environment variables decide, read at each call:

| variable | names | default |
| --- | --- | --- |
| `OSCIFORMER_DATA` | a folder of data sets that is looked at first and never written to | none |
| `OSCIFORMER_CACHE` | the folder for downloads | the cache folder of the platform, below |

The default of `OSCIFORMER_CACHE` is `$XDG_CACHE_HOME/osciformer`, or `~/.cache/osciformer`, on
Linux; `~/Library/Caches/osciformer` on macOS; `%LOCALAPPDATA%\osciformer\Cache` on Windows.

`OSCIFORMER_DATA` holds compact copies (`physionet2012/set-a.parquet`, `uea/BasicMotions.npz`,
`tpp/taxi.parquet`, as `describe_dataset` lists them) or the public files under the name of the
data set (`physionet2012/set-a.tar.gz`).

In the cache, the public files of a data set are in `datasets/<name>/`. Beside them are

- `hashes.json`: the SHA-256 of every file here. Where the registry knows no hash, this is the
  record that later uses are checked against (trust on first use);
- `.lock`: held while a file is downloaded, so that a second process waits for it;
- `<file>.bad`: a file that stood under the name of another, moved out of the way;
- `.<file>.part` and `.<file>.part.json`: a download that was interrupted and can go on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from osciformer.data.errors import DatasetError

DATA_VARIABLE = "OSCIFORMER_DATA"
CACHE_VARIABLE = "OSCIFORMER_CACHE"
HASHES_NAME = "hashes.json"
LOCK_NAME = ".lock"

_POLL_SECONDS = 0.05
_BLOCK_BYTES = 1 << 20


def local_folder() -> Path | None:
    """Return the folder that `OSCIFORMER_DATA` names, or None where the variable is not set.

    Raises:
        DatasetError: If it names something that is not a folder.
    """
    value = os.environ.get(DATA_VARIABLE, "").strip()
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DatasetError(
            f"{DATA_VARIABLE} is {value!r}, which is not a folder; correct the variable or unset it"
        )
    return folder


def cache_folder() -> Path:
    """Return the folder for downloads, which need not exist yet."""
    value = os.environ.get(CACHE_VARIABLE, "").strip()
    if value:
        return Path(value).expanduser()
    platform: str = sys.platform
    if platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(folder) / "osciformer" / "Cache"
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "osciformer"
    # The XDG specification says that a relative path is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "osciformer"


def dataset_folder(name: str) -> Path:
    """Return the folder of the cache for the public files of data set `name`."""
    return cache_folder() / "datasets" / name


def make_folder(folder: Path) -> None:
    """Create `folder`, or say which variable to change where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(
            f"the cache folder {folder} cannot be created ({error.strerror or error}); "
            f"set {CACHE_VARIABLE} to a folder that can be written to"
        ) from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read once for each state of the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "empty")
        ...     _ = path.write_bytes(b"")
        ...     file_sha256(path)[:8]
        'e3b0c442'
    """
    state = path.stat()
    return _sha256(path.resolve(), state.st_size, state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=256)
def _sha256(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    del size, mtime_ns, inode  # part of the key alone: a changed file is read again
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_hashes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `hashes.json` in `folder` records, by file name; empty where there is none."""
    path = folder / HASHES_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); delete it and try again") from error
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        raise DatasetError(f"{path} is not a record of hashes; delete it and try again")
    return content


def record_hash(folder: Path, file: str, *, sha256: str, size: int, source: str) -> None:
    """Write the hash of `file` to `hashes.json`; the caller holds the lock of `folder`."""
    content = read_hashes(folder)
    content[file] = {"sha256": sha256, "size": size, "source": source}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{HASHES_NAME}.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, folder / HASHES_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def exclusive(folder: Path, *, timeout: float = 3600.0) -> Iterator[None]:
    """Hold the lock of `folder` against other threads and processes.

    The system frees the lock when its holder ends, however it ends, so no lock is ever stale.

    Args:
        folder: An existing folder.
        timeout: Seconds to wait for the present holder.

    Raises:
        DatasetError: If the lock was not free in time, or the file system has no locks.
    """
    path = folder / LOCK_NAME
    try:
        stream = path.open("a+b")
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written ({error.strerror or error}); "
            f"set {CACHE_VARIABLE} to a folder that can be written to"
        ) from error
    with stream:
        deadline = time.monotonic() + timeout
        while not _try_lock(stream, path):
            if time.monotonic() > deadline:
                raise DatasetError(
                    f"another process has held {path} for {timeout:.0f} s; "
                    "end it, or wait for its download, and try again"
                )
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            _unlock(stream)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(stream: IO[bytes], path: Path) -> bool:
        try:
            stream.seek(0)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(stream: IO[bytes]) -> None:
        stream.seek(0)
        msvcrt.locking(stream.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(stream: IO[bytes], path: Path) -> bool:
        try:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK):
                return False
            raise DatasetError(
                f"{path} cannot be locked ({error.strerror}); "
                f"set {CACHE_VARIABLE} to a folder on a file system with locks"
            ) from error
        return True

    def _unlock(stream: IO[bytes]) -> None:
        fcntl.flock(stream.fileno(), fcntl.LOCK_UN)
