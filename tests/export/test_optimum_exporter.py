"""`--exporter optimum` with a script in place of optimum's environment; tests/optimum has the real exporter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import partita
from partita import cli
from partita.errors import InstallationError, ParityError, UnsupportedModelError, UsageError
from partita.export import optimum
from partita.export.checkpoint.description import open_checkpoint
from partita.export.optimum import with_optimum_remedy
from partita.export.optimum_child import config_for_4
from partita.export.options import ExportOptions, check_options
from partita.package.folder import check_files, read_manifest
from tests.commands.test_cli import child_environment
from tests.conftest import Exported, TinyCheckpoint
from tests.export.breadth import recipes

PLAYED = """
import json, os, shutil, sys, time
from pathlib import Path

assert sys.argv[1] == "-I" and Path(sys.argv[2]).name == "optimum_child.py"
request = json.loads(sys.argv[3])
versions = {"optimum-onnx": "9.9", "transformers": "4.1"}
covers = request["model_type"] in KNOWN
found = {"versions": versions, "covers": covers}
if MODE == "crash":
    print("something went wrong inside", flush=True)
    os.abort()
if MODE == "hang":
    Path(PLACE, "begun").write_text(str(os.getpid()))
    time.sleep(600)
if MODE == "error":
    found = {"error": "RuntimeError: it does not trace"}
if "out" in request and covers and MODE == "copy":
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(Path(PLACE, "ready", name), request["out"])
    assert Path(request["checkpoint"], "config.json").is_file()
Path(request["answer"]).write_text(json.dumps(found))
"""
Play = Callable[..., Path]
NO_TARGET: dict[str, Any] = {"cache": "growing"}
"""With which no provider is looked for, and which says of optimum's graphs nothing new."""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Have a script stand for the interpreter of optimum's environment."""

    def playing(mode: str, known: tuple[str, ...] = ("llama",)) -> Path:
        place = tmp_path / "environment"
        place.mkdir(exist_ok=True)
        script, program = place / "played.py", place / "python"
        script.write_text(f"KNOWN, MODE, PLACE = {known!r}, {mode!r}, {str(place)!r}\n{PLAYED}", encoding="utf-8")
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv(optimum.VARIABLE, str(program))
        return place

    return playing


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """OUT, alone in its folder."""
    (tmp_path / "outs").mkdir()
    return tmp_path / "outs" / "package"


def test_optimum_graph_is_verified_and_published(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, play: Play, out: Path
) -> None:
    """The input is a package with a growing cache: its port names equal those of optimum."""
    checkpoint = tiny_checkpoint("llama")
    place = play("copy")
    (place / "ready").symlink_to(exported(checkpoint, cache="growing"))
    found = partita.export(checkpoint, out, exporter="optimum", max_length=32)
    manifest = read_manifest(out)
    check_files(out, manifest, hashes=True)
    assert (manifest.verification.status, manifest.graph.attention) == ("verified", "optimum")
    assert manifest.toolchain["optimum-onnx"] == "9.9" and manifest.toolchain["transformers of optimum"] == "4.1"
    assert found.attention_reason == "exported by optimum-onnx 9.9, transformers of optimum 4.1"
    assert {state.shape[2] for state in manifest.graph.states} == {32} and manifest.source.parameters > 10_000
    assert [path.name for path in out.parent.iterdir()] == ["package"]
    (graph,) = partita.inspect(out).graphs
    assert {port.role for port in graph.inputs} == {"tokens", "positions", "mask"}


@pytest.mark.parametrize(
    ("mode", "known", "message"),
    [
        ("crash", ("llama",), "its process ended with code -6: something went wrong inside"),
        ("error", ("llama",), "optimum's exporter failed: RuntimeError: it does not trace"),
        ("copy", ("gpt2",), "optimum-onnx 9.9 does not export decoders of type llama"),
    ],
)
def test_optimum_failure_prints_single_line_and_leaves_no_files(
    tiny_checkpoint: TinyCheckpoint, play: Play, out: Path, capsys: Any, mode: str, known: tuple[str, ...], message: str
) -> None:
    play(mode, known)
    words = ["export", str(tiny_checkpoint("llama")), str(out), "--exporter", "optimum", "--cache", "growing"]
    assert cli.run(words) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1
    assert list(out.parent.iterdir()) == []


def test_terminated_optimum_export_leaves_nothing(tiny_checkpoint: TinyCheckpoint, play: Play, out: Path) -> None:
    begun = play("hang") / "begun"
    words = ["export", str(tiny_checkpoint("llama")), str(out), "--exporter", "optimum", "--cache", "growing"]
    environ = {**child_environment(), optimum.VARIABLE: os.environ[optimum.VARIABLE]}
    running = subprocess.Popen([sys.executable, "-m", "partita", *words], env=environ, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not begun.exists() or not begun.read_text():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    running.wait(60)
    assert list(out.parent.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "transformers before 4.58"),
        ("/no/such/python", "/no/such/python"),
        (sys.executable, "lacks the module optimum"),  # the real script in this environment
    ],
)
def test_missing_optimum_environment_error_has_pip_command(
    tiny_checkpoint: TinyCheckpoint, out: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, words: str
) -> None:
    monkeypatch.setattr(optimum, "FOLDER", Path("no-such-folder"))
    monkeypatch.delenv(optimum.VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(optimum.VARIABLE, given)
    with pytest.raises(
        InstallationError, match="created by: pip install optimum-onnx onnxruntime accelerate"
    ) as caught:
        partita.export(tiny_checkpoint("llama"), out, exporter="optimum", **NO_TARGET)
    assert words in str(caught.value) and list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "`exporter=optimum` supports only fp32 and fp16"),
        ({"attention": "gqa"}, "writes a growing cache: omit `cache` and `attention`"),
        ({"static_shapes": True}, "does not support `static_shapes=True`"),
    ],
)
def test_options_unsupported_by_optimum_raise_usage_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(ExportOptions("checkpoint", Path("out"), exporter="optimum", **options))


@pytest.mark.parametrize("known", ["rwkv", "gpt2", ""])
def test_unsupported_model_error_suggests_optimum_for_known_types(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    monkeypatch.setattr(optimum, "FOLDER", Path("no-such-folder"))
    monkeypatch.delenv(optimum.VARIABLE, raising=False)
    if known:
        play("copy", (known,))
    folder = recipes.save(tmp_path / "checkpoint", "rwkv")
    with pytest.raises(UnsupportedModelError, match="has no cache argument") as caught:
        partita.export(folder, tmp_path / "out", attention="gqa", max_length=32)
    suggests = "optimum's exporter supports the type; use it with: --exporter optimum" in str(caught.value)
    assert suggests is (caught.value.remedy is not None) is (known == "rwkv")


def test_parity_error_suggests_optimum_exporter(play: Play, tmp_path: Path) -> None:
    """bart needs the number of cached tokens, which the native exporter's graph lacks."""
    play("copy", ("bart",))
    folder = recipes.save(tmp_path / "checkpoint", "bart")
    with pytest.raises(ParityError, match="does not match the source model") as caught:
        partita.export(folder, tmp_path / "out", attention="gqa", precision="fp32", max_length=32)
    assert "optimum's exporter supports the type; use it with: --exporter optimum" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, UnsupportedModelError("it is so", option="batch_size")),  # the option that the error names is to blame
        ({"cache": "window"}, UnsupportedModelError("it is so")),
        ({"precision": "bf16"}, ParityError("it is not equal")),
    ],
)
def test_option_errors_do_not_suggest_optimum(
    tiny_checkpoint: TinyCheckpoint, play: Play, options: dict[str, Any], error: UnsupportedModelError | ParityError
) -> None:
    play("copy", ("llama",))
    checkpoint = open_checkpoint(str(tiny_checkpoint("llama")))
    asked = ExportOptions(str(checkpoint.folder), Path("out"), precision="fp32", attention="gqa")
    assert with_optimum_remedy(error, checkpoint, replace(asked, **options)) is error
    found = with_optimum_remedy(type(error)(error.message), checkpoint, asked)
    assert found.remedy is not None and found.remedy.options == ("--exporter", "optimum")


def test_config_is_converted_to_transformers_4_fields() -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    found = config_for_4({"dtype": "float32", "rope_parameters": scaled})
    assert found["rope_theta"] == 5e5 and found["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert found["torch_dtype"] == "float32"
    plain = config_for_4({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}})
    assert (plain["rope_theta"], plain["partial_rotary_factor"]) == (1e4, 0.5) and "rope_scaling" not in plain
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    several = config_for_4({"text_config": {"rope_parameters": kinds}})["text_config"]
    assert (several["rope_theta"], several["rope_local_base_freq"]) == (1e6, 1e4)
    assert several["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 7.0, "rope_scaling": None}
    assert config_for_4(older) == older and json.dumps(config_for_4(older))
