"""int4 and int8 mixture of experts: choice of operator, calibration, and verified graphs."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest

from partita.demo import heldout_path
from partita.export.quantise.products import routes
from tests.conftest import Exported, TinyCheckpoint
from tests.export.quantise.test_precision import attributes, checked, initializers, nodes, operators

EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model_type", "precision", "attention"),
    [
        pytest.param(
            "mixtral", "int4", "gqa", marks=pytest.mark.heavy
        ),  # a tensor for each expert and projection, stacked by transformers
        ("gpt_oss", "int8", "gqa"),  # stacks in the checkpoint, biases, a limit; no kernel without rounded activations
        pytest.param("mixtral", "int4", "primitives", marks=pytest.mark.heavy),  # all experts as one matrix
        pytest.param("nemotron_h", "int4", "gqa", marks=pytest.mark.heavy),  # an activation that MoE has not
    ],
)
def test_experts_are_quantised_and_routers_are_not(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, precision: str, attention: str
) -> None:
    package = exported(tiny_checkpoint(model_type, **EXPERTS), precision=precision, attention=attention)
    manifest = checked(package)
    assert manifest.packed is not None
    left = [told for told in manifest.packed.not_packed if "conv1d.weight" not in told]  # no product: nothing packs it
    assert left == [] and (model_type == "nemotron_h" or manifest.packed.not_packed == ())
    share = sum(kind.parameters for kind in manifest.packed.kinds) / manifest.source.parameters
    assert share > 0.95
    products = nodes(package, "MatMulNBits")
    assert not [name for name in products if "router" in name or ("gate" in name and "proj" not in name)], (
        "routers stay"
    )
    found = operators(package)
    assert not found["MoE"] and ("experts by QMoE" in manifest.packed.operators) == bool(found["QMoE"])
    if attention == "gqa" and model_type != "nemotron_h":
        assert found["QMoE"] == 2, "one for each layer"
        node = attributes(next(iter(nodes(package, "QMoE").values())))
        assert (node["expert_weight_bits"], node["block_size"]) == ({"int4": 4, "int8": 8}[precision], 32)


@pytest.mark.parametrize(
    ("steps", "router"),
    [
        ("Softmax TopK", True),
        ("Sigmoid Slice Add TopK", True),
        ("Cast Div Tanh Mul Sigmoid Add TopK", True),
        ("Softmax Reshape ReduceMax TopK", True),
        ("Softmax Where ArgMax", True),
        ("Add RMSNormalization MatMul TopK", False),
        ("Sigmoid Mul", False),
    ],
)
def test_router_is_recognised_by_the_top_k_after_it(steps: str, router: bool) -> None:
    """Operators between scores and selection are allowed, except products and norms."""
    given = ir.Value(name="x")
    node = first = ir.Node("", "MatMul", [given, ir.Value(name="w")])
    for step in steps.split():
        node = ir.Node("", step, [node.outputs[0]])
    assert routes(first) is router


@pytest.mark.heavy
def test_experts_in_keep_and_gathered_experts_are_not_quantised(
    tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    """In a package of two graphs, quantising the experts of one graph would store them twice."""
    checkpoint = tiny_checkpoint("mixtral", **EXPERTS)
    kept = exported(checkpoint, precision="int4", keep={"experts": "fp32"})
    assert operators(kept)["MoE"] == 2 and not operators(kept)["QMoE"]
    pair = exported(checkpoint, precision="int4", attention="primitives", static_shapes=True, prefill_chunk=6)
    manifest = checked(pair)
    assert manifest.packed is not None and any("experts" in phrase for phrase in manifest.packed.not_packed)
    plain = exported(checkpoint)
    assert (pair / "model.onnx.data").stat().st_size < (plain / "model.onnx.data").stat().st_size


@pytest.mark.heavy
def test_fp16_for_an_expert_stack_applies_to_both_stacks(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    checkpoint = tiny_checkpoint("mixtral", **EXPERTS)
    package = exported(checkpoint, precision="int4", keep={"layers.0.mlp.experts.down_proj": "fp16"})
    checked(package)
    kinds = {each.name: each.data_type for each in initializers(package)}
    halves = [name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT16 and "experts" in name]
    assert len(halves) == 2 and all("layers.0." in name for name in halves)
    assert operators(package)["MoE"] == 1 and operators(package)["QMoE"] == 1


@pytest.mark.heavy
def test_calibration_leaves_experts_to_the_data_free_quantiser(
    tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    package = exported(tiny_checkpoint("gpt_oss", **EXPERTS), precision="int4", calibrate=heldout_path())
    packed = checked(package).packed
    assert packed is not None and packed.calibration is not None and operators(package)["QMoE"] == 2
    assert {kind.quantiser for kind in packed.kinds} == {"gptq", "refit"}
    stacks = {f"model.layers.{layer}.mlp.experts" for layer in (0, 1)}
    assert set(packed.calibration.not_calibrated) == {"model.embed_tokens", *stacks}
