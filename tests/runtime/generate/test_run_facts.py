"""Facts of a run: windows, steps, states and memory describe the run and are consistent."""

from __future__ import annotations

import pytest

from benchmarks.engine_steps import generate
from partita.diagnosis.session_index import SessionIndex
from partita.errors import GenerationError
from partita.partition_reports.cost import node_times
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import serve
from partita.runtime.generate.request import Request
from partita.runtime.generate.run_facts import run_facts
from partita.runtime.ort.native_log import parse_plan, parse_profile, unread_profile
from tests.conftest import BASE

PROMPT = list(range(5, 25))
PAIR = {"attention": "gqa", "static_shapes": True, "prefill_chunk": 6}


def run(runner, *, new=12, chunk=512, rows=1, take=None):
    steps = generate(runner, [PROMPT] * rows, max_new_tokens=new, sampler=greedy, prefill_chunk=chunk)
    return [step for _, step in zip(range(take), steps, strict=False)] if take else list(steps)


def test_observation_window_has_prefill_and_four_decode_runs(open_runner):
    runner = open_runner(observe=True)
    steps = run(runner)
    facts = run_facts(runner)
    assert [(w.phase, w.tokens) for w in facts.sessions[0].runs] == [("prefill", 20)] + [("decode", 1)] * 4
    assert [step.observed for step in steps] == [True] * 5 + [False] * (len(steps) - 5)
    assert [step.observed for step in facts.steps] == [step.observed for step in steps]
    windows = facts.sessions[0].runs
    assert all(a.start_us + a.host_us <= b.start_us for a, b in zip(windows, windows[1:], strict=False))
    for window in windows:
        inside = [event for event in facts.sessions[0].events if event.run == window.run]
        assert [event.order for event in inside] == list(range(len(inside)))
        assert sum(event.host_us for event in inside) <= window.host_us


def test_run_records_its_number_of_rows(open_runner):
    runner = open_runner(observe=True, batch_size=3)
    assert len(list(serve(runner, [Request(PROMPT, greedy, 3)] * 2, records=True))) == 3
    facts = run_facts(runner)
    assert [(run.phase, run.tokens, run.rows) for run in facts.sessions[0].runs] == [
        ("prefill", 20, 2),
        ("decode", 1, 2),
        ("decode", 1, 2),
    ]
    index = SessionIndex(facts.sessions[0])
    assert (node_times(index, "prefill", 3).tokens, node_times(index, "decode", 3).tokens) == (40, 2)
    states = [state for state in facts.states if state.checked_steps]
    assert states and all(state.same_address and not state.address_changes for state in states)


@pytest.mark.parametrize("spec", [{"attention": "onnx24"}, {"precision": "fp16"}, PAIR])
def test_past_and_present_share_a_buffer(open_runner, spec):
    runner = open_runner(observe=True, **spec)
    before = [buffer.address() for buffer in runner.cache.buffers]
    run(runner)
    assert [buffer.address() for buffer in runner.cache.buffers] == before
    facts = run_facts(runner)
    assert len(facts.states) == 2 * BASE["num_hidden_layers"]
    assert all(state.same_address and state.address_changes == 0 for state in facts.states)
    assert all(state.memory == "Cpu" for state in facts.states)
    assert all(buffer.host[:, :, :20].any() for buffer in runner.cache.buffers)
    assert facts.memory.cache_bytes == runner.contract.cache_bytes


def test_failed_run_ends_window_and_preserves_earlier_events(open_runner):
    runner = open_runner(observe=True)
    run(runner, take=3)
    feed = runner.bound("decode", 1, 1)
    feed.tokens.fill(10_000)
    with pytest.raises(GenerationError):
        feed.run()
    (session,) = run_facts(runner).sessions
    assert len(session.runs) == 3
    assert {event.run for event in session.events} == {0, 1, 2}


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"streams": 3}', "[]"])
def test_unparsable_plan_returns_none(text):
    assert parse_plan(text) == (None, None)
    assert parse_plan('{"type":"DeviceBasedPartitioner"}') == ((), None), "of a graph without nodes"


@pytest.mark.parametrize("text", ["", "no json", "{}", '[{"cat" : "Node"', "[3]"])
def test_unparsable_profile_is_empty_and_adds_note(text):
    assert parse_profile(text, [("run", 0)]) == ((), ())
    assert len(unread_profile(1, ())) == 1 and unread_profile(0, ()) == ()
