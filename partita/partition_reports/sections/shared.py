"""Texts, anchors, keys of similar findings and suggested actions, shared by several sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from partita.diagnosis.reasons import steps_of
from partita.diagnosis.records import Fallback, SkippedProvider, VariantRecord
from partita.diagnosis.steps import Action, Situation, each, steps_for
from partita.observations.codes import PROVIDER_CODES
from partita.observations.facts import AS_IS
from partita.observations.records import Environment
from partita.observations.text_format import decimals, human_bytes, plural, short_provider
from partita.partition_reports.cost import total_bytes
from partita.partition_reports.groups import Node
from partita.partition_reports.outcome import TOO_FEW, merge_phases, too_few_steps, used_phases
from partita.partition_reports.placement import subgraph_copies
from partita.partition_reports.records import Copy, Phase, PhaseCost, Report
from partita.partition_reports.sections.model import Block, Column, Line, table
from partita.remedies import split

REASONS_PAGE = "docs/reasons.md"
"""Documentation of the reason codes, with an anchor for each."""
COPY_OPERATORS = {"MemcpyFromHost": "↓", "MemcpyToHost": "↑"}
"""Memcpy operator -> its arrow: down to the device, up to the host."""


def is_copy(node: Node) -> bool:
    """Whether it is a Memcpy node."""
    return node.op_type in COPY_OPERATORS


def placements(report: Report) -> list[list[Phase]]:
    """Phases with nodes, grouped by equal placement."""
    return merge_phases(used_phases(report))


def speed_text(phase: Phase) -> tuple[str, ...]:
    """The speed of a phase and its basis; the speed is empty if unknown."""
    if phase.tokens_per_second is None and phase.step_p50_ms is None:
        return ("",)
    few = f"; {TOO_FEW}" if too_few_steps(phase) else ""
    of = plural(phase.steps, "run" if phase.name == "run" else f"{phase.name} step")
    if phase.tokens_per_second is None:
        return f"{decimals(phase.step_p50_ms)} ms per run", f"{'median of ' if phase.steps > 1 else ''}{of}{few}"
    speed = f"{decimals(phase.tokens_per_second)} tokens/s"
    if phase.steps < 2 or phase.step_p50_ms is None:
        return speed, f"{of}{few}"
    return speed, f"mean of {of}; median step {decimals(phase.step_p50_ms)} ms{few}"


def on_providers(counts: dict[str, int]) -> str:
    """Nodes per provider, by short names."""
    return ", ".join(f"{short_provider(provider)} {count:,}" for provider, count in counts.items())


def count_and_bytes(count: int, size: int | None, at_least: int = 0) -> str:
    """Number of copies, with their bytes if there are any."""
    return f"{count:,}{in_bytes(size, at_least)}" if count else "0"


def in_bytes(size: int | None, at_least: int = 0) -> str:
    """The size in parentheses, or its lower bound."""
    if size is not None:
        return f" ({human_bytes(size)})"
    return f" ({human_bytes(at_least)} or more)" if at_least else " (size unknown)"


def subgraph_suffix(phase: Phase) -> str:
    """Suffix with the number of copies in control-flow subgraphs."""
    if phase.subgraphs is None:
        return ""
    if subgraph_copies(phase) is None:
        return " (some in control-flow subgraphs may be missing)"
    return f" and {phase.subgraphs.copies:,} in control-flow subgraphs" if phase.subgraphs.copies else ""


def copied_bytes(copies: Sequence[Copy]) -> str:
    """Sum of the sizes of copies, marked if some are unknown."""
    whole = total_bytes(copies)
    known = sum(copy.bytes_per_run or 0 for copy in copies)
    return human_bytes(known) if whole is not None else f"{human_bytes(known)} or more" if known else "size unknown"


def bytes_per_token(cost: PhaseCost) -> str:
    """Bytes copied per new token; `-` if a size is unknown."""
    return human_bytes(None if cost.copy_bytes_per_token is None else round(cost.copy_bytes_per_token))


def runtime_name(machine: Environment) -> str:
    """Wheels of ONNX Runtime with their versions."""
    imported = machine.onnxruntime_version
    named = [f"{wheel.name} {wheel.version or imported}" for wheel in machine.onnxruntime_wheels]
    if any(wheel.version in ("", imported) for wheel in machine.onnxruntime_wheels):
        return ", ".join(named)
    return " ".join([*([", ".join(named)] if named else ["onnxruntime"]), imported])


def node_anchors(report: Report) -> dict[tuple[str, int], str]:
    """(phase, position) -> anchor in the list of nodes; phases with equal placement share rows."""
    return {
        (phase.name, node.position): f"n{number}-{node.position}"
        for number, phases in enumerate(merge_phases(report.phases))
        for phase in phases
        for node in phase.nodes
    }


def reason_anchor(number: int) -> str:
    """Anchor of a reason's group, by its number in display order."""
    return f"r{number}"


OPERATOR_EVIDENCE = ("logged", "probed")
"""Kinds of evidence that apply to the operator of a node."""


def finding_key(report: Report) -> Callable[[Fallback], object]:
    """A function that returns the finding of a node for every preferred provider, for grouping."""
    parts = {name: number for number, part in enumerate(report.rejected_parts) for name in part.nodes}

    def key(entry: Fallback) -> object:
        part = parts.get(entry.node)
        about_operator = part is None and any(
            each.evidence_kind in OPERATOR_EVIDENCE and each.reason not in PROVIDER_CODES for each in entry.preferred
        )
        return tuple(map(_known, entry.preferred)), part, entry.op_type if about_operator else None

    return key


def _known(why: SkippedProvider) -> object:
    """The finding for one provider, without the texts that Partita writes."""
    trials = tuple((trial.factor, trial.after, trial.outcome, trial.neg_added) for trial in why.variants)
    return why.provider, why.reason, why.evidence_kind, trials, bool(why.missing_probes)


def first_of(texts: Iterable[str]) -> str:
    """The first of several texts, with the number of different texts if there are several."""
    different = list(dict.fromkeys(texts))
    return different[0] + (f" (one of {len(different)})" if len(different) > 1 else "")


def probe_table(title: str, variants: Sequence[VariantRecord]) -> Iterator[Block]:
    """Probes as a table of changes and outcomes, with the messages below it."""
    quoted = list(dict.fromkeys(trial.message for trial in variants if trial.message))
    rows = [
        (
            "unchanged" if trial.factor == AS_IS else trial.factor.replace("_", " "),
            trial.change,
            trial.outcome.replace("_", " "),
            f"[{quoted.index(trial.message) + 1}]" if trial.message else "",
        )
        for trial in variants
    ]
    yield table(title, ("property", "change", "outcome", Column("message")), rows)
    yield from (Line(f"[{number}] {text}") for number, text in enumerate(quoted, 1))


OF_FOLDER = ("variant", "contract", "max-length")
OF_INPUTS = ("shape", "input")
"""Options of a request other than provider options, by command-line name; those of `OF_INPUTS` are repeatable."""


def situation_of(report: Report) -> Situation:
    """Context of a report, for the placeholders of an action."""
    options = report.request.options
    # Provider options have the form PROVIDER.OPTION.
    provider_options = {name: value for name, value in options.items() if "." in name}
    several = {name: split(options.get(name, "")) for name in (*OF_INPUTS, "pin", "provider-library")}
    if report.model is None:  # --input of a generation is a prompt
        opened = [word for name in OF_FOLDER if name in options for word in each(f"--{name}", (options[name],))]
    else:
        opened = [word for name in OF_INPUTS for word in each(f"--{name}", several[name])]
    return Situation(
        report.package,
        report.request.path,
        report.request.chain,
        provider_options,
        report.dry_run.device if report.dry_run is not None else "",
        several["pin"],
        several["provider-library"],
        tuple(opened),
    )


def for_reason(report: Report, code: str, entries: Sequence[Fallback]) -> list[Action]:
    """The actions for a reason that apply to this report."""
    return steps_for(
        situation_of(report),
        steps_of(code),
        entries[0].preferred_provider,
        unprobed=any(entry.missing_probes for entry in entries),
        trials=[entry.variants for entry in entries],
    )


def top_actions(report: Report, groups: Sequence[tuple[tuple[str, str], Sequence[Fallback]]]) -> Iterator[Action]:
    """The actions for unavailable providers, and for the first reason with actions."""
    for entry in report.chain:
        if entry.status == "unavailable":
            yield from steps_for(situation_of(report), steps_of(entry.reason), entry.provider)
    for (reason, _), entries in groups:
        found = for_reason(report, reason, entries)
        if found:
            yield from found
            return
