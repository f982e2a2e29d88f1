"""Bisection: the smallest subgraph that a provider rejects, if its error names no node."""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx
import pytest

from partita.observations.facts import Outcome, RejectedPart
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.bisection import Search, find_rejected
from partita.runtime.lab.graph import Graph
from partita.runtime.lab.placement import AUXILIARY, Placement
from tests.runtime.lab.conftest import ScriptedLab

NODES = 16


def lab_of(rejects: Callable[[Collection[str]], bool], tries: int = 10_000, outcome: Outcome = "failed") -> ScriptedLab:
    """A laboratory that rejects parts of these names. `tries`: number of answers before its time ends."""

    def answer(model: onnx.ModelProto) -> Placement | None:
        names = [node.name for node in model.graph.node if node.name != AUXILIARY]
        if len(lab.models) > tries:
            return None
        return Placement(outcome, f"{len(names)} nodes are too many") if rejects(names) else Placement("supported")

    lab = ScriptedLab(answer, Resolution(known_providers()["qnn"], "active"))
    return lab


def rejected(graph: Graph, lab: ScriptedLab) -> RejectedPart:
    found = find_rejected(Search(graph, lab))
    assert found is not None
    return found


@pytest.fixture
def chain(cut) -> Graph:
    """Sixteen nodes in a row, n0 to n15; the second half also reads the output of the first node."""
    lines = [f"  [n{step}] t{step + 1} = Add(t{step}, {'t1' if step > 7 else 't0'})" for step in range(NODES)]
    return cut(f"g (float[4] t0) => (float[4] t{NODES}) {{\n" + "\n".join(lines) + "\n}")


@pytest.mark.parametrize("culprits", [("n0",), ("n7",), ("n15",), ("n0", "n15"), ("n2", "n9"), ("n14", "n15")])
@pytest.mark.parametrize("outcome", ["failed", "crashed", "timed_out"])
def test_bisection_finds_nodes_that_fail_alone_or_together(chain, culprits, outcome):
    lab = lab_of(lambda names: set(culprits) <= set(names), outcome=outcome)
    found = rejected(chain, lab)
    assert found.nodes == culprits and found.minimal
    assert found.message == f"{len(culprits)} nodes are too many", "the message of this part, not of the whole"
    assert found.neg_added == (len(culprits) == 1), "QNN compiles"
    assert found.attempts + 1 == len(lab.models), "and once without it"
    assert len(culprits) > 1 or len(lab.models) < 2 * NODES, "in halves, not one by one"


@pytest.mark.parametrize("tries", range(1, 6))
def test_exhausted_budget_returns_smallest_subgraph_so_far(chain, tries):
    pair = {"n2", "n9"}
    found = rejected(chain, lab_of(lambda names: pair <= set(names), tries))
    assert pair <= set(found.nodes) and not found.minimal
    assert found.attempts == tries and found.message == f"{len(found.nodes)} nodes are too many"


def test_bisection_finds_every_rejected_part_and_tests_the_rest(chain):
    lab = lab_of(lambda names: "n3" in names or {"n9", "n12"} <= set(names))
    found = rejected(chain, lab)
    assert [part.nodes for part in found.parts] == [("n3",), ("n9", "n12")]
    assert found.rest_opens and sum(part.attempts for part in found.parts) <= len(lab.models)
