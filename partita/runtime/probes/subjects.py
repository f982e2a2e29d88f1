"""Trying the variations of several nodes: in rounds, each only where the last left it open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita import dtypes
from partita.diagnosis.probe_verdict import helps
from partita.observations.facts import AS_IS, COMBINED, FAILED, NEIGHBOURS, OPTION, OTHER_FORM, NodeProbe, Swap, Trial
from partita.observations.text_format import plural
from partita.providers.base import Option
from partita.runtime.model_file import bodies
from partita.runtime.probes.cases import Case, case_model, node_case, to_run
from partita.runtime.probes.factors import factors
from partita.runtime.probes.graphs import cut_proto
from partita.runtime.probes.ideas import Variation
from partita.runtime.probes.lab import BUDGET, Answer, Lab, Turn
from partita.runtime.probes.neighbours import Neighbourhood
from partita.runtime.probes.other_forms import OtherForm, other_forms
from partita.runtime.probes.reference_run import with_original
from partita.runtime.probes.variations import MOST_COMBINED, as_it_is, combined, kind_of, single
from partita.runtime.provider_child import PROBE_MODEL
from partita.runtime.tensor_types import element_of, tensor_types

if TYPE_CHECKING:
    import onnx

DECIDED = frozenset({"taken", "invalid"})
MOST_WITH_OPTION = 24
"""Changes of one node that are tried under another option of the provider; they count as combinations."""
MOST_FORMS_WITH_OPTION = 3
"""Of the other nodes of its operator, the first, so many are."""
MOST_ALIKE = 4
"""Of nodes that are alike, so many are tried with the nodes around them."""


@dataclass(slots=True)
class Subject:
    """One distinct case, the nodes that it stands for, and its trials so far."""

    case: Case
    nodes: list[tuple[int, str]]
    """Session and name."""
    trials: list[Trial] = field(default_factory=list)
    around: dict[tuple[int, str], list[Trial]] = field(default_factory=dict)
    """Of each of the nodes: trials with the nodes around it."""
    unprobed: str = ""
    left_out: int = 0

    def probe(self, node: str, session: int = 0) -> NodeProbe:
        """What the trials tell of one of the nodes."""
        trials = (*self.trials, *self.around.get((session, node), ()))
        return NodeProbe(node, trials, self.unprobed, self.left_out)

    @property
    def open(self) -> bool:
        """The node as it is was not taken, and nothing tried so far was."""
        return (
            not self.unprobed
            and bool(self.trials)
            and self.trials[0].outcome not in DECIDED
            and not any(helps(trial) for trial in self.trials)
        )


@dataclass(frozen=True, slots=True)
class Experiment:
    """One model to be tried for a subject: a variation of its node, or another node of the operator."""

    subject: Subject
    model: onnx.ModelProto
    variation: Variation | None = None
    form: OtherForm | None = None
    place: int = 0
    """Where it is among those of its round: once one is taken, those of a higher place could decide nothing more."""


def one_of_each_first(subjects: Iterable[Subject]) -> list[Subject]:
    """Subjects so that every operator has had one before any has its second: the budget may not suffice for all."""
    seen: Counter[tuple[str, str]] = Counter()
    ranked = []
    for subject in subjects:
        operator = (subject.case.node.domain, subject.case.node.op_type)
        ranked.append((seen[operator], subject))
        seen[operator] += 1
    return [subject for _, subject in sorted(ranked, key=lambda entry: entry[0])]


def explore(subjects: Sequence[Subject], lab: Lab) -> None:
    """The node as it is, also with another option of the provider, then single changes, then several at once; each
    round only where the last left it open.

    With the last of them go other nodes of the operator, which tell what it means when no change helps. Where an option
    of the provider matters, single changes and other nodes are tried under it, too, in place of several changes.
    """

    def experiments(subject: Subject, variations: Iterable[Variation]) -> Iterator[Experiment]:
        for variation in variations:
            yield Experiment(subject, _changed_model(variation, subject.case, lab), variation=variation)

    _run_round([each for subject in subjects for each in experiments(subject, (as_it_is(subject.case),))], lab)
    _try_options(_open(subjects), lab)
    _try_defaults(subjects, lab)
    _run_round(
        [each for subject in _open(subjects) for each in _by_factor(experiments(subject, single(subject.case)))], lab
    )
    others = [(subject, tuple(_others(subject, lab))) for subject in _open(subjects)]
    made = _try_options_with_changes(others, lab)
    last: list[Experiment] = []
    for subject, forms in ((subject, forms) for subject, forms in others if subject.open):
        found, room = combined(subject.case), MOST_COMBINED - made[id(subject)]
        subject.left_out += max(len(found) - room, 0)
        several = [*experiments(subject, found[:room]), *forms]
        last += [replace(each, place=place) for place, each in enumerate(several)]
    _run_round(last, lab)
    for subject in subjects:
        changes = [trial for trial in subject.trials if trial.factor not in (OTHER_FORM, OPTION)]
        subject.unprobed = subject.unprobed or lateness(changes)


def _changed_model(variation: Variation, original: Case, lab: Lab) -> onnx.ModelProto:
    """The model of a variation. A changed node is also run: a provider may claim one that is not valid."""
    model = case_model(variation.case, company=lab.resolution.provider.compiles)
    if variation.factor == AS_IS:
        return model
    if lab.dry_run:
        return with_original(model, variation.case, original, variation.factor)
    return to_run(model, variation.case)


def _others(subject: Subject, lab: Lab) -> Iterator[Experiment]:
    """Other nodes of the operator."""
    rejected, compiles = subject.trials[0].outcome in FAILED, lab.resolution.provider.compiles
    if rejected and any(True for _ in bodies(subject.case.node)):
        return  # what it fails over is in the bodies, which another node of the operator has not
    for form in other_forms(subject.case, compiles=compiles):
        if form.same_types or not (rejected and compiles):  # of a failure only the node's own types tell
            yield Experiment(subject, form.model, form=form)


def _try_options(subjects: Sequence[Subject], lab: Lab) -> None:
    """The nodes as they are, where the provider has an option that may let it take them."""
    company = lab.resolution.provider.compiles
    for option in lab.resolution.provider.options:
        concerned = [subject for subject in subjects if subject.open and _worth_trying(option, subject.case, lab)]
        if concerned:
            pairs = [(subject.trials, case_model(subject.case, company=company)) for subject in concerned]
            _try_option(option, pairs, lab)


def _try_defaults(subjects: Sequence[Subject], lab: Lab) -> None:
    """The nodes as they are, each option that was given with the value that it has by itself, where the provider takes
    nothing with these options, not even what every provider takes: some values are accepted and then leave it nothing.
    """
    left = [subject for subject in _open(subjects) if subject.trials[0].outcome == "left"]
    given = given_options(lab)
    if not given or len(left) < len(subjects) or _takes_anything(lab):
        return
    company = lab.resolution.provider.compiles
    models = [(subject.trials, case_model(subject.case, company=company)) for subject in left]
    for option in given:
        if any(subject.open for subject in left):
            _try_option(option, models, lab, option.default)


def given_options(lab: Lab) -> list[Option]:
    """Options with another value than the one that they are known to have by themselves."""
    values = lab.resolution.options
    return [
        option
        for option in lab.resolution.provider.options
        if option.default and values.get(option.name, option.default) != option.default
    ]


def _takes_anything(lab: Lab) -> bool:
    """Whether the provider takes a node that every provider takes; also when it cannot be asked."""
    import onnx

    proto = onnx.ModelProto.FromString(PROBE_MODEL)
    case = node_case(cut_proto(proto, Path(), {}), proto.graph.node[0].name)
    (answer,) = lab.try_all([case_model(case, company=lab.resolution.provider.compiles)])
    return answer is None or answer.outcome == "taken"


def _try_options_with_changes(subjects: Sequence[tuple[Subject, Sequence[Experiment]]], lab: Lab) -> dict[int, int]:
    """Single changes of the nodes, and other nodes of their operators, under options that may let the provider take
    them: something else may be in the way beside the option. How many changes were tried, by `id` of the subject.
    """
    made = {id(subject): 0 for subject, _ in subjects}
    for option in lab.resolution.provider.options:
        work: list[Experiment] = []
        for subject, forms in subjects:
            if option.opens is None or not subject.open or not _worth_trying(option, subject.case, lab):
                continue
            varied = [each for each in single(subject.case) if _worth_trying(option, each.case, lab)]
            room = MOST_WITH_OPTION - made[id(subject)]
            subject.left_out += max(len(varied) - room, 0)
            made[id(subject)] += len(varied[:room])
            work += [Experiment(subject, _changed_model(each, subject.case, lab), each) for each in varied[:room]]
            work += forms[:MOST_FORMS_WITH_OPTION]
        if work and option.opens is not None:
            answers = lab.try_with(option.name, option.opens.value, [each.model for each in work])
            for each, answer in zip(work, answers, strict=True):
                if answer is not None:
                    each.subject.trials.append(_under(_swap_of(option, lab), _fact(each, answer)))
    return made


def _under(swap: Swap, told: Trial) -> Trial:
    """A fact of an experiment that was made under another option of the provider, beside what else it changed."""
    if told.factor == OTHER_FORM:
        change = "; ".join(part for part in (told.change, swap.now) if part)
        return replace(told, change=change, parts=(*told.parts, OPTION))
    change = f"{swap} and {told.change}"
    parts = (OPTION, *(told.parts or (told.factor,)))
    return replace(told, factor=COMBINED, change=change, parts=parts, swap=None, removes=False, kind=kind_of(COMBINED))


def _swap_of(option: Option, lab: Lab, value: str | None = None) -> Swap:
    """Another value of the option in place of the run's: that which may let the provider take more, unless given."""
    value = option.opens.value if value is None and option.opens is not None else value
    name = f"{lab.resolution.provider.name}.{option.name}"
    return Swap(f"{name}={value}", f"{name}={lab.resolution.options.get(option.name, option.default)}")


def _try_option(
    option: Option, models: Sequence[tuple[list[Trial], onnx.ModelProto]], lab: Lab, value: str | None = None
) -> None:
    """Models with a value of the option that may let the provider take their nodes, the one that the option names
    unless given; each trial joins its list.
    """
    value = option.opens.value if value is None and option.opens is not None else value
    assert value is not None
    swap = _swap_of(option, lab, value)
    answers = lab.try_with(option.name, value, [model for _, model in models])
    for (trials, model), answer in zip(models, answers, strict=True):
        if answer is not None:  # without one the node is looked at as if there were no such option
            trials.append(
                Trial(
                    OPTION,
                    swap.now,
                    answer.outcome,
                    answer.said,
                    answer.cached,
                    swap=swap,
                    unfolded=answer.unfolded,
                    kind=kind_of(OPTION),
                    company=len(model.graph.node) == 2 and lab.resolution.provider.compiles,
                )
            )


def explore_neighbours(
    subjects: Iterable[Subject], neighbours: Callable[[int, str], Iterable[Neighbourhood]], lab: Lab
) -> None:
    """Nodes that are taken alone, each with the nodes around it: nodes that are alike have others around them.

    `neighbours`: the neighbourhoods of a node, by session and name; asked for a few nodes of each subject only.
    """
    if lab.seconds_left <= 0:
        return
    work = [
        (subject, key, each)
        for subject in subjects
        if subject.trials and subject.trials[0].outcome == "taken"
        for key in subject.nodes[:MOST_ALIKE]
        for each in neighbours(*key)
    ]
    left: dict[tuple[int, str], tuple[Subject, Neighbourhood]] = {}
    for (subject, key, each), answer in zip(work, lab.try_all([each.model for _, _, each in work]), strict=True):
        if answer is not None:
            told = Trial(NEIGHBOURS, each.words, answer.outcome, answer.said, answer.cached, kind=kind_of(NEIGHBOURS))
            subject.around.setdefault(key, []).append(told)
            if answer.outcome == "left":
                left.setdefault(key, (subject, each))
    for option in lab.resolution.provider.options:
        concerned = {key: pair for key, pair in left.items() if _worth_trying(option, pair[0].case, lab)}
        if concerned:
            pairs = [(subject.around[key], each.model) for key, (subject, each) in concerned.items()]
            _try_option(option, pairs, lab)


def _worth_trying(option: Option, case: Case, lab: Lab) -> bool:
    """Whether a node is of the kind that the option is said to matter to, and the run had another value."""
    opens = option.opens
    if (
        opens is None
        or lab.resolution.options.get(option.name) == opens.value
        or (opens.operators and case.node.op_type not in opens.operators)
    ):
        return False
    return not opens.elements or bool(set(opens.elements) & set(_elements(case)))


def _elements(case: Case) -> Iterator[str]:
    """Names of the element types that a node reads and writes, as far as they are known."""
    model = case_model(case)
    types = tensor_types(model)
    written = (types.get(port.name, port.type) for port in model.graph.output)
    for kind in (*(feed.kind for feed in case.feeds), *written):
        element = element_of(kind)
        if element:
            yield dtypes.numbered(element).name


def lateness(trials: Sequence[Trial]) -> str:
    """What is to be said of experiments without an answer, where none of the others found what decides."""
    late = [trial for trial in trials if trial.outcome == "timed_out"]
    if not late or any(helps(trial) for trial in trials):
        return ""
    return f"{len(late)} of {plural(len(trials), 'experiment')} did not finish in time: {late[-1].said}"


def _open(subjects: Sequence[Subject]) -> list[Subject]:
    """Those that nothing has decided yet."""
    return [subject for subject in subjects if subject.open]


def _by_factor(experiments: Iterable[Experiment]) -> Iterator[Experiment]:
    """Experiments with a factor each, in the order in which the reasons go: a change of a later one decides nothing
    when one of an earlier one does."""
    order = [factor.name for factor in factors()]
    for each in experiments:
        yield replace(each, place=order.index(each.variation.factor) if each.variation is not None else 0)


def _run_round(experiments: Sequence[Experiment], lab: Lab) -> None:
    """Carry out the experiments on several subjects in one go.

    A provider that compiles takes long over each, so those that could decide nothing any more are left out there.
    """
    models, compiles = [each.model for each in experiments], lab.resolution.provider.compiles
    numbers = {id(each.subject): number for number, each in enumerate(experiments)}
    turns = [Turn(numbers[id(each.subject)], each.place) for each in experiments] if compiles else ()
    answers = lab.try_all(models, turns=turns)
    first: dict[int, int] = {}
    for turn, answer in zip(turns, answers, strict=False):
        if answer is not None and answer.outcome == "taken" and not answer.unfolded:
            first[turn.among] = min(turn.place, first.get(turn.among, turn.place))
    for each, answer in zip(experiments, answers, strict=True):
        if answer is None:
            if each.place <= first.get(numbers[id(each.subject)], each.place):
                each.subject.unprobed = lab.unusable or BUDGET
            continue
        each.subject.trials.append(_fact(each, answer))


def _fact(each: Experiment, answer: Answer) -> Trial:
    """An experiment as a fact."""
    in_company = len(each.model.graph.node) > 1
    if each.variation is not None:
        return trial(each.variation, answer, in_company=in_company)
    assert each.form is not None
    return _other_trial(each.form, answer, in_company=in_company)


def _other_trial(form: OtherForm, answer: Answer, *, in_company: bool) -> Trial:
    """An experiment with another node of the operator as a fact."""
    return Trial(
        OTHER_FORM,
        form.words,
        answer.outcome,
        answer.said,
        answer.cached,
        parts=() if form.same_types else ("type",),
        unfolded=answer.unfolded,
        kind=kind_of(OTHER_FORM),
        company=in_company,
    )


def trial(variation: Variation, answer: Answer, *, in_company: bool) -> Trial:
    """One experiment on the node as a fact."""
    return Trial(
        variation.factor,
        variation.change,
        answer.outcome,
        answer.said,
        answer.cached,
        variation.parts,
        variation.swap,
        variation.removes,
        answer.unfolded,
        kind_of(variation.factor),
        in_company,
    )
