"""Tensor types that only ONNX Runtime infers."""

import onnx.parser
import pytest

from partita.runtime.place.tensor_types import tensor_types

HEAD = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3, "com.microsoft" : 1]>\n'


@pytest.mark.parametrize(
    ("graph", "sizes"),
    [
        ("g (float[4,16] x) => (float y) { p = ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(x) y = Neg(p) }", None),
        ("g (float x) => (float y) { p = com.microsoft.QuickGelu(x) y = Neg(p) }", ()),
        ("g (float[4,16] x) => (float[4,16] y) { p = com.microsoft.QuickGelu(x) y = Neg(p) }", (4, 16)),
    ],
    ids=["no rank", "scalar", "matrix"],
)
def test_unknown_rank_is_not_inferred_as_scalar(graph: str, sizes: tuple[int, ...] | None) -> None:
    kind = tensor_types(onnx.parser.parse_model(HEAD + graph), by_runtime=True)["p"].tensor_type
    assert kind.elem_type == onnx.TensorProto.FLOAT
    assert (tuple(size.dim_value for size in kind.shape.dim) if kind.HasField("shape") else None) == sizes
