"""A benchmark in sections: settings, speed, start and memory, and placement."""

from __future__ import annotations

from partita.bench.contenders import ratio_text
from partita.bench.records import Bench, Contender
from partita.observations.text_format import NOT_KNOWN, decimals, human_bytes, listing, plural, short_provider, tally
from partita.partition_reports.phase_records import FEW_STEPS, TOO_FEW
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Block, Document, Line, Section, numbers, pairs, table, table_of

MARKS = {"differs": "", "within_noise": "~", "too_few_rounds": "?"}
RATIOS = (
    "ratio: median of the ratios of the rounds. ~: within noise (the ranges overlap). ?: too few rounds for a verdict."
)
EXPLAINED = (
    "step share: host time of all nodes, divided by the median step above. Memcpy nodes synchronise with the "
    "device; on an asynchronous device, other nodes only enqueue work."
)


def document(bench: Bench) -> Document:
    """The verdict, then every section."""
    packages = (bench.package, *bench.other_packages)
    notes = Section("notes", "Notes", tuple(Line(note, "note", "quiet") for note in bench.notes))
    return Document(
        kind="Benchmark",
        name=" and ".join(dict.fromkeys(package.name for package in packages)),
        headline=bench.verdict,
        sections=(_workload(bench), _speed(bench), _start(bench), _placement(bench), notes),
        created=bench.created,
        version=bench.partita_version,
    )


VIEWS = Views(document)


def _workload(bench: Bench) -> Section:
    """Prompt, packages and machine."""
    packages, machine = (bench.package, *bench.other_packages), bench.environment
    rows = "/".join(dict.fromkeys(str(package.batch_size) for package in packages))
    summary = (
        f"{plural(bench.prompt_tokens, 'prompt token')}, {bench.max_new_tokens} new tokens, greedy, "
        f"{rows} {'row' if rows == '1' else 'rows'}; stop tokens are ignored"
    )
    shown = [("package", f"{p.name}: {p.model_type}, {p.attention}, {p.precision}, {p.verification}") for p in packages]
    shown.append(("workload", summary))
    if machine is not None:
        threads = "" if bench.threads is None else f", --threads {bench.threads}"
        shown.append(("machine", f"{machine.cpu}, {plural(machine.logical_cores, 'core')}{threads}"))
        shown.append(("runtime", machine.runtime))
    return Section("bench", "Benchmark", (pairs("Measured configuration", shown),))


def _speed(bench: Bench) -> Section:
    """Tokens per second, ratio and step times per phase with runs."""
    rounds, rows = max((entry.rounds for entry in bench.contenders), default=0), []
    for entry in bench.contenders:
        named = entry.name if entry.rounds == rounds else f"{entry.name} ({plural(entry.rounds, 'round')})"
        ratios = {ratio.phase: f"{MARKS[ratio.significance]}{ratio_text(ratio.median)}" for ratio in entry.ratios}
        for phase, found in entry.speeds.items():
            ratio = "1" if entry.name == bench.baseline else ratios.get(phase, NOT_KNOWN)
            rate = found.tokens_per_second
            rates = map(decimals, (rate.median, rate.low, rate.high))
            rows.append((named, phase, *rates, ratio, decimals(found.p50_ms), decimals(found.p95_ms)))
    figures = numbers("tokens/s", "slowest", "fastest", "ratio", "p50 ms", "p95 ms")
    about = f"medians of {plural(rounds, 'round')}, with the slowest and the fastest"
    made = table(f"Speed: {about}", ("contender", "phase", *figures), rows, obvious=True)
    few = [entry.name for entry in bench.contenders if entry.decode is not None and entry.decode.runs < FEW_STEPS]
    short = Line(f"fewer than {FEW_STEPS} decode steps: {TOO_FEW}" if few else "", listing(few))
    return Section("speed", "Speed", (made, short, Line(RATIOS, tone="quiet")), about)


def _start(bench: Bench) -> Section:
    """Single figures, and whether the tokens are the same."""
    heads = ("contender", *numbers("first token ms", "load s", "peak memory"))
    rows = [
        (
            entry.name,
            decimals(entry.first_token_ms.median if entry.first_token_ms else None),
            decimals(entry.load_seconds),
            human_bytes(entry.peak_rss_bytes),
            _tokens_text(entry, bench.baseline),
        )
        for entry in bench.contenders
    ]
    blocks: list[Block] = [table("Start, memory and tokens", (*heads, "tokens"), rows, obvious=True)]
    # The verdict has those of other contenders.
    unused = (entry for entry in bench.contenders if entry.name == bench.baseline)
    blocks += [Line(line, entry.name) for entry in unused for line in entry.unused_providers]
    return Section("start", "Start, memory and tokens", tuple(blocks))


def _tokens_text(entry: Contender, baseline: str | None) -> str:
    """Whether the tokens equal the baseline's."""
    changing = "; differ between rounds" if entry.repeatable is False else ""
    if entry.name == baseline:
        return f"baseline{changing}"
    if entry.difference is None:
        return f"same{changing}" if entry.same_tokens else NOT_KNOWN
    return f"DIFFERENT from new token {entry.difference.position + 1} on{changing}"


def _placement(bench: Bench) -> Section:
    """Placement in the profiled rounds, and what bounds each phase."""
    rows, lines = [], []
    for entry in bench.contenders:
        for phase in entry.summary.phases if entry.summary is not None else ():
            counts = {short_provider(name): count for name, count in phase.nodes_by_provider.items()}
            row: dict[str, object] = {"contender": entry.name, "phase": phase.phase, "nodes": tally(counts)}
            row |= {"copies": phase.copies, "copy_bytes_per_run": phase.copy_bytes_per_run}
            rows.append(row | {"step_share": entry.node_share if phase.phase == "decode" else None})
        verdict = entry.summary.verdict if entry.summary is not None else ""
        sentences = (verdict, *entry.bounds, entry.summary_missing_reason)
        lines += [Line(sentence, entry.name) for sentence in sentences]
    placed = table_of("Nodes and copies of a run", rows, obvious=False)
    blocks: tuple[Block, ...] = (placed, Line(EXPLAINED if rows else "", tone="quiet"), *lines)
    return Section("placement", "Placement and time", blocks, "of a profiled round that is not counted")
