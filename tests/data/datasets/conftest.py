"""Every data set is looked for in empty places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from osciformer.data import registry

from ..file_server import FileServer


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCIFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer().running() as running:
        yield running


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that `OSCIFORMER_DATA` names."""
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setenv("OSCIFORMER_DATA", str(folder))
    return folder
