"""The experiments on a node: rounds of variants, each run only if earlier rounds found no cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from partita import dtypes
from partita.diagnosis.probe_conclusions import helps
from partita.observations.facts import AS_IS, FAILED, NEIGHBOURS, OPTION, OTHER_FORM, NodeProbe, ProbeRun, Substitution
from partita.observations.text_format import plural
from partita.providers.base import Option
from partita.runtime.chain.provider_check import PROBE_MODEL
from partita.runtime.lab.change import Variation, together
from partita.runtime.lab.factors import FACTORS, MOST_PAIRS, other_nodes, pairs, single_changes
from partita.runtime.lab.graph import Graph, cut_proto
from partita.runtime.lab.laboratory import BUDGET, Lab
from partita.runtime.lab.neighbours import holder_models, neighbourhoods, quantised_groups
from partita.runtime.lab.placement import NODE
from partita.runtime.lab.variant import Variant, to_run, variant_model
from partita.runtime.place.model_file import subgraphs_of
from partita.runtime.place.tensor_types import element_of, tensor_types

DECIDED = frozenset({"supported", "invalid"})
MOST_ALIKE = 4
"""Maximum number of equal nodes to test with their neighbours."""
Node = tuple[int, str]
"""Index of the session, and name."""
Setting = tuple[str, str]
"""A provider option and its value."""
UNCHANGED = ProbeRun(AS_IS, "", "invalid", "")
"""The trial of the unchanged node, without an outcome."""


@dataclass(slots=True)
class Subject:
    """One distinct variant, the nodes that it represents, and its trials so far."""

    variant: Variant
    nodes: list[Node]
    variants: list[ProbeRun] = field(default_factory=list)
    around: dict[Node, list[ProbeRun]] = field(default_factory=dict)
    """Trials of one node with its neighbours."""
    helped: Variation | None = None
    """The first supported variation, also the unchanged node."""
    missing_probes: str = ""
    omitted: int = 0

    def probe(self, session: int, node: str) -> NodeProbe:
        """The trials for one of the nodes."""
        trials = (*self.variants, *self.around.get((session, node), ()))
        return NodeProbe(node, trials, self.missing_probes, self.omitted)

    @property
    def outcome(self) -> str:
        """The outcome of the unchanged node; empty without one."""
        return self.variants[0].outcome if self.variants else ""

    @property
    def is_unresolved(self) -> bool:
        """Whether neither the unchanged node nor any variant was supported so far."""
        decided = self.outcome in DECIDED or any(helps(trial) for trial in self.variants)
        return bool(self.variants) and not self.missing_probes and not decided


@dataclass(frozen=True, slots=True)
class Experiment:
    """One model to test, and its trial without an outcome."""

    subject: Subject
    model: onnx.ModelProto
    trial: ProbeRun
    variant: Variant | None = None
    """The node in the model; None for other nodes of the operator, and with neighbours."""
    node: Node | None = None
    """The node whose neighbours are in the model."""


def explore(subjects: Sequence[Subject], lab: Lab) -> None:
    """Test the unchanged node, provider options, single changes, other nodes of its operator, and pairs of changes."""
    _run([_experiment(subject, UNCHANGED, subject.variant, lab) for subject in subjects], lab)
    for setting, concerned in _settings(subjects, lab):
        _run([_experiment(subject, UNCHANGED, subject.variant, lab) for subject in concerned], lab, setting)
    changed = [(subject, each) for subject in _open(subjects) for each in single_changes(subject.variant)]
    _run([_experiment(subject, *each, lab) for subject, each in changed], lab)
    others = (
        (subject, *each)
        for subject in _open(subjects)
        for each in other_nodes(subject.variant, failed=subject.outcome in FAILED, compiles=lab.compiles)
    )
    _run([Experiment(*each) for each in others], lab)
    twice: list[Experiment] = []
    for subject in _open(subjects):
        invalid = {trial.change for trial in subject.variants if trial.outcome == "invalid"}
        found = pairs(subject.variant, invalid, in_version=_has_operator(subject, lab))
        subject.omitted = max(len(found) - MOST_PAIRS, 0)
        twice += (_experiment(subject, *each, lab) for each in found[:MOST_PAIRS])
    _run(twice, lab)
    for option in lab.resolution.provider.options:
        matters = (each for each in _open(subjects) if _may_matter(option, each.variant, lab))
        concerned = [each for each in matters if _has_operator(each, lab)]
        work = [_experiment(each, *change, lab) for each, change in changed if each in concerned]
        _run(work, lab, _probe_setting(option))
    for subject in subjects:
        changes = [trial for trial in subject.variants if trial.factor not in (OTHER_FORM, OPTION)]
        subject.missing_probes = subject.missing_probes or timeout_note(changes)


def explore_surroundings(
    subjects: Sequence[Subject], graphs: Mapping[int, Graph], holders: Mapping[Node, str], lab: Lab
) -> None:
    """Test supported nodes with their neighbours, and the first helpful change of a node inside its type of subgraph.

    Some providers support nothing in subgraphs. A compiling provider is assigned a quantised group as a whole, so its
    types are changed together.

    Args:
        subjects: The distinct nodes, with the trials so far.
        graphs: The graph of each session.
        holders: Operators of the nodes that contain each node's subgraph.
        lab: Runs the experiments.
    """
    if lab.remaining_seconds <= 0:
        return
    tried = [(subject, key) for subject in subjects if subject.variants for key in subject.nodes[:MOST_ALIKE]]

    def around(subject: Subject, key: Node, model: onnx.ModelProto, words: str, **more: Any) -> Experiment:
        return Experiment(subject, model, ProbeRun(NEIGHBOURS, words, "invalid", "", **more), node=key)

    work = [
        around(subject, key, model, words)
        for subject, key in tried
        if subject.outcome == "supported"
        for words, model in neighbourhoods(graphs[key[0]], key[1], inside=lab.compiles)
    ]
    rejected = {each.node: each for each, trial in reversed(_run(work, lab)) if trial.outcome == "rejected"}
    for option in lab.resolution.provider.options:
        concerned = [each for each in rejected.values() if _may_matter(option, each.subject.variant, lab)]
        _run(concerned, lab, _probe_setting(option))
    retyped = [
        around(subject, key, model, str(substitution), substitution=substitution)
        for subject, key in tried
        if lab.compiles and (key in rejected or subject.outcome == "rejected")
        for substitution, model in quantised_groups(graphs[key[0]], key[1])
    ]
    _run(retyped, lab)
    inside = []
    for subject, key in tried:
        if key in holders and subject.helped is not None and not subject.around.get(key):
            trial, variant = subject.helped
            if not any(subgraphs_of(variant.node)):
                parts = () if trial.factor == AS_IS else trial.parts
                words, model = holder_models(variant, holders[key], unchanged=not parts)
                inside.append(around(subject, key, model, words, factors=parts))
    _run(inside, lab)


def timeout_note(trials: Sequence[ProbeRun]) -> str:
    """The note on experiments that timed out, if no other experiment was conclusive."""
    late = [trial for trial in trials if trial.outcome == "timed_out"]
    if not late or any(helps(trial) for trial in trials):
        return ""
    return f"{len(late)} of {plural(len(trials), 'experiment')} did not finish in time: {late[-1].message}"


# --- running experiments -------------------------------------------------------------------------------------------


def _open(subjects: Sequence[Subject]) -> list[Subject]:
    """Subjects without a conclusive trial."""
    return [subject for subject in subjects if subject.is_unresolved]


def _has_operator(subject: Subject, lab: Lab) -> bool:
    """Whether the provider supports another node of this version of the operator, or names this one without a cause."""
    forms = (trial for trial in subject.variants if trial.factor == OTHER_FORM and not trial.function_inlined)
    line = f"{subject.variants[0].message} node name: {NODE}"  # experiments omit the node name
    vague = (pattern for pattern in lab.resolution.provider.node_patterns if pattern.vague)
    return any(each.outcome == "supported" for each in forms) or any(each.is_about(line, NODE) for each in vague)


def _experiment(subject: Subject, trial: ProbeRun, variant: Variant, lab: Lab) -> Experiment:
    """The experiment on a variation. A changed node is also run, because a provider may be assigned an invalid node."""
    model = variant_model(variant, auxiliary=lab.compiles)
    trial = replace(trial, neg_added=len(model.graph.node) > 1)
    return Experiment(subject, model if trial.factor == AS_IS else to_run(model, variant), trial, variant)


def _run(
    experiments: Sequence[Experiment], lab: Lab, setting: Setting | None = None
) -> list[tuple[Experiment, ProbeRun]]:
    """Run experiments, with another value of a provider option if given, and add their trials to the subjects.

    A subject without an answer is marked as not fully probed, unless the experiment is with neighbours or a setting. A
    compiling provider is slow, so its round ends for a subject after the factor with which it is supported, or after
    any other supported experiment.
    """
    if not experiments:
        return []
    complete = setting is None and all(each.node is None for each in experiments)
    one_by_one = complete and lab.compiles
    found: list[tuple[Experiment, ProbeRun]] = []
    last: dict[int, str] = {}
    """The factor with which a subject is supported, by the subject's id."""
    for batch in [[each] for each in experiments] if one_by_one else [experiments]:
        left = [each for each in batch if last.get(id(each.subject), each.trial.factor) == each.trial.factor]
        models = [each.model for each in left]
        answers = lab.try_all(models) if setting is None else lab.try_with(*setting, models)
        for each, answer in zip(left, answers, strict=True):
            subject = each.subject
            if answer is None:
                subject.missing_probes = (lab.unusable or BUDGET) if complete else subject.missing_probes
                continue
            trial = replace(
                each.trial if setting is None else _with_option(each.trial, setting, lab),
                outcome=answer.outcome,
                message=answer.message,
                cached=answer.cached,
                function_inlined=answer.function_inlined,
            )
            (subject.variants if each.node is None else subject.around.setdefault(each.node, [])).append(trial)
            found.append((each, trial))
            if one_by_one and answer.is_supported:
                last.setdefault(id(subject), trial.factor if trial.factor in FACTORS else "")
            if each.variant is not None and setting is None and helps(trial) and subject.helped is None:
                subject.helped = trial, each.variant
    return found


# --- provider options ----------------------------------------------------------------------------------------------


def _settings(subjects: Sequence[Subject], lab: Lab) -> Iterator[tuple[Setting, list[Subject]]]:
    """Option values for unchanged nodes, and the open nodes for which each may matter.

    Values that are known to make the provider support more nodes; the default of a given option that the provider names
    as it leaves the node; and all defaults of given options, if the provider supports nothing at all with them.
    """
    options = lab.resolution.provider.options
    for option in options:
        concerned = [subject for subject in _open(subjects) if _may_matter(option, subject.variant, lab)]
        yield _probe_setting(option), concerned
    defaults = {option.name: option.default for option in options}
    for name in lab.resolution.options:
        named = re.compile(rf"\b{re.escape(name)}\b")
        concerned = [each for each in _open(subjects) if named.search(each.variants[0].message)]
        yield (name, defaults.get(name, "")), concerned
    given = given_options(lab)
    if given and len(_open(subjects)) == len(subjects) and not _supports_anything(lab):
        for option in given:
            left = [subject for subject in _open(subjects) if subject.outcome == "rejected"]
            yield (option.name, option.default), left


def _probe_setting(option: Option) -> Setting:
    """The value of an option that is known to make the provider support more nodes; empty without one."""
    return option.name, option.probe_value.value if option.probe_value is not None else ""


def given_options(lab: Lab) -> list[Option]:
    """Options set to another value than their known default."""
    values, options = lab.resolution.options, lab.resolution.provider.options
    return [each for each in options if each.default and values.get(each.name, each.default) != each.default]


def _supports_anything(lab: Lab) -> bool:
    """Whether the provider supports a node that every provider supports; True if untestable."""
    proto = onnx.ModelProto.FromString(PROBE_MODEL)
    (answer,) = lab.try_nodes([(cut_proto(proto, Path(), {}), proto.graph.node[0].name)])
    return answer is None or answer.outcome == "supported"


def _with_option(trial: ProbeRun, setting: Setting, lab: Lab) -> ProbeRun:
    """The trial with another value of a provider option."""
    (name, after), run = setting, lab.resolution
    default = next((option.default for option in run.provider.options if option.name == name), "")
    before = run.options.get(name, default)
    option = Substitution(f"{run.provider.name}.{name}={after}", f"{run.provider.name}.{name}={before}")
    own = ProbeRun(OPTION, option.after, "invalid", "", substitution=option, neg_added=trial.neg_added)
    return own if trial.factor in (AS_IS, NEIGHBOURS) else together(replace(own, change=str(option)), trial)


def _may_matter(option: Option, variant: Variant, lab: Lab) -> bool:
    """Whether the option is known to matter for such nodes, and the run had another value."""
    opens = option.probe_value
    if opens is None or lab.resolution.options.get(option.name) == opens.value:
        return False
    if opens.operators and variant.node.op_type not in opens.operators:
        return False
    kinds = tensor_types(variant_model(variant)).values() if opens.elements else ()
    known = {dtypes.dtype_numbered(element).name for kind in kinds if (element := element_of(kind))}
    return not opens.elements or not known.isdisjoint(opens.elements)
