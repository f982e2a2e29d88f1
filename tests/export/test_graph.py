"""Exported graphs: names, metadata, ports, states, static shapes, data file, opsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from partita.errors import UsageError
from partita.export.pipeline import ExportOptions, check_options, export
from partita.export.publish import ExportResult
from partita.options.export import Attention
from partita.package.folder import WEIGHTS, Manifest, read_manifest, sha256_of
from tests.conftest import MODELS, Exported, TinyCheckpoint

LENGTH, OPSET = 64, 18
LOWERINGS = ["gqa", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("onnx24", "primitives"))]


def unverified(checkpoint: Path, out: Path, **options: object) -> ExportResult:
    return export(
        ExportOptions(str(checkpoint), out, verify=False, **{"max_length": LENGTH, **options}),  # type: ignore[arg-type]
        replay=lambda folder, manifest: pytest.fail("`verify=False` must not replay"),
    )


def load(folder: Path, file: str) -> onnx.ModelProto:
    return onnx.load(folder / file, load_external_data=False)


def metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {p.key: p.value for p in node.metadata_props}


@pytest.fixture(scope="module")
def dynamic(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    out = tmp_path_factory.mktemp("graph") / "package"
    return out, unverified(tiny_checkpoint("gemma3_text"), out).manifest


def test_nodes_have_unique_module_names_class_and_source(dynamic: tuple[Path, Manifest]) -> None:
    graph = load(dynamic[0], "model.onnx").graph
    nodes = {node.name: metadata(node) for node in graph.node}
    assert len(nodes) == len(graph.node) and all(nodes)
    assert "model.layers.1.mlp.gate_proj/MatMul" in nodes
    for node in graph.node:
        assert node.name.startswith(f"{metadata(node)['partita.module'] or 'graph'}/{node.op_type}")
    attention = nodes["model.layers.0.self_attn/GroupQueryAttention"]
    assert attention["partita.class"] == "Gemma3Attention"
    file, line = attention["partita.source"].rsplit(":", 1)
    assert file == "transformers/models/gemma3/modeling_gemma3.py" and int(line) > 0
    assert all({"partita.module", "partita.class", "partita.source"} <= set(m) for m in nodes.values())


def test_manifest_lists_ports_states_and_cache_size(dynamic: tuple[Path, Manifest]) -> None:
    manifest = dynamic[1]
    graph = manifest.graph.files[0]
    assert {p.role: (p.shape, p.dtype) for p in graph.inputs} == {
        "tokens": ((1, "sequence_length"), "int64"),
        "positions": ((1, "sequence_length"), "int32"),
        "logits_rows": (("logits_rows",), "int64"),
        "last_index": ((1,), "int32"),
        "total_length": ((), "int32"),
    }
    assert [(p.name, p.shape) for p in graph.outputs] == [("logits", (1, "logits_rows", 288))]
    assert [s.past for s in manifest.graph.states[:2]] == ["past_key_values.0.key", "past_key_values.0.value"]
    assert all(s.shape == (1, 2, LENGTH, 16) for s in manifest.graph.states)
    assert [s.window for s in manifest.graph.states[::2]] == [8, None]
    assert manifest.graph.cache_bytes == 4 * 2 * LENGTH * 16 * 4
    written, states = load(dynamic[0], "model.onnx").graph, manifest.graph.states
    assert {v.name for v in written.input} == {p.name for p in graph.inputs} | {s.past for s in states}
    assert {v.name for v in written.output} == {p.name for p in graph.outputs} | {s.present for s in states}


@pytest.mark.parametrize("attention", LOWERINGS)
def test_static_graphs_have_no_symbolic_sizes(tiny_checkpoint: TinyCheckpoint, tmp_path: Path, attention: str) -> None:
    options = {"static_shapes": True, "prefill_chunk": 4, "attention": attention, "batch_size": 2}
    manifest = unverified(tiny_checkpoint("mistral"), tmp_path / "out", **options).manifest
    assert [(f.file, f.phase, f.sequence_length) for f in manifest.graph.files] == [
        ("prefill.onnx", "prefill", 4),
        ("decode.onnx", "decode", 1),
    ]
    for file in manifest.graph.files:
        graph = load(tmp_path / "out", file.file).graph
        values = [*graph.input, *graph.output, *graph.value_info]
        symbolic = [
            (v.name, d.dim_param) for v in values for d in v.type.tensor_type.shape.dim if not d.HasField("dim_value")
        ]
        assert symbolic == []


def test_static_graphs_share_the_data_file(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """The prefill chunk is limited to the cache length."""
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=1)
    unverified(checkpoint, tmp_path / "single")
    summary = unverified(checkpoint, tmp_path / "pair", static_shapes=True, prefill_chunk=1000)
    sizes = {name: (tmp_path / name / WEIGHTS).stat().st_size for name in ("single", "pair")}
    assert sizes["single"] == sizes["pair"]
    places = []
    for file in ("prefill.onnx", "decode.onnx"):
        graph = load(tmp_path / "pair", file).graph
        places.append(
            {i.name: [(e.key, e.value) for e in i.external_data] for i in graph.initializer if i.external_data}
        )
    assert places[0] == places[1] and len(places[0]) > 5
    assert summary.manifest.graph.files[0].sequence_length == LENGTH
    assert any("`prefill_chunk=1000`" in note and str(LENGTH) in note for note in summary.notes)


def test_package_records_opset_source_files_and_model_max_length(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder, out = tiny_checkpoint("llama", num_hidden_layers=1, dtype="bfloat16"), tmp_path / "out"
    manifest = unverified(folder, out, opset=23, max_length=None).manifest
    opsets = {o.domain: o.version for o in load(out, "model.onnx").opset_import}
    assert opsets == manifest.graph.opsets == {"": 23, "com.microsoft": 1}
    assert manifest.graph.max_length == 256
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
        assert manifest.file(name) is not None
    source = manifest.source
    assert (source.model_type, source.architecture, source.dtype) == ("llama", "LlamaForCausalLM", "bfloat16")
    (weights,) = source.files
    assert (weights.name, weights.sha256) == ("model.safetensors", sha256_of(folder / "model.safetensors"))


@pytest.mark.parametrize("attention", LOWERINGS)
def test_symbolic_axes_match_manifest(
    tiny_checkpoint: TinyCheckpoint, dynamic: tuple[Path, Manifest], tmp_path: Path, attention: str
) -> None:
    folder, manifest = dynamic
    if attention != "gqa":
        folder = tmp_path / "out"
        manifest = unverified(tiny_checkpoint("llama", num_hidden_layers=1), folder, attention=attention).manifest
    (file,) = manifest.graph.files
    graph = load(folder, "model.onnx").graph
    ports = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)}
    for port in (*file.inputs, *file.outputs):
        assert tuple(size.dim_param or size.dim_value for size in ports[port.name]) == port.shape
    inner = {size.dim_param for value in graph.value_info for size in value.type.tensor_type.shape.dim}
    assert "sequence_length" in inner and not [name for name in inner if name.lstrip("2*").startswith("s7")]


def graphs(package: Path) -> list[onnx.ModelProto]:
    return [load(package, file.file) for file in read_manifest(package).graph.files]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        # softcaps, windows and norms on both sides; the others are variations
        *(pytest.param(name, {}, marks=() if name == "gemma2" else pytest.mark.heavy) for name in sorted(MODELS)),
        pytest.param("gemma3_text", {"static_shapes": True, "prefill_chunk": 6}, marks=pytest.mark.heavy),
    ],
)
def test_primitives_lowering_uses_only_opset_18_operators(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, options: dict[str, Any]
) -> None:
    package = exported(tiny_checkpoint(model_type), attention="primitives", **options)
    assert read_manifest(package).graph.opsets == {"": OPSET}
    for model in graphs(package):
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
        assert not model.functions
        for node in model.graph.node:
            assert node.domain == "" and onnx.defs.get_schema(node.op_type, OPSET, "").since_version <= OPSET, node.name
            known = onnx.defs.get_schema(node.op_type, OPSET, "")
            assert {a.name for a in node.attribute} <= set(known.attributes), node.name
            assert known.min_input <= len(node.input) <= known.max_input, node.name


def test_primitives_cache_is_updated_by_scatter_elements(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """One ScatterElements from past to present per state, which providers can run in place."""
    package = exported(tiny_checkpoint("llama"), attention="primitives")
    (model,), manifest = graphs(package), read_manifest(package)
    writers = {output: node for node in model.graph.node for output in node.output}
    for state in manifest.graph.states:
        node = writers[state.present]
        assert (node.op_type, node.input[0]) == ("ScatterElements", state.past)
    assert {port.role for port in manifest.graph.files[0].inputs} == {"tokens", "positions", "logits_rows"}


def test_float16_mask_excludes_empty_cache_positions(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """Zeros of an empty cache may score higher than real keys; their attention weight must be 0."""
    package = exported(tiny_checkpoint("llama", num_hidden_layers=1), attention="primitives", precision="fp16")
    (model,) = graphs(package)
    (lowest,) = {
        float(numpy_helper.to_array(tensor))
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT16 and tensor.dims == [] and numpy_helper.to_array(tensor) < -1e4
    }
    assert np.isfinite(np.float16(lowest)) and np.exp(np.float16(lowest) - np.float16(-100)) == 0


@pytest.mark.parametrize(
    ("attention", "opset", "said"),
    [
        ("onnx24", 23, "`attention=onnx24` needs opset 24 or newer"),
        ("auto", 17, "must be between 18 and 24"),
        ("auto", 25, "must be between 18 and 24"),
    ],
)
def test_unsupported_opset_is_a_usage_error(tmp_path: Path, attention: Attention, opset: int, said: str) -> None:
    options = ExportOptions("none", tmp_path / "out", attention=attention, opset=opset)
    with pytest.raises(UsageError, match=f"`opset={opset}`: {said}"):
        check_options(options)
