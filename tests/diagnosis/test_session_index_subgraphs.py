"""Profile events of control-flow subgraphs are separated from those of the main graph."""

from __future__ import annotations

from partita.diagnosis.sources import main_graph_events
from partita.observations.facts import NodeEvent

CPU = "CPUExecutionProvider"


def event(run: int, order: int, name: str, start_us: int, host_us: int) -> NodeEvent:
    return NodeEvent(run, order, name, name.partition("_")[0], CPU, start_us, host_us, 4, ())


def looped(run: int, turns: int) -> list[NodeEvent]:
    """Relu_0, a loop of turns that each have an If with a Neg and an Add in it, and Relu_1."""
    begin = run * 1_000_000
    found = [event(run, 0, "Relu_0", begin, 5), event(run, 1, "Loop_0", begin + 10, 20 * turns)]
    for turn in range(turns):
        at = begin + 10 + 20 * turn
        found.append(event(run, len(found), "If_0", at, 15))
        found.append(event(run, len(found), "Neg_0", at + 1, 5))
        found.append(event(run, len(found), "Add_0", at + 16, 3))
    return [*found, event(run, len(found), "Relu_1", begin + 10 + 20 * turns, 5)]


def test_events_in_loop_and_nested_if_belong_to_subgraphs() -> None:
    main, bodies = main_graph_events(looped(0, 3) + looped(1, 3))
    assert [entry.name for entry in main] == ["Relu_0", "Loop_0", "Relu_1"] * 2
    assert bodies == {"If_0", "Neg_0", "Add_0"}
