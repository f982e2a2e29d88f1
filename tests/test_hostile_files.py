"""Irregular files and outward links in a model folder raise an error before they are opened, in every verb."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita import cli
from partita.commands.chat import read_conversation
from partita.demo import checkpoint_path
from partita.errors import PackageError, UsageError
from partita.foreign.evidence import read_json
from partita.library.sampling import FILE, suggestion
from partita.package.folder import check_folder, read_manifest
from partita.runtime.generate.text.tokens import stop_token_ids

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no such files there")
KINDS = {
    "fifo": "a FIFO, not a regular file",
    "socket": "a socket, not a regular file",
    "device": "a link out of the folder, to /dev/zero",
    "outside": "a link out of the folder, to ",
    "absolute": "a link out of the folder, to ",
    "nothing": "a broken symbolic link to gone",
    "itself": "a broken symbolic link",
    "folder": "a folder, not a regular file",
}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A file that is opened and never ends fails the test."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(300)
    yield
    signal.alarm(0)


def put(path: Path, kind: str) -> None:
    """Have something else in the place of a file; what a link leads to is a sound copy of it."""
    outside = path.parent.parent / "outside"
    if path.is_file():
        path.rename(outside)
    else:
        outside.write_text("{}")
    links: dict[str, str | Path] = {
        "device": "/dev/zero",
        "outside": "../outside",
        "absolute": outside,
        "nothing": "gone",
        "itself": path,
    }
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as place:
            place.bind(os.path.relpath(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(links[kind])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The last line on stderr of a command that fails."""
    capsys.readouterr()
    assert cli.run([*map(str, words)]) == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.fixture
def package(tiny_checkpoint, exported, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(exported(tiny_checkpoint("llama")), tmp_path / "pkg"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "model.onnx"])
def test_check_folder_rejects_every_kind_of_irregular_file(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "model").mkdir()
    (folder / name).write_text("{}")
    check_folder(folder)
    put(folder / name, kind)
    with pytest.raises(PackageError) as caught:
        check_folder(folder)
    assert f"{folder / name}: " in str(caught.value) and KINDS[kind] in str(caught.value)


@pytest.mark.parametrize(("name", "kind"), [("manifest.json", "fifo"), ("tokenizer.json", "outside")])
def test_every_verb_rejects_irregular_package_files(package, name, kind, capsys):
    put(package / name, kind)
    chain = ("--provider", "cpu")
    verbs = (("generate", package, "hi"), ("inspect", package), ("place", package), ("verify", package))
    others = (
        ("serve", package),
        ("evaluate", package),
        ("support", package, *chain),
        ("bench", package),
        ("chat", package),
    )
    for verb in (*verbs, *others):
        line = refused(capsys, *verb)
        assert f"{package / name}: " in line and KINDS[kind] in line, (verb, line)


def test_export_rejects_irregular_checkpoint_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(checkpoint_path(), tmp_path / "checkpoint"))
    cases = {"chat_template.jinja": "absolute", "special_tokens_map.json": "outside", "model.safetensors": "outside"}
    for name, kind in {**cases, "config.json": "fifo"}.items():
        kept = (folder / name).read_bytes() if (folder / name).is_file() else None
        put(folder / name, kind)
        line = refused(capsys, "export", folder, tmp_path / "out")
        assert f"{folder / name}: " in line and KINDS[kind] in line, line
        assert not (tmp_path / "out").exists()
        (folder / name).unlink()
        if kept is not None:
            (folder / name).write_bytes(kept)


def test_unread_files_and_links_inside_folder_are_accepted(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").write_text("text")
    for name in ("README.md", ".gitattributes", "picture.png"):
        (folder / name).symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "log.fifo")
    (folder / ".git").mkdir()
    os.mkfifo(folder / ".git" / "config.json")
    (folder / "runs").symlink_to(tmp_path)
    (folder / "..data").mkdir()
    (folder / "..data" / "config.json").write_text("{}")
    (folder / "config.json").symlink_to(Path("..data") / "config.json")
    check_folder(folder)
    (tmp_path / "named").symlink_to(folder)
    check_folder(tmp_path / "named")


@pytest.mark.parametrize("place", ["onnx", "additional_chat_templates"])
def test_subfolders_are_checked_and_may_not_link_outside(tmp_path: Path, place: str) -> None:
    (folder := tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match="a link out of the folder"):
        check_folder(folder)
    (folder / place).unlink()
    (folder / place).mkdir()
    check_folder(folder)
    os.mkfifo(folder / place / "tool.jinja")
    with pytest.raises(PackageError, match="tool.jinja: a FIFO"):
        check_folder(folder)


def test_links_to_blobs_of_own_hub_cache_entry_are_accepted(tmp_path: Path) -> None:
    (blobs := tmp_path / "models--me--tiny" / "blobs").mkdir(parents=True)
    (folder := blobs.parent / "snapshots" / "0a1b").mkdir(parents=True)
    (blobs / "0f").write_text("{}")
    (folder / "config.json").symlink_to(Path("..") / ".." / "blobs" / "0f")
    check_folder(folder)
    (tmp_path / "models--you--other" / "blobs").mkdir(parents=True)
    (tmp_path / "models--you--other" / "blobs" / "0f").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "models--you--other" / "blobs" / "0f")
    with pytest.raises(PackageError, match="a link out of the folder"):
        check_folder(folder)


@pytest.mark.parametrize("name", ["README.md", "LICENSE"])
def test_only_inspect_rejects_irregular_model_card(
    package: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(package / name)
    assert f"{name}: a FIFO" in refused(capsys, "inspect", package)
    assert cli.run(["generate", str(package), "1", "--token-ids", "--max-new-tokens", "1", "--provider", "cpu"]) == 0


def test_user_named_irregular_files_are_rejected(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FIFO or a device is not a report, prefix or ONNX file; an open file descriptor is accepted."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "fifo", tmp_path / "zero"):
        assert "not a regular file" in refused(capsys, "report", "show", path)
        assert "not a regular file" in refused(capsys, "generate", package, "hi", "--prefix", path)
        assert "not a regular file" in refused(capsys, "place", path)
        refused(capsys, "inspect", path)
        refused(capsys, "generate", path, "hi")
    assert cli.run(["place", str(package), "--provider", "cpu", "--report", "run.json"]) == 0
    with (tmp_path / "run.json").open("rb") as file:
        assert cli.run(["report", "show", f"/dev/fd/{file.fileno()}"]) == 0


# Text and JSON that somebody else wrote: what is absurd is refused as damaged, by every reader


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "read", "kind"),
    [
        ("manifest.json", lambda file: read_manifest(file.parent), PackageError),
        ("generation_config.json", lambda file: stop_token_ids(file.parent), PackageError),
        ("config.json", lambda file: stop_token_ids(file.parent), PackageError),
        (FILE, lambda file: suggestion(file.parent), PackageError),
        ("config.json", read_json, PackageError),
        ("talk.json", read_conversation, UsageError),
    ],
)
def test_deeply_nested_json_error_names_file(tmp_path, name, read, kind):
    file = tmp_path / name
    file.write_text(DEEP, encoding="utf-8")
    with pytest.raises(kind) as raised:
        read(file)
    assert name in str(raised.value)
