"""Conclusions from the probes of a node: the changes that made a difference, and what follows where none did. Pure.

The `factors` of a reason name the changes that show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partita.observations.facts import (
    COMBINED,
    FAILED,
    NEIGHBOURS,
    OPTION,
    OTHER_FORM,
    Factor,
    NodeProbe,
    ProbeRun,
    Swap,
)
from partita.observations.native_text import NO_ROOM
from partita.observations.text_format import listing, plural

Code = Literal["not_claimed", "no_kernel_op", "subgraph_rejected"]
"""What follows when no change made a difference."""
MOST_NAMED = 3
UNCHANGED: Mapping[str, str] = {
    "rejected": "it does not support it",
    "failed": "it fails on it",
    "crashed": "it crashes on it",
    "timed_out": "it never returns",
}
TOLD: Mapping[str, str] = {
    "rejected": "the provider does not support it",
    "failed": "it makes the provider fail",
    "crashed": "it crashes the provider",
    "timed_out": "the provider gives no answer in time",
}
TYPE: tuple[Factor, ...] = ("type",)
FORM: tuple[Factor, ...] = ("attribute",)
DECLARED: frozenset[Factor] = frozenset({"output_shape"})
"""Declarations in the file that change nothing about the node: another change that helps is the cause."""
ACCEPTS: Mapping[str, str] = {
    "supported": "the provider accepts this node",
    "placed": "the provider accepts this node (placed, not run)",
}
IN_VAIN = "made no difference"
ENDS: Mapping[str, frozenset[str]] = {
    IN_VAIN: frozenset({"rejected"}),
    "ended in an error": frozenset({"failed", "crashed"}),
    "got no answer in time": frozenset({"timed_out"}),
    "were placed and not run": frozenset({"placed"}),
    "could not be tried": frozenset({"invalid"}),
}
"""How experiments end that do not help."""
ANSWERED = frozenset({"rejected", "failed", "crashed"})
ALONE = "tested in isolation"
IN_COMPANY = "tested with only an added Neg"
"""Of a provider that compiles: it may take no partition of a single node."""


Accepted = Callable[[ProbeRun], bool]
"""Whether a changed node is accepted."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One thing that experiments show of one node."""

    evidence: str
    factors: tuple[Factor, ...] = ()
    """What was changed, all of it together, when that made the provider take the node."""
    code: Code | None = None
    """The reason, when no change made a difference."""
    inferred: bool = False
    """It follows from other nodes of the operator, and no experiment with this one isolates it."""
    not_run: bool = False
    """The changed node was placed in a dry run, and the CPU provider could not run it either."""
    accepted: bool = False
    """The provider takes the node as it is, in isolation."""


def conclusions(probe: NodeProbe | None) -> tuple[Conclusion, ...]:
    """Everything that the experiments show, in the order in which they were made; nothing when they show nothing."""
    if probe is None or not probe.variants:
        return ()
    first, *rest = probe.variants
    others = [trial for trial in rest if trial.factor != NEIGHBOURS]
    if first.outcome == "supported":
        taken = "accepts the nodes of its function, not the operator itself" if first.function_inlined else "accepts it"
        evidence = f"{_setting(first)}, with the same types, shapes and attributes, the provider {taken}"
        around = f"{evidence}{_neighbour_conclusion(rest)}"
        options = [trial for trial in others if trial.factor == OPTION and helps(trial)]
        if options:
            return (Conclusion(f"{around}; {_choice(options)} it does", (OPTION,)),)
        return (Conclusion(around, code="not_claimed", accepted=True),)
    if first.outcome == "invalid":
        return ()
    shut = next((trial for trial in rest if trial.factor == NEIGHBOURS and trial.outcome == "rejected"), None)
    if shut is not None:
        return tuple(_only_in_main_graph(first, others, shut))
    for accepted in (helps, dry_run_outcome):
        found = tuple(_by_one_change(first, others, accepted)) or tuple(_by_several(first, others, accepted))
        if found:
            return found
    return tuple(_in_vain(probe))


def _only_in_main_graph(first: ProbeRun, others: Sequence[ProbeRun], shut: ProbeRun) -> Iterator[Conclusion]:
    """A change helps the node in the main graph, but not in the control-flow subgraph that it is in."""
    helped = [trial for trial in others if helps(trial) and (trial.parts or (trial.factor,)) == shut.parts]
    change = _choice(helped[:1]) if helped else "with a change"
    said = f" ({shut.message})" if shut.message else ""
    evidence = f"{change} the provider accepts this node in a main graph, and not in {shut.change}{said}"
    yield Conclusion(f"{evidence}{without(first)}", code="not_claimed")


def _neighbour_conclusion(trials: Sequence[ProbeRun]) -> str:
    """With which of the nodes next to it the provider no longer takes a node that it takes when it is alone."""
    with_neighbours = [
        trial for trial in trials if trial.factor == NEIGHBOURS and trial.outcome in ANSWERED | {"supported"}
    ]
    left = next((trial for trial in with_neighbours if trial.outcome == "rejected"), None)
    failed = next((trial for trial in with_neighbours if trial.outcome in ANSWERED), None)
    if left is not None:
        said = f" ({left.message})" if left.message else ""
        return f"; together with {left.change} {UNCHANGED[left.outcome]}{said}"
    if failed is not None:  # which of them is at fault nobody knows
        said = f" ({failed.message})" if failed.message else ""
        return f"; a model of it and {failed.change} makes the provider fail{said}"
    return "; also together with the nodes around it that were tried" if with_neighbours else ""


def _by_one_change(first: ProbeRun, others: Sequence[ProbeRun], accepted: Accepted) -> Iterator[Conclusion]:
    """One for each factor in which a change made the provider take the node."""
    single = [trial for trial in others if trial.factor != COMBINED and accepted(trial)]
    found = dict.fromkeys(trial.factor for trial in single)
    for factor in [each for each in found if each not in DECLARED] or found:
        helped = [trial for trial in single if trial.factor == factor]
        evidence = f"{_choice(helped)} {ACCEPTS[helped[0].outcome]}{without(first)}{_rest(others, factor)}"
        yield Conclusion(evidence, (factor,), not_run=dry_run_outcome(helped[0]))


def _by_several(first: ProbeRun, others: Sequence[ProbeRun], accepted: Accepted) -> Iterator[Conclusion]:
    """The first changes that did so together."""
    trial = next((trial for trial in others if trial.factor == COMBINED and accepted(trial)), None)
    if trial is not None:
        change = _with_change(trial.change, removes=trial.removes)
        tried = sum(each.factor not in (COMBINED, OTHER_FORM) and each.outcome in ANSWERED for each in others)
        single = f"; with one change at a time ({tried} tried) it does not" if tried else ""
        evidence = f"{change} {ACCEPTS[trial.outcome]}{single}{without(first)}"
        yield Conclusion(evidence, trial.parts, not_run=dry_run_outcome(trial))


def dry_run_outcome(trial: ProbeRun) -> bool:
    """Whether a dry run supports the changed node, which could not be run on the CPU provider."""
    return trial.outcome == "placed" and trial.factor != OTHER_FORM


def helps(trial: ProbeRun) -> bool:
    """Whether the changed node is taken, and not only what it is made of."""
    return trial.outcome == "supported" and not trial.function_inlined and trial.factor != OTHER_FORM


def _in_vain(probe: NodeProbe) -> Iterator[Conclusion]:
    """What follows when nothing helped; nothing does from experiments that are not complete."""
    first, *rest = probe.variants
    changes = [trial for trial in rest if trial.factor != OTHER_FORM]
    forms = [trial for trial in rest if trial.factor == OTHER_FORM and trial.outcome != "invalid"]
    taken = [trial for trial in forms if trial.outcome == "supported" and not trial.function_inlined]
    if first.outcome in ("failed", "crashed"):
        yield Conclusion(opening(first), code="subgraph_rejected")
        alike = [trial for trial in taken if "type" not in trial.parts]
        if alike and not probe.missing_probes and not NO_ROOM.search(first.message):
            decides = "in the types of this one, so its attributes, inputs or shapes decide"
            yield Conclusion(f"{_supports_other_forms(alike)} {decides}; {opening(first)}", FORM, inferred=True)
    elif not probe.missing_probes and all(trial.outcome != "timed_out" for trial in (first, *changes)):
        more = f"; {plural(probe.omitted, 'more combination')} of changes not tried" if probe.omitted else ""
        tried = f"{opening(first)}; {_summary(changes)}{more}"
        alike = [trial for trial in taken if "type" not in trial.parts]
        # With another option of the provider the same nodes are tried again.
        also = ", with another option neither" if any(OPTION in trial.parts for trial in forms) else ""
        forms = [trial for trial in forms if OPTION not in trial.parts]
        own = sum(not trial.parts for trial in forms)
        # A crash does not show that the provider has the operator: its neighbour or ONNX Runtime may be the cause.
        failed = [trial for trial in forms if trial.outcome in FAILED - {"crashed"}]
        if alike:
            # Operator, version and types are the same: what is left are attributes, inputs and shapes.
            decides = "in the types of this one, so its attributes, inputs or shapes decide"
            yield Conclusion(f"{_supports_other_forms(alike)} {decides}; {tried}", FORM, inferred=True)
        elif taken and own:
            none = f"and none of {plural(own, 'node')} of it in the types of this one"
            yield Conclusion(f"{_supports_other_forms(taken)}, {none}; {tried}", TYPE, inferred=True)
        elif taken:
            none = "and none could be tried in the types of this one, so types, attributes, inputs or shapes decide"
            yield Conclusion(f"{_supports_other_forms(taken)}, {none}; {tried}", FORM, inferred=True)
        elif failed:
            over = f"it fails on {len(failed)} of {plural(len(forms), 'other node')} of this operator"
            yield Conclusion(f"{tried}; {over} ({failed[0].message or failed[0].outcome})", FORM, inferred=True)
        else:
            others = f"; nor does it support any of {plural(len(forms), 'other node')} of this operator{also}"
            yield Conclusion(f"{tried}{others if forms else ''}", code="no_kernel_op")


def _supports_other_forms(taken: Sequence[ProbeRun]) -> str:
    """That the provider has the operator, by an example."""
    example = f" (e.g. {taken[0].change})" if taken[0].change else ""
    return f"the provider accepts other nodes of this operator{example}"


def _with_change(change: str, *, removes: bool) -> str:
    """`with float16 in place of float32`, `without alpha=2`."""
    return change if removes else f"with {change}"


def _setting(first: ProbeRun) -> str:
    """What stood around the node when it was tried."""
    return IN_COMPANY if first.neg_added else ALONE


def opening(first: ProbeRun) -> str:
    """What became of the node as it is."""
    return f"{_setting(first)}, {TOLD[first.outcome]}{f' ({first.message})' if first.message else ''}"


def without(first: ProbeRun) -> str:
    """What becomes of the node without a change."""
    said = f" ({first.message})" if first.message else ""
    return f"; unchanged, {UNCHANGED[first.outcome]}{said}"


def _choice(trials: Sequence[ProbeRun]) -> str:
    """Changes that help; those that remove something and others apart."""
    kinds = dict.fromkeys(trial.removes for trial in trials)
    return " or ".join(_alike([trial for trial in trials if trial.removes == removes]) for removes in kinds)


def _alike(trials: Sequence[ProbeRun]) -> str:
    """Changes that help, grouped by the replaced value; only the first few are named."""
    whole = [trial for trial in trials if trial.swap is None or not trial.swap.partly]
    together: dict[tuple[str, str], list[str]] = {}
    for trial in whole or trials:
        swap = trial.swap
        place = (swap.before, swap.where) if swap is not None else ("", "")
        together.setdefault(place, []).append(swap.now if swap is not None else trial.change)
    parts = [
        str(Swap(_alternatives(now), before, where)) if before else _alternatives(now)
        for (before, where), now in together.items()
    ]
    told = f"{parts[0]} (or {_alternatives(parts[1:])})" if len(parts) > 1 else parts[0]
    return _with_change(told, removes=(whole or trials)[0].removes)


def _alternatives(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`, `a, b, c or 2 more`."""
    shown = list(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        shown.append(f"{len(names) - MOST_NAMED} more")
    *most, last = shown
    return f"{', '.join(most)} or {last}" if most else last


def _rest(others: Sequence[ProbeRun], factor: Factor) -> str:
    """How much of other kinds was tried, and did not help."""
    tried = [trial for trial in others if trial.factor != factor and trial.outcome != "invalid"]
    return "".join(f"; {text}" for text in _outcome_counts(tried, "other variation"))


def _summary(others: Sequence[ProbeRun]) -> str:
    """How much was tried in vain."""
    return "; ".join(_outcome_counts(others, "variation", kinds=True)) or "nothing about it could be varied"


def _outcome_counts(trials: Sequence[ProbeRun], what: str, *, kinds: bool = False) -> Iterator[str]:
    """How many experiments ended in which way, those aside in which the node was taken. `kinds`: and of which kind."""
    ended = [(end, [trial for trial in trials if trial.outcome in outcomes]) for end, outcomes in ENDS.items()]
    for end, found in ended:
        if found:
            named = listing(list(dict.fromkeys(trial.kind or trial.factor for trial in found)))
            yield f"{plural(len(found), what)}{f' ({named})' if kinds and 'rejected' in ENDS[end] else ''} {end}"


def fullest(probes: Mapping[str, NodeProbe], names: Sequence[str]) -> NodeProbe | None:
    """The probe of the first of several nodes that shows something; else of the first that was probed at all."""
    known = [probes[name] for name in names if name in probes]
    return next((probe for probe in known if conclusions(probe)), known[0] if known else None)


def unprobed_nodes(probes: Mapping[str, NodeProbe]) -> Iterator[str]:
    """Nodes whose experiments are missing or not complete."""
    return (name for name, probe in probes.items() if probe.missing_probes)
