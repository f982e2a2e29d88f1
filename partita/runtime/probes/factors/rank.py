"""A known rank, in place of one that the file leaves open; the sizes stay open."""

from __future__ import annotations

from collections.abc import Iterator

from partita.observations.facts import Swap
from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.variants import Change
from partita.runtime.tensor_types import rank_of

NAME = "rank"


def _known_ranks(case: Case) -> Iterator[Idea]:
    """The rank of the run for every input that has none in the file."""
    open_feeds = [feed for feed in case.feeds if feed.constant is None and rank_of(feed.kind) is None]
    ranks = {feed.name: rank for feed in open_feeds if (rank := rank_of(case.fixed.get(feed.name))) is not None}
    if ranks:
        yield Idea(NAME, Change(ranks=ranks), swap=Swap("a known rank", "an unknown rank"))


FACTOR = Factor(NAME, kind="known ranks", rank=0, vary=_known_ranks, part=Part(1, _known_ranks))
