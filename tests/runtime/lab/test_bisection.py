"""Bisection: the smallest part of a graph that a provider does not open, when it names none."""

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
from partita.runtime.lab.laboratory import Cache, Lab, ModelOutcome
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

    def try_all(self, models: Sequence[onnx.ModelProto], *, one_node: bool = True) -> list[ModelOutcome | None]:
        assert not one_node and len(models) == 1
        names = tuple(node.name for node in models[0].graph.node if node.name != AUXILIARY)
        if len(self.asked) >= self.tries:
            return [None]
        self.asked.append(names)
        if self.rejects(names):
            return [ModelOutcome(self.outcome, f"{len(names)} nodes are too many")]
        return [ModelOutcome("supported", "")]


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


@pytest.mark.parametrize("culprit", [f"n{step}" for step in range(NODES)])
def test_one_culprit_is_found_wherever_it_stands(chain, culprit):
    lab = ScriptedLab(lambda names: culprit in names)
    found = rejected(chain, lab)
    assert found is not None and found.nodes == (culprit,) and found.minimal
    assert found.message == "1 nodes are too many", "what it says of this part, not of the whole"
    assert found.neg_added, "QNN compiles"
    assert found.attempts + 1 == len(lab.asked) < 2 * NODES, "in halves, not one by one; and once without it"


@pytest.mark.parametrize("pair", [("n0", "n1"), ("n3", "n4"), ("n0", "n15"), ("n2", "n9"), ("n14", "n15")])
def test_a_pair_that_fails_only_together_is_found(chain, pair):
    found = rejected(chain, ScriptedLab(lambda names: set(pair) <= set(names)))
    assert found is not None and found.nodes == pair and found.minimal and not found.neg_added


@pytest.mark.parametrize("outcome", ["crashed", "timed_out"])
def test_a_crash_and_a_hang_are_rejections_too(chain, outcome):
    found = rejected(chain, ScriptedLab(lambda names: "n7" in names, outcome=outcome))
    assert found is not None and found.nodes == ("n7",)


@pytest.mark.parametrize("outcome", ["rejected", "invalid"])
def test_a_part_that_is_left_or_not_legal_is_not_rejected(chain, outcome):
    assert rejected(chain, ScriptedLab(lambda _: True, outcome=outcome)) is None


@pytest.mark.parametrize("tries", range(1, 6))
def test_when_the_time_is_up_the_smallest_part_so_far_is_told_as_such(chain, tries):
    pair = {"n2", "n9"}
    found = rejected(chain, ScriptedLab(lambda names: pair <= set(names), tries=tries))
    assert found is not None and pair <= set(found.nodes) and not found.minimal
    assert found.attempts == tries and found.message == f"{len(found.nodes)} nodes are too many"


def test_a_part_that_cannot_be_cut_out_counts_as_not_rejected(tmp_path):
    """The type between the two is not known, so only both together can be tried."""
    text = "g (float[4] x) => (float[4] y) {\n  [a] h = own.Mystery(x)\n  [b] y = own.Mystery(h)\n}"
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(HEAD + text), path)
    found = rejected(cut_graph(read_onnx(path), {}), ScriptedLab(lambda names: "b" in names))
    assert found is not None and found.nodes == ("a", "b")
    assert found.untested == "the type of its input 'h' is unknown"


def test_parts_that_were_not_tried_are_told(chain):
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


def test_every_culprit_is_found_and_that_the_rest_opens(chain):
    lab = ScriptedLab(lambda names: "n3" in names or {"n9", "n12"} <= set(names))
    found = rejected(chain, lab)
    assert found is not None and [part.nodes for part in found.parts] == [("n3",), ("n9", "n12")]
    assert found.rest_opens and sum(part.attempts for part in found.parts) <= len(lab.asked)


def test_where_the_first_of_a_large_graph_took_long_no_other_is_looked_for(chain, monkeypatch):
    monkeypatch.setattr("partita.runtime.lab.bisection.MORE_SECONDS", -1.0)
    slow = rejected(chain, ScriptedLab(lambda names: "n3" in names or "n9" in names))
    assert slow is not None and [part.nodes for part in slow.parts] == [("n3",), ("n9",)], "it is a small graph"
    monkeypatch.setattr("partita.runtime.lab.bisection.FEW_TRIES", 2)
    found = rejected(chain, ScriptedLab(lambda names: "n3" in names or "n9" in names))
    assert found is not None and found.nodes == ("n3",) and found.other_parts == () and not found.rest_opens


def test_of_a_graph_that_is_nothing_but_culprits_no_rest_is_said_to_open(chain):
    found = rejected(chain, ScriptedLab(lambda names: True))
    assert found is not None and len(found.parts) == MOST_PARTS and not found.rest_opens
    text = "g (float[4] x) => (float[4] y) {\n  [only] y = Neg(x)\n}"
    one = cut_proto(parser.parse_model(HEAD + text), Path(), {})
    alone = rejected(one, ScriptedLab(lambda names: True))
    assert alone is not None and alone.nodes == ("only",) and not alone.rest_opens


def test_when_the_time_is_up_after_the_first_the_rest_is_not_said_to_open(chain):
    for tries in range(1, 40):
        lab = ScriptedLab(lambda names: "n3" in names or "n9" in names, tries=tries)
        found = rejected(chain, lab)
        assert found is not None
        if found.rest_opens:
            assert [part.nodes for part in found.parts] == [("n3",), ("n9",)], tries
    assert found is not None and found.rest_opens
