"""`need` imports what is there and says how to install what is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from osciformer._optional import need


@pytest.mark.parametrize("name", ["math", "os.path"])
def test_need_returns_the_named_module(name: str) -> None:
    assert need(name, extra="plot") is sys.modules[name]


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.part"])
def test_missing_package_names_itself_and_the_extra(name: str) -> None:
    with pytest.raises(ImportError, match=r"pip install \"osciformer\[plot\]\"") as caught:
        need(name, extra="plot")
    assert repr(name) in str(caught.value)


def test_missing_dependency_of_an_installed_package_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        need("half_installed", extra="plot")
    assert "osciformer" not in str(caught.value)
