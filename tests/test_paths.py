"""One folder for everything that Partita keeps, and one variable that moves it."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows

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
    monkeypatch.setattr(platformdirs, "PlatformDirs", Unix)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(kind) == tmp_path / "xdg" / "partita" / kind
    for missing in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", missing)
        assert cache_folder(kind) == tmp_path / "home" / ".cache" / "partita" / kind


def test_on_windows_it_is_local_application_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(platformdirs, "PlatformDirs", Windows)
    folders = {"CSIDL_LOCAL_APPDATA": str(tmp_path)}
    monkeypatch.setattr("platformdirs.windows.get_win_folder", folders.__getitem__)
    assert cache_folder("probes") == tmp_path / "partita" / "probes"

    def unknown(_name: str) -> str:
        raise ValueError("SHGetKnownFolderPath returned NULL")

    monkeypatch.setattr("platformdirs.windows.get_win_folder", unknown)
    assert cache_folder("probes") is None


def test_on_macos_it_is_the_library_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", MacOS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("probes") == tmp_path / "Library" / "Caches" / "partita" / "probes"


@pytest.mark.parametrize("kind", KINDS)
def test_a_relative_folder_of_the_system_is_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older platformdirs hands on what XDG_CACHE_HOME says; answers must not land where the command was started."""
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("caches/partita"))
    assert cache_folder(kind) is None
