"""Everything that is tried on a node besides the node as it is: one factor at a time, then several together.

A variation that ONNX Runtime does not accept at all is tried all the same and counts for nothing; see `Outcome`.
"""

from __future__ import annotations

from partita.observations.facts import AS_IS, COMBINED, NEIGHBOURS, OPTION, OTHER_FORM, Factor
from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors import factors
from partita.runtime.probes.ideas import Variation, made

MOST_COMBINED = 36
"""Of one node that are tried."""
SEVERAL = "several at once"
FORMS = "other nodes of the operator"
OPTIONS = "provider options"
COMPANY = "the nodes around it"


def as_it_is(case: Case) -> Variation:
    """The node unchanged, which every experiment is compared with."""
    return Variation(AS_IS, "", case)


def single(case: Case) -> tuple[Variation, ...]:
    """Variations in which one factor differs and all others are unchanged."""
    return tuple(variation for factor in factors() for variation in made(case, factor.vary(case)))


def combined(case: Case) -> tuple[Variation, ...]:
    """Several factors at once, fewest first: what no single one decides may be decided by two."""
    found = [Variation(COMBINED, "", case)]
    for part in sorted((each.part for each in factors() if each.part is not None), key=lambda part: part.place):
        found = [each for before in found for each in (before, *before.then(part.vary(before.case)))]
    return tuple(sorted((each for each in found if len(each.parts) > 1), key=lambda each: len(each.parts)))


def kind_of(name: Factor) -> str:
    """What variations of a factor are, in words; empty for the node as it is."""
    named = {AS_IS: "", COMBINED: SEVERAL, OTHER_FORM: FORMS, OPTION: OPTIONS, NEIGHBOURS: COMPANY}
    return {**named, **{each.name: each.kind for each in factors()}}[name]
