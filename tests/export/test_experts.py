"""Mixture of experts: every exported form matches transformers' eager experts for any routing."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from partita.errors import UnsupportedModelError
from partita.export.passes.cleaning import clean
from partita.export.trace import Form
from partita.export.trace.decompositions import TABLE
from partita.export.trace.experts import IMPLEMENTATION, experts_form, refuse_loops, register
from partita.export.trace.experts.contrib import Gate, recognised
from partita.export.trace.experts.standard import Experts
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint

COUNT, CHOSEN, HIDDEN, INNER = 8, 2, 32, 24
OPERATOR = "MoE operator"
ALL, GATHERED = "standard operators over all experts", "standard operators over the selected experts"

LAYERS = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "olmoe": "OlmoeExperts",
    "gpt_oss": "GptOssExperts",  # turned around, gate and up interleaved, biases, a clamped gate
    "deepseek_v3": "DeepseekV3Experts",
    "deepseek_v4": "DeepseekV4Experts",  # a clamped gate
    "phimoe": "PhimoeExperts",
    "glm4_moe": "Glm4MoeExperts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",  # turned around, halves, biases
    "nemotron_h": "NemotronHExperts",  # no gate
}
SAMPLE = (("mixtral", "contrib"), ("gpt_oss", "contrib"), ("gpt_oss", "standard"), ("nemotron_h", "contrib"))
"""Every kind of gate, order and bias; the others are variations."""
SAMPLE_FIXED = (("gpt_oss", 1), ("mixtral", 2), ("nemotron_h", 3))
WITHOUT_OPERATOR = {"nemotron_h"}  # squared relu


def layer(model_type: str, **changes: Any) -> Any:
    """An experts layer of transformers with random weights, large enough to reach every clamp."""
    from transformers import AutoConfig

    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_experts": COUNT,
        "num_local_experts": COUNT,
        "n_routed_experts": COUNT,
    }
    config: Any = AutoConfig.for_model(model_type)
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name, value in changes.items():
        setattr(config, name, value)
    modelling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    made = getattr(modelling, LAYERS[model_type])(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


class Routed(torch.nn.Module):
    """A layer behind the end of a router."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts: Any = experts

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts(hidden, index, 2.5 * logits.sigmoid())
        return output


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, *, chosen: int = CHOSEN) -> Inputs:
    """Hidden states, chosen experts and router logits: the weights add up to anything but 1, and one of them is 0."""
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, chosen, generator=generator)
    logits[0, 0] = -torch.inf
    index = torch.rand(tokens, COUNT, generator=generator).topk(chosen).indices
    return torch.randn(tokens, HIDDEN, generator=generator), index, logits


def traced(model: Routed, form: Form, example: Inputs, *, fixed: bool) -> tuple[ir.Model, list[str]]:
    """The graph of a routed layer, and what was decided."""
    register()
    model = copy.deepcopy(model)
    model.experts.config._experts_implementation = IMPLEMENTATION
    sizes = None if fixed else ({0: torch.export.Dim("tokens", min=1, max=512)},) * 3
    with experts_form(form, len(example[0]) if fixed else None) as forms, torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=sizes, strict=False)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=18,
            custom_translation_table=dict(TABLE),
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    graph = exported.model
    for node in ir.traversal.RecursiveGraphIterator(graph.graph):
        node.domain = "" if node.domain == "onnx" else node.domain
    graph.opset_imports.clear()
    graph.opset_imports.update({"": 18, "com.microsoft": 1} if form == "contrib" else {"": 18})
    clean(graph)
    return graph, forms.notes


@cache
def traced_layer(model_type: str, form: Form, tokens: int, *, fixed: bool) -> tuple[Routed, ir.Model, list[str]]:
    """A layer, its graph for `inputs(tokens)` and the notes, traced once; a test that changes the graph clones it."""
    model = Routed(layer(model_type))
    return model, *traced(model, form, inputs(tokens), fixed=fixed)


def run(graph: ir.Model, values: Inputs) -> torch.Tensor:
    session = ort.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    output = session.run(None, {name: t.numpy() for name, t in zip(names, values, strict=True)})[0]
    return torch.from_numpy(np.asarray(output))


def eager(model: Routed, values: Inputs) -> torch.Tensor:
    model.experts.config._experts_implementation = "eager"
    with torch.no_grad():
        output: torch.Tensor = model(*values)
        return output


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert float((found - wanted).abs().max()) <= 2e-6 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in SAMPLE else pytest.mark.heavy)
        for name in sorted(LAYERS)
        for form in ("contrib", "standard")
    ],
)
def test_dynamic_expert_layers_match_eager_experts(model_type: str, form: Form) -> None:
    model, graph, notes = traced_layer(model_type, form, 3, fixed=False)
    as_operator = form == "contrib" and model_type not in WITHOUT_OPERATOR
    assert len(notes) == 1 and notes[0].startswith(f"experts of 1 layer: {OPERATOR if as_operator else ALL}")
    assert any(node.op_type == "MoE" for node in graph.graph) == as_operator
    for tokens in (1, 7):
        check(run(graph, inputs(tokens)), eager(model, inputs(tokens)))


@pytest.mark.parametrize(
    ("model_type", "tokens", "how"),
    [
        pytest.param(name, tokens, how, marks=() if (name, tokens) in SAMPLE_FIXED else pytest.mark.heavy)
        for name in ("mixtral", "gpt_oss", "nemotron_h")
        for tokens, how in ((1, GATHERED), (2, GATHERED), (3, ALL))
    ],
)
def test_static_expert_layers_match_eager_experts(model_type: str, tokens: int, how: str) -> None:
    """With few tokens only the selected experts are read."""
    values = inputs(tokens)
    model, graph, notes = traced_layer(model_type, "standard", tokens, fixed=True)
    assert notes == [f"experts of 1 layer: {how}"]
    check(run(graph, values), eager(model, values))


@pytest.mark.parametrize(
    ("form", "fixed"),
    [("contrib", False), ("standard", False), ("standard", True)],
    ids=["operator", "all", "gathered"],
)
def test_repeated_and_masked_experts_match_eager_experts(form: Form, fixed: bool) -> None:
    """Routers mark an unused slot by an out-of-range index or a weight of 0."""
    model, graph, _ = traced_layer("mixtral", form, 2 if fixed else 3, fixed=fixed)
    hidden, _, logits = inputs(2)
    index = torch.tensor([[COUNT, 5], [0, 0]])
    logits[1, 0] = -torch.inf
    check(run(graph, (hidden, index, logits)), eager(model, (hidden, index, logits)))


@pytest.mark.parametrize("fixed", [False, True], ids=["all", "gathered"])
def test_post_processing_of_expert_outputs_is_exported(fixed: bool) -> None:
    experts = layer("mixtral")
    experts.has_post_expert_norm, experts.post_expert_norm = True, torch.nn.RMSNorm(HIDDEN)
    model, values = Routed(experts), inputs(1 if fixed else 3)
    graph, notes = traced(model, "contrib", values, fixed=fixed)
    assert "post-processes the output of each expert" in notes[0]
    hidden, index, logits = inputs(1 if fixed else 5)
    outputs = []
    for token, row in enumerate(hidden):
        for place, expert in enumerate(index[token]):
            gate, up = (experts.gate_up_proj[expert] @ row).chunk(2)
            output = experts.post_expert_norm(experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            outputs.append(output * 2.5 * logits[token, place].sigmoid())
    wanted = torch.stack(outputs).reshape(len(hidden), CHOSEN, HIDDEN).sum(dim=1)
    check(run(graph, (hidden, index, logits)), wanted.detach())


@pytest.mark.parametrize(
    "model_type", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("mixtral", "nemotron_h"))]
)
@pytest.mark.parametrize("fixed", [False, True], ids=["all", "gathered"])
def test_standard_form_has_no_control_flow_and_at_most_4_dimensions(model_type: str, fixed: bool) -> None:
    """Only operators of the default ONNX domain."""
    graph = traced_layer(model_type, "standard", 1 if fixed else 3, fixed=fixed)[1].clone()
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(graph), strict_mode=True)
    onnx.checker.check_model(proto)
    assert {node.domain for node in proto.graph.node} == {""}
    assert not {"If", "Loop", "Scan", "NonZero"}.intersection(node.op_type for node in proto.graph.node)
    assert max(len(value.type.tensor_type.shape.dim) for value in proto.graph.value_info) <= 4


def experts_with(activate: Callable[[torch.Tensor], torch.Tensor], *, gated: bool = True) -> Experts:
    weights = torch.zeros(2, 4, 4)
    return Experts("Some", weights, weights, None, None, gated, activate, None)


def clamped(alpha: float, beta: float, limit: float, *, halves: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def activate(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1) if halves else (x[..., ::2], x[..., 1::2])
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    return activate


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize(("alpha", "beta", "limit"), [(1.0, 0.0, np.inf), (1.702, 1.0, 7.0), (1.3, -0.5, 2.25)])
def test_clamped_swiglu_gates_are_recognised(alpha: float, beta: float, limit: float, halves: bool) -> None:
    gate = recognised(experts_with(clamped(alpha, beta, limit, halves=halves)))
    assert gate == Gate("swiglu", alpha, beta, limit, halves)


@pytest.mark.parametrize(
    "activate",
    [
        lambda x: torch.nn.functional.gelu(x[..., ::2]) * x[..., 1::2],
        lambda x: torch.nn.functional.silu(x[..., 1::2]) * x[..., ::2],  # up first
        lambda x: torch.nn.functional.silu(x[..., ::2]).clamp(max=7.0) * x[..., 1::2].clamp(-7.0, 7.0),
        lambda x: torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2].clamp(-7.0, 8.0),
        lambda x: x @ torch.zeros(1024, 1024),
    ],
)
def test_similar_gates_are_not_recognised(activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert recognised(experts_with(activate)) is None


@pytest.mark.parametrize(
    ("activate", "kind"),
    [
        (torch.relu, "relu"),
        (torch.nn.functional.silu, "silu"),
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "gelu"),
        (torch.nn.functional.gelu, None),
        (lambda x: torch.relu(x).square(), None),
    ],
)
def test_ungated_activations_are_recognised(activate: Callable[[torch.Tensor], torch.Tensor], kind: str | None) -> None:
    found = recognised(experts_with(activate, gated=False))
    assert (found.kind if found else None) == kind


def test_loops_over_experts_are_rejected_by_class_name() -> None:
    from transformers.models.dbrx.configuration_dbrx import DbrxConfig, DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxFFN

    sizes = DbrxFFNConfig(hidden_size=8, ffn_hidden_size=8, moe_num_experts=2)
    with pytest.raises(UnsupportedModelError, match="experts: DbrxExperts loops over the selected experts"):
        refuse_loops(DbrxFFN(DbrxConfig(ffn_config=sizes)))
    refuse_loops(Routed(layer("mixtral")))


@pytest.mark.parametrize(
    ("model_type", "attention"), [("gpt_oss", "gqa"), pytest.param("mixtral", "primitives", marks=pytest.mark.heavy)]
)
def test_whole_models_with_experts_are_verified(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, attention: str
) -> None:
    """The weights are stored once, in the layout of the graph."""
    package = exported(tiny_checkpoint(model_type, **tiny()), attention=attention)
    assert read_manifest(package).verification.status == "verified"
    graph = onnx.load(package / "model.onnx", load_external_data=False).graph
    assert any(node.op_type == "MoE" for node in graph.node) == (attention == "gqa")
    check_stored_layout(graph)


def tiny() -> dict[str, Any]:
    """Settings of a checkpoint with few small experts."""
    return {"num_local_experts": COUNT, "num_experts_per_tok": CHOSEN, "intermediate_size": 48, "num_hidden_layers": 1}


def check_stored_layout(graph: onnx.GraphProto) -> None:
    """No node turns or reshapes a stack of weights when a session starts."""
    stacks = {value.name for value in graph.initializer if len(value.dims) > 2}
    assert stacks or any(node.op_type == "Gemm" for node in graph.node)
    assert not [
        node.name for node in graph.node if node.op_type in ("Transpose", "Reshape") and node.input[0] in stacks
    ]
