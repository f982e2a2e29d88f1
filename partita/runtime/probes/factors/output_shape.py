"""Sizes of outputs that depend on values, as the run had them: the file may declare them, and no rule tells them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partita.observations.text_format import listing
from partita.runtime.probes.cases import Case, case_model
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.variants import Change, vary
from partita.runtime.tensor_types import is_fixed, padded_sizes, tensor_types

if TYPE_CHECKING:
    import onnx

NAME = "output_shape"
FIXED = Change(fixed=True)


def _declared_outputs(case: Case) -> Iterator[Idea]:
    """The outputs whose sizes do not follow from those of the inputs, with the sizes of the run: all of them together.

    With inputs of symbolic sizes these are fixed as well, which is a change of its own.
    """
    fixed = vary(case, FIXED) or case
    sizes = {name: padded_sizes(case.made[name]) for name in _open_outputs(case, fixed)}
    if not sizes:
        return
    written = listing([f"[{','.join(map(str, each))}]" for each in sizes.values()])
    words = f"the sizes {written} declared of what it makes"
    if fixed == case:
        yield Idea(NAME, Change(declared=sizes), words)
    else:
        both = FIXED | Change(declared=sizes)
        yield Idea(NAME, both, f"all sizes fixed and {words}", parts=("static_shape", NAME))


def _counted(case: Case) -> Iterator[Idea]:
    """The same where a rule tells some of the sizes, so that values decide over the others: it is seldom more. Those of
    the inputs are fixed by another factor.
    """
    fixed = vary(case, FIXED) or case
    if fixed == case and all(kind is not None for kind in _open_outputs(case, fixed).values()):
        yield from _declared_outputs(case)


def _open_outputs(case: Case, fixed: Case) -> dict[str, onnx.TypeProto | None]:
    """Outputs of which the run tells the sizes and no rule does, and what a rule tells of them: less than the sizes."""
    wanted = case.made.keys() - case.declared.keys()
    known = tensor_types(case_model(fixed)) if wanted else {}
    return {name: known.get(name) for name in case.made if name in wanted and not is_fixed(known.get(name))}


FACTOR = Factor(NAME, kind="declared sizes of outputs", rank=2, vary=_declared_outputs, part=Part(2, _counted))
