"""Folders of other exporters in every environment: caches that grow and that stay, in each ONNX Runtime."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.contract.cases import cases, packages_of
from tests.contract.commands import Partita, chain_entry, honoured, nodes_on

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
    prompt = ",".join(map(str, KNOWN["prompt"]))
    command = ("generate", folder, prompt, "--token-ids", "-n", COUNT, "--provider", provider, *more)
    return [int(word) for word in honoured(partita(*command)).out.split()]


def folder_of(layout: str, out: Path) -> Path:
    """A sample folder with its configuration."""
    shutil.copytree(SAMPLES / layout, out / layout)
    if layout == "merged":
        shutil.copy(SAMPLES / "optimum" / "config.json", out / layout)
    return out / layout


@cases("layout", lambda environment: [(layout,) for layout in TOKENS])
def test_the_cpu_gives_the_known_tokens(environment, layout, partita, tmp_path):
    assert said(partita, folder_of(layout, tmp_path), "cpu") == TOKENS[layout][:COUNT]


@cases("target, layout", packages_of("foreign"))
@pytest.mark.usefixtures("device")
def test_a_provider_gives_the_tokens_of_the_cpu(environment, target, layout, partita, tmp_path):
    report = tmp_path / "report.json"
    tokens = said(partita, folder_of(layout, tmp_path), f"{target.provider},cpu", "--report", report)
    assert tokens == TOKENS[layout][:COUNT]
    content = json.loads(report.read_text())
    assert chain_entry(content, environment, target.ort_name)["status"] == "active"
    assert nodes_on(content, target.ort_name) > 0
