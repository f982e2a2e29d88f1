"""All sizes as numbers, in place of symbolic ones: those of the run, and 1 where it had none or nothing."""

from __future__ import annotations

from collections.abc import Iterator

from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.variants import Change, fixed_feed
from partita.runtime.tensor_types import is_fixed, padded_sizes, sizes_of

NAME = "static_shape"


def _static_shapes(case: Case) -> Iterator[Idea]:
    """All sizes as they are in the run; then, where some of these are 0 or not known, others in their place."""
    if not _is_open(case):
        return
    yield Idea(NAME, Change(fixed=True), "all sizes fixed")
    if others := _other_sizes(case):
        yield Idea(NAME, Change(fixed=True, sizes=others), "all sizes fixed, to 1 where the run has 0 or none")


def _one_way(case: Case) -> Iterator[Idea]:
    """The way to fix all sizes that is likeliest to be taken: many providers take no empty tensor."""
    yield from list(_static_shapes(case))[-1:]


def _is_open(case: Case) -> bool:
    """Whether there is anything to fix."""
    return bool(case.folded) or not all(is_fixed(feed.kind) for feed in case.feeds)


def _other_sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """Sizes without a 0, for every input that has one in the run or whose sizes it does not tell; the rank is known."""
    fixed = (fixed_feed(case, feed) for feed in case.feeds)
    open_feeds = [feed for feed in fixed if feed.constant is None and 0 in (sizes_of(feed.kind) or (0,))]
    padded = {feed.name: padded_sizes(feed.kind) for feed in open_feeds}
    return {name: sizes for name, sizes in padded.items() if sizes}


FACTOR = Factor(NAME, kind="fixed sizes", rank=1, vary=_static_shapes, part=Part(2, _one_way))
