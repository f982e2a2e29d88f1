"""Symbolic batch: a graph exported for a batch also accepts fewer rows, with equal results per row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from partita.export.passes.fewer_rows import BATCH, freeing
from partita.export.pipeline import ExportOptions, export
from partita.package.contract import Port
from partita.package.folder import Manifest, read_manifest
from partita.package.records import SmokeRecord, Verification
from tests.conftest import Exported, TinyCheckpoint
from tests.export.nets import Net, random, run

ROWS, WIDTH = 3, 8
INPUTS = (
    Port(name="tokens", role="tokens", shape=(ROWS, "s"), dtype="int64"),
    Port(name="rows", role="logits_rows", shape=(ROWS,), dtype="int64"),
)
OUTPUTS = (Port(name="out", role="logits", shape=(ROWS, "s", WIDTH), dtype="float32"),)
TABLE = random(16, WIDTH)


def heads(net: Net, value: ir.Value) -> ir.Value:
    """Split the last axis, with a Reshape that says B and one that takes zeros at their word."""
    split = net.op("Reshape", value, net.constant([ROWS, -1, 2, WIDTH // 2], np.int64), allowzero=1)
    turned = net.op("Transpose", split, perm=[0, 2, 1, 3])
    back = net.op("Transpose", turned, perm=[0, 2, 1, 3])
    return net.op("Reshape", back, net.constant([ROWS, -1, WIDTH], np.int64))


def flat(net: Net, value: ir.Value) -> ir.Value:
    """All tokens of all rows on one axis, as experts take them."""
    one = net.op("Reshape", value, net.constant([-1, WIDTH], np.int64))
    scaled = net.op("Mul", one, net.constant(2.0))
    return net.op("Reshape", scaled, net.constant([ROWS, -1, WIDTH], np.int64))


def spread(net: Net, value: ir.Value) -> ir.Value:
    """Something of which there is one for all rows, and something of which each has its own."""
    common = net.op("Expand", net.constant(random(1, 1, WIDTH)), net.constant([ROWS, 1, WIDTH], np.int64))
    mean = net.op("ReduceMean", value, net.constant([2], np.int64), keepdims=1)
    own = net.op("Expand", mean, net.constant([ROWS, 1, WIDTH], np.int64))
    return net.op("Add", net.op("Add", value, own), common)


def made(*layers: Callable[[Net, ir.Value], ir.Value]) -> ir.Model:
    net = Net()
    value = net.op("Gather", net.constant(TABLE), net.input("tokens", [ROWS, "s"], ir.DataType.INT64))
    net.input("rows", [ROWS], ir.DataType.INT64)
    for layer in layers:
        value = layer(net, value)
    net.give(value)
    model = net.model()
    model.graph.outputs[0].shape = ir.Shape([ROWS, "s", WIDTH])
    return model


SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
}
TOKENS = np.arange(ROWS * 4).reshape(ROWS, 4)


def fed(tokens: Any) -> dict[str, Any]:
    return {"tokens": tokens, "rows": np.zeros(ROWS, np.int64)}


@pytest.mark.parametrize("layers", [(heads,), (flat,), (spread,), (heads, flat, spread, flat)])
def test_freed_graph_gives_equal_results_for_full_batch_and_single_row(tmp_path: Path, layers: Any) -> None:
    (before,) = run(made(*layers), tmp_path, fed(TOKENS))
    model = made(*layers)
    found = freeing(model, INPUTS, OUTPUTS, (), asks=True)
    assert found is not None
    found()
    (after,) = run(model, tmp_path, fed(TOKENS))
    np.testing.assert_array_equal(after, before)
    for row in range(ROWS):
        (alone,) = run(model, tmp_path, fed(TOKENS[row : row + 1]))
        np.testing.assert_allclose(alone, before[row : row + 1], rtol=1e-6)
    assert model.graph.inputs[0].shape == ir.Shape([BATCH, "s"])
    assert model.graph.inputs[1].shape == ir.Shape([ROWS]), "which logits are wanted has nothing to do with the batch"


def test_graph_is_unchanged_if_required_shape_nodes_are_disallowed() -> None:
    model = made(heads)
    found, count = freeing(model, INPUTS, OUTPUTS, (), asks=False), len(list(model.graph))
    assert found is not None
    found()
    assert len(list(model.graph)) == count
    for layers in ((flat,), (heads, spread)):
        model = made(*layers)
        assert freeing(model, INPUTS, OUTPUTS, (), asks=False) is None
        assert model.graph.inputs[0].shape == ir.Shape([ROWS, "s"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"batch_size": 3}),
        # tests/runtime/verify/test_replay.py has this one
        pytest.param("llama", {"batch_size": 3, "attention": "onnx24"}, marks=pytest.mark.heavy),
        pytest.param("llama", {"batch_size": 2, "attention": "primitives"}, marks=pytest.mark.heavy),
        pytest.param("mixtral", {"batch_size": 2}, marks=pytest.mark.heavy),
        pytest.param("lfm2", {"batch_size": 2}, marks=pytest.mark.heavy),
        pytest.param("mamba2", {"batch_size": 2}, marks=pytest.mark.heavy),
        pytest.param("llama", {"batch_size": 2, "precision": "int4"}, marks=pytest.mark.heavy),
        pytest.param("llama", {"batch_size": 2, "precision": "bf16"}, marks=pytest.mark.heavy),
        pytest.param("llama", {"batch_size": 2, "cache_precision": "int8"}, marks=pytest.mark.heavy),
    ],
)
def test_batch_packages_are_verified_with_fewer_rows(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str, options: dict[str, Any]
) -> None:
    manifest = read_manifest(exported(tiny_checkpoint(kind, **SETTINGS.get(kind, {})), **options))
    assert manifest.graph.symbolic_batch
    tokens = next(port for port in manifest.graph.files[0].inputs if port.role == "tokens")
    assert tokens.shape[0] == BATCH
    assert {state.shape[0] for state in manifest.graph.states} == {options["batch_size"]}
    assert [step.step for step in manifest.verification.steps][-1] == "rows by themselves"


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"batch_size": 2, "static_shapes": True, "prefill_chunk": 6, "attention": "gqa"}, marks=pytest.mark.heavy
        ),
    ],
    ids=["one row", "static shapes"],
)
def test_batch_is_static_for_single_row_or_static_shapes(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, options: dict[str, Any]
) -> None:
    graph = read_manifest(exported(tiny_checkpoint("llama"), **options)).graph
    assert not graph.symbolic_batch
    assert all(port.shape[0] == graph.batch_size for port in graph.files[0].inputs if port.role == "tokens")


def test_failed_check_with_fewer_rows_restores_static_batch(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    tried: list[tuple[str, bool]] = []

    def replay(folder: Path, manifest: Manifest) -> Verification:
        tried.append(("replay", manifest.graph.symbolic_batch))
        agrees = not manifest.graph.symbolic_batch
        return Verification(status="verified" if agrees else "unverified", detail="said by the test")

    def smoke(folder: Path, manifest: Manifest) -> SmokeRecord:
        tried.append(("smoke", manifest.graph.symbolic_batch))
        if manifest.graph.symbolic_batch:
            raise ValueError("of another shape")
        return SmokeRecord(chain="cpu", status="ran", detail="said by the test")

    checkpoint = str(tiny_checkpoint("llama", num_hidden_layers=1))
    for verify in (True, False):
        out = tmp_path / str(verify)
        options = ExportOptions(checkpoint, out, max_length=64, batch_size=2, verify=verify)
        summary = export(options, replay=replay, smoke=smoke)
        assert not read_manifest(out).graph.symbolic_batch
        assert any("only for the whole batch" in note for note in summary.notes)
    assert tried == [("replay", True), ("replay", False), ("smoke", True), ("smoke", False)]
