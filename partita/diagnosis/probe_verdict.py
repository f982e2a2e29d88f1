"""What experiments on a node mean: which nodes call for them, and which reason they show. Pure.

The experiments themselves are made by whoever can open sessions; here are only their answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partita.observations.facts import Factor, NodeProbe, Swap, Trial
from partita.observations.text_format import listing, plural

Code = Literal[
    "not_claimed",
    "dynamic_shape",
    "no_kernel_type",
    "no_kernel_version",
    "attribute_unsupported",
    "no_kernel_op",
    "subgraph_rejected",
]
CODES: Mapping[Factor, Code] = {
    "static_shape": "dynamic_shape",
    "type": "no_kernel_type",
    "opset": "no_kernel_version",
    "attribute": "attribute_unsupported",
    "input": "attribute_unsupported",
}
"""The reason that a single factor shows, in the order in which it is chosen when several would help."""
IN_COMBINATION: tuple[Factor, ...] = ("type", "opset", "attribute", "input", "static_shape")
MOST_NAMED = 3
UNCHANGED: Mapping[str, str] = {
    "left": "it does not claim it",
    "failed": "it fails on it",
    "crashed": "it crashes on it",
    "timed_out": "it gives no answer",
}
TOLD: Mapping[str, str] = {
    "left": "tested in isolation, the provider does not claim it",
    "failed": "tested in isolation, it makes the provider fail",
    "crashed": "tested in isolation, it crashes the provider",
    "timed_out": "tested in isolation, it never returns",
}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What experiments show of one node."""

    code: Code
    evidence: str


def conclude(probe: NodeProbe | None) -> Conclusion | None:
    """The reason that the experiments show; None when they show none."""
    if probe is None or not probe.trials:
        return None
    first, *others = probe.trials
    if first.outcome == "taken":
        return Conclusion(
            "not_claimed", "tested in isolation, with the same types, shapes and attributes, the provider accepts it"
        )
    if first.outcome == "invalid":
        return None
    return decided(first, others) or undecided(probe, first, others)


def decided(first: Trial, others: Sequence[Trial]) -> Conclusion | None:
    """The conclusion when something that was changed made the provider take the node."""
    for factor, code in CODES.items():
        helped = [trial for trial in others if trial.factor == factor and helps(trial)]
        if helped:
            evidence = f"{choice(helped)} the provider accepts this node{without(first)}{rest(others, factor)}"
            return Conclusion(code, evidence)
    for trial in others:
        if trial.factor == "combined" and helps(trial):
            main: Factor = next((factor for factor in IN_COMBINATION if factor in trial.parts), "type")
            change = with_change(trial.change, removes=trial.removes)
            evidence = f"{change} the provider accepts this node, with no single change{without(first)}"
            return Conclusion(CODES[main], evidence)
    return None


def helps(trial: Trial) -> bool:
    """Whether the changed node is taken, and not only what it is made of."""
    return trial.outcome == "taken" and not trial.unfolded


def undecided(probe: NodeProbe, first: Trial, others: Sequence[Trial]) -> Conclusion | None:
    """The conclusion when nothing helped; none is drawn from experiments that are not complete."""
    if first.outcome in ("failed", "crashed"):
        return Conclusion("subgraph_rejected", opening(first))
    if probe.unprobed or any(trial.outcome == "timed_out" for trial in (first, *others)):
        return None
    left = [trial for trial in others if trial.outcome == "left"]
    broken = sum(trial.outcome in ("failed", "crashed") for trial in others)
    also = f"; {plural(broken, 'variation')} ended in an error" if broken else ""
    return Conclusion("no_kernel_op", f"{opening(first)}; {summary(left)}{also}")


def with_change(change: str, *, removes: bool) -> str:
    """`with float16 in place of float32`, `without alpha=2`."""
    return change if removes else f"with {change}"


def opening(first: Trial) -> str:
    """What became of the node as it is."""
    return f"{TOLD[first.outcome]}{f' ({first.said})' if first.said else ''}"


def without(first: Trial) -> str:
    """What becomes of the node without a change."""
    said = f" ({first.said})" if first.said else ""
    return f"; unchanged, {UNCHANGED[first.outcome]}{said}"


def choice(trials: Sequence[Trial]) -> str:
    """Changes that help, those that take the place of the same thing together; only the first few are named."""
    whole = [trial for trial in trials if trial.swap is None or not trial.swap.partly]
    together: dict[tuple[str, str], list[str]] = {}
    for trial in whole or trials:
        swap = trial.swap
        place = (swap.before, swap.where) if swap is not None else ("", "")
        together.setdefault(place, []).append(swap.now if swap is not None else trial.change)
    parts = [
        str(Swap(alternatives(now), before, where)) if before else alternatives(now)
        for (before, where), now in together.items()
    ]
    told = f"{parts[0]} (or {alternatives(parts[1:])})" if len(parts) > 1 else parts[0]
    return with_change(told, removes=(whole or trials)[0].removes)


def alternatives(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`, `a, b, c or 2 more`."""
    shown = list(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        shown.append(f"{len(names) - MOST_NAMED} more")
    *most, last = shown
    return f"{', '.join(most)} or {last}" if most else last


def rest(others: Sequence[Trial], factor: Factor) -> str:
    """How much of other kinds was tried, and did not help."""
    useless = [trial for trial in others if trial.factor != factor and trial.outcome not in ("taken", "invalid")]
    return f"; {plural(len(useless), 'other variation')} made no difference" if useless else ""


def summary(tried: Sequence[Trial]) -> str:
    """How much was tried in vain."""
    if not tried:
        return "nothing about it could be varied"
    names: dict[Factor, str] = {
        "static_shape": "fixed sizes",
        "type": "other types",
        "opset": "other opsets",
        "attribute": "attributes left out",
        "input": "other inputs",
        "combined": "several at once",
    }
    kinds = [name for factor, name in names.items() if any(trial.factor == factor for trial in tried)]
    return f"{plural(len(tried), 'variation')} ({listing(kinds)}) made no difference"


def fullest(probes: Mapping[str, NodeProbe], names: Sequence[str]) -> NodeProbe | None:
    """The probe of the first of several nodes that has a conclusion; else of the first that was probed at all."""
    known = [probes[name] for name in names if name in probes]
    return next((probe for probe in known if conclude(probe) is not None), known[0] if known else None)


def unprobed_nodes(probes: Mapping[str, NodeProbe]) -> Iterator[str]:
    """Nodes whose experiments are missing or not complete."""
    return (name for name, probe in probes.items() if probe.unprobed)
