"""Times per node from observed runs, per step from the clock, and figures of speculative decoding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import SpeculationFact, StepFact
from partita.observations.records import PhaseName
from partita.observations.text_format import plural
from partita.partition_reports.groups import grouped
from partita.partition_reports.request_records import Speculation


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Times and sizes of nodes in the observed runs of one phase."""

    host_us: dict[str, float]
    """Median over the timed runs; several executions in a run are summed."""
    output_bytes: dict[str, int]
    """All outputs of all executions in the last observed run, without nodes whose outputs are not tensors, for which
    ONNX Runtime reports no size.
    """
    observed_runs: int
    timed_runs: int
    """Observed runs in the medians; the first run is excluded if there are more."""
    earlier: bool = False
    """The observed runs belong to an earlier generation than the steps."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Speed of one phase. A step is the session run and the host work around it."""

    steps: int
    tokens: int
    """Tokens of all rows, without padding and finished rows."""
    seconds: float | None
    tokens_per_second: float | None
    step_p50_ms: float | None
    step_p95_ms: float | None
    step_p99_ms: float | None
    overhead_p50_ms: float | None
    profiled: bool | None
    """The steps were profiled, which slows them down, because there were no others; None without steps."""
    note: str


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile (0 .. 100) with linear interpolation; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return below + (above - below) * (rank - math.floor(rank))


def node_times(index: SessionIndex, phase: PhaseName) -> NodeTimes:
    """Host time (us) and output bytes of every node, from the observed runs of `phase`."""
    windows = [window for window in index.facts.runs if window.phase == phase]
    runs = sorted(window.run for window in windows)
    timed = runs[1:] if len(runs) > 1 else runs
    last_run = runs[-1] if runs else None
    per_run: dict[str, dict[int, int]] = {}
    output_bytes: dict[str, int] = {}
    unmeasured: set[str] = set()
    for event in index.events:
        if event.run in timed:
            of_node = per_run.setdefault(event.name, {})
            of_node[event.run] = of_node.get(event.run, 0) + event.host_us
        if event.run == last_run:
            output_bytes[event.name] = output_bytes.get(event.name, 0) + event.output_bytes
            if not event.output_shapes:
                unmeasured.add(event.name)
    output_bytes = {name: size for name, size in output_bytes.items() if name not in unmeasured}
    earlier = any(window.earlier for window in windows)
    host_us = {name: float(statistics.median(of_node.values())) for name, of_node in per_run.items()}
    return NodeTimes(host_us, output_bytes, observed_runs=len(runs), timed_runs=len(timed), earlier=earlier)


def step_times(steps: Iterable[StepFact], phase: PhaseName, rows: int) -> StepTimes:
    """Speed of the steps of `phase` that were not observed, or of all if every step was. `rows`: batch size."""
    of_phase = [step for step in steps if step.phase == phase]
    free = [step for step in of_phase if not step.observed]
    timed = free or of_phase
    tokens = sum(rows * step.tokens if step.row_tokens is None else step.row_tokens for step in timed)
    whole = [step.seconds + step.overhead_seconds for step in timed]
    seconds = sum(whole)
    milliseconds = [1000 * value for value in whole]
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
        note=_speed_note(len(of_phase), len(free)),
    )


def _speed_note(steps: int, free: int) -> str:
    """The steps that the speed figures cover."""
    if not steps:
        return "no step of this phase was run"
    if free:
        return f"speed over {free} of {plural(steps, 'step')}, excluding profiled steps"
    return (
        "speed over 1 step, slowed by profiling" if steps == 1 else f"speed over {steps} steps, all slowed by profiling"
    )


def node_time_note(times: NodeTimes) -> str:
    """The runs that the node times cover."""
    if not times.observed_runs:
        return "no node times: no run of this phase was profiled"
    of = " of an earlier generation" if times.earlier else ""
    if times.timed_runs < times.observed_runs:
        runs = "one profiled run" if times.timed_runs == 1 else f"{times.timed_runs} profiled runs"
        return f"node times are medians over {runs}{of}, excluding the warm-up run"
    return f"node times are from one profiled run{of}, which includes warm-up"


def speculation_figures(fact: SpeculationFact | None, steps: Sequence[StepFact]) -> Speculation | None:
    """The figures of a run; None without speculative decoding."""
    if fact is None:
        return None
    made = [step for step in steps if step.phase == "decode" and not step.observed]
    plain = [_own_seconds(step) / _tokens(step) for step in made if not step.drafted and _tokens(step)]
    tokens, drafted = sum(map(_tokens, made)), sum(step.drafted for step in made)
    accepted = sum(step.accepted for step in made)
    return Speculation(
        kind=fact.kind,
        draft=fact.draft,
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
