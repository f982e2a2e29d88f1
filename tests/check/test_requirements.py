"""Requirements of `report check`: conditions, measures, and failures that name values and nodes."""

from __future__ import annotations

import pytest

from partita.check.gate import find
from partita.check.requirements import FIELDS, parse_requirement
from partita.errors import UsageError
from partita.partition_reports.phase_records import SubgraphNode, Subgraphs
from tests.partition_reports.report_changes import compiled, each_node, each_phase, mixed
from tests.partition_reports.samples import CPU, GPU, MISSING_FIRST_CHAIN, recorded_facts, report_of

PROVIDERS = {"webgpu": GPU, "cpu": CPU}.__getitem__
QUERY = "model.layers.0.self_attn.q_proj/MatMul"
SLOW = each_phase(mixed(), lambda phase: {"tokens_per_second": None})


def required(text, report=None):
    """Whether a requirement holds, and its detail."""
    return find(parse_requirement(text, PROVIDERS), report or mixed())


def having(report=None, **changes):
    """The report with other fields."""
    return (report or mixed()).model_copy(update=changes)


def inside(**changes):
    """The report with a control-flow subgraph in every phase."""
    return each_phase(mixed(), lambda phase: {"subgraphs": Subgraphs(**({"nodes": 5} | changes))})


FUSED = compiled(1, "model.layers.0.mlp/Mul", QUERY, "lm_head/MatMul", provider=CPU)


# Nodes of the file: 9, of which Gather, Concat and Det are on the CPU. The Transpose on the CPU is ONNX Runtime's own.
@pytest.mark.parametrize(
    ("text", "holds", "change"),
    [
        *((text, True, None) for text in (
            "provider=webgpu,share>=0.66",
            "provider=cpu,nodes<=4",
            "provider!=webgpu,nodes=4",
            "provider = webgpu , nodes >= 6",
            "op=MatMul,provider=webgpu,share=1",
            "op=Gather,provider=webgpu,share==0.5",
            "op!=Gather,provider=webgpu,share>=0.7",
            "module=rotary_emb,provider=cpu,share=50%",
            "module=layers.0,provider=cpu,nodes=1",
            "module=self_attn,provider=cpu,nodes=1",
            "module=self_atn,nodes=0",
            "reason=no_kernel_op,nodes=1",
            "phase=decode,copies<=4",
            "provider=webgpu,nodes>=6,share>=0.6",
            "op=Conv,provider=cpu,nodes=0",
            "unavailable=0",
        )),
        *((text, False, None) for text in (
            "provider=webgpu,share>0.67",
            "module=rotary,provider=cpu,nodes=0",  # a part of a path is a whole word of it
            "reason=unexplained,nodes=0",
            "phase=decode,copies<=3",
            "phase=run,copies<=99",
            "provider=webgpu,nodes>=6,share>=0.7",
        )),
        *((text, True, FUSED) for text in (
            "op=Mul,provider=cpu,share=1",
            "op!=MatMul,provider=cpu,share<=0.572",  # Mul, Gather, Concat and Det of 7, without the two MatMul
            "op!=MatMul,provider=cpu,share>=0.571",
            "op=CompiledSubgraph,provider=cpu,share=1",
            "op=CompiledSubgraph,nodes=3",
            "module=q_proj,provider=cpu,nodes=1",
            "module=layers.0,provider=cpu,share=1",
            "module=embed_tokens,provider=cpu,nodes=0",
            "op=Mul,module=lm_head,provider=cpu,nodes=0",
        )),
        ("module=lm_head,provider=cpu,nodes=0", False, FUSED),
    ],
)  # fmt: skip
def test_requirement_conditions_and_measures_are_evaluated(text, holds, change):
    report = mixed() if change is None else change(mixed())
    assert required(text, report)[0] is holds, required(text, report)


LOST = each_node(mixed(), lambda n: n.model_copy(update={"provider": None if n.name == QUERY else n.provider}))
UNAVAILABLE = report_of(recorded_facts(), MISSING_FIRST_CHAIN)
NO_MODULE = "cannot be confirmed in prefill and decode: no phase has a node of this module"
"""A renamed or misspelled module selects no node, so `nodes=0` would always hold."""


@pytest.mark.parametrize(
    ("text", "report", "detail"),
    [
        (
            "op=Gather,provider=webgpu,share>=0.9",
            mixed(),
            "share 0.5 in prefill and decode, without model.rotary_emb/Gather (Gather on CPU: no_kernel_op)",
        ),
        (
            "provider=cpu,nodes=0",
            mixed(),
            "nodes 4 in prefill and decode: model.rotary_emb/Gather (Gather on CPU: no_kernel_op), ",
        ),
        ("op=MatMul,provider=webgpu,share=1", LOST, "share "),
        ("op=MatMul,provider!=cpu,share=1", LOST, "share "),
        ("op=Conv,provider=webgpu,share<=1", mixed(), "cannot be confirmed in prefill and decode: no node of the file"),
        ("tokens_per_second>=0", SLOW, "cannot be confirmed in prefill and decode: the report has no times"),
        *((f"module=self_atn,{part},nodes=0", mixed(), NO_MODULE) for part in ("provider=cpu", "reason=unexplained")),
        ("unavailable=0", UNAVAILABLE, "1 unavailable provider in prefill and decode: TensorrtExecutionProvider ("),
        ("copies<=99", inside(copies=None), "cannot be confirmed in prefill and decode: some copies in control-flow"),
        ("provider=webgpu,share>=0.9", inside(copies=0), "share 0.6667 (5 nodes in control-flow subgraphs not "),
    ],
)
def test_failed_requirement_names_values_nodes_and_reasons(text, report, detail):
    holds, said = required(text, report)
    assert not holds and said.startswith(detail)


def test_expanded_function_counts_on_least_preferred_provider():
    parts = tuple(
        SubgraphNode(name=name, op_type=name, provider=place, replaces=("map",))
        for name, place in (("At", GPU), ("Insert", CPU))
    )
    function = mixed().phases[0].file_nodes[0].model_copy(update={"name": "map", "op_type": "SequenceMap"})
    bodies = Subgraphs(nodes=3, function_nodes=parts, copies=0)
    report = each_phase(mixed(), lambda phase: {"file_nodes": (*phase.file_nodes, function), "subgraphs": bodies})
    held, said = required("op=SequenceMap,provider=webgpu,share>=1", report)
    assert not held and said.startswith("share 0 (1 node in control-flow subgraphs not counted) in ")
    assert required("op=SequenceMap,provider=cpu,nodes=1", report)[0], "on the least preferred of its providers"


def test_folded_nodes_are_excluded_from_share():
    folded = {"state": "folded", "provider": None, "ran_as": ()}
    phases = tuple(
        having(phase, file_nodes=tuple(having(r, **(folded if r.provider == CPU else {})) for r in phase.file_nodes))
        for phase in mixed().phases
    )
    report = having(phases=phases)
    assert required("provider=webgpu,share=1", report)[0] and required("op=Det,nodes=0", report)[0]


@pytest.mark.parametrize("text", ["provider!=cpu,share<=0", "module=typo,provider=webgpu,share>=1"])
def test_share_does_not_apply_to_folded_graph(text):
    report = each_phase(mixed(), lambda phase: {"nodes": (), "file_nodes": (), "folded_nodes": 9})
    applies_not = "share does not apply in prefill and decode: ONNX Runtime folded the whole graph at load time"
    assert required(text, report) == (True, applies_not)
    assert required("provider=cpu,nodes=0", report) == (True, "nodes 0 in prefill and decode")
    nodes = required("module=model.embed_tokens,provider=cpu,nodes=0", report)
    assert nodes == (True, applies_not.replace("share", "nodes"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("provder=webgpu,share>=1", "unknown field 'provder'; did you mean 'provider'?"),
        ("speed>=1", f"known: {', '.join(FIELDS)}"),
        ("provider=webgpu", "it has no measure"),
        ("share>=0.5", "share needs provider or reason"),
        ("provider>webgpu,nodes=1", "provider takes = or !="),
        ("provider=,nodes=1", "provider has no value"),
        ("phase=decod,copies=0", "did you mean 'decode'"),
        ("reason=unexplaind,nodes=0", "did you mean 'unexplained'"),
        ("copies<=many", "copies is compared with a number"),
        ("copies<=nan", "compared with a number"),
        ("provider=cpu,share>=95", "between 0 and 1"),
        ("provider=cpu,copies<=1", "copies measures a whole phase"),
        ("provider=cpu,unavailable=0", "unavailable measures a whole phase"),
        ("", "is not FIELD OP VALUE"),
    ],
)
def test_invalid_requirement_raises_single_line_usage_error(text, words):
    with pytest.raises(UsageError) as caught:
        parse_requirement(text, PROVIDERS)
    assert words in str(caught.value) and "\n" not in str(caught.value)
