"""A bench for a terminal: the verdict first, then the figures, then where the time goes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from partita.partition_reports.bench_records import Bench, Contender, PhaseSpeed, Ratio
from partita.partition_reports.bench_verdict import times
from partita.partition_reports.views._tables import BOLD, DIM, NAME, Column, Page
from partita.partition_reports.wording import NOT_KNOWN, decimals, human_bytes, percent, plural, short_provider

MARKS = {"differs": "", "within_noise": "~", "too_few_rounds": "?"}
EXPLAINED = (
    "Memcpy nodes wait until the device has done what is queued, and copy; where a device works on its own, its own "
    "nodes only queue work. of a step: all node time as part of the median step above"
)


def render(bench: Bench, console: Console) -> None:
    """Print a bench to `console`, at its width; readable at 80 columns and without colour."""
    page = Page(console)
    for sentence in bench.verdict:
        page.line(sentence, indent=0, style=BOLD)
    show_surroundings(page, bench)
    show_speed(page, bench)
    show_once(page, bench)
    show_why(page, bench)
    for note in bench.notes:
        page.line(f"note: {note}", style=DIM)


def show_surroundings(page: Page, bench: Bench) -> None:
    """What was run, on which machine."""
    package, machine = bench.package, bench.environment
    page.heading("Bench")
    rows = [
        ("package", f"{package.name}: {package.model_type}, {package.attention}, {package.precision}, "
                    f"{package.verification}"),
        ("work", f"{plural(bench.prompt_tokens, 'prompt token')}, {bench.max_new_tokens} new ones, greedy, "
                 f"{plural(package.batch_size, 'row')}; stop tokens do not end it"),
    ]  # fmt: skip
    if machine is not None:
        threads = "" if bench.threads is None else f", --threads {bench.threads}"
        rows.append(("machine", f"{machine.cpu}, {plural(machine.logical_cores, 'core')}{threads}"))
        rows.append(("runtime", machine.onnxruntime_package))
    page.pairs(rows)


def show_speed(page: Page, bench: Bench) -> None:
    """Tokens per second, ratio and step times per phase."""
    rounds = max((entry.rounds for entry in bench.contenders), default=0)
    page.heading(f"Speed: medians of {plural(rounds, 'round')}, with the slowest and the fastest")
    columns = [NAME, Column("", number=False)]
    columns += [Column(title) for title in ("tokens/s", "slowest", "fastest", "ratio", "p50 ms", "p95 ms")]
    page.table(columns, [row for entry in bench.contenders for row in speed_rows(entry, bench.baseline)])


def speed_rows(entry: Contender, baseline: str | None) -> Iterator[tuple[str, ...]]:
    """One row per phase that was run."""
    ratios = {ratio.phase: ratio for ratio in entry.ratios}
    phases: tuple[tuple[str, PhaseSpeed | None], ...] = (("decode", entry.decode), ("prefill", entry.prefill))
    for name, speed in phases:
        if speed is None:
            continue
        rate = speed.tokens_per_second
        ratio = "1" if entry.name == baseline else say_ratio(next((r for p, r in ratios.items() if p == name), None))
        yield (
            entry.name, name, decimals(rate.median), decimals(rate.low), decimals(rate.high), ratio,
            decimals(speed.p50_ms), decimals(speed.p95_ms),
        )  # fmt: skip


def say_ratio(ratio: Ratio | None) -> str:
    """The ratio, with a mark where it tells nothing."""
    return NOT_KNOWN if ratio is None else f"{MARKS[ratio.standing]}{times(ratio.median)}"


def show_once(page: Page, bench: Bench) -> None:
    """What there is one figure of, and whether the tokens are the same."""
    page.line(
        "ratio: the median of the ratios of the rounds; ~ within noise, the ranges overlap; ? too few rounds to tell",
        style=DIM,
    )
    page.heading("Start, memory and tokens")
    columns = [NAME, *(Column(title) for title in ("first token ms", "load s", "peak memory"))]
    rows = [
        (
            entry.name, decimals(entry.first_token_ms.median if entry.first_token_ms else None),
            decimals(entry.load_seconds), human_bytes(entry.peak_rss_bytes), say_tokens(entry, bench.baseline),
        )
        for entry in bench.contenders
    ]  # fmt: skip
    page.table([*columns, Column("tokens", number=False)], rows)
    for entry in bench.contenders:
        if entry.name == bench.baseline:  # what the verdict has of the others
            for line in entry.unused:
                page.line(f"{entry.name}: {line}")


def say_tokens(entry: Contender, baseline: str | None) -> str:
    """Whether they are those of the baseline."""
    changing = "; change from round to round" if entry.repeats is False else ""
    if entry.name == baseline:
        return f"baseline{changing}"
    if entry.difference is None:
        return f"the same{changing}" if entry.same_tokens else NOT_KNOWN
    return f"DIFFERENT from new token {entry.difference.position + 1} on{changing}"


def show_why(page: Page, bench: Bench) -> None:
    """Placement and host time of the observed round."""
    known = [entry for entry in bench.contenders if entry.why is not None]
    if known:
        page.heading("Placement in decode")
        titles = ("nodes", "elsewhere", "partitions", "copies", "bytes/token")
        columns = [NAME, Column("provider", number=False), *(Column(title) for title in titles)]
        page.table(columns, [placement_row(entry) for entry in known])
        page.heading("Host time in nodes, in decode runs that were profiled and are not counted")
        columns = [NAME, *(Column(title) for title in ("of a step", "own nodes", "elsewhere", "Memcpy nodes"))]
        page.table(columns, [time_row(entry) for entry in known])
        page.line(EXPLAINED, style=DIM)
    for entry in bench.contenders:
        if entry.why_unknown:
            page.line(f"{entry.name}: {entry.why_unknown}")


def placement_row(entry: Contender) -> tuple[str, ...]:
    """What is where, and what moves."""
    why = entry.why
    assert why is not None
    moved = None if why.copy_bytes_per_token is None else round(why.copy_bytes_per_token)
    counts = (why.nodes, why.nodes_elsewhere, why.partitions, why.copies)
    return (entry.name, short_provider(why.provider), *map(str, counts), human_bytes(moved))


def time_row(entry: Contender) -> tuple[str, ...]:
    """Parts of the time in nodes."""
    why = entry.why
    assert why is not None
    shares = (entry.node_share, why.own_share, why.elsewhere_share, why.wait_share)
    return (entry.name, *(percent(share) for share in shares))
