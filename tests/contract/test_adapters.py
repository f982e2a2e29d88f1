"""Rows with adapters of their own in every environment: each gets the tokens that numpy knows for its adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.cases import cases, packages_of
from tests.contract.commands import chain_entry, honoured, nodes_on, refused
from tests.runtime.handmade_packages import ALL, VOCAB, handmade, known_tokens

RANKS = {"loud": 3, "small": 1}
PROMPT = [(7 * i + 3) % VOCAB for i in range(17)]
NAMES = ["loud", None, "small", "small", "loud"]


def package(folder: Path, shapes: str) -> Path:
    return handmade(folder / "package", batch=3, shapes=shapes, adapters=RANKS)


@cases("target, shapes", packages_of("adapters"), sample=True)
@pytest.mark.usefixtures("device")
def test_each_row_has_the_tokens_of_its_adapter(environment, target, shapes, partita, tmp_path):
    source, out, report = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "report.json"))
    rows: list[dict[str, Any]] = [{"tokens": PROMPT, "adapter": name} for name in NAMES]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = ("--input", source, "--output", out, "--report", report)
    asked = ("--token-ids", "--max-new-tokens", 5, "--provider", f"{target.provider},cpu")
    honoured(partita("generate", package(tmp_path, shapes), *files, *asked))
    wanted = [known_tokens(PROMPT, 5, ALL, None if name is None else (name, RANKS[name])) for name in NAMES]
    assert [json.loads(line)["tokens"] for line in out.read_text("utf-8").splitlines()] == wanted
    assert wanted[0] != wanted[1] != wanted[2]
    content = json.loads(report.read_text("utf-8"))
    assert chain_entry(content, environment, target.ort_name)["status"] == "active"
    assert nodes_on(content, target.ort_name) > 0
    assert "lora_" not in json.dumps([phase["copies"] for phase in content["phases"]]), (
        "it is copied once, not per token"
    )


@cases("target, shapes", packages_of("constant_defaults"))
@pytest.mark.usefixtures("device")
def test_a_provider_that_would_not_read_an_adapter_is_refused(environment, target, shapes, partita, tmp_path):
    """Its tokens would be those of no adapter, or of nothing at all."""
    folder = package(tmp_path, shapes)
    done = partita("generate", folder, "1,2,3", "--token-ids", "--provider", f"{target.provider},cpu")
    refused(done, f"{target.provider} treats inputs with a default as constants", "--static-shapes")
