"""The operator as older and newer operator sets have it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from partita.observations.facts import Swap
from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.schemas import history
from partita.runtime.probes.variants import OLDEST_OPSET, Change, schema_of

NAME = "opset"
MOST_VERSIONS = 6
NO_VERSION = 1 << 30


def _other_versions(case: Case) -> Iterator[Idea]:
    """The operator as older and newer operator sets have it."""
    node = case.node
    current = schema_of(case)
    if node.domain or current is None:
        return
    versions = [schema.since for schema in history(node.domain, node.op_type)]
    # A version counts when some operator set that ONNX Runtime supports has it.
    others = [
        since
        for since, after in zip(versions, (*versions[1:], NO_VERSION), strict=True)
        if since != current.since and after > OLDEST_OPSET
    ]
    older = [since for since in others if since < current.since][::-1]
    newer = [since for since in others if since > current.since]
    for since in islice((*older, *newer), MOST_VERSIONS):
        swap = Swap(f"{node.op_type} of opset {since}", str(current.since))
        yield Idea(NAME, Change(opset=max(since, OLDEST_OPSET)), swap=swap)


FACTOR = Factor(NAME, kind="other opsets", rank=3, vary=_other_versions, part=Part(4, _other_versions))
