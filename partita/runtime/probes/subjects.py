"""Trying the variations of several nodes: in rounds, each only where the last left it open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from partita.diagnosis.probe_verdict import helps
from partita.observations.facts import NodeProbe, Trial
from partita.observations.text_format import plural
from partita.runtime.probes.cases import Case, case_model
from partita.runtime.probes.ideas import Variation
from partita.runtime.probes.lab import BUDGET, Answer, Lab
from partita.runtime.probes.variations import MOST_COMBINED, as_it_is, combined, kind_of, single

DECIDED = frozenset({"taken", "invalid"})


@dataclass(slots=True)
class Subject:
    """One distinct case, the nodes that it stands for, and its trials so far."""

    case: Case
    nodes: list[tuple[int, str]]
    """Session and name."""
    trials: list[Trial] = field(default_factory=list)
    unprobed: str = ""
    left_out: int = 0

    def probe(self, node: str) -> NodeProbe:
        """What the trials tell of one of the nodes."""
        return NodeProbe(node, tuple(self.trials), self.unprobed, self.left_out)

    @property
    def open(self) -> bool:
        """The node as it is was not taken, and nothing tried so far was."""
        return (
            not self.unprobed
            and bool(self.trials)
            and self.trials[0].outcome not in DECIDED
            and not any(helps(trial) for trial in self.trials)
        )


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
    """The node as it is, then single changes, then several at once; each round only where the last left it open."""
    _run_round([(subject, (as_it_is(subject.case),)) for subject in subjects], lab)
    _run_round([(subject, single(subject.case)) for subject in subjects if subject.open], lab)
    plans = [(subject, combined(subject.case)) for subject in subjects if subject.open]
    for subject, found in plans:
        subject.left_out = max(len(found) - MOST_COMBINED, 0)
    _run_round([(subject, found[:MOST_COMBINED]) for subject, found in plans], lab)
    for subject in subjects:
        subject.unprobed = subject.unprobed or lateness(subject.trials)


def lateness(trials: Sequence[Trial]) -> str:
    """What is to be said of experiments without an answer, where none of the others found what decides."""
    late = [trial for trial in trials if trial.outcome == "timed_out"]
    if not late or any(helps(trial) for trial in trials):
        return ""
    return f"{len(late)} of {plural(len(trials), 'experiment')} did not finish in time: {late[-1].said}"


def _run_round(plans: Sequence[tuple[Subject, Sequence[Variation]]], lab: Lab) -> None:
    """Try variations of several subjects in one go."""
    listed = [(subject, variation) for subject, variations in plans for variation in variations]
    company = lab.resolution.provider.compiles
    models = [case_model(variation.case, company=company) for _, variation in listed]
    for (subject, variation), model, answer in zip(listed, models, lab.try_all(models), strict=True):
        if answer is None:
            subject.unprobed = lab.unusable or BUDGET
        else:
            subject.trials.append(trial(variation, answer, in_company=len(model.graph.node) > 1))


def trial(variation: Variation, answer: Answer, *, in_company: bool) -> Trial:
    """One experiment as a fact."""
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
