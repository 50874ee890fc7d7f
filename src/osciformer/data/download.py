"""Downloads that end in a complete, verified file or leave no file at all.

pooch verifies and places the file. This module continues interrupted downloads from `.<name>.part`
with a `Range` request, tries several addresses in turn, and says in errors what to do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from osciformer._optional import need
from osciformer.data.errors import ChecksumError, DiskFullError, DownloadError

DATA_VARIABLE = "OSCIFORMER_DATA"
CACHE_VARIABLE = "OSCIFORMER_CACHE"

#: Called with the name of the file, the bytes so far, and the bytes in all if they are known.
#: The last call for a file has both numbers equal.
ProgressCallback = Callable[[str, int, int | None], None]

_BLOCK_BYTES = 1 << 18
# An attempt that brings this much resets the count of attempts.
_PROGRESS_BYTES = 1 << 20
_LONGEST_WAIT_SECONDS = 60.0
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")


class Downloaded(NamedTuple):
    """A file that has arrived: its address, its SHA-256 and its number of bytes."""

    address: str
    sha256: str
    size: int


class _TransferError(Exception):
    """An address did not give the file."""


class _WrongContentError(_TransferError):
    """An address gives another file."""


class _InterruptedError(_TransferError):
    """Another attempt may succeed, after `wait` seconds if the server says so."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


def download(
    addresses: Sequence[str], target: Path, *, sha256_source: str = "the registry", **settings: Any
) -> Downloaded:
    """Download `target` from the first address that gives it; the caller holds its folder's lock.

    `settings` are those of `_ResumedTransfer`; `sha256_source` says where its hash comes from.
    """
    for address in addresses:
        if urlsplit(address).scheme not in ("http", "https"):
            raise ValueError(f"an address must begin with http:// or https://, got {address!r}")
    causes, is_wrong = "", False
    for address in addresses:
        transfer = _ResumedTransfer(target, **settings)
        try:
            transfer.retrieve(address)
        except _TransferError as error:
            causes += f"\n  {address}: {error}"
            is_wrong |= isinstance(error, _WrongContentError)
            continue
        found = Downloaded(address, file_sha256(target), target.stat().st_size)
        if transfer.progress is not None:
            transfer.progress(target.name, found.size, found.size)
        return found
    if is_wrong:
        raise ChecksumError(
            f"{target.name} is not the expected file (its hash comes from {sha256_source}):{causes}"
            "\nThe download was deleted. Try again: if it fails in the same way, the published "
            f"file has changed or the network alters it. {offline_advice(target)}"
        )
    kept = _size(part_path(target))
    if kept:
        causes += f"\n{format_bytes(kept)} have arrived and are kept; call again to continue."
    raise DownloadError(f"{target.name} could not be downloaded:{causes}\n{offline_advice(target)}")


@dataclass
class _ResumedTransfer:
    """A downloader for pooch that continues the part file of an interrupted download.

    The server must show by `ETag` or `Last-Modified` that the file is still the same. If it sends
    neither, the SHA-256 of the whole file decides.
    """

    target: Path
    sha256: str | None = None
    size: int | None = None
    progress: ProgressCallback | None = None
    timeout: float = 30.0
    attempts: int = 5  # in a row that bring less than 1 MiB each
    backoff: float = 0.5  # seconds to the second attempt, doubled each time; or Retry-After
    is_resumed: bool = False

    def __post_init__(self) -> None:
        self.part = part_path(self.target)
        self.note = self.part.with_name(self.part.name + ".json")

    def retrieve(self, address: str) -> None:
        """Let pooch download, verify and place the file."""
        pooch = need("pooch", extra="data")
        # pooch reports each download on standard error, unless its level says otherwise.
        level = pooch.get_logger().level
        pooch.get_logger().setLevel("WARNING")
        try:
            name, folder = self.target.name, self.target.parent
            pooch.retrieve(address, self.sha256, name, folder, downloader=self)
        except (ValueError, _WrongContentError) as error:
            self.discard()
            if not self.is_resumed:
                raise _WrongContentError(str(error)) from error
            # Halves of two different files make a third one: download once more from the start.
            self.is_resumed = False
            self.retrieve(address)
        finally:
            pooch.get_logger().setLevel(level)

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        """Bring the whole file to `output_file`, over as many attempts as it takes."""
        fruitless, furthest = 0, _size(self.part)
        while True:
            try:
                self.attempt(url)
                break
            except _InterruptedError as error:
                # A server that always starts over gets no further.
                fruitless = 0 if _size(self.part) - furthest >= _PROGRESS_BYTES else fruitless
                furthest = max(furthest, _size(self.part))
                fruitless += 1
                if fruitless >= self.attempts:
                    raise
                wait = self.backoff * 2 ** (fruitless - 1) if error.wait is None else error.wait
                time.sleep(min(wait, _LONGEST_WAIT_SECONDS))
        os.replace(self.part, output_file)
        self.discard()

    def attempt(self, url: str) -> None:
        """Bring the part file to its end, or raise."""
        requests, urllib3 = need("requests", extra="data"), need("urllib3", extra="data")
        headers = {"User-Agent": "osciformer", "Accept-Encoding": "identity"}
        offset, validator = _size(self.part), self.validator(url)
        if validator is None and self.sha256 is None:
            offset = 0  # nothing would show that it is the same file
        if offset:
            self.is_resumed = True
            headers["Range"] = f"bytes={offset}-"
            headers |= {} if validator is None else {"If-Range": validator}
        with requests.Session() as session:
            if url.startswith("https:"):
                session.adapters.pop("http://")  # a redirect must not lead from https to http
            settings = {"headers": headers, "stream": True, "timeout": self.timeout}
            try:
                with session.get(url, **settings) as response:
                    self.receive(response, url, offset)
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                raise _connection_error(error) from error

    def receive(self, response: Any, url: str, offset: int) -> None:
        """Write the body of the response to the part file."""
        headers, status = response.headers, response.status_code
        said = f"the server answered {status} {response.reason or ''}".rstrip()
        matched = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
        if status == 416 and offset:
            if matched and matched[3] == str(offset):
                return  # the part is the whole file
            self.discard()
            raise _InterruptedError(said)
        if status in _RETRY_STATUS:
            wait = need("urllib3", extra="data").Retry().get_retry_after(response.raw)
            raise _InterruptedError(said, wait)
        if status not in (200, 206):
            raise _TransferError(said)
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _TransferError("the server compressed its answer although it was asked not to")
        if headers.get("Content-Type", "").lower().startswith("text/html"):
            raise _TransferError("the server sent a web page in place of the file")
        if status == 206:
            if matched is None or matched[1] is None or int(matched[1]) != offset:
                self.discard()
                raise _InterruptedError("the server sent another range than requested")
            length = matched[3]
        else:
            offset, length = 0, headers.get("Content-Length", "")  # the server ignores Range
        total = int(length) if length.isdigit() else self.size
        if self.size not in (None, total):
            raise _WrongContentError(f"the file there has {total} bytes, expected {self.size}")
        etag = headers.get("ETag", "W/")
        # A weak tag promises the same meaning, not the same bytes.
        validator = headers.get("Last-Modified") if etag.startswith("W/") else etag
        try:
            free = shutil.disk_usage(self.target.parent).free
            if total is not None and total - offset > free:
                needed = f"{format_bytes(total - offset)} needed, {format_bytes(free)} free"
                raise OSError(errno.ENOSPC, needed)
            self.note.write_text(json.dumps({"address": url, "validator": validator}))
            done = self.append(response, offset, total)
        except OSError as error:
            self.discard()
            reason = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                place = f"{self.target.name} in {self.target.parent}"
                advice = f"free some space or set {CACHE_VARIABLE} to a folder on another disk"
                raise DiskFullError(f"no room for {place} ({reason}); {advice}") from error
            advice = f"set {CACHE_VARIABLE} to a folder that can be written to"
            raise DownloadError(f"{self.part} cannot be written ({reason}); {advice}") from error
        if done == 0 or (total is not None and done < total):
            of = "" if total is None else f" of {total}"
            raise _InterruptedError(f"the connection ended after {done}{of} bytes")

    def append(self, response: Any, offset: int, total: int | None) -> int:
        """Append the body to the part file and return the size that the file then has."""
        protocol_error, done = need("urllib3", extra="data").exceptions.ProtocolError, offset
        with self.part.open("ab" if offset else "wb") as stream:
            while True:
                try:
                    block = response.raw.read1(_BLOCK_BYTES, decode_content=False)
                except protocol_error:
                    if total is None:
                        raise
                    block = b""  # the caller sees that bytes are missing
                if not block:
                    break
                done += len(block)
                if total is not None and done > total:
                    raise _WrongContentError(f"more than the expected {total} bytes arrived")
                stream.write(block)
                if self.progress is not None and done != total:
                    self.progress(self.target.name, done, total)
            stream.flush()
            os.fsync(stream.fileno())
        return done

    def validator(self, url: str) -> str | None:
        """Return the `If-Range` that proves that the part belongs to the file at this address."""
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
            return note["validator"] if note["address"] == url else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def discard(self) -> None:
        """Delete the part file and its note."""
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def _connection_error(error: Exception) -> _TransferError:
    """Return what a broken connection means, and whether it deserves another attempt."""
    failures, urllib3 = need("requests", extra="data").exceptions, need("urllib3", extra="data")
    reason = getattr(error.args[0] if error.args else None, "reason", error)
    if isinstance(reason, urllib3.exceptions.NameResolutionError):
        return _TransferError(f"the name of the server cannot be resolved ({reason})")
    if isinstance(error, failures.SSLError):
        return _TransferError(f"the certificate of the server is not valid ({reason})")
    if isinstance(error, failures.InvalidSchema | failures.TooManyRedirects):
        return _TransferError(f"the redirect is not followed ({error})")
    if isinstance(error, failures.Timeout | urllib3.exceptions.TimeoutError):
        return _InterruptedError("the server did not answer in time")
    return _InterruptedError(f"the connection failed ({reason})")


def part_path(target: Path) -> Path:
    """Return the file that holds an unfinished download of `target`."""
    return target.with_name(f".{target.name}.part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def offline_advice(target: Path) -> str:
    """Return what to do without a network."""
    return (
        f"Without the network: set {DATA_VARIABLE} to a folder that holds the data set, "
        f"or put the file at {target}"
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, computed once for each state of the file."""
    state = path.stat()
    return _sha256(path.resolve(), (state.st_size, state.st_mtime_ns, state.st_ino))


@lru_cache(maxsize=256)
def _sha256(path: Path, state: tuple[int, int, int]) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def format_bytes(count: float) -> str:
    """Return a number of bytes for people to read, such as 512 B or 6.6 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class TerminalBar:
    """A progress callback that draws one line per file, rewritten in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._drawn_at = 0.0

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Draw the state of one file, at most ten times a second."""
        is_last = done == total
        if not is_last and time.monotonic() - self._drawn_at < 0.1:
            return
        self._drawn_at = time.monotonic()
        state = format_bytes(done)
        if total:
            bar = "#" * round(24 * min(1.0, done / total))
            state = f"[{bar:-<24}] {state} of {format_bytes(total)}"
        # The escape clears what a longer line left behind.
        self._stream.write(f"\r{name} {state}\x1b[K" + ("\n" if is_last else ""))
        self._stream.flush()


def choose_progress(progress: bool | ProgressCallback | None) -> ProgressCallback | None:
    """Return the callback that `progress` asks for; None draws a bar on a terminal only."""
    if progress is None:
        progress = bool(getattr(sys.stderr, "isatty", lambda: False)())
    return TerminalBar() if progress is True else progress or None
