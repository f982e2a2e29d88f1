"""The operator as older and newer operator sets have it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from partita.observations.facts import Factor as Name
from partita.observations.facts import Swap
from partita.observations.text_format import listing
from partita.runtime.probes.cases import Case
from partita.runtime.probes.factors import attribute as attributes
from partita.runtime.probes.factors.base import Factor, Part
from partita.runtime.probes.ideas import Idea
from partita.runtime.probes.schemas import Schema, history
from partita.runtime.probes.variants import OLDEST_OPSET, Change, optional_inputs, schema_of, vary

NAME: Name = "opset"
INPUT: Name = "input"
MOST_VERSIONS = 6
NO_VERSION = 1 << 30


def _versions(case: Case) -> Iterator[tuple[Schema, Change, Swap]]:
    """Older and newer versions of the operator, how the case changes for each, and that in words."""
    node = case.node
    current = schema_of(case)
    if node.domain or current is None:
        return
    schemas = history(node.domain, node.op_type)
    # A version counts when some operator set that ONNX Runtime supports has it.
    ends = (*(schema.since for schema in schemas[1:]), NO_VERSION)
    others = [
        schema
        for schema, after in zip(schemas, ends, strict=True)
        if schema.since != current.since and after > OLDEST_OPSET
    ]
    older = [schema for schema in others if schema.since < current.since][::-1]
    newer = [schema for schema in others if schema.since > current.since]
    for schema in islice((*older, *newer), MOST_VERSIONS):
        swap = Swap(f"{node.op_type} of opset {schema.since}", str(current.since))
        yield schema, Change(opset=max(schema.since, OLDEST_OPSET)), swap


def _other_versions(case: Case) -> Iterator[Idea]:
    """The operator as older and newer operator sets have it."""
    for _, change, swap in _versions(case):
        yield Idea(NAME, change, swap=swap)


def _and_without(case: Case) -> Iterator[Idea]:
    """The same; where a version has no such form of the node, without what it does not know and the node can spare."""
    for schema, change, swap in _versions(case):
        if vary(case, change) is not None:
            yield Idea(NAME, change, swap=swap)
            continue
        current = schema_of(case)
        unknown = {
            entry.name: attributes.told(entry)
            for entry in case.node.attribute
            if entry.name not in schema.attributes and attributes.can_go(entry, current)
        }
        optional = optional_inputs(case, current)
        surplus = {position: name for position, name in optional.items() if schema.slot(position) is None}
        if unknown or surplus:
            less = Change(attributes=dict.fromkeys(unknown), inputs_left_out=frozenset(surplus))
            going = [*unknown.values(), *(f"the optional input {name}" for name in surplus.values())]
            parts = (NAME, *(attributes.NAME for _ in unknown), *(INPUT for _ in surplus))
            yield Idea(NAME, less | change, f"{swap} and without {listing(going)}", parts=parts)


FACTOR = Factor(NAME, kind="other opsets", rank=3, vary=_other_versions, part=Part(4, _and_without))
