"""Facts to build reports from: a recorded run on the CPU, and a hand-made one on WebGPU with the CPU as second choice.

`recorded/tiny_llama_cpu.json` was recorded with ONNX Runtime 1.31.1: a random 2-layer llama with GroupQueryAttention,
one prefill run of 5 tokens and two decode runs with the profile on, then two decode steps without. Memory and loading
times are made up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.observations.facts import (
    AssignedNode,
    GraphNode,
    NodeEvent,
    PortFact,
    RunFacts,
    RunWindow,
    SessionFacts,
    StateFact,
    StepFact,
)
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry, Environment, Memory, PackageFacts
from partita.partition_reports.build import build_report
from partita.partition_reports.phase_records import Phase
from partita.partition_reports.records import DryRunFacts, Report, Request
from partita.partition_reports.render.show import load_view
from partita.partition_reports.sections.model import Line, Section
from partita.partition_reports.sections.report import document

CPU = "CPUExecutionProvider"
GPU = "WebGpuExecutionProvider"
CPU_CHAIN = (ChainEntry(provider=CPU, status="active"),)
GPU_CHAIN = (ChainEntry(provider=GPU, status="active"), *CPU_CHAIN)
NO_GPU_CHAIN = (
    ChainEntry(
        provider=GPU,
        status="unavailable",
        reason="not_in_build",
        evidence="onnxruntime 1.31.1 offers CPUExecutionProvider",
        remedy="pip install onnxruntime-webgpu",
    ),
    *CPU_CHAIN,
)
TENSORRT = "TensorrtExecutionProvider"
MISSING_FIRST_CHAIN = (
    ChainEntry(
        provider=TENSORRT,
        status="unavailable",
        reason="library_missing",
        evidence="libnvinfer.so.10: cannot open shared object file",
        remedy="install TensorRT",
    ),
    *GPU_CHAIN,
)
"""Three providers, of which the preferred one is not there."""
ENVIRONMENT = Environment(
    cpu="Test CPU",
    logical_cores=2,
    memory_bytes=8 << 30,
    operating_system="Linux 6.1",
    python="3.11.9",
    onnxruntime_version="1.31.1",
    onnxruntime_build="Release",
    packages={"numpy": "2.3.0"},
)
PACKAGE = PackageFacts(
    name="tiny",
    manifest_sha256="ab" * 32,
    model_type="llama",
    attention="gqa",
    precision="fp32",
    batch_size=1,
    max_length=64,
    verification="verified",
    verification_detail="known answer replayed on CPUExecutionProvider",
)
REQUEST = Request(
    verb="generate",
    chain=("cpu",),
    chain_source="default",
    options={"temperature": "0"},
    threads=None,
    prompt_tokens=5,
    max_new_tokens=5,
    prefill_chunk_tokens=512,
)
MEMORY = Memory(
    weight_bytes=1 << 20,
    cache_bytes=65536,
    rss_before_load_bytes=100_000_000,
    rss_after_load_bytes=120_000_000,
    peak_rss_bytes=130_000_000,
)


PLAYED = DryRunFacts(
    device="h100",
    device_name="NVIDIA H100",
    compute_capability="9.0",
    memory_bytes=80 << 30,
    multiprocessors=132,
    provider_library="libonnxruntime_providers_cuda.so",
    onnxruntime_version="1.31.1",
    cuda_version="13.0",
    stub_build="0123456789abcdef",
    not_real=("values", "times"),
)
"""The device of a dry run."""


def report_of(facts: RunFacts, chain: tuple[ChainEntry, ...] = CPU_CHAIN, **changes: Any) -> Report:
    """The report of `facts`, with the sample environment, package and request unless changed."""
    asked = REQUEST if chain == CPU_CHAIN else REQUEST.model_copy(update={"chain": tuple(e.provider for e in chain)})
    given: dict[str, Any] = {"environment": ENVIRONMENT, "package": PACKAGE, "request": asked}
    given |= {"created": "2026-11-21T08:00:00Z", "partita_version": "0.1.0"}
    return build_report(facts, chain=chain, **(given | changes))


def shown(report: Report, view: str = "text") -> str:
    """A view of a report."""
    return load_view(view).to_text(report)


def top(report: Report) -> dict[str, str]:
    """Label -> text of the sentences at the top of every view."""
    return {block.label: block.text for block in document(report).opening if isinstance(block, Line)}


def section_of(report: Report, key: str) -> Section | None:
    """A section of the document of a report; None if it has none."""
    return next((part for part in document(report).sections if part.key == key), None)


def phase_of(report: Report, name: str) -> Phase:
    """The phase called `name`."""
    return next(phase for phase in report.phases if phase.name == name)


def failed(report: Report) -> list[str]:
    """Names of the checks that did not pass."""
    return [check.name for check in report.checks if not check.passed]


def run_facts(*sessions: SessionFacts, **changes: Any) -> RunFacts:
    """A run of these sessions: 5 prompt tokens and 3 new ones unless changed."""
    given: dict[str, Any] = {
        "sessions": sessions,
        "states": (),
        "steps": (step("prefill", 5, observed=True), step("decode", 1, observed=True), step("decode", 1)),
        "memory": MEMORY,
        "tokenizer_load_seconds": 0.05,
        "first_token_seconds": 0.01,
        "prompt_tokens": 5,
        "new_tokens": 3,
        "finish_reason": "length",
    }
    return RunFacts(**(given | changes))


def step(
    phase: str, tokens: int, seconds: float = 0.01, overhead: float = 0.001, *, observed: bool = False
) -> StepFact:
    return StepFact(phase, tokens, seconds, overhead, observed)


OF_A_PROVIDER = ("patterns", "budget", "probes", "rejected")


def of_provider(changes: dict[str, Any]) -> dict[str, Any]:
    """Takes out of `changes` what is known of one provider."""
    return {name: changes.pop(name) for name in OF_A_PROVIDER if name in changes}


def session_facts(*, of: str = GPU, **changes: Any) -> SessionFacts:
    """A session without any fact but those given. `of`: the provider that what is known of a provider belongs to."""
    known = of_provider(changes)
    given: dict[str, Any] = {
        "file": "model.onnx",
        "phases": ("prefill", "decode"),
        "graph": (),
        "plan": None,
        "assigned": None,
        "events": (),
        "runs": (),
        "log": (),
        "registered": (CPU,),
        "ports": (),
        "load_seconds": 0.1,
    }
    session = SessionFacts(**(given | changes))
    return session.with_provider(of, **known) if known else session


def exported(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str | None = None) -> GraphNode:
    """An exported node; module and operator are read off its name."""
    module, _, op = name.partition("/")
    return GraphNode(name, op.partition("_")[0], "", inputs, outputs, module or None, source)


def event(run: int, order: int, name: str, op_type: str, provider: str, **changes: Any) -> NodeEvent:
    """One execution: starts at order * 100 us and takes 10 us unless changed."""
    given: dict[str, Any] = {"start_us": run * 100_000 + order * 100, "host_us": 10, "output_bytes": 512}
    given["output_shapes"] = ("float32[1,128]",)
    return NodeEvent(run=run, order=order, name=name, op_type=op_type, provider=provider, **(given | changes))


def windows(*phases: str) -> tuple[RunWindow, ...]:
    """One session run per phase named."""
    return tuple(
        RunWindow(run, phase, 5 if phase == "prefill" else 1, run * 100_000, 50_000) for run, phase in enumerate(phases)
    )


def recorded_facts() -> RunFacts:
    """The recorded run on the CPU."""
    text = (Path(__file__).parent / "recorded" / "tiny_llama_cpu.json").read_text(encoding="utf-8")
    raw = frozen(json.loads(text))
    session = raw.pop("session")
    kinds = {"graph": GraphNode, "assigned": AssignedNode, "events": NodeEvent}
    session |= {name: tuple(kind(*row) for row in session[name]) for name, kind in kinds.items()}
    session |= {"runs": tuple(RunWindow(**row) for row in session["runs"])}
    session |= {"ports": tuple(PortFact(**row) for row in session["ports"])}
    raw |= {"states": tuple(StateFact(**row) for row in raw["states"]), "memory": Memory(**raw["memory"])}
    raw |= {"steps": tuple(StepFact(**row) for row in raw["steps"]), "sessions": (SessionFacts(**session),)}
    return RunFacts(**raw)


def frozen(value: Any) -> Any:
    """JSON lists as tuples, at every depth."""
    if isinstance(value, dict):
        return {name: frozen(inner) for name, inner in value.items()}
    return tuple(frozen(inner) for inner in value) if isinstance(value, list) else value


# The plan of the hand-made run: name, operator, provider. Two shape operators and one that WebGPU does not have are on
# the CPU; three copies and a Transpose are ONNX Runtime's own.
MIXED_PLAN = (
    ("model.embed_tokens/Gather", "Gather", GPU),
    ("model.rotary_emb/Shape", "Shape", GPU),
    ("model.rotary_emb/Gather", "Gather", CPU),
    ("model.rotary_emb/Concat", "Concat", CPU),
    ("Memcpy_token_0", "MemcpyFromHost", GPU),
    ("model.rotary_emb/Expand", "Expand", GPU),
    ("model.layers.0.self_attn.q_proj/MatMul", "MatMul", GPU),
    ("Memcpy", "MemcpyToHost", GPU),
    ("model.layers.0.self_attn/Det", "Det", CPU),
    ("Transpose_token_4", "Transpose", CPU),
    ("Memcpy_token_1", "MemcpyFromHost", GPU),
    ("model.layers.0.mlp/Mul", "Mul", GPU),
    ("lm_head/MatMul", "MatMul", GPU),
)
NO_KERNEL = (
    "[I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability] webgpu kernel not found in registries for "
    "Op type: Gather node name: model.rotary_emb/Gather"
)
PREFERRED = (
    "[I:onnxruntime:, fallback_cpu_capability.cc:171 operator()] ORT optimization- Force fallback to CPU execution "
    "for node: model.rotary_emb/Concat because the CPU execution path is deemed faster than overhead involved with "
    "execution on other EPs  capable of executing this node"
)
COPIED = tuple(
    f"[I:onnxruntime:, transformer_memcpy.cc:470 AddCopyNode] Add {which} for WebGpuExecutionProvider"
    for which in ("MemcpyToHost before query", "MemcpyFromHost after wide", "MemcpyFromHost after det")
)
"""The copies in the order in which their nodes are numbered."""

PATTERNS = (
    LogPattern(
        "no_kernel_op", r"webgpu kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)"
    ),
    LogPattern("cpu_preferred", r"Force fallback to CPU execution for node: (?P<node>\S+) because (?P<why>the CPU)"),
)


def mixed_session(**changes: Any) -> SessionFacts:
    """One prefill and three decode runs on WebGPU and CPU; the first decode run is ten times slower than the others."""
    events = tuple(
        event(run, order, name, op, provider, host_us=1000 if run == 1 else 100, output_bytes=512)
        for run in range(4)
        for order, (name, op, provider) in enumerate(MIXED_PLAN)
    )
    given: dict[str, Any] = {
        "graph": (
            exported("model.embed_tokens/Gather", ("embedding", "input_ids"), ("hidden",)),
            exported("model.rotary_emb/Shape", ("input_ids",), ("shape",)),
            exported("model.rotary_emb/Gather", ("shape", "zero"), ("batch",), "modeling_llama.py:88"),
            exported("model.rotary_emb/Concat", ("batch",), ("wide",)),
            exported("model.rotary_emb/Expand", ("hidden", "wide"), ("expanded",)),
            exported("model.layers.0.self_attn.q_proj/MatMul", ("expanded", "q"), ("query",)),
            exported("model.layers.0.self_attn/Det", ("query",), ("det",)),
            exported("model.layers.0.mlp/Mul", ("det", "expanded"), ("scaled",)),
            exported("lm_head/MatMul", ("scaled", "head"), ("logits",)),
        ),
        "plan": (tuple(name for name, _, _ in MIXED_PLAN),),
        "assigned": tuple(
            AssignedNode(name, op, "", provider, number)
            for number, (name, op, provider) in enumerate(MIXED_PLAN)
            if not name.startswith("Memcpy")
        ),
        "events": events,
        "runs": windows("prefill", "decode", "decode", "decode"),
        "log": (
            "[I:onnxruntime:, inference_session.cc:2767 operator()] Initializing session.",
            NO_KERNEL,
            PREFERRED,
            *COPIED,
        ),
        "patterns": PATTERNS,
        "registered": (GPU, CPU),
        "ports": (
            PortFact("input_ids", "input", "tokens", "WebGPU_Buf", "Cpu", 8),
            PortFact("logits", "output", "logits", "WebGPU_Buf", "WebGPU_Buf", 2048),
        ),
    }
    return session_facts(**(given | changes))


def mixed_facts(**changes: Any) -> RunFacts:
    """The hand-made run on WebGPU and CPU."""
    return run_facts(mixed_session(**changes))


def with_session(facts: RunFacts, **changes: Any) -> RunFacts:
    """The same run with its only session changed."""
    known = of_provider(changes)
    return replace(facts, sessions=(replace(facts.sessions[0].with_provider(GPU, **known), **changes),))
