"""Findings from the probes of a node: the changes with which the provider supports it, else a reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partita.observations.codes import EvidenceKind, ReasonCode
from partita.observations.facts import COMBINED, FAILED, NEIGHBOURS, OPTION, OTHER_FORM, Factor, NodeProbe, ProbeRun
from partita.observations.native_text import NO_ROOM
from partita.observations.text_format import listing, plural

MOST_NAMED = 3
OUTCOMES: Mapping[str, str] = {
    "supported": "supports this node",
    "placed": "supports this node (placed, not run)",
    "rejected": "does not support it",
    "failed": "fails on it",
    "crashed": "crashes on it",
    "timed_out": "does not respond in time",
}
"""The outcome of an experiment, after `the provider`."""
FACTORS: Mapping[Factor, tuple[str, ReasonCode | None]] = {
    OPTION: ("provider options", "option_needed"),
    "rank": ("known ranks", "dynamic_shape"),
    "static_shape": ("fixed sizes", "dynamic_shape"),
    "output_shape": ("declared sizes of outputs", "dynamic_shape"),
    "type": ("other types", "no_kernel_type"),
    "opset": ("other opsets", "no_kernel_version"),
    "attribute": ("other attributes", "attribute_unsupported"),
    "input": ("other inputs", "attribute_unsupported"),
    COMBINED: ("two factors together", None),
    NEIGHBOURS: ("neighbouring nodes", None),
}
"""Factor -> its variations in words, and the reason if the provider supports the node after a change of it."""
CAUSES: Mapping[Factor, ReasonCode] = {factor: cause for factor, (_, cause) in FACTORS.items() if cause is not None}
REMEDIES: Mapping[Factor, str] = {
    "rank": "declare in the file the ranks of the model's inputs, or of the inputs of the node (value_info); sizes may "
    "stay symbolic",
    "output_shape": "if the outputs of the node always have the same sizes, declare them in the file (value_info, or "
    "the type of the graph output); otherwise use a provider that supports sizes that depend on values",
}
"""Factor -> the remedy that replaces that of the reason."""
OTHER_OPERATOR = (
    "put a provider that supports the operator first in --provider, or use other operators (for a package: export it "
    "with another --attention)"
)
DECLARED: frozenset[Factor] = frozenset({"output_shape"})
"""Changes of declarations only. If another change helps, too, that one is the cause."""
ENDS: Mapping[str, frozenset[str]] = {
    "made no difference": frozenset({"rejected"}),
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
class Finding:
    """A reason applies, with its evidence."""

    code: ReasonCode
    kind: EvidenceKind
    basis: str
    """Source of the evidence: a basis in `reasons.PRECEDENCE`."""
    evidence: str
    remedy: str | None = None
    """Replaces the remedy of the reason; None: the reason's own."""
    not_run: bool = False
    """The changed node was placed in a dry run, and the CPU provider could not run it either."""
    changes: tuple[Factor, ...] = ()
    """The factors of the change that helps; each has its own remedy."""


def conclusions(probe: NodeProbe | None) -> tuple[Finding, ...]:
    """The findings in the order of the experiments; empty when there are none."""
    if probe is None or not probe.variants or probe.variants[0].outcome == "invalid":
        return ()
    first, *rest = probe.variants
    others = [trial for trial in rest if trial.factor != NEIGHBOURS]
    around = [trial for trial in rest if trial.factor == NEIGHBOURS and trial.substitution is None]
    group = [trial.change for trial in rest if trial.factor == NEIGHBOURS and trial.substitution and helps(trial)]
    with_group = f"; in its quantised group, with {_alternatives(group)} it does" if group else ""
    if first.outcome == "supported":
        support = "supports the nodes of its function, not the operator itself" if first.function_inlined else ""
        evidence = f"{WITH_NEG if first.neg_added else ALONE}, with the same types, shapes and attributes, "
        evidence += f"the provider {support or 'supports it'}{_neighbour_conclusion(around)}{with_group}"
        if options := [trial for trial in others if trial.factor == OPTION and helps(trial)]:
            return tuple(_caused_by((OPTION,), f"{evidence}; {_choice(options)} it does"))
        return (_probed("not_claimed", evidence),)
    if with_group:
        return (_probed("not_claimed", f"{opening(first)}{with_group}"),)
    in_subgraph = next((trial for trial in around if trial.outcome == "rejected"), None)
    if in_subgraph is not None:
        return (_only_in_main_graph(first, others, in_subgraph),)
    for supported in (helps, dry_run_outcome):
        found = tuple(_by_one_change(first, others, supported)) or tuple(_by_several(first, others, supported))
        if found:
            return found
    return tuple(_without_effect(probe))


def _probed(code: ReasonCode, evidence: str, basis: str = "alone") -> Finding:
    """A finding about the unchanged node, or about other nodes of the operator."""
    return Finding(code, "probed", basis, evidence, OTHER_OPERATOR if code == "no_kernel_op" else None)


def _caused_by(factors: Sequence[Factor], evidence: str, *, not_run: bool = False) -> Iterator[Finding]:
    """A finding for each reason that a change of these factors shows; several factors were changed together."""
    basis = "together" if len(factors) > 1 else "alone"
    changes = tuple(factor for factor in factors if factor in CAUSES)
    for code in dict.fromkeys(CAUSES[factor] for factor in changes):
        yield Finding(code, "probed", basis, evidence, None, not_run, changes)


def _only_in_main_graph(first: ProbeRun, others: Sequence[ProbeRun], in_subgraph: ProbeRun) -> Finding:
    """With a change, the provider supports the node in the main graph, but not in its control-flow subgraph."""
    helped = [trial for trial in others if helps(trial) and trial.parts == in_subgraph.factors]
    change = _choice(helped[:1]) if helped else "with a change"
    inside = f"{in_subgraph.change}{_message(in_subgraph)}"
    evidence = f"{change} the provider supports this node in a main graph, and not in {inside}{_unchanged(first)}"
    return _probed("not_claimed", evidence)


def _neighbour_conclusion(trials: Sequence[ProbeRun]) -> str:
    """The neighbours with which the provider no longer supports a node that it supports in isolation."""
    for outcomes, text in (
        ({"rejected"}, "; together with {} it does not support it"),
        (ANSWERED, "; a model of it and {} makes the provider fail"),  # the cause may be any node of this model
    ):
        found = next((trial for trial in trials if trial.outcome in outcomes), None)
        if found is not None:
            return f"{text.format(found.change)}{_message(found)}"
    tested = any(trial.outcome == "supported" for trial in trials)
    return "; also together with the tested neighbours" if tested else ""


def _by_one_change(first: ProbeRun, others: Sequence[ProbeRun], supported: IsSupported) -> Iterator[Finding]:
    """One for each factor with a change with which the provider supports the node."""
    single = [trial for trial in others if trial.factor != COMBINED and supported(trial)]
    found = dict.fromkeys(trial.factor for trial in single)
    for factor in [each for each in found if each not in DECLARED] or found:
        helped = [trial for trial in single if trial.factor == factor]
        evidence = f"{_choice(helped)} the provider {OUTCOMES[helped[0].outcome]}{_unchanged(first)}"
        yield from _caused_by((factor,), evidence, not_run=dry_run_outcome(helped[0]))


def _by_several(first: ProbeRun, others: Sequence[ProbeRun], supported: IsSupported) -> Iterator[Finding]:
    """The first combined change with which the provider supports the node."""
    trial = next((trial for trial in others if trial.factor == COMBINED and supported(trial)), None)
    if trial is not None:
        tried = sum(each.factor not in (COMBINED, OTHER_FORM) and each.outcome in ANSWERED for each in others)
        single = f"; with one change at a time ({tried} tested) it does not" if tried else ""
        evidence = f"{_with_change(trial.change)} the provider {OUTCOMES[trial.outcome]}{single}{_unchanged(first)}"
        yield from _caused_by(trial.factors, evidence, not_run=dry_run_outcome(trial))


def dry_run_outcome(trial: ProbeRun) -> bool:
    """Whether a dry run placed the changed node on the provider, and the CPU provider could not run it."""
    return trial.outcome == "placed" and trial.factor != OTHER_FORM


def helps(trial: ProbeRun) -> bool:
    """Whether the provider supports the changed node itself, not only the nodes of its function."""
    return trial.outcome == "supported" and not trial.function_inlined and trial.factor != OTHER_FORM


def _without_effect(probe: NodeProbe) -> Iterator[Finding]:
    """The findings when no change helped; incomplete experiments show only a failure of the unchanged node."""
    first, *rest = probe.variants
    changes = [trial for trial in rest if trial.factor != OTHER_FORM]
    forms = [trial for trial in rest if trial.factor == OTHER_FORM and trial.outcome != "invalid"]
    supported = [trial for trial in forms if trial.outcome == "supported" and not trial.function_inlined]
    alike = [trial for trial in supported if "type" not in trial.factors]  # attributes, inputs and shapes may differ
    example = "".join(f" (e.g. {trial.change})" for trial in (alike or supported)[:1] if trial.change)
    others = f"the provider supports other nodes of this operator{example}"
    if first.outcome in ("failed", "crashed"):
        yield _probed("subgraph_rejected", opening(first))
        if alike and not probe.missing_probes and not NO_ROOM.search(first.message):
            yield _probed("attribute_unsupported", f"{others} {SAME_TYPES}; {opening(first)}", "forms")
        return
    if probe.missing_probes or any(trial.outcome == "timed_out" for trial in (first, *changes)):
        return
    more = f"; {plural(probe.omitted, 'more combination')} of changes not tested" if probe.omitted else ""
    tried = f"{opening(first)}; {_summary(changes)}{more}"
    own = sum(not trial.factors for trial in forms)
    # A crash does not show that the provider has the operator: its neighbour or ONNX Runtime may be the cause.
    failed = [trial for trial in forms if trial.outcome in FAILED - {"crashed"}]
    if alike:
        yield _probed("attribute_unsupported", f"{others} {SAME_TYPES}; {tried}", "forms")
    elif supported and own:
        none = f"but none of {plural(own, 'node')} with the types of this node"
        yield _probed("no_kernel_type", f"{others}, {none}; {tried}", "forms")
    elif supported:
        none = "but none could be tested with its types, so its types, attributes, inputs or shapes are the cause"
        yield _probed("attribute_unsupported", f"{others}, {none}; {tried}", "forms")
    elif failed:
        over = f"it fails on {len(failed)} of {plural(len(forms), 'other node')} of this operator"
        evidence = f"{tried}; {over} ({failed[0].message or failed[0].outcome})"
        yield _probed("attribute_unsupported", evidence, "forms")
    else:
        none = f"; it supports none of {plural(len(forms), 'other node')} of this operator" if forms else ""
        yield _probed("no_kernel_op", f"{tried}{none}")


def _with_change(change: str) -> str:
    """`with float16 in place of float32`, `without alpha=2`."""
    return change if change.startswith("without ") else f"with {change}"


def _message(trial: ProbeRun) -> str:
    """The message of an experiment in brackets; empty without one."""
    return f" ({trial.message})" if trial.message else ""


def opening(first: ProbeRun) -> str:
    """The outcome of the unchanged node."""
    return f"{WITH_NEG if first.neg_added else ALONE}, the provider {OUTCOMES[first.outcome]}{_message(first)}"


def _unchanged(first: ProbeRun) -> str:
    """The outcome of the unchanged node, as the end of a sentence."""
    return f"; unchanged, it {OUTCOMES[first.outcome]}{_message(first)}"


def _choice(trials: Sequence[ProbeRun]) -> str:
    """Changes that help; changes that remove something are listed apart."""
    kinds = dict.fromkeys(trial.removes for trial in trials)
    return " or ".join(_alike([trial for trial in trials if trial.removes == removes]) for removes in kinds)


def _alike(trials: Sequence[ProbeRun]) -> str:
    """Changes that help, which all remove something or all do not; only the first few are named."""
    found = [trial.substitution for trial in trials if trial.substitution is not None]
    if len(found) == len(trials) and len({(each.before, each.location) for each in found}) == 1:
        return _with_change(str(replace(found[0], after=_alternatives([each.after for each in found]))))
    return _with_change(_alternatives([trial.change for trial in trials]))


def _alternatives(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`, `a, b, c or 2 more`."""
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    *most, last = *names[:MOST_NAMED], *more
    return f"{', '.join(most)} or {last}" if most else last


def _summary(trials: Sequence[ProbeRun]) -> str:
    """The changes that did not help, counted by outcome, with the kinds of changes without an effect."""
    texts = []
    for end, outcomes in ENDS.items():
        if found := [trial for trial in trials if trial.outcome in outcomes]:
            named = listing(dict.fromkeys(FACTORS.get(trial.factor, (trial.factor,))[0] for trial in found))
            texts.append(f"{plural(len(found), 'variation')}{f' ({named})' if 'rejected' in outcomes else ''} {end}")
    return "; ".join(texts) or "no variation is possible"


def fullest(probes: Mapping[str, NodeProbe], names: Sequence[str]) -> NodeProbe | None:
    """The first probe of these nodes with a conclusion; else the first probe; None without any."""
    known = [probes[name] for name in names if name in probes]
    return next((probe for probe in known if conclusions(probe)), known[0] if known else None)
