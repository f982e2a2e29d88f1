"""All sizes as they are in the run, in place of symbolic ones."""

from __future__ import annotations

from collections.abc import Iterator

from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.variants import Change
from partita.runtime.tensor_types import is_fixed

NAME = "static_shape"


def _static_shapes(case: Case) -> Iterator[Idea]:
    """All sizes as they are in the run."""
    if case.folded or not all(is_fixed(feed.kind) for feed in case.feeds):
        yield Idea(NAME, Change(fixed=True), "all sizes fixed")


FACTOR = Factor(NAME, kind="fixed sizes", rank=1, vary=_static_shapes, part=Part(2, _static_shapes))
