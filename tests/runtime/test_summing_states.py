"""Recurrent (summing) states: each batch row depends only on its own tokens, for all lengths and shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engine_steps import generate
from partita.package.folder import read_manifest, write_manifest
from partita.providers.resolve import parse_chain
from partita.runtime.generate.cache import StoredState
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.run_facts import run_facts
from partita.runtime.generate.runner import load_runner
from partita.runtime.ort.buffers import host_buffer
from partita.runtime.place.run_phases import run_package
from partita.runtime.verify.replay import replay
from tests.runtime.handmade_packages import ALL, LENGTH, PHASES, PROMPTS, handmade, known_tokens

CPU = parse_chain("cpu")
STATES = [ALL, ("recurrent",), ("conv", "key"), ("key",)]


def run(runner, prompts, *, new=9, chunk=512, stop=(), sampler=greedy):
    return list(generate(runner, prompts, max_new_tokens=new, sampler=sampler, stop_ids=stop, prefill_chunk=chunk))


def row(steps, index=0):
    return [token for step in steps for token in step.tokens[index]]


def reading(steps):
    """What the steps that read prompts took in: most of a row, over all rows, and the file."""
    return [(step.new_tokens, step.row_tokens, step.file.split(".")[0]) for step in steps if step.phase == "prefill"]


@pytest.mark.parametrize("states", STATES, ids="+".join)
@pytest.mark.parametrize("shapes", PHASES)
@pytest.mark.parametrize(("batch", "appends"), [(1, True), (2, True), (3, True), (3, False)])
def test_each_row_generates_expected_tokens_of_its_own_prompt(opened, shapes, batch, appends, states):
    runner = opened(shapes=shapes, batch=batch, appends=appends, states=states)
    for prompts in (PROMPTS[:batch], PROMPTS[:batch][::-1]):
        for chunk in (512, 4, 1):
            steps = run(runner, prompts, chunk=chunk)
            assert [row(steps, index) for index in range(batch)] == [known_tokens(p, 9, states) for p in prompts]


@pytest.mark.parametrize("shapes", PHASES)
@pytest.mark.parametrize("chooses_rows", [True, False], ids=["K", "all logits"])
@pytest.mark.parametrize(("batch", "appends"), [(1, True), (3, True), (3, False)])
def test_replay_verifies_package_with_summing_states(tmp_path, shapes, chooses_rows, batch, appends):
    folder = handmade(tmp_path, shapes=shapes, batch=batch, appends=appends, chooses_rows=chooses_rows)
    found = replay(folder, CPU, threads=1)
    assert found.status == "verified", found.detail
    assert [step.step for step in found.steps] == [
        "prefill",
        "chunked prefill",
        *(f"decode {n}" for n in range(1, 7)),
        *["rows of different length"] * (batch > 1),
    ]


def test_static_prefill_uses_whole_chunks_then_single_token_steps(opened):
    """Chunk size 5: one chunk for both rows, then single tokens until the shorter prompt ends."""
    runner = opened(shapes="pair", batch=2)
    steps = run(runner, PROMPTS[:2])
    assert reading(steps) == [(5, 10, "prefill"), *[(1, 2, "decode")] * 9, (5, 5, "prefill"), (1, 1, "decode")]


@pytest.mark.parametrize("appends", [True, False])
def test_single_token_graph_is_observed_in_prefill_and_decode(opened, appends):
    runner = opened(shapes="one", observe=True, appends=appends)
    assert (runner.capacity.chunk, runner.capacity.logits_rows) == (1, 1)
    steps = run(runner, [PROMPTS[2]])
    assert reading(steps) == [(1, 1, "model")] * 3
    facts = run_facts(runner)
    assert not facts.notes
    phases = [window.phase for window in facts.sessions[0].runs]
    assert (phases.count("prefill"), phases.count("decode")) == (3, 4)


@pytest.mark.parametrize("memory", ["Cpu", "Cuda"])
@pytest.mark.parametrize("rows", [[1], [0, 2], [2, 0, 1]])
def test_clear_rows_zeroes_only_selected_rows(memory, rows):
    """Cuda: on the host, through the calls used for CUDA memory."""
    filled = host_buffer((3, 4), "float16")
    filled.host[...] = np.arange(1, 13).reshape(3, 4)
    before = filled.host.copy()
    buffer = filled if memory == "Cpu" else replace(filled, array=None, memory=memory)
    assert buffer.readable
    buffer.clear_rows(rows)
    before[rows] = 0
    np.testing.assert_array_equal(filled.host, before)


def test_states_without_row_reset_hold_a_single_sequence(opened, monkeypatch):
    """ONNX Runtime's Python package cannot read bfloat16 back from CUDA."""
    monkeypatch.setattr(StoredState, "separate", False)
    assert [opened(batch=batch).rows for batch in (1, 2)] == [1, 1]
    runner = opened(batch=2)
    assert row(run(runner, PROMPTS[:1])) == known_tokens(PROMPTS[0], 9)
    assert row(run(runner, PROMPTS[1:2])) == known_tokens(PROMPTS[1], 9)


def test_recomputed_prefill_starts_from_empty_states(opened, tmp_path):
    """The manifest sets recompute_above although the states do not depend on the length."""
    folder = handmade(tmp_path / "again", batch=2)
    manifest = read_manifest(folder)
    write_manifest(
        folder, manifest.model_copy(update={"graph": manifest.graph.model_copy(update={"recompute_above": 23})})
    )
    with load_runner(folder, CPU, threads=1) as runner:
        steps = run(runner, PROMPTS[:2])
        assert any(step.is_repeated for step in steps)
        assert [row(steps, index) for index in range(2)] == [known_tokens(prompt, 9) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("states", [ALL, ("key",)], ids=["states", "keys"])
def test_run_package_supports_more_decode_steps_than_cache_length(opened, states):
    runner = opened(batch=2, states=states)
    assert run_package(runner, 60) is None
    assert [step.phase for step in runner.recorder.steps].count("decode") == 60 > LENGTH
    assert all(count <= LENGTH for count in runner.cache.lengths)
