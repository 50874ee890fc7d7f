"""Downloads over HTTP that end in a complete, checked file or in none at all.

The bytes go to `.<name>.part` beside the target, which gets its name in one atomic step after the
hash has been checked. An interrupted part is kept and continued with a `Range` request, as long as
the server can show (by `ETag` or `Last-Modified`, or by the hash of the whole) that it is still
the same file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
import urllib.error
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from osciformer.data.cache import CACHE_VARIABLE, DATA_VARIABLE
from osciformer.data.connection import (
    RETRY_STATUS,
    InterruptedTransferError,
    RefusedTransferError,
    WrongContentError,
    check_scheme,
    open_address,
    read_block,
    retry_after,
)
from osciformer.data.errors import ChecksumError, DiskFullError, DownloadError
from osciformer.data.progress import ProgressCallback, format_bytes

_BLOCK_BYTES = 1 << 18
# An attempt that brought this much was worth its while: the count of attempts starts again.
_PROGRESS_BYTES = 1 << 20
_LONGEST_WAIT_SECONDS = 60.0
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A file that has arrived: where from, its SHA-256 and its number of bytes."""

    address: str
    sha256: str
    size: int


def download(
    addresses: Sequence[str],
    target: Path,
    *,
    sha256: str | None = None,
    sha256_source: str = "the registry",
    size: int | None = None,
    progress: ProgressCallback | None = None,
    timeout: float = 30.0,
    attempts: int = 5,
    backoff: float = 0.5,
) -> Downloaded:
    """Return where `target` was downloaded from, with its hash, once it is complete and checked.

    The caller makes sure that nobody else writes to the same target (`cache.exclusive`).

    Args:
        addresses: Addresses of one and the same file, tried in order.
        target: The file to write. Its folder exists.
        sha256: The expected hash in hexadecimal; None accepts any content.
        sha256_source: Where `sha256` comes from, for the message of an error.
        size: The expected number of bytes, where it is known.
        progress: Called after each block.
        timeout: Seconds without a byte after which a connection counts as broken.
        attempts: Attempts in a row, at one address, that bring less than 1 MiB.
        backoff: Seconds before the second attempt; doubled for each one after it. A server's
            `Retry-After` replaces it, up to a minute.

    Raises:
        DownloadError: If no address gave the file. What has arrived is kept for the next call.
        ChecksumError: If an address gave another file. It is deleted.
        DiskFullError: If there is no room. Nothing is left behind.
    """
    for address in addresses:
        check_scheme(address)
    failures: list[tuple[str, InterruptedTransferError | RefusedTransferError]] = []
    for address in addresses:
        transfer = _Transfer(address, target, sha256, size, progress, timeout)
        try:
            return transfer.run(attempts, backoff)
        except (InterruptedTransferError, RefusedTransferError) as error:
            failures.append((address, error))
    raise _failure(target, failures, sha256_source)


class _Transfer:
    """The way of one file from one address to its part file, over as many attempts as it takes."""

    def __init__(
        self,
        address: str,
        target: Path,
        sha256: str | None,
        size: int | None,
        progress: ProgressCallback | None,
        timeout: float,
    ) -> None:
        self.address = address
        self.target = target
        self.sha256 = None if sha256 is None else sha256.lower()
        self.size = size
        self.progress = progress
        self.timeout = timeout
        self.part = part_path(target)
        self.note = self.part.with_name(self.part.name + ".json")

    def run(self, attempts: int, backoff: float) -> Downloaded:
        """Return the finished download."""
        fruitless = 0
        furthest = self.part_size()
        has_restarted = False
        while True:
            is_continued = self.part_size() > 0
            try:
                self.attempt()
                digest = self.check()
                break
            except InterruptedTransferError as error:
                # Against the furthest point, lest a server that starts over each time counts.
                if self.part_size() - furthest >= _PROGRESS_BYTES:
                    fruitless = 0
                furthest = max(furthest, self.part_size())
                fruitless += 1
                if fruitless >= attempts:
                    raise
                wait = backoff * 2 ** (fruitless - 1) if error.wait is None else error.wait
                _pause(min(wait, _LONGEST_WAIT_SECONDS))
            except WrongContentError:
                self.discard()
                # Two halves of different files make a third one: once more, from the start.
                if has_restarted or not is_continued:
                    raise
                has_restarted = True
        size = self.part_size()
        os.replace(self.part, self.target)
        self.discard()
        if self.progress is not None:
            self.progress(self.target.name, size, size)
        return Downloaded(self.address, digest, size)

    def attempt(self) -> None:
        """Bring the part file to its end, or raise."""
        offset, validator = self.resume_point()
        headers = {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if validator:
                headers["If-Range"] = validator
        try:
            response = open_address(self.address, headers, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            with error:
                self.handle_status(error, offset)
            return
        with response:
            self.receive(response, offset)

    def handle_status(self, error: urllib.error.HTTPError, offset: int) -> None:
        """Raise what the status of a failed answer calls for; return if the part is complete."""
        said = f"the server answered {error.code} {error.reason}".rstrip()
        if error.code == 416 and offset:
            match = _CONTENT_RANGE.match(error.headers.get("Content-Range", ""))
            if match and match[3] == str(offset):
                return
            self.discard()
            raise InterruptedTransferError(said)
        if error.code in RETRY_STATUS:
            raise InterruptedTransferError(said, retry_after(error.headers.get("Retry-After")))
        raise RefusedTransferError(said)

    def receive(self, response: Any, offset: int) -> None:
        """Write the body of `response` to the part file."""
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RefusedTransferError(
                "the server compressed its answer although it was asked not to"
            )
        if response.headers.get_content_type() == "text/html":
            raise RefusedTransferError("the server sent a web page in place of the file")
        length = response.headers.get("Content-Length")
        if response.status == 206:
            match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
            if match is None or match[1] is None or int(match[1]) != offset:
                self.discard()
                raise InterruptedTransferError(
                    "the server sent another range than the one asked for"
                )
            total = None if match[3] == "*" else int(match[3])
        elif response.status == 200:
            # A server that ignores Range sends the whole file: start again with it.
            offset = 0
            total = int(length) if length and length.isdigit() else None
        else:
            raise RefusedTransferError(f"the server answered {response.status} {response.reason}")
        if self.size is not None and total is not None and total != self.size:
            raise WrongContentError(f"the file there has {total} bytes, expected {self.size}")
        total = self.size if total is None else total
        self.require_room(offset, total)
        self.write_note(response)
        done = self.copy(response, offset, total)
        if done == 0 or (total is not None and done < total):
            of = "" if total is None else f" of {total}"
            raise InterruptedTransferError(f"the connection ended after {done}{of} bytes")

    def copy(self, response: Any, offset: int, total: int | None) -> int:
        """Append the body to the part file and return the size that the file then has."""
        done = offset
        with self.disk_errors(), self.part.open("ab" if offset else "wb") as stream:
            while block := read_block(response, _BLOCK_BYTES):
                done += len(block)
                if total is not None and done > total:
                    raise WrongContentError(f"more than the expected {total} bytes arrived")
                _write(stream, block)
                if self.progress is not None and done != total:
                    self.progress(self.target.name, done, total)
            stream.flush()
            os.fsync(stream.fileno())
        return done

    def check(self) -> str:
        """Return the hash of the part file, or raise if it is not the expected one."""
        digest = hashlib.sha256()
        with self.part.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
        got = digest.hexdigest()
        if self.sha256 is not None and got != self.sha256:
            raise WrongContentError(f"SHA-256 expected {self.sha256}, got {got}")
        return got

    def part_size(self) -> int:
        """Return the number of bytes that have arrived."""
        try:
            return self.part.stat().st_size
        except FileNotFoundError:
            return 0

    def resume_point(self) -> tuple[int, str | None]:
        """Return the offset to continue at, and what the server must still call the file."""
        offset = self.part_size()
        if not offset:
            return 0, None
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
            validator = note["validator"] if note["address"] == self.address else None
        except (OSError, ValueError, KeyError, TypeError):
            validator = None
        if validator is None and self.sha256 is None:
            return 0, None
        return offset, validator

    def write_note(self, response: Any) -> None:
        """Remember what the server calls this state of the file."""
        etag = response.headers.get("ETag")
        # A weak tag promises the same meaning, not the same bytes.
        strong = etag if etag and not etag.startswith("W/") else None
        note = {
            "address": self.address,
            "validator": strong or response.headers.get("Last-Modified"),
        }
        with self.disk_errors():
            self.note.write_text(json.dumps(note), encoding="utf-8")

    def require_room(self, offset: int, total: int | None) -> None:
        """Raise before the first byte is written if the rest does not fit on the disk."""
        if total is None:
            return
        free = shutil.disk_usage(self.target.parent).free
        if total - offset > free:
            self.discard()
            raise self.disk_full(
                f"{format_bytes(total - offset)} needed, {format_bytes(free)} free"
            )

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn a full disk, or one that refuses, into a clear error that leaves nothing behind."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            self.discard()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self.disk_full(reason) from error
            raise DownloadError(
                f"{self.part} cannot be written ({reason}); "
                f"set {CACHE_VARIABLE} to a folder that can be written to"
            ) from error

    def disk_full(self, reason: str) -> DiskFullError:
        """Return the error for a full disk."""
        return DiskFullError(
            f"no room for {self.target.name} in {self.target.parent} ({reason}); "
            f"free some space or set {CACHE_VARIABLE} to a folder on another disk"
        )

    def discard(self) -> None:
        """Delete the part file and its note."""
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def part_path(target: Path) -> Path:
    """Return the file that holds an unfinished download of `target`.

    Example:
        >>> part_path(Path("cache/set-a.tar.gz")).name
        '.set-a.tar.gz.part'
    """
    return target.with_name(f".{target.name}.part")


def way_out(target: Path) -> str:
    """Return what a user can do whom the network does not serve."""
    return (
        f"Without the network: set {DATA_VARIABLE} to a folder that holds the data set, "
        f"or put the file at {target}"
    )


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _write(stream: IO[bytes], block: bytes) -> None:
    stream.write(block)


def _failure(
    target: Path,
    failures: list[tuple[str, InterruptedTransferError | RefusedTransferError]],
    sha256_source: str,
) -> DownloadError | ChecksumError:
    causes = "".join(f"\n  {address}: {error}" for address, error in failures)
    if any(isinstance(error, WrongContentError) for _, error in failures):
        return ChecksumError(
            f"{target.name} is not the expected file (its hash comes from {sha256_source}):{causes}"
            "\nThe download was deleted. Try again: if it fails in the same way, the published "
            f"file has changed or the network alters it. {way_out(target)}"
        )
    kept = part_path(target).stat().st_size if part_path(target).exists() else 0
    note = f"\n{format_bytes(kept)} have arrived and are kept; call again to go on." if kept else ""
    if not failures:
        causes = "\n  no public address is known"
    return DownloadError(f"{target.name} could not be downloaded:{causes}{note}\n{way_out(target)}")
