"""Times per node and step, figures of speculative decoding, and the cost of fallbacks and copies. Pure.

In a dry run device memory reads as zeros, so computed values and sizes that depend on them are wrong: its facts lose
times and these sizes.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from partita.diagnosis.graphs import COMPILED
from partita.diagnosis.records import Fallback, FallbackCost
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import RunFacts, RunWindow, SessionFacts, SpeculationFact, StepFact
from partita.observations.grouping import grouped
from partita.observations.records import ChainEntry, PhaseName
from partita.observations.text_format import percent, plural
from partita.partition_reports.groups import provider_of, share_of, total_us
from partita.partition_reports.phase_records import Copy, NodePlacement, Partition, Phase, PhaseCost, StepTimes
from partita.partition_reports.records import Speculation

HARMLESS_SHARE = 0.01
"""A harmless fallback takes a smaller share of its phase's node time."""
NO_TIMES = "no times: this was a dry run without a device"
BY_VALUES = frozenset(
    {
        *("BeamSearch", "BlackmanWindow", "Compress", "ConstantOfShape", "GreedySearch", "HammingWindow", "HannWindow"),
        *("If", "Loop", "MelWeightMatrix", "NonMaxSuppression", "NonZero"),
        *("Optional", "OptionalGetElement", "Range", "RemovePadding", "Sampling", "Scan", "SequenceAt", "SequenceMap"),
        *("SplitToSequence", "StringNormalizer", "StringSplit", "Unique", "WhisperBeamSearch"),
    }
)
"""Operators whose output sizes depend on input values, or on the execution of control-flow subgraphs."""
BY_FURTHER_INPUTS = frozenset(
    {
        *("AffineGrid", "CenterCropPad", "Col2Im", "CropAndResize", "DFT", "Expand", "MaxUnpool", "OneHot", "Pad"),
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape", "Resize", "STFT", "Slice", "Split", "Tile", "TopK"),
        "Upsample",
    }
)
"""Operators whose output sizes depend on the values of inputs other than the first."""
RESIDENT = ("rss_before_load_bytes", "rss_after_load_bytes", "peak_rss_bytes", "anonymous_growth_bytes")


# Cost of copies and fallbacks


def phase_cost(
    nodes: Iterable[NodePlacement], partitions: Sequence[Partition], copies: Sequence[Copy], tokens: int | None
) -> PhaseCost:
    """Cost of one run of a phase. `tokens`: new tokens per run."""
    moved = total_bytes(copies)
    wait = waiting_us(copies) if total_us(nodes) is not None else None
    return PhaseCost(
        partitions=len(partitions),
        copies=len(copies),
        copy_bytes_per_run=moved,
        copy_bytes_at_least=sum(copy.bytes_per_run or 0 for copy in copies),
        host_wait_us_per_run=wait,
        tokens_per_run=tokens,
        copy_bytes_per_token=moved / tokens if moved is not None and tokens else None,
        host_wait_us_per_token=wait / tokens if wait is not None and tokens else None,
    )


def total_bytes(copies: Iterable[Copy]) -> int | None:
    """Bytes copied in one run; None if the size of a copy is unknown."""
    sizes = [copy.bytes_per_run for copy in copies]
    return None if None in sizes else sum(filter(None, sizes))


def waiting_us(copies: Iterable[Copy]) -> float | None:
    """Host time of Memcpy nodes; None if one is unknown. Copies of session inputs and outputs have no profile."""
    times = [copy.host_us_per_run for copy in copies if copy.kind == "memcpy_node"]
    return None if None in times else float(sum(filter(None, times)))


def with_costs(fallbacks: Iterable[Fallback], phase: Phase, preferred: ChainEntry) -> Iterator[Fallback]:
    """The fallbacks of a phase with their cost per run; nodes in control-flow subgraphs have no cost."""
    # A node in a control-flow subgraph may have the name of a plan node on another provider.
    nodes = {(node.name, provider_of(node)): node for node in phase.nodes}
    whole = total_us(phase.nodes)
    copies = defaultdict[str, list[Copy]](list)
    for copy in phase.copies:
        for name in copy.caused_by:
            copies[name].append(copy)
    for entry in fallbacks:
        node = nodes.get((entry.node, entry.provider))
        if node is None:
            yield entry
            continue
        caused = copies[entry.node]
        part = share_of(node.host_us_per_run, whole)
        harmless, reason = _judge(caused, part, phase, preferred)
        cost = FallbackCost(
            copies=tuple(copy.name for copy in caused),
            copy_bytes_per_run=total_bytes(caused),
            copy_wait_us_per_run=waiting_us(caused) if whole is not None else None,
            host_us_per_run=node.host_us_per_run,
            time_share=part,
            harmless=harmless,
            harmless_reason=reason,
        )
        yield entry.model_copy(update={"cost": cost})


def _judge(caused: Sequence[Copy], part: float | None, phase: Phase, preferred: ChainEntry) -> tuple[bool | None, str]:
    """Whether a fallback is harmless, with the reason; unknown without a time, as in a dry run.

    `caused`: copies that it requires; `part`: its share of the node time.
    """
    if caused:
        return False, f"it causes {plural(len(caused), 'copy')}"
    if preferred.status != "active":
        return None, f"{preferred.provider} runs no nodes, so the cost of one node is unknown"
    unexplained = sum(bool(copy.cause_missing_reason) for copy in phase.copies)
    if unexplained:
        return None, f"it may cause {plural(unexplained, 'Memcpy node')} whose cause is unknown"
    if part is None:
        return None, "it causes no copy; its time is unknown"
    taken = f"{percent(part)} of the node time of {phase.name}"
    if part >= HARMLESS_SHARE:
        return False, f"it causes no copy, but takes {taken}"
    if any(node.op_type == COMPILED for node in phase.nodes):
        return None, f"it takes {taken}; ONNX Runtime does not report the copies of compiled nodes"
    if phase.subgraphs is not None and phase.subgraphs.may_have_more_copies:
        return None, f"it takes {taken}; ONNX Runtime does not report the copies for control-flow subgraphs"
    return True, f"it causes no copy and takes {taken}"


# Times of nodes and steps


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Times and sizes of nodes in the observed runs of one phase."""

    host_us: dict[str, float]
    """Median over the observed runs without the first, if there are more; several executions in a run are summed."""
    output_bytes: dict[str, int]
    """All outputs of all executions in the last observed run, without nodes whose outputs are not tensors, for which
    ONNX Runtime reports no size.
    """
    observed_runs: int
    tokens: int | None
    """New tokens in all rows of the last observed run; None if there are none."""
    note: str
    """The runs that the node times cover."""


def node_times(index: SessionIndex, phase: PhaseName, rows: int, *, is_dry: bool = False) -> NodeTimes:
    """Host time (us) and output bytes of every node, from the observed runs of `phase`.

    `rows`: batch size. `is_dry`: a dry run, without times and without sizes that depend on values.
    """
    windows = sorted((window for window in index.facts.runs if window.phase == phase), key=lambda window: window.run)
    timed = set[int]() if is_dry else {window.run for window in windows[1:] or windows}
    per_run: dict[str, Counter[int]] = defaultdict(Counter)
    for event in index.events:
        if event.run in timed:
            per_run[event.name][event.run] += event.host_us
    last = [event for event in index.events if windows and event.run == windows[-1].run]
    unknown = _tensors_of_unknown_size(index.facts) if is_dry else frozenset[str]()
    return NodeTimes(
        host_us={name: float(statistics.median(times.values())) for name, times in per_run.items()},
        output_bytes={
            name: sum(event.output_bytes for event in events)
            for name, events in grouped(last, lambda event: event.name).items()
            if all(event.output_shapes for event in events) and (not unknown or _has_known_size(index, name, unknown))
        },
        observed_runs=len(windows),
        tokens=windows[-1].tokens * (windows[-1].rows or rows) or None if windows else None,
        note=NO_TIMES if is_dry else _node_time_note(windows),
    )


def _node_time_note(windows: Sequence[RunWindow]) -> str:
    """The runs that the node times cover."""
    if not windows:
        return "no node times: no run of this phase was profiled"
    of = " of an earlier generation" if any(window.earlier for window in windows) else ""
    if len(windows) == 1:
        return f"node times are from one profiled run{of}, which includes warm-up"
    runs = "one profiled run" if len(windows) == 2 else f"{len(windows) - 1} profiled runs"
    return f"node times are medians over {runs}{of}, excluding the warm-up run"


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The percentile (1 .. 99) with linear interpolation; None without values."""
    if len(values) < 2:
        return next(iter(values), None)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def step_times(steps: Iterable[StepFact], phase: PhaseName, rows: int) -> StepTimes:
    """Speed of the steps of `phase` that were not observed, or of all if every step was. `rows`: batch size."""
    of_phase = [step for step in steps if step.phase == phase]
    free = [step for step in of_phase if not step.observed]
    timed = free or of_phase
    tokens = sum(rows * step.tokens if step.row_tokens is None else step.row_tokens for step in timed)
    milliseconds = [1000 * (step.seconds + step.overhead_seconds) for step in timed]
    seconds = sum(step.seconds + step.overhead_seconds for step in timed)
    count = plural(len(of_phase), "step")
    note = f"speed over {len(free)} of {count}, excluding profiled steps" if free else f"speed over {count}"
    if not free:
        note += ", slowed by profiling" if len(of_phase) == 1 else ", all slowed by profiling"
    return StepTimes(
        steps=len(timed),
        tokens=tokens,
        seconds=seconds if timed else None,
        tokens_per_second=tokens / seconds if seconds > 0 and tokens else None,
        step_p50_ms=percentile(milliseconds, 50),
        step_p95_ms=percentile(milliseconds, 95),
        step_p99_ms=percentile(milliseconds, 99),
        overhead_p50_ms=percentile([1000 * step.overhead_seconds for step in timed], 50),
        profiled=not free if of_phase else None,
        timing_note=note if of_phase else "no step of this phase was run",
    )


# Dry runs


def without_times(facts: RunFacts) -> RunFacts:
    """The facts of a dry run without steps, loading times and resident memory of this machine.

    Graph outputs whose size may depend on values have no size; inputs and states keep theirs.
    """
    sessions = []
    for session in facts.sessions:
        unknown = _tensors_of_unknown_size(session)
        ports = (
            replace(port, bytes_per_decode_step=None)
            if port.direction == "output" and port.role != "state" and port.name in unknown
            else port
            for port in session.ports
        )
        sessions.append(replace(session, ports=tuple(ports)))
    return replace(
        facts,
        sessions=tuple(sessions),
        steps=(),
        first_token_seconds=None,
        memory=facts.memory.model_copy(update=dict.fromkeys(RESIDENT)),
    )


def _has_known_size(index: SessionIndex, name: str, unknown: frozenset[str]) -> bool:
    """Whether the size of the node's output does not depend on values.

    For a node outside the file, the nodes that it replaces decide; for a copy, its tensor. If both are unknown, the
    size is unknown.
    """
    origins = [index.file_nodes[each] for each in (name, *index.replaces(name)) if each in index.file_nodes]
    if origins:
        return not any(tensor in unknown for node in origins for tensor in node.outputs)
    copied = index.memcpy.get(name)
    if copied is None or copied.tensor in unknown:
        return False
    # ONNX Runtime adds tensors that no node of the file writes or reads.
    return any(copied.tensor in (*node.outputs, *node.inputs) for node in index.facts.graph)


def _tensors_of_unknown_size(facts: SessionFacts) -> frozenset[str]:
    """Tensors of the file whose size may depend on values: neither shape inference nor constants determine it."""
    unknown: set[str] = set()
    for node in facts.graph:
        sizes = set(filter(None, node.inputs[1:])) if node.op_type in BY_FURTHER_INPUTS else set[str]()
        if node.op_type in BY_VALUES or unknown.intersection(node.inputs) or not sizes <= facts.constants:
            unknown.update(name for name in node.outputs if name and name not in facts.fixed_shapes)
    return frozenset(unknown)


# Speculative decoding


def speculation_figures(fact: SpeculationFact | None, steps: Sequence[StepFact]) -> Speculation | None:
    """The figures of a run; None without speculative decoding."""
    if fact is None:
        return None
    made = [step for step in steps if step.phase == "decode" and not step.observed]
    plain = [_own_seconds(step) / _tokens(step) for step in made if not step.drafted and _tokens(step)]
    tokens, drafted = sum(map(_tokens, made)), sum(step.drafted for step in made)
    accepted = sum(step.accepted for step in made)
    return Speculation.copy_of(
        fact,
        steps=len(made),
        drafting_steps=sum(bool(step.drafted) for step in made),
        drafted=drafted,
        accepted=accepted,
        acceptance_rate=accepted / drafted if drafted else None,
        tokens=tokens,
        tokens_per_step=tokens / len(made) if made else None,
        seconds=sum(step.seconds + step.overhead_seconds for step in made),
        draft_seconds=sum(step.draft_seconds for step in made),
        plain_token_ms=1000 * statistics.median(plain) if plain else None,
        speedup=_speedup(made) if drafted else None,
    )


def _speedup(steps: Sequence[StepFact]) -> float | None:
    """Speedup, comparing each step with steps of equally many rows, because rows share the time of a step."""
    by_rows = grouped((step for step in steps if not step.drafted and _tokens(step)), _rows)
    plain = {rows: statistics.median(map(_own_seconds, own)) for rows, own in by_rows.items()}
    compared = [step for step in steps if _rows(step) in plain]
    took = sum(step.seconds + step.overhead_seconds for step in compared)
    without = sum(_tokens(step) / _rows(step) * plain[_rows(step)] for step in compared)
    return without / took if took > 0 else None


def _rows(step: StepFact) -> int:
    return _tokens(step) - step.accepted


def _own_seconds(step: StepFact) -> float:
    return step.seconds + step.overhead_seconds - step.draft_seconds


def _tokens(step: StepFact) -> int:
    return step.tokens if step.row_tokens is None else step.row_tokens
