"""The top of the page: did it run where it was asked to, what did not, why, and what does it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from partita.partition_reports.groups import op_type_of, provider_of
from partita.partition_reports.reasons.base import load_reasons
from partita.partition_reports.records import Fallback, Phase, Report
from partita.partition_reports.verdict import merge_phases, phase_names
from partita.partition_reports.views._page.figures import in_bytes
from partita.partition_reports.views._page.marks import COPY_OPERATORS, Mark
from partita.partition_reports.views._page.tables import Link
from partita.partition_reports.wording import (
    decimals,
    human_bytes,
    listing,
    percent,
    plural,
    short_provider,
    tally,
)

StateName = Literal["all", "partly", "none", "refused", "nothing"]
SIGNS: dict[StateName, str] = {"all": "✓", "partly": "◐", "none": "✕", "refused": "⊘", "nothing": "–"}
"""A shape for each state, so that it is not told by colour alone."""
NAMED_CHECKS = 3
"""Failed checks that are named at the top."""
WIDTH = 1000
"""Of a ribbon, in its own units."""
MOST_BANDS = 600
"""Partitions that a ribbon draws; more of them could not be told apart."""


@dataclass(frozen=True, slots=True)
class State:
    """The answer in a few words, and what makes it better or worse than it sounds."""

    name: StateName
    sign: str
    headline: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question that everybody comes with, and the answers of this report."""

    question: str
    lines: tuple[str | Link, ...]
    more: str
    """Id of the section that has the rest."""


@dataclass(frozen=True, slots=True)
class Band:
    """One partition in a ribbon."""

    css: str
    left: float
    width: float
    lane: int
    """0 for the wanted provider, 1 for every other one: place tells it too, not colour alone."""


@dataclass(frozen=True, slots=True)
class Ribbon:
    """The partitions of phases that share a placement, from the first node to the last."""

    title: str
    told: str
    bands: tuple[Band, ...]


def wanted_of(report: Report) -> str:
    """The first provider of the chain."""
    return report.chain[0].provider if report.chain else "no provider"


def find_state(report: Report) -> State:
    """All, partly, not at all, or refused, with the conditions that hold beside it."""
    wanted = short_provider(wanted_of(report))
    on = sum(provider_of(node) == wanted_of(report) for phase in report.phases for node in phase.nodes)
    total = sum(len(phase.nodes) for phase in report.phases)
    ran = "would run" if report.dry_run is not None else "ran"
    refused = any(part.provider == wanted_of(report) for part in report.rejected)
    name: StateName
    if not total:
        name, headline = "nothing", "No node is known to have run"
    elif refused:
        where = f"nothing {ran} there" if not on else f"the rest {ran} there"
        name, headline = "refused", f"{wanted} refused part of the graph; {where}"
    elif on == total and not report.fallbacks:
        name, headline = "all", f"All of it {ran} on {wanted}"
    elif on:
        off = {node.name for phase in report.phases for node in phase.nodes if provider_of(node) != wanted_of(report)}
        elsewhere = f"{plural(len(off), 'node')} elsewhere" if off else "nodes in control flow elsewhere"
        name, headline = "partly", f"Partly on {wanted}: {elsewhere}"
    else:
        name, headline = "none", f"Nothing {ran} on {wanted}"
    return State(name, SIGNS[name], headline, tuple(find_flags(report)))


def find_flags(report: Report) -> list[str]:
    """What no reader may overlook."""
    flags = []
    if report.dry_run is not None:
        flags.append(f"Dry run: no {report.dry_run.device_name} was used, there are no times")
    if report.package is not None and report.package.verification != "verified":
        flags.append(f"Unverified package: {report.package.verification_detail}")
    flags += [f"Limit exceeded: {sentence}" for sentence in report.exceeded]
    failed = [check.name for check in report.checks if not check.passed]
    if failed:
        more = [f"{len(failed) - NAMED_CHECKS} more"] if len(failed) > NAMED_CHECKS else []
        named = listing([*failed[:NAMED_CHECKS], *more])
        flags.append(f"{plural(len(failed), 'check')} of this report failed: {named}")
    if report.disagreements:
        nodes = len({entry.node for entry in report.disagreements})
        flags.append(f"Sources disagree on {plural(nodes, 'node')}")
    if report.totals is not None and report.totals.finish_reason in ("interrupted", "error"):
        flags.append(f"The run ended early: {report.totals.finish_reason}")
    return flags


def answer_questions(report: Report) -> tuple[Answer, ...]:
    """The four questions."""
    return (
        Answer("Did it run where I asked?", tuple(say_where(report)), "map"),
        Answer("What did not?", tuple(say_strays(report)), "map"),
        Answer("Why?", tuple(say_why(report)), "reasons"),
        Answer("What does it cost?", tuple(say_costs(report)), "partitions"),
    )


def say_where(report: Report) -> list[str | Link]:
    """Nodes on the wanted provider, per placement."""
    wanted = wanted_of(report)
    lines: list[str | Link] = []
    for phases in merge_phases(report.phases):
        total = len(phases[0].nodes)
        on = sum(provider_of(node) == wanted for node in phases[0].nodes)
        part = f" ({percent(on / total)})" if total and on < total else ""
        lines.append(f"{on:,} of {plural(total, 'node')}{part} on {short_provider(wanted)} in {phase_names(phases)}")
    return lines or ["No phase was run."]


def say_strays(report: Report) -> list[str | Link]:
    """Nodes elsewhere by provider and operator, and those in control flow."""
    lines: list[str | Link] = []
    for phases in merge_phases(report.phases):
        off: dict[str, Counter[str]] = {}
        for node in phases[0].nodes:
            if provider_of(node) != wanted_of(report):
                off.setdefault(provider_of(node), Counter())[op_type_of(node)] += 1
        lines += [
            f"{plural(counts.total(), 'node')} on {short_provider(provider)} in {phase_names(phases)}: "
            f"{tally(dict(counts))}"
            for provider, counts in off.items()
        ]
        if phases[0].bodies is not None and phases[0].bodies.cpu_nodes:
            lines.append(f"In bodies of control flow: {plural(len(phases[0].bodies.cpu_nodes), 'node')} on CPU")
    return lines or [f"Every node is on {short_provider(wanted_of(report))}."]


def say_why(report: Report) -> list[str | Link]:
    """Reasons, most nodes first, and providers that are not there."""
    lines: list[str | Link] = [
        f"{short_provider(entry.provider)} is not available ({entry.reason or 'no reason known'}): "
        f"{entry.evidence or 'no evidence'}"
        for entry in report.chain
        if entry.status == "unavailable"
    ]
    for number, ((reason, _), entries) in enumerate(group_reasons(report.fallbacks)):
        kinds = listing(sorted({entry.evidence_kind for entry in entries}))
        nodes = plural(len({entry.node for entry in entries}), "node")
        lines.append(Link(f"{reason_title(reason)}: {nodes}, evidence {kinds}", f"r{number}"))
    return lines or ["Nothing has to be explained."]


def reason_title(code: str) -> str:
    """`No kernel found (no_kernel_op)`; a code that this version does not know stands alone."""
    title = next((reason.title for reason in load_reasons() if reason.code == code), "")
    return f"{title} ({code})" if title else code


def group_reasons(fallbacks: Sequence[Fallback]) -> list[tuple[tuple[str, str], list[Fallback]]]:
    """Fallbacks by reason and the provider that has the nodes, most first, what is unexplained last."""
    groups: dict[tuple[str, str], list[Fallback]] = {}
    for entry in fallbacks:
        groups.setdefault((entry.reason, entry.provider), []).append(entry)
    return sorted(groups.items(), key=lambda item: (item[0][0] == "unexplained", -len(item[1]), item[0]))


def say_costs(report: Report) -> list[str | Link]:
    """Copies and partitions of the last phase, the node time that is spent elsewhere, and what of it is harmless."""
    phases = [phase for phase in report.phases if phase.nodes]
    if not phases:
        return ["Not known."]
    phase = phases[-1]
    lines: list[str | Link] = []
    lines += say_phase_cost(phase)
    shares = [entry.time_share for entry in phase.providers if entry.provider != wanted_of(report)]
    known = [share for share in shares if share is not None]
    if known:
        lines.append(f"Nodes elsewhere take {percent(sum(known))} of the node time of {phase.name}")
    harmless = Counter(entry.cost.harmless for entry in report.fallbacks if entry.cost and entry.phase == phase.name)
    words = ((True, "harmless"), (False, "not harmless"), (None, "not known to be harmless"))
    if harmless:
        told = listing(f"{harmless[key]} {word}" for key, word in words if harmless[key])
        lines.append(f"Of the nodes elsewhere: {told}")
    return lines or ["Not known."]


def say_phase_cost(phase: Phase) -> list[str]:
    """Partitions, what they hand over, and what is copied, in one run and per token."""
    cost = phase.cost
    if cost is None:
        return [plural(len(phase.partitions), "partition")]
    run = "run" if phase.name == "run" else f"{phase.name} run"
    handed = f", {plural(cost.crossings, 'tensor')} between them{in_bytes(cost.crossing_bytes_per_run)}"
    lines = [plural(cost.partitions, "partition") + (handed if cost.crossings else "")]
    if not cost.copies:
        return [*lines, "No copy between devices"]
    lines.append(
        f"{plural(cost.copies, 'copy')} per {run}{in_bytes(cost.copy_bytes_per_run, cost.copy_bytes_at_least)}"
    )
    if cost.copy_bytes_per_token is not None:
        lines.append(f"{human_bytes(round(cost.copy_bytes_per_token))} copied per token")
    if cost.host_wait_us_per_run:
        token = cost.host_wait_us_per_token
        each = "" if token is None else f"; {decimals(token, 1e-3)} ms per token"
        wait = f"{decimals(cost.host_wait_us_per_run, 1e-3)} ms host wait in copies per {run}"
        lines.append(f"{wait}{share_of_copies(phase)}{each}")
    return lines


def share_of_copies(phase: Phase) -> str:
    """The part of the node time that Memcpy nodes take."""
    known = [entry.time_share for entry in phase.by_op_type if entry.name in COPY_OPERATORS]
    shares = [share for share in known if share is not None]
    return f", {percent(sum(shares))} of the node time" if shares else ""


def draw_ribbons(report: Report, marks: dict[str, Mark]) -> tuple[Ribbon, ...]:
    """One ribbon per placement."""
    ribbons = []
    for phases in merge_phases(tuple(phase for phase in report.phases if phase.nodes)):
        phase = phases[0]
        total = len(phase.nodes)
        bands = tuple(
            Band(
                css=marks[part.provider].css if part.provider in marks else "eu",
                left=round(WIDTH * part.first_position / total, 2),
                width=round(WIDTH * part.nodes / total, 2),
                lane=int(part.provider != wanted_of(report)),
            )
            for part in phase.partitions[:MOST_BANDS]
        )
        told = f"{plural(len(phase.partitions), 'partition')} over {plural(total, 'node')}"
        ribbons.append(Ribbon(phase_names(phases), told, bands))
    return tuple(ribbons)
