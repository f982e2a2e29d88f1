"""Sizes of outputs that depend on values, as the run had them: the file may declare them, and no rule tells them."""

from __future__ import annotations

from collections.abc import Iterator

from partita.observations.text_format import listing
from partita.runtime.probes.cases import Case, case_model
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.variants import Change, vary
from partita.runtime.tensor_types import is_fixed, padded_sizes, tensor_types

NAME = "output_shape"
FIXED = Change(fixed=True)


def _declared_outputs(case: Case) -> Iterator[Idea]:
    """Each output whose sizes do not follow from those of the inputs, with the sizes of the run: all of them together.

    With inputs of symbolic sizes these are fixed as well, which is a change of its own.
    """
    if not case.made:
        return
    fixed = vary(case, FIXED) or case
    known = tensor_types(case_model(fixed))
    sizes = {
        name: padded_sizes(kind)
        for name, kind in case.made.items()
        if name not in case.declared and not is_fixed(known.get(name))
    }
    if not sizes:
        return
    written = listing([f"[{','.join(map(str, each))}]" for each in sizes.values()])
    words = f"the sizes {written} declared of what it makes"
    if fixed == case:
        yield Idea(NAME, Change(declared=sizes), words)
    else:
        both = FIXED | Change(declared=sizes)
        yield Idea(NAME, both, f"all sizes fixed and {words}", parts=("static_shape", NAME))


FACTOR = Factor(NAME, kind="declared sizes of outputs", rank=2, vary=_declared_outputs, part=Part(2, _declared_outputs))
