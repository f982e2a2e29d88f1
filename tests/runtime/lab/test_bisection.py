"""Bisection: the smallest subgraph that a provider rejects, if its error names no node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita.observations.facts import Outcome, RejectedPart
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.bisection import MOST_PARTS, Search, find_rejected
from partita.runtime.lab.graph import Graph, cut_graph, cut_proto
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.variant import AUXILIARY
from partita.runtime.place.onnx_model import read_onnx

HEAD = '<ir_version: 10, opset_import: ["" : 21, "own" : 1]>\n'
NODES = 16


class ScriptedLab(Lab):
    """Says what a provider makes of a part; `tries`: how often it has time to answer."""

    def __init__(
        self, rejects: Callable[[Collection[str]], bool], tries: int = 10_000, outcome: Outcome = "failed"
    ) -> None:
        super().__init__(Resolution(known_providers()["qnn"], "active"), Cache(None), 0.0)
        self.rejects, self.tries, self.outcome = rejects, tries, outcome
        self.asked: list[tuple[str, ...]] = []

    def try_all(self, models: Sequence[onnx.ModelProto], *, one_node: bool = True) -> list[Placement | None]:
        assert not one_node and len(models) == 1
        names = tuple(node.name for node in models[0].graph.node if node.name != AUXILIARY)
        if len(self.asked) >= self.tries:
            return [None]
        self.asked.append(names)
        if self.rejects(names):
            return [Placement(self.outcome, f"{len(names)} nodes are too many")]
        return [Placement("supported", "")]


def rejected(graph: Graph, lab: Lab) -> RejectedPart | None:
    return find_rejected(Search(graph, lab))


@pytest.fixture
def chain(tmp_path) -> Graph:
    """Sixteen nodes in a row, n0 to n15; the second half reads what the first node makes, too."""
    lines = [f"  [n{step}] t{step + 1} = Add(t{step}, {'t1' if step > 7 else 't0'})" for step in range(NODES)]
    text = f"g (float[4] t0) => (float[4] t{NODES}) {{\n" + "\n".join(lines) + "\n}"
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(HEAD + text), path)
    return cut_graph(read_onnx(path), {})


@pytest.mark.parametrize("culprits", [("n0",), ("n7",), ("n15",), ("n0", "n15"), ("n2", "n9"), ("n14", "n15")])
@pytest.mark.parametrize("outcome", ["failed", "crashed", "timed_out"])
def test_bisection_finds_nodes_that_fail_alone_or_together(chain, culprits, outcome):
    lab = ScriptedLab(lambda names: set(culprits) <= set(names), outcome=outcome)
    found = rejected(chain, lab)
    assert found is not None and found.nodes == culprits and found.minimal
    assert found.message == f"{len(culprits)} nodes are too many", "what it says of this part, not of the whole"
    assert found.neg_added == (len(culprits) == 1), "QNN compiles"
    assert found.attempts + 1 == len(lab.asked), "and once without it"
    assert len(culprits) > 1 or len(lab.asked) < 2 * NODES, "in halves, not one by one"


@pytest.mark.parametrize("tries", range(1, 6))
def test_exhausted_budget_returns_smallest_subgraph_so_far(chain, tries):
    pair = {"n2", "n9"}
    found = rejected(chain, ScriptedLab(lambda names: pair <= set(names), tries=tries))
    assert found is not None and pair <= set(found.nodes) and not found.minimal
    assert found.attempts == tries and found.message == f"{len(found.nodes)} nodes are too many"


def test_subgraph_with_unknown_input_type_is_not_tested(tmp_path):
    """The type between the two nodes is unknown, so only both together are tested."""
    text = "g (float[4] x) => (float[4] y) {\n  [a] h = own.Mystery(x)\n  [b] y = own.Mystery(h)\n}"
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(HEAD + text), path)
    found = rejected(cut_graph(read_onnx(path), {}), ScriptedLab(lambda names: "b" in names))
    assert found is not None and found.nodes == ("a", "b")
    assert found.untested == "the type of its input 'h' is unknown"


def test_search_records_reason_for_untested_subgraphs(chain):
    for lab, why in (
        (ScriptedLab(lambda _: True, tries=0), "probing budget exhausted (--probe-seconds)"),
        (
            ScriptedLab(lambda _: True, outcome="invalid"),
            "ONNX Runtime does not accept this model (16 nodes are too many)",
        ),
        (ScriptedLab(lambda _: False), ""),
    ):
        search = Search(chain, lab)
        assert find_rejected(search) is None and search.untested == why


def test_bisection_finds_every_rejected_part_and_tests_the_rest(chain):
    lab = ScriptedLab(lambda names: "n3" in names or {"n9", "n12"} <= set(names))
    found = rejected(chain, lab)
    assert found is not None and [part.nodes for part in found.parts] == [("n3",), ("n9", "n12")]
    assert found.rest_opens and sum(part.attempts for part in found.parts) <= len(lab.asked)


def test_rest_opens_is_false_if_every_node_is_rejected(chain):
    found = rejected(chain, ScriptedLab(lambda names: True))
    assert found is not None and len(found.parts) == MOST_PARTS and not found.rest_opens
    text = "g (float[4] x) => (float[4] y) {\n  [only] y = Neg(x)\n}"
    one = cut_proto(parser.parse_model(HEAD + text), Path(), {})
    alone = rejected(one, ScriptedLab(lambda names: True))
    assert alone is not None and alone.nodes == ("only",) and not alone.rest_opens
