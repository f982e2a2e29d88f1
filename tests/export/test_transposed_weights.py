"""Stacks of weights are written in the layout that their operator reads, and only where nothing else reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.passes import transposed_weights
from partita.export.weights.sources import StoredPart, checkpoint_weight, weight_part
from tests.conftest import TinyCheckpoint
from tests.export.test_passes import NOTHING_KNOWN, check_equal, constant, graph, random, value

STACK, BIAS = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj_bias"
EXPERTS, HIDDEN, WIDTH = 4, 64, 40


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    """One whose stacks [4, 64, 40] are single tensors."""
    sizes: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": WIDTH // 2}
    return open_checkpoint(str(tiny_checkpoint("gpt_oss", num_hidden_layers=1, **sizes)))


def weight(checkpoint: Checkpoint, source: str = STACK) -> ir.Value:
    tensor = checkpoint_weight(checkpoint, source, ir.DataType.FLOAT)
    return ir.Value(name=source, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


def of_shape(node: ir.Node, *shape: int) -> ir.Node:
    node.outputs[0].shape, node.outputs[0].type = ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
    return node


def only_weight(model: ir.Model) -> StoredPart:
    (found,) = [part for value in model.graph.initializers.values() if (part := weight_part(value)) is not None]
    return found


def test_a_stack_is_written_transposed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def make() -> ir.Model:
        x, w = value("x", [EXPERTS, "t", WIDTH]), weight(checkpoint)
        turn = ir.node("Transpose", [w], {"perm": [0, 2, 1]})
        return graph([x], [turn, ir.node("MatMul", [x, turn.outputs[0]])], [w])

    model = check_equal(make, transposed_weights.PASS, tmp_path, {"x": random(EXPERTS, 3, WIDTH)})
    assert [node.op_type for node in model.graph] == ["MatMul"]
    assert only_weight(model).shape == ir.Shape([EXPERTS, WIDTH, HIDDEN])


@pytest.mark.parametrize("source", [STACK, BIAS])
@pytest.mark.parametrize("other_order", [False, True])
def test_halves_take_turns(checkpoint: Checkpoint, tmp_path: Path, source: str, other_order: bool) -> None:
    """With the axes of the stack turned before, too: the second axis of what is there then has the halves."""
    kept: Any = checkpoint_weight(checkpoint, source, ir.DataType.FLOAT)
    before = tuple(int(size) for size in kept.shape.numpy())
    turned = other_order and len(before) == 3
    shape = (before[0], before[2], before[1]) if turned else before

    def make() -> ir.Model:
        w, x = weight(checkpoint, source), value("x", list(shape))
        first = [of_shape(ir.node("Transpose", [w], {"perm": [0, 2, 1]}), *shape)] if turned else []
        whole = first[0].outputs[0] if first else w
        sizes = [shape[0], 2, shape[1] // 2, *shape[2:]]
        split, joined = constant("split", sizes), constant("joined", list(shape))
        apart = of_shape(ir.node("Reshape", [whole, split]), *sizes)
        order = [0, 2, 1, 3][: len(sizes)]
        swap = of_shape(ir.node("Transpose", [apart.outputs[0]], {"perm": order}), *(sizes[i] for i in order))
        together = of_shape(ir.node("Reshape", [swap.outputs[0], joined]), *shape)
        return graph([x], [*first, apart, swap, together, ir.node("Add", [x, together.outputs[0]])], [w, split, joined])

    model = make() if turned else check_equal(make, transposed_weights.PASS, tmp_path, {"x": random(*shape)})
    if turned:
        wanted = kept.permuted((0, 2, 1)).interleaved(1)
        assert transposed_weights.run(model, NOTHING_KNOWN) == 2
        assert only_weight(model).key == wanted.key
    assert [node.op_type for node in model.graph] == ["Add"]


def test_another_shape_is_the_same_bytes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The graphs of a pair see one stack in two shapes, and it is written once."""

    def make() -> ir.Model:
        x, w = value("x", ["t", WIDTH]), weight(checkpoint)
        shape = constant("shape", [EXPERTS * HIDDEN, WIDTH])
        flat = of_shape(ir.node("Reshape", [w, shape]), EXPERTS * HIDDEN, WIDTH)
        return graph([x], [flat, ir.node("Gemm", [x, flat.outputs[0]], {"transB": 1})], [w, shape])

    model = check_equal(make, transposed_weights.PASS, tmp_path, {"x": random(3, WIDTH)})
    assert [node.op_type for node in model.graph] == ["Gemm"]
    found = only_weight(model)
    assert found.shape == ir.Shape([EXPERTS * HIDDEN, WIDTH])
    assert found.key == checkpoint_weight(checkpoint, STACK, ir.DataType.FLOAT).key


def test_what_is_read_elsewhere_stays(checkpoint: Checkpoint) -> None:
    x, w = value("x", [EXPERTS, "t", WIDTH]), weight(checkpoint)
    turn = ir.node("Transpose", [w], {"perm": [0, 2, 1]})
    product = ir.node("MatMul", [x, turn.outputs[0]])
    model = graph([x], [turn, product, ir.node("MatMul", [product.outputs[0], w])], [w])
    assert transposed_weights.run(model, NOTHING_KNOWN) == 0
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul", "MatMul"]


@pytest.mark.parametrize("perm", [[0, 2, 1, 3], [0, 1, 3, 2]])
def test_what_only_resembles_an_interleaving(checkpoint: Checkpoint, tmp_path: Path, perm: list[int]) -> None:
    """Quarters in place of halves, and another pair of axes swapped: neither is folded, and nothing is lost."""
    count = 2 if perm == [0, 1, 3, 2] else 4
    sizes = [EXPERTS, count, HIDDEN // count, WIDTH]

    def make() -> ir.Model:
        w, x = weight(checkpoint), value("x", [EXPERTS * HIDDEN * WIDTH])
        split, flat = constant("split", sizes), constant("flat", [-1])
        apart = of_shape(ir.node("Reshape", [w, split]), *sizes)
        swap = of_shape(ir.node("Transpose", [apart.outputs[0]], {"perm": perm}), *(sizes[i] for i in perm))
        together = of_shape(ir.node("Reshape", [swap.outputs[0], flat]), EXPERTS * HIDDEN * WIDTH)
        return graph([x], [apart, swap, together, ir.node("Add", [x, together.outputs[0]])], [w, split, flat])

    assert transposed_weights.run(make(), NOTHING_KNOWN) == 0


def test_axes_of_a_reshaped_weight_are_gone(checkpoint: Checkpoint) -> None:
    seen: Any = checkpoint_weight(checkpoint, STACK, ir.DataType.FLOAT).reshaped((EXPERTS * HIDDEN, WIDTH))
    np.testing.assert_array_equal(
        seen.numpy(), checkpoint_weight(checkpoint, STACK, ir.DataType.FLOAT).numpy().reshape(-1, WIDTH)
    )
    with pytest.raises(ValueError, match="are gone"):
        seen.permuted((0, 2, 1))
    with pytest.raises(ValueError, match="cannot be viewed as"):
        seen.reshaped((7, 7))
