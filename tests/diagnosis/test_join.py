"""File nodes behind each executed node, in recorded sessions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from partita.diagnosis.session_index import index_session
from partita.observations.facts import AssignedNode, GraphNode, PortFact, SessionFacts
from tests.partition_reports.samples import event, session_facts

CASES = tomllib.loads((Path(__file__).parent / "joins.toml").read_text("utf-8"))["case"]
NODE = re.compile(r"(?P<name>\S+) = ((?P<domain>\S+):)?(?P<op>\w+)\((?P<inputs>.*)\) -> (?P<outputs>.*)")


def names(text: str) -> tuple[str, ...]:
    return tuple("" if each == "-" else each for each in text.split())


def nodes(text: str) -> tuple[GraphNode, ...]:
    found = [match for match in map(NODE.fullmatch, text.splitlines()) if match]
    assert len(found) == len(text.splitlines())
    return tuple(
        GraphNode(
            "".join(names(each["name"])),
            each["op"],
            each["domain"] or "",
            names(each["inputs"]),
            names(each["outputs"]),
        )
        for each in found
    )


def facts_of(case: dict[str, Any]) -> SessionFacts:
    """The facts of a recorded case, without times."""
    listed = []
    for name, op, provider, entry in map(str.split, case["listed"].splitlines()):
        domain, _, op_type = op.rpartition(":")
        listed.append(AssignedNode("" if name == "-" else name, op_type, domain, provider, int(entry)))
    return session_facts(
        graph=nodes(case["file"]),
        optimised=nodes(case["optimised"]) if "optimised" in case else None,
        plan=tuple(names(line) for line in case["plan"].splitlines()),
        assigned=tuple(listed),
        events=tuple(event(0, at, *line.split()) for at, line in enumerate(case["ran"].splitlines())),
        ports=tuple(PortFact(name, "input", "input", "Cpu", "Cpu", 64) for name in names(case["inputs"])),
    )


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_executed_nodes_of_recorded_sessions_match_file_nodes(case: dict[str, Any]) -> None:
    index = index_session(facts_of(case))
    found = [f"{name} <- {' '.join(behind)}" for name, behind in index.file_nodes_of.items()]
    found += [f"{name} + {' '.join(behind)}" for name, behind in index.rewritten_with.items()]
    assert sorted(found) == sorted(case["expected"].splitlines())
