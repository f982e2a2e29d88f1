"""Contents that `inspect` reads from graphs of any exporter without weights; damage yields findings."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import partita
from partita.errors import PackageError
from partita.inspection.document import storage_text
from partita.inspection.records import Inspection
from partita.package.folder import MANIFEST, read_manifest
from partita.runtime.contents.build import licence_of
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint
from tests.foreign.conftest import SAMPLES
from tests.inspection.graphs import FLOAT, model, save, weight

MS = "com.microsoft"


@pytest.fixture(scope="module")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def int4(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"), precision="int4")


def kept(found: Inspection, module: str) -> list[str]:
    return [storage_text(each) for each in found.modules if each.module == module]


def test_inspect_of_package_matches_manifest_and_graph(package):
    found = partita.inspect(package)
    manifest, proto = read_manifest(package), onnx.load(package / "model.onnx", load_external_data=False)
    assert (found.kind, found.findings) == ("package", ())
    (graph,) = found.graphs
    counted = Counter((node.domain, node.op_type) for node in proto.graph.node)
    assert {(entry.domain, entry.operator): entry.nodes for entry in graph.operators} == counted
    assert graph.nodes == manifest.graph.files[0].nodes == len(proto.graph.node)
    assert graph.opsets == manifest.graph.opsets and graph.data_files == ("model.onnx.data",)
    assert {port.role for port in graph.inputs} == {port.role for port in manifest.graph.files[0].inputs}
    assert found.cache is not None and found.cache.size_bytes == manifest.graph.cache_bytes
    assert found.cache.bytes_per_token * manifest.graph.max_length == manifest.graph.cache_bytes
    padding = manifest.graph.weight_bytes - found.weights.size_bytes  # tensors begin at multiples of 4096 bytes
    assert 0 <= padding < 4096 * sum(kind.tensors for kind in found.weights.kinds)
    assert sum(module.parameters for module in found.modules) >= manifest.source.parameters
    assert {file.name for file in found.files} == {file.name for file in manifest.files}
    assert found.provenance.source_files[0].sha256 == manifest.source.files[0].sha256
    assert found.tokenizer.kind == "tokenizers" and found.tokenizer.model == "BPE" and found.tokenizer.chat_template
    assert found.licence.name is None and "README.md" in found.licence.source


def test_quantised_weights_are_listed_per_module(int4):
    found = partita.inspect(int4)
    manifest = read_manifest(int4)
    assert manifest.packed is not None
    rows = [module for module in found.modules if module.operator]
    assert sum(row.parameters for row in rows) == sum(kind.parameters for kind in manifest.packed.kinds)
    assert sum(row.size_bytes for row in rows) == sum(kind.size_bytes for kind in manifest.packed.kinds)
    assert {row.precision for row in rows} == {kind.precision for kind in manifest.packed.kinds}
    assert all(row.module for row in rows)
    (down,) = kept(found, "model.layers.0.mlp.down_proj")
    assert down.startswith("int4, MatMulNBits, blocks of")


def matmul_nbits(bits: int, *, zero_points: bool = True) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    inputs = ["x", "w", "s", *(["z"] if zero_points else [])]
    node = helper.make_node(
        "MatMulNBits", inputs, ["y"], "/model/layers.0/mlp/up_proj/MatMul_Q4", domain=MS,
        K=64, N=128, bits=bits, block_size=32,
    )  # fmt: skip
    weights = [weight("w", (128, 2, 4 * bits), np.uint8), weight("s", (256,)), weight("z", (128,), np.uint8)]
    return [node], weights if zero_points else weights[:2]


def dequantised(**attributes: Any) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], "w_dequantise", **attributes),
        helper.make_node("Transpose", ["d"], ["t"], "w_turn"),
        helper.make_node("MatMul", ["x", "t"], ["y"], "/model/layers.0/mlp/up_proj/MatMul"),
    ]
    return nodes, [weight("w", (128, 64), np.int8), weight("s", (128, 2) if attributes else ())]


def integer_matmul() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "x_q"),
        helper.make_node("MatMulInteger", ["q", "w", "qz", "z"], ["i"], "/model/layers.0/mlp/up_proj/MatMul_quant"),
        helper.make_node("Cast", ["i"], ["f"], "c", to=FLOAT),
        helper.make_node("Mul", ["f", "s"], ["y"], "m"),
    ]
    return nodes, [weight("w", (64, 128), np.int8), weight("z", (), np.int8), weight("s", ())]


def cast_to_float() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], "w_cast", to=FLOAT),
        helper.make_node("MatMul", ["x", "c"], ["y"], "/model/layers.0/mlp/up_proj/MatMul"),
    ]
    return nodes, [weight("w", (64, 128), np.float16)]


def bitsandbytes() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    node = helper.make_node(
        "MatMulBnb4", ["x", "w", "s"], ["y"], "/model/layers.0/mlp/up_proj/MatMul_Bnb4", domain=MS,
        K=64, N=128, block_size=64, quant_type=1,
    )  # fmt: skip
    return [node], [weight("w", (4096,), np.uint8), weight("s", (128,))]


def codes(kind: type[Any]) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Floats of 8 bits, or places of 4 bits in a table, as packages have them."""
    tabled = kind is ml_dtypes.uint4
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], "a", to=onnx.TensorProto.INT32 if tabled else FLOAT),
        *([helper.make_node("Gather", ["t", "c"], ["g"], "b")] if tabled else []),
        helper.make_node("Reshape", ["g" if tabled else "c", "sizes"], ["r"], "d"),
        helper.make_node("Mul", ["r", "s"], ["m"], "e"),
        helper.make_node("Reshape", ["m", "whole"], ["n"], "f"),
        helper.make_node("Cast", ["n"], ["o"], "h", to=onnx.TensorProto.BFLOAT16),
        helper.make_node("Cast", ["o"], ["v"], "i", to=FLOAT),
        helper.make_node("MatMul", ["x", "v"], ["y"], "/model/layers.0/mlp/up_proj/MatMul"),
    ]
    table = [weight("t", (16,))] if tabled else []
    return nodes, [weight("w", (64, 128), kind), weight("s", (2, 1, 128)), *table]


def unknown_operator() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    node = helper.make_node("Secret", ["x", "w"], ["y"], "/model/layers.0/mlp/up_proj/Secret", domain="of.nobody")
    return [node], [weight("w", (64, 128), np.uint8)]


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda: matmul_nbits(4), "int4, MatMulNBits, blocks of 32, zero points"),
        (lambda: matmul_nbits(8, zero_points=False), "int8, MatMulNBits, blocks of 32"),
        (lambda: dequantised(block_size=32, axis=1), "int8, DequantizeLinear, blocks of 32"),
        (dequantised, "int8, DequantizeLinear"),
        (integer_matmul, "int8, MatMulInteger, zero points"),
        (cast_to_float, "float16, computed in float32"),
        (bitsandbytes, "nf4, MatMulBnb4, blocks of 64"),
        (unknown_operator, "uint8, Secret"),
        (lambda: codes(ml_dtypes.uint4), "uint4, Gather, blocks of 32, computed in float32"),
        (lambda: codes(ml_dtypes.float8_e4m3fn), "float8e4m3fn, Cast, blocks of 32, computed in float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("external", [False, True], ids=["inside", "external"])
def test_weight_storage_of_other_exporters_is_listed_per_module(tmp_path, make, how, external):
    nodes, weights = make()
    path = save(model(nodes, weights, ("", MS, "of.nobody")), tmp_path / "model.onnx", external=external)
    found = partita.inspect(path)
    (row,) = [module for module in found.modules if module.module]
    assert (row.module, storage_text(row), row.parameters) == ("model.layers.0.mlp.up_proj", how, 64 * 128)
    stored = sum(len(tensor.raw_data) for tensor in make()[1])
    assert found.weights.size_bytes == stored
    if how.endswith("blocks of 32, computed in float32"):
        assert len(found.modules) == 1 and row.size_bytes == stored, "codes are one weight with their scales"
    assert found.contract is None and found.kind == "onnx file" and found.findings == ()


def test_tied_weight_counts_once_and_lists_both_modules(tmp_path):
    nodes = [
        helper.make_node("Gather", ["w", "ids"], ["e"], "/model/embed_tokens/Gather"),
        helper.make_node("Transpose", ["w"], ["t"], "turned"),
        helper.make_node("MatMul", ["e", "t"], ["y"], "/lm_head/MatMul"),
    ]
    path = save(model(nodes, [weight("w", (128, 64)), weight("ids", (2,), np.int64)]), tmp_path / "model.onnx")
    (row,) = partita.inspect(path).modules
    assert (row.module, row.shared_with, row.parameters) == ("model.embed_tokens", ("lm_head",), 128 * 64)


def test_subgraph_nodes_and_weights_are_counted(tmp_path):
    def body(name: str) -> onnx.GraphProto:
        node = helper.make_node("MatMul", ["x", "w"], [f"{name}_out"], "/model/layers.0/mlp/MatMul")
        out = helper.make_tensor_value_info(f"{name}_out", FLOAT, None)
        return helper.make_graph([node], name, [], [out], [weight("w", (64, 64))])

    nodes = [
        helper.make_node("Constant", [], ["c"], "c", value=weight("c", (1,), np.bool_)),
        helper.make_node("If", ["c"], ["y"], "optimum::if", then_branch=body("then"), else_branch=body("else")),
    ]
    found = partita.inspect(save(model(nodes, []), tmp_path / "decoder_model_merged.onnx"))
    (graph,) = found.graphs
    assert (graph.nodes, graph.subgraph_nodes) == (2, 2)
    assert {entry.operator: entry.nodes for entry in graph.operators} == {"MatMul": 2, "If": 1, "Constant": 1}
    assert sum(kind.tensors for kind in found.weights.kinds if kind.dtype == "float32") == 2
    assert found.weights.size_bytes == 2 * 64 * 64 * 4 + 1


def damage_manifest(folder: Path) -> str:
    (folder / MANIFEST).write_text("{", encoding="utf-8")
    return "manifest.json: damaged"


def remove_graph(folder: Path) -> str:
    (folder / "model.onnx").unlink()
    return "model.onnx: missing"


def cut_graph(folder: Path) -> str:
    data = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(data[: len(data) // 2])
    return "model.onnx: not a readable ONNX file (it is truncated, or not a protobuf message)"


def remove_weights(folder: Path) -> str:
    (folder / "model.onnx.data").unlink()
    return "weights file 'model.onnx.data' is missing"


def cut_weights(folder: Path) -> str:
    data = (folder / "model.onnx.data").read_bytes()
    (folder / "model.onnx.data").write_bytes(data[:-1000])
    return "is truncated"


def remove_answer(folder: Path) -> str:
    (folder / "known_answer.safetensors").unlink()
    return "known_answer.safetensors: missing"


def leave_the_folder(folder: Path) -> str:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return "../secret"


@pytest.mark.parametrize(
    "damage",
    [damage_manifest, remove_graph, cut_graph, remove_weights, cut_weights, remove_answer, leave_the_folder],
    ids=lambda damage: damage.__name__,
)
def test_damaged_package_yields_finding_and_remaining_contents(package, own_copy, damage: Callable[[Path], str]):
    folder = own_copy(package)
    expected = damage(folder)
    found = partita.inspect(folder)
    assert any(expected in finding.problem for finding in found.findings), found.findings
    assert found.kind == "package"
    assert found.tokenizer.model == "BPE" and found.model.model_type == "llama"
    if damage in (damage_manifest, remove_weights, cut_weights, remove_answer):
        assert found.graphs and found.weights.kinds


def test_inspect_error_identifies_non_package_input(tiny_checkpoint, tmp_path):
    with pytest.raises(PackageError, match="a checkpoint, not a package"):
        partita.inspect(tiny_checkpoint("llama"))
    with pytest.raises(PackageError, match="no such folder"):
        partita.inspect(tmp_path / "absent")
    (tmp_path / "run.json").write_text('{"schema": "partita.report/1"}', encoding="utf-8")
    with pytest.raises(PackageError, match="the report of a run"):
        partita.inspect(tmp_path / "run.json")
    (tmp_path / "text.onnx").write_text("no graph", encoding="utf-8")
    with pytest.raises(PackageError, match=r"text\.onnx: not a readable ONNX file"):
        partita.inspect(tmp_path / "text.onnx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PackageError, match="it has no manifest"):
        partita.inspect(tmp_path / "empty")


def test_onnx_folder_is_inspected_without_manifest(tmp_path):
    nodes, weights = matmul_nbits(4)
    save(model(nodes, weights, ("", MS)), tmp_path / "onnx" / "model_q4.onnx", external=True)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    found = partita.inspect(tmp_path)
    assert (found.kind, found.model.model_type) == ("onnx folder", "llama")
    assert [graph.file for graph in found.graphs] == ["onnx/model_q4.onnx"]
    assert {file.name for file in found.files} == {"config.json", "onnx/model_q4.onnx", "onnx/model_q4.onnx.data"}
    (finding,) = found.findings  # it is no decoder; what it holds is shown all the same
    assert "no input" in finding.problem and found.contract is None and found.modules


@pytest.mark.parametrize(
    ("name", "text", "licence"),
    [
        ("README.md", "---\nlicense: apache-2.0\ntags: [a]\n---\n# Model\n", "apache-2.0"),
        ("README.md", "---\r\nlicense: other\r\nlicense_name: llama3\r\nlicense_link: LICENSE\r\n---\r\n", "llama3"),
        ("README.md", "# Model\nlicense: mit\n", None),
        ("LICENSE", "\n   Apache License\n   Version 2.0\n", "Apache License"),
        ("notes.txt", "license: mit", None),
    ],
)
def test_licence_is_read_only_from_model_card_or_licence_file(tmp_path, name, text, licence):
    (tmp_path / name).write_bytes(text.encode())
    found = licence_of(tmp_path)
    assert found.name == licence
    assert found.source == name or (licence is None and "no licence" in found.source)


def test_inspect_does_not_import_onnxruntime_or_torch(package, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from partita.cli import run; "
        f"code = run(['inspect', {str(package)!r}, '--json', '--out', {str(tmp_path / 'out.json')!r}]); "
        "print(code, [name for name in ('torch', 'onnxruntime', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []", done.stderr


@pytest.mark.parametrize(
    ("sample", "layout", "module", "how"),
    [
        ("optimum", "optimum", "model.layers.0.mlp.up_proj", "float32"),
        ("genai-int4-cpu", "onnxruntime-genai", "model.layers.0.mlp.up_proj", "int4, MatMulNBits, blocks of 32"),
    ],
)
def test_contract_of_foreign_folder_is_inferred(sample, layout, module, how):
    found = partita.inspect(SAMPLES / sample)
    assert (found.kind, found.model.layout, found.findings) == ("onnx folder", layout, ())
    assert found.contract is not None and layout in found.contract.source and found.foreign is not None
    assert {port.role for port in found.graphs[0].inputs} >= {"tokens", "mask"}
    assert found.cache is not None and found.cache.bytes_per_token * found.contract.max_length == found.cache.size_bytes
    (kept_as,) = kept(found, module)
    assert kept_as.startswith(how)
    assert partita.inspect(SAMPLES / "optimum", against=SAMPLES / sample).changes or sample == "optimum"


def test_oversized_tensor_shape_is_reported_as_truncated_file(tmp_path):
    nodes, weights = cast_to_float()
    path = save(model(nodes, weights), tmp_path / "model.onnx", external=True)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].dims[:] = [1 << 40, 1 << 20]
    path.write_bytes(proto.SerializeToString())
    found = partita.inspect(path)
    assert found.weights.size_bytes == 1 << 61
    assert any("is truncated" in finding.problem for finding in found.findings)
