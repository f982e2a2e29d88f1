"""What experiments on a node mean: which nodes call for them, and which reason they show. Pure.

The experiments themselves are made by whoever can open sessions; here are only their answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partita.partition_reports.facts import Factor, NodeProbe, Trial
from partita.partition_reports.wording import listing, plural

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
MOST_NAMED = 4
TOLD: Mapping[str, str] = {
    "left": "alone, it is left to another provider",
    "failed": "alone, it makes the provider fail",
    "crashed": "alone, it crashes the provider",
    "timed_out": "alone, it keeps the provider busy without end",
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
        return Conclusion("not_claimed", "alone, with the same types, shapes and attributes, the provider takes it")
    if first.outcome == "invalid":
        return None
    return decided(first, others) or undecided(probe, first, others)


def decided(first: Trial, others: Sequence[Trial]) -> Conclusion | None:
    """The conclusion when something that was changed made the provider take the node."""
    for factor, code in CODES.items():
        helped = [trial.change for trial in others if trial.factor == factor and trial.outcome == "taken"]
        if helped:
            return Conclusion(code, f"{opening(first)}; it is taken with {choice(helped)}{rest(others, factor)}")
    for trial in others:
        if trial.factor == "combined" and trial.outcome == "taken":
            main: Factor = next((factor for factor in IN_COMBINATION if factor in trial.parts), "type")
            evidence = f"{opening(first)}; no single change helps, it is taken with {trial.change}"
            return Conclusion(CODES[main], evidence)
    return None


def undecided(probe: NodeProbe, first: Trial, others: Sequence[Trial]) -> Conclusion | None:
    """The conclusion when nothing helped; none is drawn from experiments that are not complete."""
    if first.outcome in ("failed", "crashed"):
        return Conclusion("subgraph_rejected", opening(first))
    if probe.unprobed or first.outcome == "timed_out":
        return None
    tried = [trial for trial in others if trial.outcome != "invalid"]
    return Conclusion("no_kernel_op", f"{opening(first)}; so it is {summary(tried)}")


def opening(first: Trial) -> str:
    """What became of the node as it is."""
    return f"{TOLD[first.outcome]}{f' ({first.said})' if first.said else ''}"


def choice(changes: Sequence[str]) -> str:
    """The first of several changes that help."""
    more = len(changes) - MOST_NAMED
    listed = "; or with ".join(changes[:MOST_NAMED])
    return f"{listed}; or with {plural(more, 'other change')}" if more > 0 else listed


def rest(others: Sequence[Trial], factor: Factor) -> str:
    """What was tried of other kinds, and did not help."""
    useless = [trial for trial in others if trial.factor != factor and trial.outcome not in ("taken", "invalid")]
    return f", not by any of {plural(len(useless), 'change')} of another kind" if useless else ""


def summary(tried: Sequence[Trial]) -> str:
    """How much was tried in vain."""
    if not tried:
        return "with every change that ONNX Runtime accepts: there is none"
    names: dict[Factor, str] = {
        "static_shape": "fixed sizes", "type": "other types", "opset": "other opsets",
        "attribute": "attributes left out", "input": "other inputs", "combined": "several at once",
    }  # fmt: skip
    kinds = [name for factor, name in names.items() if any(trial.factor == factor for trial in tried)]
    return f"with {plural(len(tried), 'change')}: {listing(kinds)}"


def fullest(probes: Mapping[str, NodeProbe], names: Sequence[str]) -> NodeProbe | None:
    """The probe of the first of several nodes that has a conclusion; else of the first that was probed at all."""
    known = [probes[name] for name in names if name in probes]
    return next((probe for probe in known if conclude(probe) is not None), known[0] if known else None)


def unprobed_nodes(probes: Mapping[str, NodeProbe]) -> Iterator[str]:
    """Nodes whose experiments are missing or not complete."""
    return (name for name, probe in probes.items() if probe.unprobed)
