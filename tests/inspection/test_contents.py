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
    assert graph.operators == {f"{domain}:{name}".lstrip(":"): nodes for (domain, name), nodes in counted.items()}
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


def op(kind: str, ports: str, name: str = "n", **attributes: Any) -> onnx.NodeProto:
    """A node from `domain:operator` and `inputs -> outputs`."""
    domain, _, operator = kind.rpartition(":")
    inputs, outputs = (names.split() for names in ports.split(" -> "))
    return helper.make_node(operator, inputs, outputs, name, domain=domain, **attributes)


UP = "/model/layers.0/mlp/up_proj"
Form = tuple[list[onnx.NodeProto], dict[str, tuple[Any, ...]]]
"""Nodes, and name -> type and shape of each weight."""


def matmul_nbits(bits: int, ports: str) -> Form:
    node = op(f"{MS}:MatMulNBits", f"{ports} -> y", f"{UP}/MatMul_Q4", K=64, N=128, bits=bits, block_size=32)
    weights = {"w": (np.uint8, 128, 2, 4 * bits), "s": (np.float32, 256), "z": (np.uint8, 128)}
    return [node], {name: weights[name] for name in ports.split()[1:]}


def dequantised(scale: tuple[int, ...], **attributes: Any) -> Form:
    nodes = [
        op("DequantizeLinear", "w s -> d", **attributes),
        op("Transpose", "d -> t"),
        op("MatMul", "x t -> y", f"{UP}/MatMul"),
    ]
    return nodes, {"w": (np.int8, 128, 64), "s": (np.float32, *scale)}


def codes(kind: type[Any], table: dict[str, tuple[Any, ...]]) -> Form:
    """Floats of 8 bits, or places of 4 bits in a table, as packages have them."""
    nodes = [
        op("Cast", "w -> c", to=onnx.TensorProto.INT32 if table else FLOAT),
        *(op("Gather", f"{name} c -> g") for name in table),
        op("Reshape", f"{'g' if table else 'c'} sizes -> r"),
        op("Mul", "r s -> m"),
        op("Reshape", "m whole -> n"),
        op("Cast", "n -> o", to=onnx.TensorProto.BFLOAT16),
        op("Cast", "o -> v", to=FLOAT),
        op("MatMul", "x v -> y", f"{UP}/MatMul"),
    ]
    return nodes, {"w": (kind, 64, 128), "s": (np.float32, 2, 1, 128), **table}


CAST: Form = (
    [op("Cast", "w -> c", to=FLOAT), op("MatMul", "x c -> y", f"{UP}/MatMul")],
    {"w": (np.float16, 64, 128)},
)
FORMS: dict[str, Form] = {
    "int4, MatMulNBits, blocks of 32, zero points": matmul_nbits(4, "x w s z"),
    "int8, MatMulNBits, blocks of 32": matmul_nbits(8, "x w s"),
    "int8, DequantizeLinear, blocks of 32": dequantised((128, 2), block_size=32, axis=1),
    "int8, DequantizeLinear": dequantised(()),
    "int8, MatMulInteger, zero points": (
        [
            op("DynamicQuantizeLinear", "x -> q qs qz"),
            op("MatMulInteger", "q w qz z -> i", f"{UP}/MatMul_quant"),
            op("Cast", "i -> f", to=FLOAT),
            op("Mul", "f s -> y"),
        ],
        {"w": (np.int8, 64, 128), "z": (np.int8,), "s": (np.float32,)},
    ),
    "float16, computed in float32": CAST,
    "nf4, MatMulBnb4, blocks of 64": (
        [op(f"{MS}:MatMulBnb4", "x w s -> y", f"{UP}/MatMul_Bnb4", K=64, N=128, block_size=64, quant_type=1)],
        {"w": (np.uint8, 4096), "s": (np.float32, 128)},
    ),
    "uint8, Secret": ([op("of.nobody:Secret", "x w -> y", f"{UP}/Secret")], {"w": (np.uint8, 64, 128)}),
    "uint4, Gather, blocks of 32, computed in float32": codes(ml_dtypes.uint4, {"t": (np.float32, 16)}),
    "float8e4m3fn, Cast, blocks of 32, computed in float32": codes(ml_dtypes.float8_e4m3fn, {}),
}
"""Storage as text -> a graph that stores a weight so."""


def saved(form: Form, path: Path, *, external: bool = False) -> Path:
    """An ONNX file of a form."""
    weights = [weight(name, shape, kind) for name, (kind, *shape) in form[1].items()]
    return save(model(form[0], weights, ("", MS, "of.nobody")), path, external=external)


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("external", [False, True], ids=["inside", "external"])
def test_weight_storage_of_other_exporters_is_listed_per_module(tmp_path, how, external):
    path = saved(FORMS[how], tmp_path / "model.onnx", external=external)
    found = partita.inspect(path)
    (row,) = [module for module in found.modules if module.module]
    assert (row.module, storage_text(row), row.parameters) == ("model.layers.0.mlp.up_proj", how, 64 * 128)
    stored = sum(len(weight(name, shape, kind).raw_data) for name, (kind, *shape) in FORMS[how][1].items())
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
    assert graph.operators == {"MatMul": 2, "If": 1, "Constant": 1}
    assert sum(kind.tensors for kind in found.weights.kinds if kind.dtype == "float32") == 2
    assert found.weights.size_bytes == 2 * 64 * 64 * 4 + 1


def cut(path: Path, most: int) -> None:
    path.write_bytes(path.read_bytes()[:most])


def leave_the_folder(folder: Path) -> None:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "manifest.json: damaged": lambda folder: (folder / MANIFEST).write_text("{", encoding="utf-8"),
    "weights file 'model.onnx.data' is missing": lambda folder: (folder / "model.onnx.data").unlink(),
    "is truncated": lambda folder: cut(folder / "model.onnx.data", -1000),
    "known_answer.safetensors: missing": lambda folder: (folder / "known_answer.safetensors").unlink(),
    "model.onnx: missing": lambda folder: (folder / "model.onnx").unlink(),
    "model.onnx: not a readable ONNX file (it is truncated, or not a protobuf message)": (
        lambda folder: cut(folder / "model.onnx", (folder / "model.onnx").stat().st_size // 2)
    ),
    "../secret": leave_the_folder,
}
"""A finding -> what causes it. The graph is readable after the first four."""


@pytest.mark.parametrize("problem", DAMAGE)
def test_damaged_package_yields_finding_and_remaining_contents(package, own_copy, problem):
    folder = own_copy(package)
    DAMAGE[problem](folder)
    found = partita.inspect(folder)
    assert any(problem in finding.problem for finding in found.findings), found.findings
    assert found.kind == "package"
    assert found.tokenizer.model == "BPE" and found.model.model_type == "llama"
    if problem in list(DAMAGE)[:4]:
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
    saved(matmul_nbits(4, "x w s z"), tmp_path / "onnx" / "model_q4.onnx", external=True)
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
    path = saved(CAST, tmp_path / "model.onnx", external=True)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].dims[:] = [1 << 40, 1 << 20]
    path.write_bytes(proto.SerializeToString())
    found = partita.inspect(path)
    assert found.weights.size_bytes == 1 << 61
    assert any("is truncated" in finding.problem for finding in found.findings)
