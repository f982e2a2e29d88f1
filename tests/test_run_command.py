"""`partita run`: any model, exported once into the cache folder, then text or a chat; `partita cache`."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from partita.cli import run
from partita.export.hub_id import HUB_ID
from partita.library import models
from tests.conftest import DEMO_CHECKPOINT

WORDS = ("Return the", "--raw", "--max-new-tokens", "4", "--provider", "cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / models.KIND


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("exported")

    monkeypatch.setattr(models, "run_export", refuse)


def texts(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The standard output of a command that succeeds."""
    assert run([str(each) for each in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded checkpoint as a package."""
    folder = tmp_path_factory.mktemp("exported") / "package"
    assert run(["export", str(DEMO_CHECKPOINT), str(folder), "--max-length", "64", "--no-verify"]) == 0
    return folder


def test_a_checkpoint_is_exported_once_and_again_when_it_has_changed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = shutil.copytree(DEMO_CHECKPOINT, tmp_path / "my-model")
    first = texts(capsys, "run", checkpoint, *WORDS)
    (package,) = cache.iterdir()
    assert first.strip() and package.name.startswith("my-model-auto-")
    with monkeypatch.context() as patch:
        patch.setattr(models, "run_export", None)
        assert texts(capsys, "run", checkpoint, *WORDS) == first
        patch.chdir(checkpoint)
        assert texts(capsys, "run", ".", *WORDS) == first
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
        assert texts(capsys, "run", checkpoint, "--max-new-tokens", 3, "--provider", "cpu").strip()
        patch.setattr(models, "run_export", lambda options, *others: (_ for _ in ()).throw(KeyError(options.precision)))
        for changed in ("config.json", None):
            if changed:
                os.utime(checkpoint / changed, (1, 1))
            with pytest.raises(KeyError, match="auto" if changed else "fp16"):
                models.folder_of(str(checkpoint), "auto" if changed else "fp16", "cpu")
    listed = texts(capsys, "cache", "list")
    assert package.name in listed and "fp32" in listed
    texts(capsys, "cache", "remove", package.name)
    assert texts(capsys, "cache", "list") == "" and not package.exists()


@pytest.mark.usefixtures("cache", "no_export")
def test_a_package_is_used_where_it_is(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = ("Return the", "--max-new-tokens", 4, "--provider", "cpu")
    assert texts(capsys, "run", exported, *WORDS) == texts(capsys, "generate", exported, *same)
    chatted = texts(capsys, "run", exported, *same)
    assert chatted == texts(capsys, "generate", exported, *same, "--chat")


@pytest.mark.usefixtures("cache", "no_export")
def test_a_folder_of_another_exporter_is_used_where_it_is(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "foreign")
    (folder / "manifest.json").unlink()
    assert models.folder_of(str(folder), "auto", None) == folder


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("absent", "hi"), 1, "no such folder, and not a hub id"),
        (("",), 2, "MODEL"),
        ((DEMO_CHECKPOINT, "--report", "r.json"), 2, "--report is for a prompt"),
        ((DEMO_CHECKPOINT, "hi", "--provider", "gpu9"), 2, "gpu9"),
        ((DEMO_CHECKPOINT, "hi", "--precision", "fp3"), 2, "fp3"),
        ((DEMO_CHECKPOINT / "config.json", "hi"), 1, "a file, not a checkpoint folder"),
        (("../owner/name@main", "hi"), 1, "not a hub id"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_bad_input_is_one_line(
    arguments: tuple[object, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err.splitlines()[-1] and "Traceback" not in err


def test_without_a_cache_folder_nothing_is_exported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARTITA_CACHE_DIR", "")
    assert run(["run", str(DEMO_CHECKPOINT), "hi"]) == 2
    assert "name one in PARTITA_CACHE_DIR" in capsys.readouterr().err
    assert run(["cache", "list"]) == 0
    assert run(["cache", "remove", "some"]) == 2


@pytest.mark.parametrize(
    ("given", "name", "revision"),
    [
        ("owner/name", "owner/name", None),
        ("owner/name@v1.0", "owner/name", "v1.0"),
        ("hf://owner/name@refs/pr/2", "owner/name", "refs/pr/2"),
        ("hf:/owner/name", "owner/name", None),
    ],
)
def test_hub_ids(given: str, name: str, revision: str | None) -> None:
    found = HUB_ID.fullmatch(given)
    assert found is not None and (found["name"], found["revision"]) == (name, revision)


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that a download uses: one repository with the embedded checkpoint."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path == "/api/models/me/tiny/revision/v1":
            files = [{"rfilename": each.name} for each in DEMO_CHECKPOINT.iterdir()]
            data, kind = json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": files}).encode(), "application/json"
        elif path == f"/api/models/me/tiny/tree/{COMMIT}":
            found = [(each.name, each.stat().st_size) for each in DEMO_CHECKPOINT.iterdir()]
            listed = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in found]
            data, kind = json.dumps(listed).encode(), "application/json"
        elif path == f"/me/tiny/resolve/{COMMIT}/{name}" and (DEMO_CHECKPOINT / name).is_file():
            data, kind = (DEMO_CHECKPOINT / name).read_bytes(), "application/octet-stream"
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for header, value in {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT, "Content-Type": kind}.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_downloaded_and_exported_once(hub: str, cache: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "partita", "run", "hf://me/tiny@v1", *WORDS]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 0 and first.stdout.strip(), first.stderr
    (package,) = cache.iterdir()
    assert package.name.startswith("tiny-v1-auto-")
    gone = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "nothing")}
    again = subprocess.run(command, env=gone, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    command[4] = "me/tiny@v2"
    absent = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert absent.returncode == 1 and "could not be downloaded" in absent.stderr and "Traceback" not in absent.stderr
