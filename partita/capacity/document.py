"""Document of a plan, for every view."""

from __future__ import annotations

from collections.abc import Iterator

from partita.capacity.records import Estimate, Plan
from partita.observations.text_format import decimals, human_bytes, plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Column, Document, Group, Line, Plot, Section, pairs, table


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
        (
            phase.phase,
            human_bytes(phase.read_bytes),
            decimals(phase.flops, 1e-9),
            _range(phase.seconds),
            phase.bound_by,
        )
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
