"""Foreign model folders in every environment: growing and fixed-size KV caches, on each ONNX Runtime version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.contract.cases import cases, packages_of
from tests.contract.commands import Partita, chain_entry, honoured, nodes_on, refused

SAMPLES = Path(__file__).parents[1] / "foreign" / "samples"
KNOWN = json.loads((SAMPLES / "tokens.json").read_text(encoding="utf-8"))
ROUNDED = json.loads((SAMPLES / "genai-int4-cpu" / "tokens.json").read_text(encoding="utf-8"))
TOKENS = {
    "optimum": KNOWN["tokens"],
    "merged": KNOWN["tokens"],
    "genai-fp32-cpu": KNOWN["tokens"],
    "genai-int4-cpu": ROUNDED["tokens"],
    "genai-int4-webgpu": ROUNDED["tokens"],
}
"""What follows the prompt, by layout. The graphs of 4 bits have the same integers."""
COUNT = 6


def said(partita: Partita, folder: Path, provider: str, *more: object) -> list[int]:
    """The tokens that `generate` prints."""
    return [int(word) for word in honoured(partita(*command(folder, provider), *more)).out.split()]


def command(folder: Path, provider: str) -> tuple[object, ...]:
    """`generate` with the known prompt."""
    prompt = ",".join(map(str, KNOWN["prompt"]))
    return ("generate", folder, prompt, "--token-ids", "-n", COUNT, "--provider", provider)


def folder_of(layout: str, out: Path) -> Path:
    """A sample folder with its configuration."""
    shutil.copytree(SAMPLES / layout, out / layout)
    if layout == "merged":
        shutil.copy(SAMPLES / "optimum" / "config.json", out / layout)
    return out / layout


def layouts(environment):
    """A cache that grows or a fixed one: the other than is tested on the environment's provider. For the main
    environment tests/foreign/test_generate.py has all of them."""
    return [("genai-int4-cpu",) if environment.name == "openvino" else ("optimum",)]


@cases("layout", layouts, heavy=("main", "plugins"))
def test_cpu_gives_known_tokens(environment, layout, partita, tmp_path):
    assert said(partita, folder_of(layout, tmp_path), "cpu") == TOKENS[layout][:COUNT]


@cases("target, layout", packages_of("foreign"), sample=True)
def test_provider_with_cpu_gives_cpu_tokens(environment, target, layout, partita, tmp_path):
    report = tmp_path / "report.json"
    tokens = said(partita, folder_of(layout, tmp_path), f"{target.provider},cpu", "--report", report)
    assert tokens == TOKENS[layout][:COUNT]
    content = json.loads(report.read_text())
    assert chain_entry(content, environment, target.ort_name)["status"] == "active"
    assert nodes_on(content, target.ort_name) > 0


PLAIN = """
from pathlib import Path
from tests.foreign.reference_loop import plain_tokens
print(json.dumps(plain_tokens(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4:], (1, 16))))
"""
"""Greedy tokens of a folder's model on some providers, without Partita."""


def plain_arguments(folder: Path, ort_name: str) -> tuple[object, ...]:
    return folder / "model.onnx", json.dumps(KNOWN["prompt"]), COUNT, ort_name, "CPUExecutionProvider"


@cases("target, layout", packages_of("foreign_others"))
@pytest.mark.heavy
def test_differing_tokens_match_plain_onnx_runtime_loop(environment, target, layout, partita, plain, tmp_path):
    """The provider itself computes other tokens than the CPU here; `verify --reference` detects it."""
    folder, report = folder_of(layout, tmp_path), tmp_path / "report.json"
    tokens = said(partita, folder, f"{target.provider},cpu", "--report", report)
    done = honoured(plain(PLAIN, *plain_arguments(folder, target.ort_name)))
    assert tokens == json.loads(done.out.splitlines()[-1]) != TOKENS[layout][:COUNT]
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > nodes_on(content, "CPUExecutionProvider") > 0
    assert content["cache"]["copied_bytes"] == 0


@cases("target, layout", packages_of("foreign_ends"))
@pytest.mark.heavy  # tests/commands/test_signals.py and tests/serve/test_ending.py have processes that end
def test_crash_of_provider_exits_3_with_signal_name(environment, target, layout, partita, plain, tmp_path):
    folder = folder_of(layout, tmp_path)
    assert plain(PLAIN, *plain_arguments(folder, target.ort_name)).code < 0
    done = partita(*command(folder, f"{target.provider},cpu"))
    assert done.code == 3 and f"partita: {target.provider}: " in done.err, done
    assert "it was killed by SIG" in done.err, done
    begun = [int(word) for word in done.out.split()]
    assert begun == TOKENS[layout][: len(begun)]


@cases("target, layout", packages_of("foreign_lacks"), sample=True)
def test_missing_device_feature_is_named(environment, target, layout, partita, tmp_path):
    folder = folder_of(layout, tmp_path)
    for asked in (command(folder, f"{target.provider},cpu"), ("place", folder, "--provider", f"{target.provider},cpu")):
        refused(partita(*asked), "the device cannot run it: ", "requires f16")


@cases("layout", lambda environment: [("genai-fp32-cpu",)], heavy=("main", "webgpu", "qnn", "plugins"))
def test_hub_cache_snapshot_gives_known_tokens(environment, layout, partita, tmp_path):
    """Snapshot files are links to blobs outside the folder, which ONNX Runtime 1.24 does not follow itself."""
    home = tmp_path / "models--tiny"
    snapshot, blobs = home / "snapshots" / "1", home / "blobs"
    snapshot.mkdir(parents=True)
    folder_of(layout, tmp_path).rename(blobs)
    for file in sorted(blobs.iterdir()):
        (snapshot / file.name).symlink_to(file.rename(blobs / f"blob-{file.name}"))
    assert said(partita, snapshot, "cpu") == TOKENS[layout][:COUNT]
