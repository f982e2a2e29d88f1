"""Optimum exports, its exporter, and packages in ORTModelForCausalLM; run by `make test-optimum` or skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import partita
from partita.package.folder import read_manifest
from tests.export.breadth import recipes
from tests.optimum.conftest import ROUNDED, TYPES, Ask, generated, known

pytestmark = pytest.mark.heavy
GROUPED = ("phi3",)
"""Types with fewer KV heads than heads for which optimum-onnx 0.1.0 takes as many: it runs no graph of theirs, not even
its own."""
PRECISIONS = ("fp16", "int8")


def tokens_of(folder: Path, text: dict[str, list[int]], **choice: Any) -> list[int]:
    with partita.load(folder, "cpu", **choice) as model:
        answer = model.generate(text["prompt"], max_new_tokens=len(text["tokens"]), stop_token_ids=()).run()
        return list(answer.results[0].tokens)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "optimum") for kind in TYPES), *(("llama", name) for name in ("whole", "pair", "merged"))],
)
def test_optimum_exports_match_transformers_tokens(made: Path, kind: str, layout: str) -> None:
    """Without past; separate graphs for the first and later steps; merged with use_cache_branch."""
    text = known(made, kind)
    assert tokens_of(made / kind / layout, text) == text["tokens"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ROUNDED)
def test_fp16_and_int8_graphs_match_optimum_tokens(
    made: Path, said_by_optimum: dict[str, Any], kind: str, precision: str
) -> None:
    (graph,) = (made / kind / precision).glob("*.onnx")
    found = tokens_of(graph.parent, known(made, kind))
    assert found == said_by_optimum[f"{kind}/{precision}"]
    assert precision == partita.inspect(graph.parent).model.precision


@pytest.mark.parametrize("kind", TYPES)
def test_optimum_exporter_writes_verified_package(made: Path, kind: str, tmp_path: Path) -> None:
    text = known(made, kind)
    found = partita.export(made / kind / "checkpoint", tmp_path / "out", exporter="optimum", max_length=64)
    manifest = read_manifest(found.path)
    assert manifest.verification.status == "verified" and manifest.graph.attention == "optimum"
    assert all(state.growing_axis == 2 for state in manifest.graph.states) and manifest.graph.states
    assert "optimum-onnx" in found.attention_reason and "optimum-onnx" in manifest.toolchain
    assert tokens_of(found.path, text) == text["tokens"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def growing(made: Path, ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ORTModelForCausalLM generates of packages with a growing cache, by type."""
    out = tmp_path_factory.mktemp("growing-")
    folders = []
    for kind in TYPES:
        partita.export(made / kind / "checkpoint", out / kind / "package", cache="growing", max_length=64)
        folders.append(str(out / kind / "package"))
    return {name.partition("/")[0]: said for name, said in generated(ask, folders, made, out / "said.json").items()}


@pytest.mark.parametrize("kind", TYPES)
def test_growing_cache_package_matches_export_in_ortmodelforcausallm(
    made: Path, growing: dict[str, Any], said_by_optimum: dict[str, Any], kind: str
) -> None:
    if kind in GROUPED:
        for said in (growing[kind], said_by_optimum[f"{kind}/optimum"]):
            assert "Got invalid dimensions for input: past_key_values" in said
        return
    assert growing[kind] == known(made, kind)["tokens"] == said_by_optimum[f"{kind}/optimum"]


def test_growing_cache_package_runs_with_io_binding(made: Path, ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "llama" / "package"
    partita.export(made / "llama" / "checkpoint", folder, cache="growing", max_length=64)
    said = generated(ask, [str(folder)], made, tmp_path / "said.json", io_binding=True)
    assert said["llama/package"] == known(made, "llama")["tokens"]


@pytest.mark.parametrize("kind", ["bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus"])
def test_optimum_exporter_verifies_encoder_decoder_decoders(python: Path, kind: str, tmp_path: Path) -> None:
    """Their code needs the number of cached tokens, so Partita's own graph does not match."""
    folder = recipes.save(tmp_path / "checkpoint", kind)
    found = partita.export(folder, tmp_path / "out", exporter="optimum", max_length=32)
    assert read_manifest(found.path).verification.status == "verified"


def test_optimum_graph_mismatch_raises_parity_error(python: Path, tmp_path: Path) -> None:
    folder = recipes.save(tmp_path / "checkpoint", "bigbird_pegasus")
    with pytest.raises(partita.ParityError, match="optimum wrote the graph"):
        partita.export(folder, tmp_path / "out", exporter="optimum", max_length=32)
    assert not (tmp_path / "out").exists()
