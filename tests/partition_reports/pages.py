"""Reports that the HTML page is tried on: one with many layers, one with hostile names, one per state."""

from __future__ import annotations

from typing import Any

from partita.diagnosis.records import Fallback, VariantRecord
from partita.partition_reports.cost import phase_cost
from partita.partition_reports.groups import with_groups, without_file
from partita.partition_reports.phase_records import Copy, NodePlacement, Phase
from partita.partition_reports.placement import find_partitions
from partita.partition_reports.records import RejectedPart, Report
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.samples import CPU, GPU, recorded_facts, report_of

HOSTILE = "</script></style><script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=2>{{7*7}}&amp;"
CONTROL = "a\u202eb\u2066c\x00d\x1b[31me\u200ff\ud800g\nh"
LAYER_OPERATORS = (
    *("Pow", "ReduceMean", "Add", "Sqrt", "Mul", "MatMul", "Reshape", "Transpose", "MemcpyToHost", "Attention"),
    *("MemcpyFromHost", "MatMul", "Add", "Sigmoid", "Mul", "MatMul", "Add"),
)
TRIALS = (
    VariantRecord(factor="as_is", change="", outcome="rejected", message="no kernel", cached=False),
    VariantRecord(factor="type", change="float16 in place of float32", outcome="supported", message="", cached=True),
)


def cpu_report() -> Report:
    """Everything on the CPU, as asked."""
    return report_of(recorded_facts())


def node(position: int, name: str, operator: str, provider: str, layer: int | None, **changes: Any) -> NodePlacement:
    """A node of the plan."""
    module = name.rpartition("/")[0] or None
    given: dict[str, Any] = {"host_us_per_run": 12.5, "output_bytes": 256, "replaces": ()}
    given["sources"] = ("profile",) if operator.startswith("Memcpy") else ("profile", "model_file")
    given["added"] = operator.startswith("Memcpy")
    return NodePlacement(
        position=position,
        name=name,
        op_type=operator,
        provider=provider,
        module=module,
        layer=layer,
        **(given | changes),
    )


def layer_nodes(layers: int, repeats: int) -> tuple[NodePlacement, ...]:
    """An embedding, layers whose attention is on the CPU between two copies, and a head."""
    nodes = [node(0, "model.embed_tokens/Gather", "Gather", GPU, None)]
    for layer in range(layers):
        for repeat in range(repeats):
            for operator in LAYER_OPERATORS:
                position = len(nodes)
                copy = operator.startswith("Memcpy")
                name = f"Memcpy_{position}" if copy else f"model.layers.{layer}.part_{repeat}/{operator}_{position}"
                provider = CPU if operator == "Attention" else GPU
                nodes.append(node(position, name, operator, provider, layer))
    nodes.append(node(len(nodes), "lm_head/MatMul", "MatMul", GPU, None))
    return tuple(nodes)


def phase_with(phase: Phase, nodes: tuple[NodePlacement, ...]) -> Phase:
    """The phase with other nodes, and the sums that go with them."""
    strays = [entry for entry in nodes if entry.provider == CPU]
    copies = tuple(
        Copy(
            kind="memcpy_node",
            direction="device_to_host",
            name=nodes[at].name,
            tensor="t",
            bytes_per_run=64,
            host_us_per_run=5.0,
            caused_by=(stray.name,),
            source="profile",
        )
        for stray in strays
        for at in (stray.position - 1, stray.position + 1)
    )
    partitions = find_partitions(nodes)
    changed = phase.model_copy(
        update={
            "file_nodes": without_file(nodes),
            "nodes": nodes,
            "partitions": partitions,
            "copies": copies,
            "cost": phase_cost(nodes, partitions, copies, 1),
        }
    )
    return with_groups(changed)


COPYING = next(entry for entry in mixed().fallbacks if entry.cost is not None and entry.cost.copies)


def fallback(phase: str, entry: NodePlacement, **changes: Any) -> Fallback:
    """Why a node is on the CPU."""
    given: dict[str, Any] = {
        "phase": phase,
        "node": entry.name,
        "op_type": entry.op_type,
        "module": entry.module,
        "reason": "no_kernel_type",
        "evidence_kind": "probed",
        "evidence": f"no kernel for {entry.name} in float32",
        "remedy": "export with --precision fp16",
        "source_line": "modeling.py:12",
        "variants": TRIALS,
    }
    return COPYING.model_copy(update=given | changes)


def deep_report(layers: int = 32, repeats: int = 3) -> Report:
    """A model with many layers, and a fallback in each."""
    report = mixed()
    nodes = layer_nodes(layers, repeats)
    phases = tuple(phase_with(phase, nodes) for phase in report.phases)
    fallbacks = tuple(fallback(phase.name, entry) for phase in phases for entry in nodes if entry.provider == CPU)
    return report.model_copy(update={"phases": phases, "fallbacks": fallbacks})


def hostile_report(text: str = HOSTILE) -> Report:
    """A report in which every free text is `text`."""
    report = deep_report(layers=1, repeats=1)
    nodes = tuple(
        entry.model_copy(
            update={
                "name": f"{text}{entry.position}",
                "op_type": entry.op_type if entry.op_type and entry.op_type.startswith("Memcpy") else text,
                "module": text,
                "replaces": (text,),
            }
        )
        for entry in report.phases[0].nodes
    )
    phases = tuple(
        phase_with(phase, nodes).model_copy(update={"timing_note": text, "file": text}) for phase in report.phases
    )
    stray = next(entry for entry in nodes if entry.provider == CPU)
    trial = VariantRecord(factor="type", change=text, outcome="rejected", message=text, cached=False)
    said = {
        "evidence": text,
        "remedy": text,
        "source_line": text,
        "variants": (trial,),
        "missing_probes": text,
        "reason": text,
    }
    return report.model_copy(
        update={
            "package": report.package
            and report.package.model_copy(
                update={"name": text, "verification_detail": text, "verification": "unverified"}
            ),
            "request": report.request.model_copy(update={"options": {text: text}, "chain": (text,), "verb": text}),
            "environment": report.environment.model_copy(update={"cpu": text, "onnxruntime_build": text}),
            "phases": phases,
            "fallbacks": tuple(fallback(phase.name, stray, **said) for phase in phases),
            "notes": (text,),
            "exceeded_limits": (text,),
            "checks": tuple(check.model_copy(update={"detail": text, "passed": False}) for check in report.checks),
            "created": text,
            "partita_version": text,
        }
    )


def refused_report() -> Report:
    """The preferred provider refuses a part of the graph."""
    part = RejectedPart(
        file="model.onnx", provider=GPU, nodes=("a", "b"), evidence="cannot finalize", minimal=True, attempts=7
    )
    return mixed().model_copy(update={"rejected_parts": (part,)})
