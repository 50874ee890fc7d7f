"""A data set of one small file, for tests of where files come from."""

from __future__ import annotations

import hashlib
from typing import Any

from osciformer.data.dataset_info import DataFile, DatasetInfo, Request, Source
from osciformer.data.registry import register_dataset

from .file_server import FileServer

CONTENT = b"0123456789" * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def read_bytes(request: Request) -> bytes:
    (path,) = request.files.values()
    return path.read_bytes()


def numbers(address: str, *, sha256: str | None = SHA256) -> DatasetInfo:
    """Return a data set of one file, with a compact copy of another content."""
    copy = hashlib.sha256(b"copy").hexdigest()
    return DatasetInfo(
        name="numbers",
        description="Digits.",
        task="classification",
        splits=("train", "test"),
        split_definition="None.",
        licence="CC0",
        citation="Nobody.",
        local=Source((DataFile("toy/numbers.bin", sha256=copy),), read_bytes),
        public=Source((DataFile("numbers.txt", sha256=sha256, addresses=(address,)),), read_bytes),
    )


def register_numbers(server: FileServer, **options: Any) -> None:
    register_dataset(numbers(server.address("numbers.txt"), **options), replace=True)
