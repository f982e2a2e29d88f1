"""Nodes in bodies of control flow that a change would have the provider take: whether it takes them in a body.

Some providers take nothing there, so that the change, which helps the node by itself, would change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from partita.diagnosis.probe_verdict import helps
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import AS_IS, COMBINED, NEIGHBOURS, OPTION, Trial
from partita.runtime.model_file import all_nodes, bodies
from partita.runtime.probes.cases import COMPANY, NODE, Case, case_graph, finish
from partita.runtime.probes.graphs import Graph
from partita.runtime.probes.ideas import Variation
from partita.runtime.probes.lab import Lab
from partita.runtime.probes.names import copy_node
from partita.runtime.probes.subjects import MOST_ALIKE, Subject
from partita.runtime.probes.variations import as_it_is, combined, kind_of, single
from partita.runtime.tensor_types import tensor_type

if TYPE_CHECKING:
    import onnx

BRANCH = "If"
CHOOSES, COUNT = f"{COMPANY}_chooses", f"{COMPANY}_count"
HOLDING = frozenset({BRANCH, "Loop", "Scan", "SequenceMap"})
IN = ("the body of a Loop", "the branch of an If")
WITH = ("an Identity, both in the body of a Loop,", "a node like it in the other branch of an If")
BOOL, INT64 = 9, 7
"""Numbers of ONNX's element types."""
Holders = Mapping[tuple[int, str], str]
"""Nodes that run in a body, by session and name, and the operator of the node that has it."""


def holder_of(graph: Graph, name: str) -> str:
    """The operator of the node of the main graph in whose body a node is; empty for one that is in none."""
    for holder in graph.proto.graph.node:
        if any(inner.name == name for body in bodies(holder) for inner in all_nodes(body)):
            return str(holder.op_type)
    return ""


def holder_in_run(index: SessionIndex, graph: Graph, name: str) -> str:
    """The operator of the node in whose body a node runs, as far as it is known; empty for one of the main graph.

    A node that is in a body in the file only is listed by another name; one without a name is where the node is that it
    is a part of, and a SequenceMap becomes a Loop.
    """
    if name in index.inner and name in index.assigned:
        return holder_of(graph, name)
    owners = index.parts.get(name, ()) if name in index.assigned and name not in index.present else ()
    found = (holder_of(graph, owner) or index.exported_op(owner) for owner in owners)
    return next((op for op in found if op in HOLDING), "")


def explore_bodies(subjects: Iterable[Subject], holders: Holders, lab: Lab) -> None:
    """Put the first change that helps a node, with it, into a body of the kind that the node is in; a node that is
    taken as it is, and that nothing was tried around, as it is.
    """
    if lab.seconds_left <= 0:
        return
    work = []
    for subject in subjects:
        keys = [key for key in subject.nodes[:MOST_ALIKE] if key in holders and not subject.around.get(key)]
        helped = _helpful(subject) if keys else None
        if helped is not None and not any(bodies(helped.case.node)):
            work += [(subject, key, helped, in_a_body(helped.case, holders[key])) for key in keys]
    answers = lab.try_all([model for _, _, _, model in work])
    for (subject, key, helped, _), answer in zip(work, answers, strict=True):
        if answer is not None:
            as_it_was = helped.factor == AS_IS
            parts = () if as_it_was else helped.parts or (helped.factor,)
            words = WITH[holders[key] == BRANCH] if as_it_was else IN[holders[key] == BRANCH]
            subject.around.setdefault(key, []).append(
                Trial(
                    NEIGHBOURS,
                    words,
                    answer.outcome,
                    answer.said,
                    answer.cached,
                    parts=parts,
                    kind=kind_of(NEIGHBOURS),
                )
            )


def _helpful(subject: Subject) -> Variation | None:
    """The first change of the node itself with which the provider took it; none at all where it takes it as it is."""
    trial = next((trial for trial in subject.trials if helps(trial) and trial.factor != OPTION), None)
    if trial is None or trial.factor == AS_IS:
        return None if trial is None else as_it_is(subject.case)
    tried = combined(subject.case) if trial.factor == COMBINED else single(subject.case)
    return next((each for each in tried if (each.factor, each.change) == (trial.factor, trial.change)), None)


def in_a_body(case: Case, op_type: str) -> onnx.ModelProto:
    """The node in the branch of an If that an input decides, or in the body of a Loop; it reads what is around that."""
    import onnx

    alone = case_graph(case)
    graph = onnx.GraphProto(name=NODE, input=alone.input, initializer=alone.initializer)
    graph.input.add(name=CHOOSES, type=tensor_type(BOOL, ()))
    outputs = [port.name for port in alone.output]
    body = onnx.GraphProto(name=f"{NODE}_body", node=alone.node)
    if op_type == BRANCH:
        other = onnx.GraphProto(name=f"{COMPANY}_body")
        twin = copy_node(alone.node[0])
        twin.name = f"{COMPANY}1"
        twin.output[:] = [f"{COMPANY}_{name}" if name else "" for name in twin.output]
        other.node.append(twin)
        for name in outputs:
            body.output.add(name=name)
            other.output.add(name=f"{COMPANY}_{name}")
        inputs, attributes = [CHOOSES], {"then_branch": body, "else_branch": other}
    else:
        goes_on, count = f"{COMPANY}_goes_on", f"{COMPANY}_i"
        graph.input.add(name=COUNT, type=tensor_type(INT64, ()))
        body.input.add(name=count, type=tensor_type(INT64, ()))
        body.input.add(name=goes_on, type=tensor_type(BOOL, ()))
        again = onnx.helper.make_node("Identity", [goes_on], [f"{goes_on}_again"], name=f"{COMPANY}1")
        body.node.append(again)
        body.output.add(name=f"{goes_on}_again", type=tensor_type(BOOL, ()))
        for name in outputs:
            body.output.add(name=name)
        inputs, attributes = [COUNT, CHOOSES], {"body": body}
    made = [f"{NODE}_{name}" for name in outputs]
    kind = BRANCH if op_type == BRANCH else "Loop"
    graph.node.append(onnx.helper.make_node(kind, inputs, made, name=f"{COMPANY}0", **attributes))
    for name in made:
        graph.output.add(name=name)
    return finish(graph, case.opsets, case.ir_version, case.functions)
