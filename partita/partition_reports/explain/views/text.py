"""Everything a report knows about one node, for a terminal: where it ran and why first, then experiments and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console

from partita.diagnosis.records import Fallback, Skipped, Trial
from partita.observations.facts import AS_IS, COMBINED, OTHER_FORM
from partita.observations.text_format import NOT_KNOWN, decimals, human_bytes, listing, percent, plural, tally
from partita.partition_reports.diff.headline import provider as provider_name
from partita.partition_reports.explain.node_explanation import Cause, Explanation, Matches, Place
from partita.partition_reports.records import Copy, RejectedPart
from partita.partition_reports.render.terminal import BOLD, DIM, Page, terminal_view
from partita.partition_reports.sections.model import Column

MOST = 40
"""Most names, and most rows of a table; --json has all."""
FACTORS = {
    AS_IS: "as it is",
    "static_shape": "shape",
    "output_shape": "output",
    COMBINED: "several",
    OTHER_FORM: "another node",
}
"""Words for what was changed, where they are not the name of the factor."""


def render(told: Explanation, console: Console) -> None:
    """Print all about one node to `console`, at its width; readable at 80 columns and without colour."""
    page = Page(console)
    page.line(headline(told), indent=0, style=BOLD)
    _show_identity(page, told)
    _show_places(page, told)
    _show_stand_ins(page, told)
    _show_copies(page, told)
    _show_reasons(page, told)
    _show_rejections(page, told)
    for entry in told.disagreements:
        page.line(f"sources disagree in {entry.phase}: {entry.detail} ({', '.join(entry.sources)})")
    for note in told.notes:
        page.line(f"note: {note}", style=DIM)


def render_matches(found: Matches, console: Console) -> None:
    """Print the nodes that a part of a name fits, as a table."""
    page = Page(console)
    phases = list(dict.fromkeys(phase for entry in found.matches for phase in entry.providers))
    rows = []
    for entry in found.matches[:MOST]:
        where = " / ".join(dict.fromkeys(provider_name(entry.providers.get(phase)) for phase in phases))
        rows.append((entry.node, entry.op_type or NOT_KNOWN, where or NOT_KNOWN, entry.reason or ""))
    left = len(found.matches) - MOST
    rest = f"and {plural(left, 'more node')}; --json has all" if left > 0 else ""
    page.table([Column(title, False) for title in ("node", "operator", "on", "reason")], rows, rest)


def say_no_single(found: Matches) -> str:
    """One line on a name that fits no node, or several."""
    if found.matches:
        return (
            f"{plural(len(found.matches), 'node')} have {found.query!r} in their name; "
            "give one in full, or any unique part of it"
        )
    if not found.query:
        return "the name of the node is empty; give one, or a part of it"
    near = f"; did you mean {' or '.join(found.suggestions)}?" if found.suggestions else ""
    return (
        f"no node has {found.query!r} in its name, and none was fused from one that had: it was never there, or ONNX "
        f"Runtime folded it away{near}"
    )


def headline(told: Explanation) -> str:
    """Where it is, and why not elsewhere."""
    if not told.places:
        return f"{told.node}: in no phase; {'rejected by its provider' if told.rejected else 'only named'}"
    parts: dict[str, list[str]] = {}
    for phase, places in _by_phase(told).items():
        said = _say_place(told, places[0]) if len(places) == 1 else _say_parts(told, places)
        parts.setdefault(said, []).append(phase)
    return f"{told.node}: " + "; ".join(f"{text} in {listing(phases)}" for text, phases in parts.items())


def _by_phase(told: Explanation) -> dict[str, list[Place]]:
    """Its places in each phase; several where ONNX Runtime put more than one node in its place."""
    found: dict[str, list[Place]] = {}
    for place in told.places:
        found.setdefault(place.phase, []).append(place)
    return found


def _say_parts(told: Explanation, places: Sequence[Place]) -> str:
    """A node in whose place there are several."""
    on = Counter(provider_name(place.provider) for place in places)
    why = dict.fromkeys(entry.reason for place in places if (entry := _reason_in(told, place)) is not None)
    where = listing(f"{count} on {provider}" for provider, count in on.items())
    reasons = f", not on {provider_name(told.wanted)}: {', '.join(why)}," if why else ""
    return f"not in the plan; fused into {plural(len(places), 'node')}: {where}{reasons}"


def _say_place(told: Explanation, place: Place) -> str:
    """One phase in a few words."""
    if place.role == "border" and place.copy_made is not None:
        made = place.copy_made
        return f"{made.kind.replace('_', ' ')}, copied {made.direction.replace('_', ' ')}"
    if place.role == "copy" and place.copy_made is not None:
        made = place.copy_made
        return f"copies {made.tensor or 'an unknown tensor'} {made.direction.replace('_', ' ')}"
    where = f"{place.op_type or 'unknown operator'} on {provider_name(place.provider)}"
    if place.role == "replaced":
        where = f"not in the plan; fused into {place.node}: {where}"
    if place.role == "body":
        where += " in a control-flow subgraph"
    why = _reason_in(told, place)
    if why is not None:
        return f"{where}, not on {provider_name(why.wanted)}: {why.reason} ({why.evidence_kind})"
    return f"{where}, the preferred provider," if place.provider == told.wanted else where


def _reason_in(told: Explanation, place: Place) -> Fallback | None:
    """Why it is not on the preferred provider in one phase."""
    here = (entry for entry in told.fallbacks if entry.phase == place.phase and entry.node == place.node)
    return next(here, None)


def _show_identity(page: Page, told: Explanation) -> None:
    """What does not depend on the phase."""
    page.console.print()
    seen = list(dict.fromkeys(source for place in told.places for source in place.sources))
    rows = [
        ("runs as" if any(place.role == "replaced" for place in told.places) else "operator", _say_operators(told)),
        ("module", told.module),
        ("layer", None if told.layer is None else str(told.layer)),
        ("source line", told.source_line),
        ("preferred provider", told.wanted),
        ("seen by", ", ".join(seen)),
    ]
    page.pairs([(name, value) for name, value in rows if value])


def _say_operators(told: Explanation) -> str | None:
    """Its operator, or those of the nodes in its place."""
    found = dict.fromkeys(place.op_type for place in told.places if place.op_type)
    return ", ".join(found) or told.op_type


def _show_places(page: Page, told: Explanation) -> None:
    """One column per phase; one row per node where a phase has several in its place."""
    if any(len(places) > 1 for places in _by_phase(told).values()):
        _show_parts(page, told)
        return
    facts: tuple[tuple[str, Callable[[Place], str]], ...] = (
        ("file", lambda place: place.file),
        ("provider", lambda place: provider_name(place.provider)),
        ("position", lambda place: NOT_KNOWN if place.position is None else f"{place.position} of {place.plan_nodes}"),
        ("partition", _say_partition),
        ("host ms per run", lambda place: decimals(place.host_us_per_run, 1e-3)),
        ("share of node time", lambda place: percent(place.time_share)),
        ("output bytes", lambda place: human_bytes(place.output_bytes)),
    )
    places = [place for place in told.places if place.role != "border"]
    if not places:
        return
    page.console.print()
    rows = [(name, *(say(place) for place in places)) for name, say in facts]
    known = [row for row in rows if set(row[1:]) != {NOT_KNOWN}]
    page.table((Column("", False), *(Column(place.phase) for place in places)), known)


def _show_parts(page: Page, told: Explanation) -> None:
    """The nodes in its place, in every phase."""
    columns = (
        *(Column(title, False) for title in ("in its place", "phase", "operator", "on")),
        *(Column("position"), Column("share of node time"), Column("reason", False)),
    )
    rows = []
    for place in told.places[:MOST]:
        why = _reason_in(told, place)
        position = NOT_KNOWN if place.position is None else f"{place.position} of {place.plan_nodes}"
        row = (place.node, place.phase, place.op_type or NOT_KNOWN, provider_name(place.provider), position)
        rows.append((*row, percent(place.time_share), why.reason if why is not None else ""))
    left = len(told.places) - MOST
    page.console.print()
    page.table(columns, rows, f"and {plural(left, 'more node')}; --json has all" if left > 0 else "")


def _say_partition(place: Place) -> str:
    """Its partition and how large that is."""
    return NOT_KNOWN if place.partition is None else f"{place.partition} ({plural(place.partition_nodes or 0, 'node')})"


def _show_stand_ins(page: Page, told: Explanation) -> None:
    """What it took the place of, or what else its stand-in stands for."""
    lines: dict[str, list[str]] = {}
    for place in told.places:
        if place.replaces and place.replaces != (told.node,):
            head = f"{place.node} is fused from" if place.role == "replaced" else "fused from"
            kinds = f" ({tally(Counter(place.replaces_op_types))})" if place.replaces_op_types else ""
            text = f"{head} {plural(len(place.replaces), 'node')} of the file{kinds}: {_name_some(place.replaces)}"
            lines.setdefault(text, []).append(place.phase)
    for text, phases in lines.items():
        page.line(text if len(phases) == len(told.places) else f"{text} (in {listing(phases)})")


def _name_some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def _show_copies(page: Page, told: Explanation) -> None:
    """The copy that it is, with its causes, and the copies that it causes."""
    for place in told.places:
        if place.copy_made is not None:
            page.line(f"copy in {place.phase}: {_say_copy(place.copy_made)}{_say_why(place)}")
    caused = [place for place in told.places if place.copies_caused]
    if not caused:
        return
    page.heading("Copies that it causes")
    for place in caused:
        total = "of unknown size in all" if place.copy_bytes_caused is None else human_bytes(place.copy_bytes_caused)
        wait = f", {decimals(place.copy_wait_us_caused, 1e-3)} ms wait" if place.copy_wait_us_caused else ""
        page.line(f"{place.phase}: {plural(len(place.copies_caused), 'copy')}, {total} per run{wait}")
        for copy in place.copies_caused[:MOST]:
            page.line(f"{copy.name}: {_say_copy(copy)}", indent=4)


def _say_copy(copy: Copy) -> str:
    """What moves, which way, how much."""
    wait = f", {decimals(copy.host_us_per_run, 1e-3)} ms wait and copy" if copy.host_us_per_run is not None else ""
    size = "unknown size" if copy.bytes_per_run is None else human_bytes(copy.bytes_per_run)
    tensor = f"{copy.tensor}, " if copy.tensor else ""
    return f"{tensor}{copy.direction.replace('_', ' ')}, {size} per run{wait}"


def _say_why(place: Place) -> str:
    """For whom a copy is made."""
    made = place.copy_made
    if place.caused_by:
        return f"; for {listing(_say_cause(entry) for entry in place.caused_by)}"
    if made is not None and made.cause_unknown:
        return f"; cause not known: {made.cause_unknown}"
    return "; bound in other memory than ONNX Runtime wants" if place.role == "border" else ""


def _say_cause(entry: Cause) -> str:
    """A node, where it is and why."""
    why = f": {entry.reason}" if entry.reason else ""
    return f"{entry.node} ({entry.op_type or 'unknown'} on {provider_name(entry.provider)}{why})"


def _show_reasons(page: Page, told: Explanation) -> None:
    """Each reason with evidence, remedy and cost; phases that say the same share it."""
    alike: dict[object, list[Fallback]] = {}
    for entry in told.fallbacks:
        every: tuple[Fallback | Skipped, ...] = (entry, *entry.skipped)
        changes = tuple((trial.change, trial.outcome) for each in every for trial in each.trials)
        others = tuple((each.provider, each.reason, each.evidence) for each in entry.skipped)
        alike.setdefault((entry.node, entry.reason, entry.evidence, others, changes), []).append(entry)
    for entries in alike.values():
        first = entries[0]
        page.heading(f"Why not on {first.wanted} in {listing(entry.phase for entry in entries)}: {first.reason}")
        rows = [(f"evidence ({first.evidence_kind})", first.evidence), ("remedy", first.remedy)]
        rows += [(f"cost in {entry.phase}", _say_cost(entry)) for entry in entries]
        page.pairs(rows)
        _show_trials(page, first, first.wanted)
        for skipped in first.skipped:
            page.heading(f"Why not on {skipped.provider} either: {skipped.reason}")
            page.pairs([(f"evidence ({skipped.evidence_kind})", skipped.evidence), ("remedy", skipped.remedy)])
            _show_trials(page, skipped, skipped.provider)
    for block in told.graph_capture:
        page.line(f"CUDA graph capture: {block.why} ({provider_name(block.provider)})")


def _say_cost(entry: Fallback) -> str:
    """What it costs that it is not there."""
    cost = entry.cost
    if cost is None:
        return "not known: it never ran, or is in a control-flow subgraph"
    word = {True: "harmless", False: "not harmless", None: "not known to be harmless"}[cost.harmless]
    parts = [plural(len(cost.copies), "copy") if cost.copies else "no copy"]
    if cost.copies:
        parts.append(human_bytes(cost.copy_bytes_per_run))
    if cost.copy_wait_us_per_run:
        parts.append(f"{decimals(cost.copy_wait_us_per_run, 1e-3)} ms wait")
    if cost.host_us_per_run is not None:
        parts.append(f"{decimals(cost.host_us_per_run, 1e-3)} ms of its own")
    return f"{', '.join(parts)}; {word}: {cost.why}"


def _show_trials(page: Page, entry: Fallback | Skipped, provider: str) -> None:
    """Experiments on `provider` as a table: what was changed, and what it did."""
    if not entry.trials:
        if entry.unprobed:
            page.line(f"no experiments: {entry.unprobed}")
        return
    new = sum(not trial.cached for trial in entry.trials)
    company = {trial.company for trial in entry.trials}
    around = (
        "in isolation" if True not in company else "with a Neg beside it" + (", where one can be," * (False in company))
    )
    page.console.print()
    page.line(
        f"{plural(len(entry.trials), 'experiment')}: this node {around} on {provider} ({new} in this run, "
        f"{len(entry.trials) - new} from the cache)"
    )
    quoted = list(dict.fromkeys(trial.said for trial in entry.trials if trial.said))
    rows = [_trial_row(trial, quoted) for trial in entry.trials]
    columns = (Column("changed", False), Column("to", False), Column("outcome", False), Column("said"))
    page.table(columns, rows)
    for number, text in enumerate(quoted, 1):
        page.line(f"[{number}] {text}", indent=4)
    if entry.unprobed:
        page.line(f"incomplete: {entry.unprobed}")


def _trial_row(trial: Trial, quoted: Sequence[str]) -> tuple[str, ...]:
    """One experiment; what was said stands below the table, once."""
    said = f"[{quoted.index(trial.said) + 1}]" if trial.said else ""
    return (
        FACTORS.get(trial.factor, trial.factor.replace("_", " ")),
        trial.change,
        trial.outcome.replace("_", " "),
        said,
    )


def _show_rejections(page: Page, told: Explanation) -> None:
    """Parts that a provider does not open, with this node in them."""
    alike: dict[tuple[object, ...], list[RejectedPart]] = {}
    for part in told.rejected:
        alike.setdefault((part.provider, part.nodes, part.evidence, part.minimal), []).append(part)
    for parts in alike.values():
        part = parts[0]
        page.heading(f"Rejected by {part.provider} in {listing(entry.file for entry in parts)}")
        alone = "it fails with only a Neg beside it" if part.company else "it fails alone"
        together = alone if len(part.nodes) == 1 else f"fail together: {_name_some(part.nodes)}"
        least = "no smaller part that was tried fails" if part.minimal else "there may be a smaller part"
        tries = sum(entry.tries for entry in parts)
        page.line(f"{together}; {least}; {plural(tries, 'part')} of the graph tried")
        page.line(f"evidence: {part.evidence}")


VIEW = terminal_view("text", "everything about one node", render)
