"""Reservation of the output path: files of others are never replaced or lost during an export."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.errors import PackageError
from partita.export.publish import reserve
from partita.package.folder import MANIFEST, SCHEMA
from tests.conftest import REPOSITORY

NOWHERE = "/no/such/checkpoint"


def fill(folder: Path, word: str) -> None:
    """The least that passes for a package."""
    files = [{"name": "model.onnx"}]
    (folder / MANIFEST).write_text(json.dumps({"schema": SCHEMA, "files": files}))
    (folder / "model.onnx").write_text(word)


def package(folder: Path, word: str) -> Path:
    folder.mkdir()
    fill(folder, word)
    return folder


def word(folder: Path) -> str:
    return (folder / "model.onnx").read_text()


def export(out: Path, text: str, meanwhile: Callable[[], object] = lambda: None, *, force: bool = False) -> list[str]:
    """An export with nothing in it but its place; `meanwhile` happens before it is published."""
    with reserve(out, [NOWHERE], force=force) as place:
        fill(place.folder, text)
        meanwhile()
        place.publish()
    return place.notes


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def make_folder(out: Path) -> None:
    out.mkdir()
    (out / "data.txt").write_text("precious")


def away(out: Path) -> Path:
    """Move the package out of the way."""
    return out.rename(out.parent / "away")


APPEARS: dict[str, Callable[[Path], object]] = {
    "a folder with a file": make_folder,
    "an empty folder": Path.mkdir,
    "a file": lambda out: out.write_text("precious"),
    "a link to a folder": lambda out: out.symlink_to(out.parent / "elsewhere", target_is_directory=True),
    "a link to nowhere": lambda out: out.symlink_to(out.parent / "nowhere"),
    "another package": lambda out: package(out, "theirs"),
}
REPLACED = ("an empty folder", "another package")
"""With --force."""


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("what", APPEARS)
def test_out_created_during_export_is_kept_and_package_saved_as_out_new(tmp_path: Path, what: str, force: bool) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    make_folder(elsewhere)
    if force and what in REPLACED:
        export(out, "ours", lambda: APPEARS[what](out), force=True)
        assert word(out) == "ours" and sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]
        return
    with pytest.raises(PackageError) as caught:
        export(out, "ours", lambda: APPEARS[what](out), force=force)
    kept = tmp_path / "out.new"
    assert str(kept) in str(caught.value) and word(kept) == "ours"
    assert (elsewhere / "data.txt").read_text() == "precious"
    if out.is_symlink():
        assert out.readlink().parent == tmp_path
    elif out.is_dir():
        assert "ours" not in [path.read_text() for path in out.iterdir()]
    else:
        assert out.read_text() == "precious"
    assert hidden(tmp_path) == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file is added": lambda out: (out / "notes.txt").write_text("precious"),
    "a file deep inside is added": lambda out: make_folder(out / "a"),
    "it becomes a link": lambda out: out.symlink_to(away(out)),
    "it becomes a file": lambda out: (away(out), out.write_text("precious")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_force_does_not_replace_what_is_no_package_any_more(tmp_path: Path, what: str) -> None:
    out = package(tmp_path / "out", "old")
    with pytest.raises(PackageError, match=r"has appeared or changed.* in .*out\.new$"):
        export(out, "new", lambda: CHANGES[what](out), force=True)
    assert word(tmp_path / "out.new") == "new"
    there = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(tmp_path / "out.new")]
    texts = [path.read_text() for path in there]
    assert "old" in texts and ("precious" in texts or what == "it becomes a link")
    assert hidden(tmp_path) == []


MANIFESTS = ['{"name": "my extension", "manifest_version": 3}', "{", "[]", '{"schema": "other/1", "files": []}']


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        *((MANIFEST, text, "`force=True` replaces only packages") for text in MANIFESTS),
        ("notes.txt", "mine", r"do not belong to the package \(notes.txt\)"),
    ],
)
def test_force_replaces_only_packages(tmp_path: Path, name: str, text: str, words: str) -> None:
    out = package(tmp_path / "out", "old")
    (out / name).write_text(text)
    refused(out, words)
    assert word(out) == "old" and (out / name).read_text() == text


def test_force_rejects_folder_containing_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    make_folder(checkpoint := tmp_path / "folder" / "checkpoint")
    for out in (checkpoint, checkpoint.parent):
        refused(out, "contains the checkpoint", checkpoint)
    assert (checkpoint / "data.txt").is_file()


@pytest.mark.parametrize(("force", "words"), [(False, "exists already"), (True, "a link or a file")])
def test_symlink_at_out_is_not_replaced(tmp_path: Path, force: bool, words: str) -> None:
    (out := tmp_path / "out").symlink_to(tmp_path / "nowhere")
    refused(out, words, force=force)
    assert out.is_symlink()


def refused(out: Path, words: str, checkpoint: Path = Path(NOWHERE), *, force: bool = True) -> None:
    with pytest.raises(PackageError, match=words), reserve(out, [str(checkpoint)], force=force):
        pass


def test_old_package_is_restored_if_publishing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = package(tmp_path / "out", "old"), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.startswith(".out.partial-"):
            raise OSError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Permission denied"):
        export(out, "new", force=True)
    assert word(out) == "old" and [path.name for path in tmp_path.iterdir()] == ["out"]


def _race(out: str, text: str, go: str, queue: multiprocessing.Queue) -> None:
    while not Path(go).exists():
        time.sleep(0.001)
    try:
        export(Path(out), text, lambda: time.sleep(0.2))
        queue.put((text, ""))
    except PackageError as error:
        queue.put((text, str(error)))


def test_concurrent_exports_have_single_winner_and_leave_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue = context.Queue()
    out, go = tmp_path / "place" / "out", tmp_path / "go"
    children = [context.Process(target=_race, args=(str(out), f"{n}", str(go), queue)) for n in range(6)]
    for child in children:
        child.start()
    go.touch()
    told = dict(queue.get(timeout=300) for _ in children)
    for child in children:
        child.join()
    winners = [text for text, error in told.items() if not error]
    assert len(winners) == 1 and word(out) == winners[0]
    assert all("another export" in e or "exists already" in e for e in told.values() if e)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


HANGS = """
    import sys, time
    from pathlib import Path
    from partita.export.publish import reserve
    with reserve(Path(sys.argv[1]), ["nowhere"], force=True) as place:
        (place.folder / "model.onnx.data").write_bytes(bytes(1000))
        print("ready", flush=True)
        time.sleep(600)
"""


def killed(out: Path) -> None:
    """An export that is killed while it works."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HANGS), str(out)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()


def test_leftovers_of_killed_export_are_removed_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed(out)
    killed(tmp_path / "other")
    killed(tmp_path / "out.partial-b")
    (left,) = tmp_path.glob(".out.partial-????????")
    (told,) = export(out, "new")
    assert str(left) in told and "killed" in told
    assert not left.exists() and word(out) == "new"
    # Those of other places stay: an export may be running for them.
    assert len(list(tmp_path.glob(".other.partial-*"))) == len(list(tmp_path.glob(".out.partial-b.partial-*"))) == 1


def test_package_moved_aside_by_killed_export_is_reported(tmp_path: Path) -> None:
    aside = tmp_path / ".out.old-abcdefgh"
    aside.mkdir()
    package(aside / "package", "old")
    (note,) = export(tmp_path / "out", "new")
    assert str(aside / "package") in note and word(aside / "package") == "old"


def test_force_replaces_package_inside_checkpoint_folder(tmp_path: Path) -> None:
    """No checkpoint file links into the package."""
    (tmp_path / "config.json").write_text("{}")
    out = package(tmp_path / "package", "old")
    with reserve(out, [str(tmp_path)], force=True) as place:
        fill(place.folder, "new")
        place.publish()
    assert word(out) == "new"


def test_package_mode_follows_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export(tmp_path / "out", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


@pytest.mark.parametrize("given", [Path(), Path("../out")])
def test_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Path) -> None:
    monkeypatch.chdir(package(tmp_path / "out", "old"))
    refused(given, "is the current folder, or contains it")
    assert word(tmp_path / "out") == "old" and hidden(tmp_path) == []
