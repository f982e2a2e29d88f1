"""`partita run` with checkpoints, packages, GGUF files and hub models; the export cache, `cache` and `push`."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from partita.cli import run
from partita.errors import UsageError
from partita.library import model_cache
from partita.library.api import Audience
from partita.options.export import ExportOptions
from partita.package.folder import read_manifest, write_manifest
from tests.commands.test_cli import succeeds
from tests.conftest import DEMO_CHECKPOINT, TinyCheckpoint, require
from tests.foreign.conftest import SAMPLES
from tests.gguf_files import save_gguf
from tests.local_hub import Hub, local_hub

Partita = Callable[..., tuple[int, str, str]]
WORDS = ("Return the", "--raw", "--max-new-tokens", "4", "--provider", "cpu")
FOREIGN = SAMPLES / "optimum"
"""A decoder that optimum has exported."""
KNOWN = json.loads((FOREIGN.parent / "tokens.json").read_text(encoding="utf-8"))
IDS = (",".join(map(str, KNOWN["prompt"])), "--token-ids", "--max-new-tokens", "4", "--provider", "cpu")
FOREIGN_TEXT = " ".join(map(str, KNOWN["tokens"][:4])) + " \n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / model_cache.KIND


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("exported")

    monkeypatch.setattr(model_cache, "run_export", refuse)


def texts(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The standard output of a command that succeeds."""
    return succeeds(capsys, *arguments)[0]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Path:
    """One layer, with a tokenizer and a chat template."""
    return tiny_checkpoint("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The checkpoint as a package."""
    folder = tmp_path_factory.mktemp("exported") / "package"
    assert run(["export", str(checkpoint), str(folder), "--max-length", "64", "--no-verify"]) == 0
    return folder


def test_checkpoint_is_exported_once_and_again_after_change(cache, checkpoint, tmp_path, capsys, monkeypatch):
    checkpoint = shutil.copytree(checkpoint, tmp_path / "my-model")
    first = texts(capsys, "run", checkpoint, *WORDS)
    (package,) = cache.iterdir()
    assert first.strip() and package.name.startswith("my-model-auto-")
    with monkeypatch.context() as patch:
        patch.setattr(model_cache, "run_export", None)
        assert texts(capsys, "run", checkpoint, *WORDS) == first
        patch.chdir(checkpoint)
        assert texts(capsys, "run", ".", *WORDS) == first
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
        assert texts(capsys, "run", checkpoint, "--max-new-tokens", 3, "--provider", "cpu").strip()
        patch.setattr(
            model_cache, "run_export", lambda options, *others: (_ for _ in ()).throw(KeyError(options.precision))
        )
        with pytest.raises(KeyError, match="fp16"):
            model_cache.folder_of(str(checkpoint), "fp16", "cpu")
        os.utime(checkpoint / "config.json", (1, 1))
        (checkpoint / "README.md").write_text("of no interest")
        assert model_cache.folder_of(str(checkpoint), "auto", "cpu") == package, "the content of the config is the same"
        text = (checkpoint / "config.json").read_text()
        for file, content in (("config.json", text + "\n"), ("config.json", text), ("model.safetensors", None)):
            if content is None:
                os.utime(checkpoint / file, (1, 1))
            else:
                (checkpoint / file).write_text(content)
            if content == text:
                assert model_cache.folder_of(str(checkpoint), "auto", "cpu") == package
                continue
            with pytest.raises(KeyError, match="auto"):
                model_cache.folder_of(str(checkpoint), "auto", "cpu")
    listed = texts(capsys, "cache", "list")
    assert package.name in listed and "fp32" in listed
    texts(capsys, "cache", "remove", package.name)
    assert texts(capsys, "cache", "list") == "" and not package.exists()


@pytest.mark.parametrize("content", ["{", '{"schema": "partita.package/1", "unknown": 1}'])
def test_damaged_cached_package_is_listed_and_exported_again(cache, checkpoint, tmp_path, capsys, content):
    checkpoint = shutil.copytree(checkpoint, tmp_path / "my-model")
    first = texts(capsys, "run", checkpoint, *WORDS)
    (package,) = cache.iterdir()
    (package / "manifest.json").write_text(content)
    assert "damaged" in texts(capsys, "cache", "list")
    assert texts(capsys, "run", checkpoint, *WORDS) == first
    assert "damaged" not in texts(capsys, "cache", "list")


@pytest.mark.usefixtures("cache", "no_export")
def test_package_runs_without_export(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = ("Return the", "--max-new-tokens", 4, "--provider", "cpu")
    assert texts(capsys, "run", exported, *WORDS) == texts(capsys, "generate", exported, *same)
    chatted = texts(capsys, "run", exported, *same)
    assert chatted == texts(capsys, "generate", exported, *same, "--chat")


def test_gguf_file_is_exported_once(cache, tiny_checkpoint, tmp_path, capsys, monkeypatch):
    require("gguf")
    file = save_gguf(tmp_path / "tiny.gguf", tiny_checkpoint("llama"), "Q8_0")
    first = texts(capsys, "run", file, *WORDS)
    (package,) = cache.iterdir()
    assert package.name.startswith("tiny-auto-") and read_manifest(package).source.model_type == "llama"
    monkeypatch.setattr(model_cache, "run_export", None)
    assert texts(capsys, "run", file, *WORDS) == first


def test_model_commands_share_cached_export(cache, exported, capsys, monkeypatch):
    """The first command exports the model and the others reuse the export."""
    asked = []

    def copy(options: ExportOptions, *others: object) -> SimpleNamespace:
        asked.append((options.checkpoint, options.precision, options.target))
        shutil.copytree(exported, options.out)
        return SimpleNamespace(notes=())

    monkeypatch.setattr(model_cache, "run_export", copy)
    model = (DEMO_CHECKPOINT, "--precision", "int8")
    short = ("--provider", "cpu", "--max-new-tokens", 4)
    text = texts(capsys, "generate", *model, "Return the", *short)
    assert text == texts(capsys, "generate", exported, "Return the", *short)
    assert text == texts(capsys, "run", *model, "Return the", *short, "--raw")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    assert texts(capsys, "chat", *model, *short).strip()
    assert "tokens/s" in texts(capsys, "bench", *model, "--against", exported, "--rounds", 1, *short)
    served: list[Path] = []

    def refuse(name: str, package: Path, *others: object, **more: object) -> None:
        served.append(package)
        raise UsageError(name)

    monkeypatch.setattr("partita.serve.served_package.ServedPackage", refuse)
    assert run(["serve", *map(str, (*model, exported)), "--provider", "cpu", "--port", "0"]) == 2
    assert "checkpoint" in capsys.readouterr().err
    (package,) = cache.glob("[!.]*")
    assert served == [package] and asked == [(str(DEMO_CHECKPOINT), "int8", "cpu")]


def test_concurrent_run_waits_for_export(cache, exported, monkeypatch):
    entered, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    exports = []

    def slow(options: ExportOptions, *others: object) -> SimpleNamespace:
        exports.append(options.out)
        entered.set()
        assert go_on.wait(60)
        shutil.copytree(exported, options.out)
        return SimpleNamespace(notes=())

    monkeypatch.setattr(model_cache, "run_export", slow)
    found: list[Path] = []
    heard = Audience(lambda text: waiting.set() if "waiting for it" in text else None)
    call = lambda: found.append(model_cache.folder_of(str(DEMO_CHECKPOINT), audience=heard))  # noqa: E731
    runs = [threading.Thread(target=call) for _ in range(2)]
    for each in runs:
        each.start()
        assert entered.wait(60)
    assert waiting.wait(60)
    go_on.set()
    for each in runs:
        each.join()
    assert len(exports) == 1 and found == exports * 2 and not list(cache.glob(".*lock"))


def test_missing_tokenizer_error_suggests_token_ids(exported, tmp_path, capsys):
    folder = shutil.copytree(exported, tmp_path / "package", ignore=shutil.ignore_patterns("tokenizer*"))
    manifest = read_manifest(folder)
    files = tuple(each for each in manifest.files if not each.name.startswith("tokenizer"))
    write_manifest(folder, manifest.model_copy(update={"files": files, "tokenizer": "none"}))
    assert run(["run", str(folder), "hi", "--provider", "cpu", "--raw"]) == 1
    assert "no tokenizer; pass the prompt as token ids" in (err := capsys.readouterr().err) and "--token-ids" in err
    short = ("--provider", "cpu", "--max-new-tokens", 3, "--token-ids")
    assert len(texts(capsys, "run", folder, "1,2,3", *short).split()) == 3


def test_run_requires_cache_folder(monkeypatch, capsys):
    monkeypatch.setenv("PARTITA_CACHE_DIR", "")
    assert run(["run", str(DEMO_CHECKPOINT), "hi"]) == 2
    assert "set PARTITA_CACHE_DIR to a folder" in capsys.readouterr().err
    assert run(["cache", "list"]) == 0
    assert run(["cache", "remove", "some"]) == 2


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    """A hub on this machine with the checkpoint."""
    with local_hub() as found:
        found.add("me/tiny", checkpoint)
        yield found


@pytest.fixture
def partita(hub: Hub, tmp_path: Path, cache: Path) -> Partita:
    """The command in a process of its own, with that hub; the exit code, stdout and stderr."""

    def call(*words: object, **variables: str) -> tuple[int, str, str]:
        at_hub = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x"}
        command = [sys.executable, "-m", "partita", *map(str, words)]
        environment = {**os.environ, **at_hub, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return call


def test_hub_model_is_exported_once_and_runs_offline(hub, partita, cache, tmp_path):
    command = ("run", "hf://me/tiny@v1", *WORDS)
    code, text, said = partita(*command)
    assert code == 0 and text.strip(), said
    (package,) = cache.glob("[!.]*")
    assert package.name.startswith("tiny-v1-auto-")
    assert read_manifest(package).source.checkpoint == f"me/tiny@{hub.commit('me/tiny')}"
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "nothing")}
    assert partita(*command, **gone)[:2] == (0, text), "without a connection: the commit that was found last"


@pytest.mark.usefixtures("cache")
def test_new_hub_commit_is_exported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(options: ExportOptions, *others: object) -> None:
        raise KeyError(options.checkpoint)

    monkeypatch.setattr(model_cache, "run_export", refuse)
    for sha in ("a" * 40, "b" * 40):
        info = SimpleNamespace(sha=sha, siblings=[])
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *given, info=info, **settings: info)
        with pytest.raises(KeyError, match=f"me/tiny@{sha}"):
            model_cache.folder_of("me/tiny", revision="v1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("me/tiny@v2",), "me/tiny@v2: the Hugging Face hub does not have this revision of the model"),
        (("me/tiny@v1", "--revision", "v2"), "--revision v2 differs from the revision in me/tiny@v1; give only one"),
        (("nothing",), "nothing: found neither a folder nor a model on the Hugging Face hub"),
        (("me/gated",), "gated on the Hugging Face hub; accept its conditions on https://huggingface.co/me/gated"),
    ],
)
def test_hub_errors_fail_with_message(hub: Hub, partita: Partita, words: tuple[str, ...], said: str) -> None:
    hub.add("me/gated", DEMO_CHECKPOINT)
    hub.has_gate.add("me/gated")
    code, text, err = partita("run", *words, "hi")
    last = err.splitlines()[-1]
    assert code in (1, 2) and text == "" and said in last and "Traceback" not in err, err
    assert code == 2 or "revision" in last or last.endswith("hf auth login")


def test_pushed_package_runs_without_export(hub, partita, exported, cache, capsys):
    code, text, said = partita("push", exported, "me/pushed", "--private")
    assert (code, text) == (0, f"{hub.url}/me/pushed/commit/{hub.commit('me/pushed')}\n"), said
    names = {each.name for each in read_manifest(exported).files}
    assert set(hub.repositories["me/pushed"]) == {*names, "manifest.json"} and hub.private == {"me/pushed"}
    code, text, said = partita("run", "me/pushed", *WORDS)
    assert (code, text) == (0, texts(capsys, "run", exported, *WORDS)), said
    assert not list(cache.glob("[!.]*")), "nothing was exported"
    assert partita("run", "me/pushed", *WORDS, HF_ENDPOINT="http://127.0.0.1:9")[:2] == (0, text)
    hub.read_only = True
    code, text, said = partita("push", exported, "me/pushed", "--quiet")
    assert (code, text) == (2, "") and said.count("\n") == 1
    assert "me/pushed: the hub rejected the upload" in said and said.endswith("may write: hf auth login\n")


@pytest.mark.parametrize("home", [".", "onnx"])
def test_hub_onnx_decoder_runs_without_export(home, hub, partita, cache, tmp_path):
    folder = tmp_path / "repository"
    (folder / home).mkdir(parents=True)
    for file in FOREIGN.iterdir():
        shutil.copy(file, folder / home if file.suffix == ".onnx" else folder)
    hub.add("me/onnx", folder)
    code, text, said = partita("run", "me/onnx", *IDS)
    assert (code, text) == (0, FOREIGN_TEXT), said
    if home == ".":
        assert partita("run", "me/onnx", *IDS, HF_ENDPOINT="http://127.0.0.1:9")[:2] == (0, text), "offline"
    assert not list(cache.glob("[!.]*")), "nothing was exported"


def test_only_selected_onnx_variant_is_downloaded(hub, partita, cache, tmp_path):
    folder = shutil.copytree(FOREIGN, tmp_path / "repository")
    (folder / "onnx").mkdir()
    for file in folder.glob("*.onnx"):
        for name in (file.name, f"{file.stem}_q4.onnx", f"{file.stem}_fp16.onnx"):
            shutil.copy(file, folder / "onnx" / name)
        file.unlink()
    hub.add("me/variants", folder)
    code, text, said = partita("run", "me/variants", *IDS, "--variant", "q4")
    taken = {each.rpartition("/")[2] for each in hub.requests if "/resolve/" in each and "/onnx/" in each}
    assert (code, text) == (0, FOREIGN_TEXT) and taken == {f"{file.stem}_q4.onnx" for file in FOREIGN.glob("*.onnx")}
    code, _, said = partita("run", "me/variants", *IDS, "--variant", "int8")
    assert code == 2 and "--variant int8: no such variant; me/variants has" in said, said


def test_push_rejects_invalid_package_or_repository(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(exported, tmp_path / "broken")
    (broken / "model.onnx").unlink()
    for words, said in (
        ((DEMO_CHECKPOINT, "me/x"), "a checkpoint, not a package"),
        ((broken, "me/x"), "missing from the package"),
        ((exported, "me/x/y"), "is not of the form OWNER/NAME"),
    ):
        assert run(["push", *map(str, words)]) in (1, 2)
        assert said in capsys.readouterr().err
