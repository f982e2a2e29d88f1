"""One folder for everything that Partita keeps, and one variable that moves it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from partita.paths import CACHE_VARIABLE, cache_folder

KINDS = ("probes", "cuda-dry-run")


@pytest.mark.parametrize("kind", KINDS)
def test_the_user_says_where(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder(kind) == tmp_path / kind
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_folder(kind) is None, "an empty variable: nothing is kept"


@pytest.mark.parametrize("kind", KINDS)
def test_else_it_is_where_the_system_has_caches(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(kind) == tmp_path / "xdg" / "partita" / kind
    for missing in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", missing)
        assert cache_folder(kind) == tmp_path / "home" / ".cache" / "partita" / kind


def test_on_windows_it_is_local_application_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache_folder("probes") == tmp_path / "partita" / "probes"
    monkeypatch.delenv("LOCALAPPDATA")
    assert cache_folder("probes") is None
