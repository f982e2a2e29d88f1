"""Storage forms of quantised weights: each computes with the values of the quantiser."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from partita.export.checkpoint.description import open_checkpoint
from partita.export.passes.base import added
from partita.export.progress import Silent, stage
from partita.export.quantise import Grid, Packing, weight_source
from partita.export.quantise.forms import Form, Place, Weight
from partita.export.quantise.plan import FORMS
from partita.export.quantise.reference import written_rows
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.weight_source import QuantisedSource
from partita.export.target import Kernels
from partita.export.weights import external_data as weights
from partita.export.weights.sources import FloatSource, StoredPart
from partita.runtime.chain.cpu_settings import EXACT, supports_exact
from partita.runtime.place.tensor_types import tensor_types
from tests.conftest import TinyCheckpoint
from tests.export.nets import float_source

WIDTH = 96
NAME = "model.layers.0.mlp.down_proj.weight"  # [64, 96]


def wide_integers(path: Path) -> dict[str, str]:
    """Values of 64-bit integers that nodes make, and values of unknown type, by operator: some providers lack int64."""
    model = onnx.load(path, load_external_data=False)
    types = tensor_types(model)
    found = {}
    for node in model.graph.node:
        for name in filter(None, node.output):
            kind = types[name].tensor_type.elem_type if name in types else onnx.TensorProto.UNDEFINED
            if kind in (onnx.TensorProto.INT64, onnx.TensorProto.UNDEFINED):
                found[name] = node.op_type
    return found


def plain(folder: Path, name: str = NAME) -> FloatSource:
    """A weight of a checkpoint, as it would be in fp32."""
    return float_source(open_checkpoint(str(folder)), name)


def found_by_quantiser(weight: QuantisedSource) -> np.ndarray:
    """The weight [N, K] that integers, scales and zero points stand for."""
    return torch.cat([rows for _, rows in weight.rows_restored()]).numpy()


class Written:
    """One use of a weight in a form, as a file with its weights beside it."""

    def __init__(
        self,
        folder: Path,
        written: Form,
        weight: QuantisedSource,
        *,
        look_up: bool = False,
        products: int = 1,
        batch: int = 1,
        length: int | str = "S",
    ) -> None:
        self.folder, self.weight = folder, weight
        kind = ir.DataType.INT64 if look_up else ir.DataType.FLOAT
        shape = ir.Shape([batch, length] if look_up else [batch, length, weight.width])
        given = ir.Value(name="x", shape=shape, type=ir.TensorType(kind))
        opsets = {"": max(written.opset, 18), "com.microsoft": 1}
        graph = ir.Graph([given], [], nodes=[], opset_imports=opsets, name="one")
        stored = [StoredPart(weight, index) for index in range(len(weight.parts))]
        self.values = tuple(added(graph, each, each.part.named("w")) for each in stored)
        place = Place(graph, None, Kernels())
        parts = Weight(self.values, weight.rows, weight.width, weight.packing)
        if look_up:
            made = [written.look_up.write(place, given, parts)]
        else:
            made = [written.product.write(place, given, None, parts) for _ in range(products)]
        for index, value in enumerate(value for node in graph for value in node.outputs):
            value.name = f"v{index}"
        graph.outputs.extend(made)
        self.model = ir.Model(graph, ir_version=10)
        size = weights.file_bytes((self.model,))
        with stage(Silent(), "write weights", {}) as current:
            written_file = weights.write_data((self.model,), folder, current)
        assert written_file.size_bytes == size, "what a size budget goes by"

    def run(self, feed: np.ndarray) -> np.ndarray:
        """What the CPU provider makes of it."""
        path = self.folder / "one.onnx"
        ir.save(self.model, path)
        onnx.checker.check_model(path)
        options = ort.SessionOptions()
        if supports_exact(path):  # as in Partita's own sessions on processors that need it
            options.add_session_config_entry(EXACT, "1")
        return np.asarray(ort.InferenceSession(path, options).run(None, {"x": feed})[0])

    def read_back(self) -> np.ndarray:
        """The weight as the reference of the known answer reads it."""
        rows = list(written_rows(PlacedWeight(self.weight, (), self.values)))
        return torch.cat([each for _, each in rows]).numpy()


ODD = "model.embed_tokens.weight"  # [301, 64]: other rows of packed 4-bit columns begin inside a byte


@pytest.mark.parametrize(
    ("name", "bits", "symmetric", "size", "batch", "tensor"),
    [
        ("matmul_nbits", 4, False, 32, 1, NAME),
        ("matmul_nbits", 4, True, 64, 1, NAME),  # 96 is not a multiple of 64
        ("matmul_nbits", 8, False, 64, 1, NAME),
        ("dequantize_linear", 4, False, 32, 1, NAME),
        ("dequantize_linear", 4, False, 32, 1, ODD),
        ("dequantize_linear", 4, True, 32, 1, NAME),
        ("dequantize_linear", 8, False, 32, 1, NAME),
        ("dequantize_linear", 8, True, 32, 1, NAME),
        ("matmul_integer", 8, True, WIDTH, 2, NAME),
        ("matmul_integer_to_float", 8, True, WIDTH, 2, NAME),
    ],
)
def test_quantised_products_match_quantiser_values(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    name: str,
    bits: int,
    symmetric: bool,
    size: int,
    batch: int,
    tensor: str,
) -> None:
    written = FORMS[name]
    packing = Packing(Grid(bits, symmetric), size, "refit")
    whole = plain(tiny_checkpoint("llama", vocab_size=301), tensor)
    weight = QuantisedSource.of(whole, packing, written.product.layout)
    one = Written(tmp_path, written, weight, batch=batch)
    values = found_by_quantiser(weight)
    assert np.array_equal(one.read_back(), values)
    x = np.random.default_rng(0).standard_normal((batch, 5, weight.width)).astype(np.float32)
    x[-1, 0, 3] = 200.0  # a token with massive activations, which costs the others nothing
    wanted = x @ values.T
    largest = np.abs(wanted).max(-1, keepdims=True)
    assert (np.abs(one.run(x) - wanted) < 0.03 * largest).all(), "activations are quantised per token"
    written.product.exact(one.model)
    assert (np.abs(one.run(x) - wanted) < 1e-5 * largest).all()


@pytest.mark.parametrize(
    ("batch", "length", "operators"),
    [
        (1, 1, {"Reshape": 1}),  # the zero point of the one token is a constant
        (1, "S", {"Reshape": 1, "Clip": 1, "Cast": 1}),
        (2, "S", {"Clip": 1, "Cast": 1}),
        (2, 1, {"Reshape": 1, "Clip": 1, "Cast": 1}),
    ],
)
def test_activation_quantisation_has_no_shape_nodes(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, batch: int, length: int | str, operators: dict[str, int]
) -> None:
    """Shape nodes produce int64, which some providers do not support."""
    written = FORMS["matmul_integer_to_float"]
    packing = Packing(Grid(8, symmetric=True), WIDTH, "nearest")
    weight = QuantisedSource.of(plain(tiny_checkpoint("llama")), packing, written.product.layout)
    one = Written(tmp_path, written, weight, batch=batch, length=length)
    x = np.random.default_rng(0).standard_normal((batch, 1, WIDTH)).astype(np.float32)
    x[-1] = 0
    wanted = x @ found_by_quantiser(weight).T
    assert (np.abs(one.run(x) - wanted) <= 0.03 * np.abs(wanted).max(-1, keepdims=True)).all()
    assert not wide_integers(tmp_path / "one.onnx")
    usual = {"Abs": 1, "ReduceMax": 1, "Max": 1, "Mul": 2, "QuantizeLinear": 1, "MatMulIntegerToFloat": 1}
    assert Counter(node.op_type for node in one.model.graph) == Counter({**usual, **operators})


@pytest.mark.parametrize("name", ["matmul_nbits", "dequantize_linear", "matmul_integer"])
def test_quantised_embedding_lookups_match_quantiser_values(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, name: str
) -> None:
    written = FORMS[name]
    packing = Packing(Grid(8, written.look_up.symmetric), 32, "refit")
    weight = QuantisedSource.of(plain(tiny_checkpoint("llama")), packing, written.look_up.layout)
    one = Written(tmp_path, written, weight, look_up=True)
    values = found_by_quantiser(weight)
    assert np.array_equal(one.read_back(), values)
    assert np.array_equal(one.run(np.array([[3, 0, 63]], np.int64))[0], values[[3, 0, 63]])


def test_cpu_provider_fuses_dequantize_linear_into_matmul_nbits(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """Otherwise every step would dequantise the whole weight."""
    written = FORMS["dequantize_linear"]
    packing = Packing(Grid(4, symmetric=False), 32, "nearest")
    one = Written(
        tmp_path, written, QuantisedSource.of(plain(tiny_checkpoint("llama")), packing, written.product.layout)
    )
    one.run(np.zeros((1, 1, WIDTH), np.float32))
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(tmp_path / "one.onnx", options)
    seen = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert seen == {"MatMulNBits"}


def arrays(weight: QuantisedSource) -> list[np.ndarray]:
    """The parts in memory."""
    return [StoredPart(weight, index).numpy() for index in range(len(weight.parts))]


def test_quantised_bytes_are_independent_of_slice_size(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = QuantisedSource.of(plain(tiny_checkpoint("llama")), Packing(Grid(4, symmetric=False), 32, "refit"))
    whole = arrays(weight)
    monkeypatch.setattr(weight_source, "SLICE_BYTES", 96 * 4 * 7)  # seven rows are read at a time
    monkeypatch.setattr(weight_source, "WORKING_ELEMENTS", 96 * 3)  # and three of them quantised
    pieces = list(weight.pieces())
    assert [index for index, _ in pieces] == sorted(index for index, _ in pieces)
    assert max(piece.numel() for index, piece in pieces if index == 0) == 3 * 96 // 2
    assert all(np.array_equal(one, other) for one, other in zip(whole, arrays(weight), strict=True))
