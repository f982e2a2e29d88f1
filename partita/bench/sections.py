"""A benchmark in sections: settings, speed, start and memory, and placement."""

from __future__ import annotations

from collections.abc import Iterator

from partita.bench.contenders import times
from partita.bench.records import Bench, Contender, PhaseSpeed, Ratio
from partita.observations.records import PackageFacts
from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    human_bytes,
    listing,
    percent,
    plural,
    short_provider,
    tally,
)
from partita.partition_reports.outcome import FEW_STEPS, TOO_FEW
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Block, Document, Line, Section, numbers, pairs, table

MARKS = {"differs": "", "within_noise": "~", "too_few_rounds": "?"}
RATIOS = (
    "ratio: median of the ratios of the rounds. ~: within noise (the ranges overlap). ?: too few rounds for a verdict."
)
EXPLAINED = (
    "share of step: host time of all nodes, divided by the median step above. Memcpy nodes synchronise with the "
    "device; on an asynchronous device, other nodes only enqueue work."
)
PHASES = ("decode", "prefill")


def document(bench: Bench) -> Document:
    """The verdict, then every section."""
    names = " and ".join(dict.fromkeys(package.name for package in (bench.package, *bench.other_packages)))
    return Document(
        kind="Benchmark",
        name=names,
        headline=bench.verdict,
        sections=sections(bench),
        created=bench.created,
        version=bench.partita_version,
    )


VIEWS = Views(document)


def sections(bench: Bench) -> tuple[Section, ...]:
    """Every non-empty section."""
    return (_workload(bench), speed(bench), _start(bench), *_placement(bench), *_notes(bench))


def _workload(bench: Bench) -> Section:
    """Prompt, packages and machine."""
    packages, machine = (bench.package, *bench.other_packages), bench.environment
    rows = "/".join(dict.fromkeys(str(package.batch_size) for package in packages))
    summary = (
        f"{plural(bench.prompt_tokens, 'prompt token')}, {bench.max_new_tokens} new tokens, greedy, "
        f"{rows} {'row' if rows == '1' else 'rows'}; stop tokens are ignored"
    )
    shown = [*(("package", _describe(package)) for package in packages), ("workload", summary)]
    if machine is not None:
        threads = "" if bench.threads is None else f", --threads {bench.threads}"
        shown.append(("machine", f"{machine.cpu}, {plural(machine.logical_cores, 'core')}{threads}"))
        shown.append(("runtime", machine.runtime))
    return Section("bench", "Benchmark", (pairs("Measured configuration", shown),))


def _describe(package: PackageFacts) -> str:
    """A package as a short text."""
    return f"{package.name}: {package.model_type}, {package.attention}, {package.precision}, {package.verification}"


def speed(bench: Bench) -> Section:
    """Tokens per second, ratio and step times per phase."""
    rounds = max((entry.rounds for entry in bench.contenders), default=0)
    heads = ("contender", "phase")
    figures = numbers("tokens/s", "slowest", "fastest", "ratio", "p50 ms", "p95 ms")
    rows = [row for entry in bench.contenders for row in _speed_rows(entry, bench.baseline, rounds)]
    about = f"medians of {plural(rounds, 'round')}, with the slowest and the fastest"
    made = table(f"Speed: {about}", (*heads, *figures), rows, obvious=True)
    few = [entry.name for entry in bench.contenders if entry.decode is not None and entry.decode.runs < FEW_STEPS]
    short = [Line(f"fewer than {FEW_STEPS} decode steps: {TOO_FEW}", listing(few))] if few else []
    return Section("speed", "Speed", (made, *short, Line(RATIOS, tone="quiet")), about)


def speeds_of(entry: Contender) -> Iterator[tuple[str, PhaseSpeed]]:
    """The phases with runs, and their speed."""
    for name, found in zip(PHASES, (entry.decode, entry.prefill), strict=True):
        if found is not None:
            yield name, found


def _speed_rows(entry: Contender, baseline: str | None, rounds: int) -> Iterator[tuple[str, ...]]:
    """One row per phase with runs. A contender that failed before all `rounds` shows its own number."""
    named = entry.name if entry.rounds == rounds else f"{entry.name} ({plural(entry.rounds, 'round')})"
    ratios: dict[str, Ratio] = {ratio.phase: ratio for ratio in entry.ratios}
    for name, found in speeds_of(entry):
        rate = found.tokens_per_second
        ratio = "1" if entry.name == baseline else _render_ratio(ratios.get(name))
        figures = (decimals(rate.median), decimals(rate.low), decimals(rate.high), ratio)
        yield named, name, *figures, decimals(found.p50_ms), decimals(found.p95_ms)


def _render_ratio(ratio: Ratio | None) -> str:
    """The ratio, with a mark if it is not significant."""
    return NOT_KNOWN if ratio is None else f"{MARKS[ratio.significance]}{times(ratio.median)}"


def _start(bench: Bench) -> Section:
    """Single figures, and whether the tokens are the same."""
    heads = ("contender", *numbers("first token ms", "load s", "peak memory"))
    rows = [
        (
            entry.name,
            decimals(entry.first_token_ms.median if entry.first_token_ms else None),
            decimals(entry.load_seconds),
            human_bytes(entry.peak_rss_bytes),
            _render_tokens(entry, bench.baseline),
        )
        for entry in bench.contenders
    ]
    blocks: list[Block] = [table("Start, memory and tokens", (*heads, "tokens"), rows, obvious=True)]
    # The verdict has those of other contenders.
    unused = (entry for entry in bench.contenders if entry.name == bench.baseline)
    blocks += [Line(line, entry.name) for entry in unused for line in entry.unused_providers]
    return Section("start", "Start, memory and tokens", tuple(blocks))


def _render_tokens(entry: Contender, baseline: str | None) -> str:
    """Whether the tokens equal the baseline's."""
    changing = "; differ between rounds" if entry.repeatable is False else ""
    if entry.name == baseline:
        return f"baseline{changing}"
    if entry.difference is None:
        return f"same{changing}" if entry.same_tokens else NOT_KNOWN
    return f"DIFFERENT from new token {entry.difference.position + 1} on{changing}"


def _placement(bench: Bench) -> Iterator[Section]:
    """Placement in the profiled rounds, and what bounds each phase."""
    rows = []
    lines = []
    for entry in bench.contenders:
        for phase in entry.summary.phases if entry.summary is not None else ():
            providers = tally({short_provider(name): count for name, count in phase.nodes_by_provider.items()})
            share = percent(entry.node_share) if phase.phase == "decode" else ""
            moved = human_bytes(phase.copy_bytes_per_run)
            rows.append((entry.name, phase.phase, providers, str(phase.copies), moved, share))
        sentences = (entry.headline, *entry.bounds, entry.summary_missing_reason)
        lines += [Line(sentence, entry.name) for sentence in sentences if sentence]
    heads = ("contender", "phase", "nodes", *numbers("copies", "bytes/run", "share of step"))
    blocks: list[Block] = (
        [table("Nodes and copies of a run", heads, rows), Line(EXPLAINED, tone="quiet")] if rows else []
    )
    if rows or lines:
        yield Section("placement", "Placement and time", (*blocks, *lines), "of a profiled round that is not counted")


def _notes(bench: Bench) -> Iterator[Section]:
    """Other notes."""
    if bench.notes:
        yield Section("notes", "Notes", tuple(Line(note, "note", "quiet") for note in bench.notes))
