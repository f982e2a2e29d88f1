"""Weight variants of onnx-community repositories, and GroupQueryAttention graphs in their layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

import partita
from partita.cli import run
from partita.dtypes import PRECISIONS
from partita.foreign.folder import open_folder
from partita.library.inspecting import read
from tests.foreign.conftest import KNOWN, SAMPLES, Sample
from tests.foreign.test_bad_input import altered
from tests.foreign.test_generate import generated

TOKENS = KNOWN["tokens"]
CONFIGS = ("config.json", "generation_config.json")


@pytest.mark.parametrize(("bits", "precision"), [((2,), "int2"), ((8, 8, 4), "int8"), ((4, 8), "int4")])
def test_precision_is_bit_width_of_most_quantised_weights(
    bits: tuple[int, ...], precision: str, sample: Sample
) -> None:
    """In a merged decoder, all quantised weights are in control-flow subgraphs."""

    def pack(model: onnx.ModelProto) -> None:
        for body in (body for node in model.graph.node for attribute in node.attribute for body in [attribute.g]):
            products = [node for node in body.node if node.op_type == "MatMul"]
            for node, width in zip(products, bits, strict=False):
                node.op_type, node.domain = "MatMulNBits", "com.microsoft"
                node.attribute.append(onnx.helper.make_attribute("bits", width))

    folder = altered(sample("merged"), pack, "decoder_model_merged.onnx")
    manifest = open_folder(folder)
    assert manifest.graph.precision == precision
    assert manifest.is_rounded and manifest.tolerance == PRECISIONS["int4"].tolerance
    assert read(folder).model.precision == precision


def test_gqa_graph_in_hub_layout_matches(tmp_path: Path) -> None:
    """Graph and weights are under onnx/, config.json above."""
    (tmp_path / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(SAMPLES / "genai-fp32-cpu" / name, tmp_path / "onnx")
    for name in CONFIGS:
        shutil.copy(SAMPLES / "optimum" / name, tmp_path)
    manifest = open_folder(tmp_path)
    assert manifest.foreign is not None and manifest.foreign.layout == "transformers.js"
    assert manifest.graph.attention == "gqa" and all(state.in_place for state in manifest.graph.states)
    assert generated(tmp_path) == TOKENS


def windowed(model: onnx.ModelProto, **more: int) -> None:
    """Give attention a window of 4 tokens, and further attributes."""
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            kept = [attribute for attribute in node.attribute if attribute.name != "local_window_size"]
            del node.attribute[:]
            told = {"local_window_size": 4, **more}
            node.attribute.extend([*kept, *(onnx.helper.make_attribute(*each) for each in told.items())])
    for port in model.graph.input:
        if port.name.startswith("past"):
            port.type.tensor_type.shape.dim[3].dim_value = 16


@pytest.mark.parametrize("rows", [None, 4, 7], ids=["open", "of the window", "more than the window"])
def test_rolling_window_cache_matches_full_cache(sample: Sample, rows: int | None) -> None:
    """The cache has the size of the window unless the graph declares another size."""

    def narrowed(model: onnx.ModelProto) -> None:
        windowed(model, sliding_window_cache=1)
        for port in (*model.graph.input, *model.graph.output):
            if port.name.startswith(("past", "present")) and rows:
                port.type.tensor_type.shape.dim[2].dim_value = rows

    whole = altered(sample("genai-fp32-cpu"), windowed)
    wanted = generated(whole)
    folder = altered(whole, narrowed)
    states = open_folder(folder).graph.states
    assert {(state.rolling, state.shape[2]) for state in states} == {(True, rows or 4)}
    assert generated(folder) == generated(folder, chunk=3) == wanted != TOKENS


def test_placement_limits_apply_to_selected_variant(hub_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(hub_folder), "5,6,7", "--token-ids", "-n", "2", "--provider", "cpu", "--variant", "uint8"]
    assert run(["generate", *words, "--max-copies", "0"]) == 0, capsys.readouterr().err


def test_cuda_dry_run_places_cache_in_device_memory(stand_ins: Path) -> None:
    report = partita.place(SAMPLES / "genai-fp16-cuda", "cuda,cpu", dry_run=True, probe_seconds=0, runs=2)
    cache = report.cache
    assert cache is not None and set(cache.memories) == {"Cuda"}
    assert (cache.states, cache.in_place_states) == (2, 2)
    crossing = {copy.name for phase in report.phases for copy in phase.copies}
    assert not [name for name in crossing if "past" in name or "present" in name], "the cache crosses to the host"
