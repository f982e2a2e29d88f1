"""Quantisation plan: precision and block size of each weight, and the probes of the provider."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from partita.errors import ProviderError, UsageError
from partita.export.options import ExportOptions
from partita.export.quantise import Keep, check_modules
from partita.export.quantise.forms import GATHER, MATMUL
from partita.export.quantise.plan import make_plan
from partita.export.target import Kernels, ProbeResult, Target
from partita.options.export import Attention

MODULES = ["model", "model.layers.1", "model.layers.1.mlp.down_proj", "model.layers.10", "lm_head"]


class Asked:
    """A provider by the operators and nodes that it leaves."""

    def __init__(
        self, leaves: frozenset[str] = frozenset(), refuses: Callable[[onnx.NodeProto], bool] = lambda _: False
    ) -> None:
        self.leaves, self.refuses = leaves, refuses
        self.models: list[onnx.ModelProto] = []

    def ask(self, model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> ProbeResult:
        proto = onnx.ModelProto.FromString(model)
        onnx.checker.check_model(proto, full_check=False)
        self.models.append(proto)
        left = [node.op_type for node in proto.graph.node if node.op_type in self.leaves or self.refuses(node)]
        return ProbeResult(len(proto.graph.node), Counter(left), "")


def has(node: onnx.NodeProto, name: str, fits: Callable[[int], bool]) -> bool:
    """Whether a MatMulNBits has such an attribute."""
    return node.op_type == MATMUL and any(each.name == name and fits(each.i) for each in node.attribute)


def options(
    precision: str = "int4", keep: Mapping[str, str] | None = None, block_size: int | None = None
) -> ExportOptions:
    return ExportOptions("checkpoint", Path("out"), precision=precision, keep=keep, block_size=block_size)  # type: ignore[arg-type]


def target(asked: Asked | None, kernels: Kernels | None = None) -> Target:
    ask = None if asked is None else asked.ask
    return Target("npu", "--target", "gqa", "directly", ask, kernels=kernels or Kernels())


def test_keep_pattern_matches_whole_path_components() -> None:
    assert Keep("layers.1", "fp32").fits("model.layers.1.mlp.down_proj")
    assert not Keep("layers.1", "fp32").fits("model.layers.10.mlp.down_proj")
    assert not Keep("down", "fp32").fits("model.layers.10.mlp.down_proj")
    check_modules([Keep("lm_head", "int8"), Keep("layers.1.mlp", "fp32")], MODULES)
    for pattern, said in (("down_prj", "down_proj is one"), ("zzz", f"one of its modules is {MODULES[2]}")):
        with pytest.raises(UsageError, match=rf"`keep={pattern}=int8`: the model has no such module; {said}"):
            check_modules([Keep(pattern, "int8")], MODULES)


@pytest.mark.parametrize(
    ("width", "asked", "size"),
    [(256, None, 64), (96, None, 32), (100, None, 32), (96, 64, 32), (576, 128, 64), (80, 128, 16), (100, 128, 32)],
)
def test_block_size_divides_rows_if_possible(width: int, asked: int | None, size: int) -> None:
    plan = make_plan(options(block_size=asked), None, MODULES)
    assert plan is not None
    found = plan.packing(["lm_head"], width)
    assert found is not None and found.block_size == size
    embedding = plan.packing(["embed_tokens"], width, use="lookup")
    assert embedding is not None and (embedding.block_size == size or asked is None)


def test_smaller_block_sizes_are_limited_to_target_support() -> None:
    """One probe covers all sizes; a rejection is followed by one probe per size."""
    asked = Asked(refuses=lambda node: has(node, "block_size", lambda size: size < 32))
    plan = make_plan(options(block_size=128), target(asked), MODULES)
    assert plan is not None and plan.kernels.smaller == (32, 64) and len(asked.models) == 8
    nobody = make_plan(options(block_size=128), target(None), MODULES)
    assert nobody is not None and nobody.kernels.smaller == (32, 64)


def test_plan_follows_probed_kernels_and_zero_point_support() -> None:
    asked = Asked(frozenset({GATHER}), lambda node: node.op_type == MATMUL and len(node.input) > 3)
    plan = make_plan(options(keep={"lm_head": "int8"}), target(asked), MODULES)
    assert plan is not None and plan.form.name == "matmul_nbits"
    assert plan.kernels.symmetric and not plan.kernels.gather
    bits = {a.i for n in asked.models[0].graph.node for a in n.attribute if a.name == "bits"}
    assert bits == {4, 8} and len(asked.models) == 4, "products with and without zero points, look-ups, smaller blocks"


def test_int8_products_are_probed_only_if_the_package_has_them() -> None:
    """An int8 embedding uses the lookup kernel."""
    narrow, told = Asked(refuses=lambda node: has(node, "bits", lambda bits: bits == 8)), list[str]()
    plan = make_plan(options(), target(narrow), MODULES, told.append)
    assert plan is not None and plan.form.name == "matmul_nbits" and plan.kernels.gather and not told
    assert plan.kernels.smaller
    embedding = plan.packing(["model.embed_tokens"], 256, use="lookup")
    assert embedding is not None and embedding.grid.bits == 8
    kept = make_plan(options(keep={"lm_head": "int8"}), target(narrow), MODULES, told.append)
    assert kept is not None and kept.form.name == "dequantize_linear"
    assert "npu does not support MatMulNBits" in told[-1]


def test_dequantize_linear_is_used_if_target_lacks_contrib_operators() -> None:
    asked, told = Asked(frozenset({MATMUL, GATHER})), list[str]()
    plan = make_plan(options(), target(asked), MODULES, told.append)
    assert plan is not None and plan.form.name == "dequantize_linear" and plan.kernels.gather
    assert [node.op_type for node in asked.models[-3].graph.node][:2] == ["Gather", "DequantizeLinear"]
    assert "quantised weights are stored for DequantizeLinear before MatMul" in told[-1]
    assert plan.packing(["lm_head"], 100) is None, "blocks have to divide a row"
    embedding = plan.packing(["model.embed_tokens"], 100, use="lookup")
    assert embedding is not None and (embedding.grid.bits, embedding.block_size) == (8, 100)


@pytest.mark.parametrize(
    ("folds", "attention", "first"),
    [
        (False, "auto", "matmul_nbits"),
        (False, "gqa", "matmul_nbits"),
        (True, "auto", "dequantize_linear"),
        (False, "primitives", "dequantize_linear"),
        (False, "onnx24", "dequantize_linear"),
    ],
)
def test_attention_and_constant_folding_select_the_weight_form(folds: bool, attention: Attention, first: str) -> None:
    asked = Asked(frozenset())
    wanted = replace(options(), attention=attention)
    plan = make_plan(wanted, target(asked, Kernels(folds=folds)), MODULES)
    assert plan is not None and plan.form.name == first


def test_int8_activations_require_an_integer_matmul_kernel() -> None:
    asked = Asked(frozenset())
    plan = make_plan(replace(options("int8"), activations="int8"), target(asked), MODULES)
    assert plan is not None and plan.form.name == "matmul_integer_to_float"
    found = plan.packing(["lm_head"], 100)
    assert found is not None and (found.block_size, found.grid.symmetric) == (100, True)
    own = frozenset({"MatMulIntegerToFloat"})
    plan = make_plan(replace(options("int8"), activations="int8"), target(Asked(own)), MODULES)
    assert plan is not None and plan.form.name == "matmul_integer", "the same in standard operators"
    with pytest.raises(ProviderError, match="`activations=int8`: npu has no kernel .* or omit `activations=int8`"):
        make_plan(replace(options("int8"), activations="int8"), target(Asked(own | {"MatMulInteger"})), MODULES)


def test_precision_without_kernel_raises_provider_error() -> None:
    said = (
        r"`precision=int4`: npu has no kernel that computes float32 activations with quantised weights: .*"
        r"MatMulNBits \(com\.microsoft\).* leaves MatMulNBits .*DequantizeLinear of blocks and MatMul"
    )
    asked = Asked(frozenset({MATMUL, "DequantizeLinear"}))
    with pytest.raises(ProviderError, match=said):
        make_plan(options(), target(asked), MODULES)
    asked.models.clear()
    assert make_plan(options("fp32"), target(asked), MODULES) is None and not asked.models


def test_whole_weight_dequantising_kernel_is_not_used() -> None:
    """The CPU provider does this for int8 at accuracy level 0, and only logs it."""
    from partita.library.place.target import find_target

    found = find_target("cpu", {}, default_allowed=False, libraries={})
    slow = replace(found, kernels=Kernels(accuracy_level=0))
    told: list[str] = []
    plan = make_plan(options("int8"), slow, MODULES, told.append)
    assert plan is not None and plan.form.name == "dequantize_linear", "of which MatMulNBits at level 4 is made"
    assert "cpu does not support MatMulNBits" in told[-1]
    restoring = replace(slow, unpacks=lambda model, sizes: True)
    with pytest.raises(ProviderError, match=r"cpu has no kernel .* dequantises the whole matrix"):
        make_plan(options("int8"), restoring, MODULES)
