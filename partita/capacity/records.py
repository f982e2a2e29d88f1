"""Records of `partita plan --json` with its document, and of the measured rates of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from partita.observations.records import Record
from partita.observations.text_format import decimals, human_bytes, plural
from partita.partition_reports.phase_records import Bound
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Column, Document, Group, Line, Plot, Section, pairs, table

SCHEMA = "partita.plan/1"


class FormRates(Record):
    """Rates of products with weights of one form."""

    gemv_bytes_per_second: dict[int, float]
    """Bytes of all weights of a model -> bytes per second that one row of activations reads of them."""
    product_bytes: tuple[int, int]
    """Bytes of the weights of one product: in `gemv_bytes_per_second`, and in `large_gemv_bytes_per_second`."""
    large_gemv_bytes_per_second: float
    """The same with larger matrices than any cache holds together."""
    gemm_flops: float
    """Arithmetic per second for 256 rows."""
    product_seconds: float
    """A product with a matrix of 256 x 256: mostly start and synchronisation of the threads."""


class MachineRates(Record):
    """Rates of this machine with ONNX Runtime's CPU provider, each the fastest of several runs."""

    threads: int
    onnxruntime: str
    read_bytes_per_second: float
    elementwise_bytes_per_second: float
    """Read and written."""
    forms: dict[str, FormRates]
    """By form of the weights: float32, int8, int4."""
    attention_decode_flops: float
    """Arithmetic per second of attention, one new token after 1,023."""
    attention_prefill_flops: float
    node_seconds: float
    """One small node."""
    process_bytes: int
    """Resident memory of a process with ONNX Runtime and no model."""


class DeviceFacts(Record):
    """The device of a plan."""

    name: str
    """`here`, or the name of a known device."""
    title: str
    memory_bytes: int
    available_bytes: int
    """For `here`, the free memory now."""
    source: str
    """Basis of its memory and rates."""


class MemoryPart(Record):
    """Memory of one kind at full context and batch."""

    name: Literal["process", "weights", "cache", "logits", "workspace"]
    size_bytes: int
    basis: str


class Estimate(Record):
    """A computed figure with an interval."""

    value: float
    low: float
    high: float


class PhasePlan(Record):
    """One phase: prefill is the prompt, decode is one step of all rows."""

    phase: Literal["prefill", "decode"]
    read_bytes: int
    """Weights, and the cached keys and values."""
    flops: int
    seconds: Estimate
    bound_by: Bound
    """The part with most of the time."""


class Plan(Record):
    """The result of `partita plan`."""

    schema_id: Literal["partita.plan/1"] = Field(default="partita.plan/1", alias="schema")
    partita_version: str
    model: str
    kind: Literal["checkpoint", "config", "package", "folder"]
    model_type: str
    parameters: int
    """Parameters of the source model; 0 if unknown."""
    precision: str
    attention: str
    device: DeviceFacts
    context: int
    batch: int
    prompt_tokens: int
    fits: bool
    required_bytes: int
    """Peak: of loading or of running."""
    load_bytes: int
    """Peak of loading on the CPU: mapped weights and packed weights; 0 on a GPU."""
    memory: tuple[MemoryPart, ...]
    cache_bytes_per_token: int
    """Of one row, in layers that cache every token."""
    largest_context: int
    """Of this batch size; 0 if none fits. At most the model's maximum length."""
    largest_batch: int
    """Of this context; 0 if none fits."""
    context_limit: int | None
    """The model's maximum length, or the package's; null if unknown."""
    batch_limit: int | None
    """The batch size of the package; null for a checkpoint."""
    phases: tuple[PhasePlan, ...]
    first_token_seconds: Estimate
    """Of a prompt of `prompt_tokens` in every row."""
    decode_tokens_per_second: Estimate
    """Of all rows, after `prompt_tokens` tokens."""
    speed_basis: str
    notes: tuple[str, ...]


# Document


def document(plan: Plan) -> Document:
    """Every section."""
    return Document(
        kind="Plan",
        name=plan.model,
        headline=(headline(plan),),
        opening=tuple(_opening(plan)),
        sections=(_memory(plan), _speed(plan), _model(plan)),
        version=plan.partita_version,
    )


VIEWS = Views(document)


def headline(plan: Plan) -> str:
    """Whether it fits, in one sentence."""
    device = plan.device
    where = "this machine" if device.name == "here" else device.name
    needs = f"{human_bytes(plan.required_bytes)} of {human_bytes(device.available_bytes)} on {where}"
    return f"{'fits' if plan.fits else 'does not fit'}: needs {needs}, context {plan.context:,}, batch {plan.batch}"


def largest(plan: Plan) -> str:
    """The largest settings that fit, in one sentence."""
    found = {
        f"context {plan.largest_context:,} with batch {plan.batch}": (plan.largest_context, plan.context_limit),
        f"batch {plan.largest_batch:,} with context {plan.context:,}": (plan.largest_batch, plan.batch_limit),
    }
    fitting = [f"{text}{' (its limit)' if size == limit else ''}" for text, (size, limit) in found.items() if size]
    return "; ".join(fitting) or "no context and batch size; use a smaller precision"


def _opening(plan: Plan) -> Iterator[Line]:
    """The largest settings, and the speed."""
    yield Line(largest(plan), "largest that fit")
    yield Line(f"{_range(plan.first_token_seconds)} s, prompt of {plural(plan.prompt_tokens, 'token')}", "first token")
    yield Line(f"{_range(plan.decode_tokens_per_second)} tokens/s", "decode")


def _range(found: Estimate) -> str:
    return f"{decimals(found.value)} ({decimals(found.low)} to {decimals(found.high)})"


def _memory(plan: Plan) -> Section:
    """Memory by kind, and as a plot in the page."""
    rows: list[tuple[str, str, str]] = [(part.name, human_bytes(part.size_bytes), part.basis) for part in plan.memory]
    if plan.load_bytes == plan.required_bytes:
        rows.append(("peak of loading", human_bytes(plan.load_bytes), "packed weights and the mapped file together"))
    heads = ("memory", Column("size"), "basis")
    points = tuple((part.name, float(part.size_bytes)) for part in plan.memory)
    plot = Plot("Memory in bytes", points, float(plan.device.available_bytes), "available memory")
    fold = Group("Plot of the memory", (plot,), folded=True)
    return Section("memory", "Memory", (table("Memory at full context", heads, rows), fold))


def _speed(plan: Plan) -> Section:
    """Work and time of both phases."""
    rows = [
        (phase.phase, human_bytes(phase.read_bytes), decimals(phase.flops, 1e-9), _range(phase.seconds), phase.bound_by)
        for phase in plan.phases
    ]
    heads = ("phase", Column("reads"), Column("GFLOP"), Column("seconds"), "bound by")
    about = "prefill: the whole prompt; decode: one step of all rows"
    made = table(f"Work and time ({about})", heads, rows)
    return Section("speed", "Speed", (made, Line(plan.speed_basis, "basis", "quiet")))


def _model(plan: Plan) -> Section:
    """The model and the device."""
    limit = "unknown" if plan.context_limit is None else f"{plan.context_limit:,}"
    parameters = f", {plan.parameters:,} parameters" if plan.parameters else ""
    rows = (
        ("model", f"{plan.model_type}{parameters}, {plan.precision}, attention {plan.attention} ({plan.kind})"),
        ("cache", f"{plan.cache_bytes_per_token:,} bytes per token and row; maximum context {limit}"),
        ("device", f"{plan.device.title}, {human_bytes(plan.device.memory_bytes)}; {plan.device.source}"),
    )
    notes = tuple(Line(note, "note", "quiet") for note in plan.notes)
    return Section("model", "Model and device", (pairs("Model and device", rows), *notes))
