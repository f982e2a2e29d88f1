"""Conclusions from the probes of a node: the changes with which the provider supports it, else a reason. Pure.

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
    Substitution,
)
from partita.observations.native_text import NO_ROOM
from partita.observations.text_format import listing, plural

Code = Literal["not_claimed", "no_kernel_op", "subgraph_rejected"]
"""Reasons that apply when no change made a difference."""
MOST_NAMED = 3
UNCHANGED: Mapping[str, str] = {
    "rejected": "it does not support it",
    "failed": "it fails on it",
    "crashed": "it crashes on it",
    "timed_out": "it does not respond in time",
}
FIRST_OUTCOME: Mapping[str, str] = {
    "rejected": "the provider does not support it",
    "failed": "it makes the provider fail",
    "crashed": "it crashes the provider",
    "timed_out": "the provider does not respond in time",
}
"""The outcome of the unchanged node."""
TYPE: tuple[Factor, ...] = ("type",)
FORM: tuple[Factor, ...] = ("attribute",)
DECLARED: frozenset[Factor] = frozenset({"output_shape"})
"""Changes of declarations only. If another change helps, too, that one is the cause."""
SUPPORTS: Mapping[str, str] = {
    "supported": "the provider supports this node",
    "placed": "the provider supports this node (placed, not run)",
}
KINDS: Mapping[Factor, str] = {
    "rank": "known ranks",
    "static_shape": "fixed sizes",
    "output_shape": "declared sizes of outputs",
    "type": "other types",
    "opset": "other opsets",
    "attribute": "other attributes",
    "input": "other inputs",
    COMBINED: "two factors together",
    OPTION: "provider options",
    NEIGHBOURS: "neighbouring nodes",
}
"""The variations of a factor, in words."""
NO_EFFECT = "made no difference"
ENDS: Mapping[str, frozenset[str]] = {
    NO_EFFECT: frozenset({"rejected"}),
    "failed": frozenset({"failed", "crashed"}),
    "timed out": frozenset({"timed_out"}),
    "were placed and not run": frozenset({"placed"}),
    "could not be tested": frozenset({"invalid"}),
}
"""Text -> outcomes of experiments that do not help."""
ANSWERED = frozenset({"rejected", "failed", "crashed"})
ALONE = "tested in isolation"
SAME_TYPES = "with the types of this node, so its attributes, inputs or shapes are the cause"
WITH_NEG = "tested with only an added Neg"
"""For a compiling provider, which may reject a partition of a single node."""


IsSupported = Callable[[ProbeRun], bool]
"""Whether the provider supports a changed node."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One conclusion from the experiments on a node."""

    evidence: str
    factors: tuple[Factor, ...] = ()
    """The factors of the change with which the provider supports the node; several: changed together."""
    code: Code | None = None
    """The reason, when no change made a difference."""
    inferred: bool = False
    """It follows from experiments with other nodes of the operator, not with this node."""
    not_run: bool = False
    """The changed node was placed in a dry run, and the CPU provider could not run it either."""
    accepted: bool = False
    """The provider supports the unchanged node in isolation."""


def conclusions(probe: NodeProbe | None) -> tuple[Conclusion, ...]:
    """The conclusions in the order of the experiments; empty when there are none."""
    if probe is None or not probe.variants:
        return ()
    first, *rest = probe.variants
    others = [trial for trial in rest if trial.factor != NEIGHBOURS]
    group = [trial.change for trial in rest if trial.factor == NEIGHBOURS and trial.substitution and helps(trial)]
    rest = [trial for trial in rest if trial.factor != NEIGHBOURS or trial.substitution is None]
    with_group = f"in its quantised group, with {_alternatives(group)} it does" if group else ""
    if first.outcome == "supported":
        support = (
            "supports the nodes of its function, not the operator itself" if first.function_inlined else "supports it"
        )
        evidence = f"{_setting(first)}, with the same types, shapes and attributes, the provider {support}"
        around = f"{evidence}{_neighbour_conclusion(rest)}"
        around += f"; {with_group}" if with_group else ""
        options = [trial for trial in others if trial.factor == OPTION and helps(trial)]
        if options:
            return (Conclusion(f"{around}; {_choice(options)} it does", (OPTION,)),)
        return (Conclusion(around, code="not_claimed", accepted=True),)
    if first.outcome == "invalid":
        return ()
    if with_group:
        return (Conclusion(f"{opening(first)}; {with_group}", code="not_claimed"),)
    in_subgraph = next((trial for trial in rest if trial.factor == NEIGHBOURS and trial.outcome == "rejected"), None)
    if in_subgraph is not None:
        return tuple(_only_in_main_graph(first, others, in_subgraph))
    for supported in (helps, dry_run_outcome):
        found = tuple(_by_one_change(first, others, supported)) or tuple(_by_several(first, others, supported))
        if found:
            return found
    return tuple(_without_effect(probe))


def _only_in_main_graph(first: ProbeRun, others: Sequence[ProbeRun], in_subgraph: ProbeRun) -> Iterator[Conclusion]:
    """With a change, the provider supports the node in the main graph, but not in its control-flow subgraph."""
    helped = [trial for trial in others if helps(trial) and trial.parts == in_subgraph.factors]
    change = _choice(helped[:1]) if helped else "with a change"
    message = f" ({in_subgraph.message})" if in_subgraph.message else ""
    evidence = f"{change} the provider supports this node in a main graph, and not in {in_subgraph.change}{message}"
    yield Conclusion(f"{evidence}{without(first)}", code="not_claimed")


def _neighbour_conclusion(trials: Sequence[ProbeRun]) -> str:
    """The neighbours with which the provider no longer supports a node that it supports in isolation."""
    with_neighbours = [
        trial for trial in trials if trial.factor == NEIGHBOURS and trial.outcome in ANSWERED | {"supported"}
    ]
    rejected = next((trial for trial in with_neighbours if trial.outcome == "rejected"), None)
    failed = next((trial for trial in with_neighbours if trial.outcome in ANSWERED), None)
    if rejected is not None:
        message = f" ({rejected.message})" if rejected.message else ""
        return f"; together with {rejected.change} {UNCHANGED[rejected.outcome]}{message}"
    if failed is not None:  # the cause may be any node of this model
        message = f" ({failed.message})" if failed.message else ""
        return f"; a model of it and {failed.change} makes the provider fail{message}"
    return "; also together with the tested neighbours" if with_neighbours else ""


def _by_one_change(first: ProbeRun, others: Sequence[ProbeRun], supported: IsSupported) -> Iterator[Conclusion]:
    """One for each factor with a change with which the provider supports the node."""
    single = [trial for trial in others if trial.factor != COMBINED and supported(trial)]
    found = dict.fromkeys(trial.factor for trial in single)
    for factor in [each for each in found if each not in DECLARED] or found:
        helped = [trial for trial in single if trial.factor == factor]
        evidence = f"{_choice(helped)} {SUPPORTS[helped[0].outcome]}{without(first)}{_unhelpful_counts(others, factor)}"
        yield Conclusion(evidence, (factor,), not_run=dry_run_outcome(helped[0]))


def _by_several(first: ProbeRun, others: Sequence[ProbeRun], supported: IsSupported) -> Iterator[Conclusion]:
    """The first combined change with which the provider supports the node."""
    trial = next((trial for trial in others if trial.factor == COMBINED and supported(trial)), None)
    if trial is not None:
        change = _with_change(trial.change, removes=trial.removes)
        tried = sum(each.factor not in (COMBINED, OTHER_FORM) and each.outcome in ANSWERED for each in others)
        single = f"; with one change at a time ({tried} tested) it does not" if tried else ""
        evidence = f"{change} {SUPPORTS[trial.outcome]}{single}{without(first)}"
        yield Conclusion(evidence, trial.factors, not_run=dry_run_outcome(trial))


def dry_run_outcome(trial: ProbeRun) -> bool:
    """Whether a dry run placed the changed node on the provider, and the CPU provider could not run it."""
    return trial.outcome == "placed" and trial.factor != OTHER_FORM


def helps(trial: ProbeRun) -> bool:
    """Whether the provider supports the changed node itself, not only the nodes of its function."""
    return trial.outcome == "supported" and not trial.function_inlined and trial.factor != OTHER_FORM


def _without_effect(probe: NodeProbe) -> Iterator[Conclusion]:
    """The conclusions when no change helped; incomplete experiments show only a failure of the unchanged node."""
    first, *rest = probe.variants
    changes = [trial for trial in rest if trial.factor != OTHER_FORM]
    forms = [trial for trial in rest if trial.factor == OTHER_FORM and trial.outcome != "invalid"]
    supported = [trial for trial in forms if trial.outcome == "supported" and not trial.function_inlined]
    if first.outcome in ("failed", "crashed"):
        yield Conclusion(opening(first), code="subgraph_rejected")
        alike = [trial for trial in supported if "type" not in trial.factors]
        if alike and not probe.missing_probes and not NO_ROOM.search(first.message):
            yield Conclusion(f"{_supports_other_forms(alike)} {SAME_TYPES}; {opening(first)}", FORM, inferred=True)
    elif not probe.missing_probes and all(trial.outcome != "timed_out" for trial in (first, *changes)):
        more = f"; {plural(probe.omitted, 'more combination')} of changes not tested" if probe.omitted else ""
        tried = f"{opening(first)}; {_summary(changes)}{more}"
        alike = [trial for trial in supported if "type" not in trial.factors]
        own = sum(not trial.factors for trial in forms)
        # A crash does not show that the provider has the operator: its neighbour or ONNX Runtime may be the cause.
        failed = [trial for trial in forms if trial.outcome in FAILED - {"crashed"}]
        if alike:
            # Operator, version and types are equal; attributes, inputs and shapes may differ.
            yield Conclusion(f"{_supports_other_forms(alike)} {SAME_TYPES}; {tried}", FORM, inferred=True)
        elif supported and own:
            none = f"but none of {plural(own, 'node')} with the types of this node"
            yield Conclusion(f"{_supports_other_forms(supported)}, {none}; {tried}", TYPE, inferred=True)
        elif supported:
            none = "but none could be tested with its types, so its types, attributes, inputs or shapes are the cause"
            yield Conclusion(f"{_supports_other_forms(supported)}, {none}; {tried}", FORM, inferred=True)
        elif failed:
            over = f"it fails on {len(failed)} of {plural(len(forms), 'other node')} of this operator"
            yield Conclusion(f"{tried}; {over} ({failed[0].message or failed[0].outcome})", FORM, inferred=True)
        else:
            others = f"; it supports none of {plural(len(forms), 'other node')} of this operator"
            yield Conclusion(f"{tried}{others if forms else ''}", code="no_kernel_op")


def _supports_other_forms(supported: Sequence[ProbeRun]) -> str:
    """A clause with an example of a supported node of the operator."""
    example = f" (e.g. {supported[0].change})" if supported[0].change else ""
    return f"the provider supports other nodes of this operator{example}"


def _with_change(change: str, *, removes: bool) -> str:
    """`with float16 in place of float32`, `without alpha=2`."""
    return change if removes else f"with {change}"


def _setting(first: ProbeRun) -> str:
    """The nodes in the model of the experiment, as text."""
    return WITH_NEG if first.neg_added else ALONE


def opening(first: ProbeRun) -> str:
    """The outcome of the unchanged node."""
    return f"{_setting(first)}, {FIRST_OUTCOME[first.outcome]}{f' ({first.message})' if first.message else ''}"


def without(first: ProbeRun) -> str:
    """The outcome of the unchanged node, as the end of a sentence."""
    message = f" ({first.message})" if first.message else ""
    return f"; unchanged, {UNCHANGED[first.outcome]}{message}"


def _choice(trials: Sequence[ProbeRun]) -> str:
    """Changes that help; changes that remove something are listed apart."""
    kinds = dict.fromkeys(trial.removes for trial in trials)
    return " or ".join(_helpful_changes([trial for trial in trials if trial.removes == removes]) for removes in kinds)


def _helpful_changes(trials: Sequence[ProbeRun]) -> str:
    """Changes that help, grouped by the replaced value; only the first few are named."""
    together: dict[tuple[str, str], list[str]] = {}
    for trial in trials:
        substitution = trial.substitution
        place = (substitution.before, substitution.location) if substitution is not None else ("", "")
        together.setdefault(place, []).append(substitution.after if substitution is not None else trial.change)
    parts = [
        str(Substitution(_alternatives(now), before, where)) if before else _alternatives(now)
        for (before, where), now in together.items()
    ]
    text = f"{parts[0]} (or {_alternatives(parts[1:])})" if len(parts) > 1 else parts[0]
    return _with_change(text, removes=trials[0].removes)


def _alternatives(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`, `a, b, c or 2 more`."""
    shown = list(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        shown.append(f"{len(names) - MOST_NAMED} more")
    *most, last = shown
    return f"{', '.join(most)} or {last}" if most else last


def _unhelpful_counts(others: Sequence[ProbeRun], factor: Factor) -> str:
    """The experiments with other factors that did not help, counted by outcome."""
    tried = [trial for trial in others if trial.factor != factor and trial.outcome != "invalid"]
    return "".join(f"; {text}" for text in _outcome_counts(tried, "other variation"))


def _summary(others: Sequence[ProbeRun]) -> str:
    """The experiments that did not help, counted by outcome."""
    return "; ".join(_outcome_counts(others, "variation", kinds=True)) or "no variation is possible"


def _outcome_counts(trials: Sequence[ProbeRun], noun: str, *, kinds: bool = False) -> Iterator[str]:
    """Number of experiments by outcome, without supported variants. `kinds`: name the kinds of rejected variations."""
    ended = [(end, [trial for trial in trials if trial.outcome in outcomes]) for end, outcomes in ENDS.items()]
    for end, found in ended:
        if found:
            named = listing(list(dict.fromkeys(KINDS.get(trial.factor, trial.factor) for trial in found)))
            yield f"{plural(len(found), noun)}{f' ({named})' if kinds and 'rejected' in ENDS[end] else ''} {end}"


def fullest(probes: Mapping[str, NodeProbe], names: Sequence[str]) -> NodeProbe | None:
    """The first probe of these nodes with a conclusion; else the first probe; None without any."""
    known = [probes[name] for name in names if name in probes]
    return next((probe for probe in known if conclusions(probe)), known[0] if known else None)


def unprobed_nodes(probes: Mapping[str, NodeProbe]) -> Iterator[str]:
    """Nodes whose experiments are missing or not complete."""
    return (name for name, probe in probes.items() if probe.missing_probes)
