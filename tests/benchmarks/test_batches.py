"""What everyone answers in a benchmark of batches, what is made of the figures, and our own child."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.batches import ANSWERS, LENGTHS, Contender, Task, table
from benchmarks.peers.plan import ENTRIES
from benchmarks.peers.race import ChildFailedError
from tests.runtime.handmade_packages import VOCAB, handmade, known_tokens

OURS, GENAI = (next(entry for entry in ENTRIES if entry.peer == peer) for peer in ("partita", "genai"))


def test_every_length_of_a_prompt_comes_with_every_length_of_an_answer():
    task = Task.of(len(LENGTHS) * len(ANSWERS), 100)
    pairs = {(len(prompt), new) for prompt, new in zip(task.prompts, task.new_tokens, strict=True)}
    assert len(pairs) == len(LENGTHS) * len(ANSWERS) == len({tuple(prompt) for prompt in task.prompts})
    assert all(10 <= token < 100 for prompt in task.prompts for token in prompt)
    assert task.length == max(LENGTHS) + max(ANSWERS)


def test_an_answer_of_another_length_is_a_failure():
    task = Task.of(2, 100)
    task.check([[1] * count for count in task.new_tokens])
    with pytest.raises(ChildFailedError, match="another number of tokens"):
        task.check([[1] * count for count in reversed(task.new_tokens)])


def test_only_our_packages_have_a_number_of_rows():
    assert Contender(OURS).entry_for(4).words == (*OURS.words, "--batch-size", "4")
    assert Contender(OURS).entry_for(4).form != OURS.form and Contender(OURS).entry_for(1) == OURS
    assert Contender(GENAI).entry_for(4) == GENAI


def test_the_table_has_rates_ratios_and_failures():
    task = Task([[1], [2]], [10, 10])
    ours = Contender(OURS, {1: [2.0, 1.0, 4.0], 4: [0.5]}, {1: [[1], [2]], 4: [[1], [2]]})
    genai = Contender(GENAI, {1: [4.0]}, {1: [[1], [2]], 4: [[1], [3]]}, errors={4: "refused"})
    found = {"prompts": 2, "new_tokens": 20, "threads": 1, "shape": "tiny"}
    lines = table({**found, "contenders": [each.record(task) for each in (ours, genai)]}, [1, 4])
    assert "10.0 (1.00x)" in lines[2] and "40.0 (4.00x)" in lines[2]
    assert "5.0 (1.00x)" in lines[3] and lines[3].endswith("failed")
    assert "2.00x" in lines[4] and lines[4].endswith("-")
    assert lines[5].endswith("other tokens than one at a time with 4 rows")
    assert not any("other tokens" in line for line in lines[:5])


@pytest.mark.parametrize("fewer", [False, True])
def test_our_child_answers_each_prompt_as_it_would_alone(tmp_path: Path, fewer: bool):
    package = handmade(tmp_path / "package", batch=3, states=("key",), fewer=fewer)
    prompts = [[(5 * place + index) % VOCAB for place in range(3 + 2 * index)] for index in range(5)]
    counts = [4, 9, 2, 6, 5]
    lines = [{"model": str(package), "threads": 1, "length": 32}]
    lines += [{"prompts": prompts, "new_tokens": counts, "rows": rows} for rows in (3, 2)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.children.batch_partita"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    opened, answered, refused = map(json.loads, done.stdout.splitlines())
    assert opened["settings"]["rows by themselves"] == ("yes" if fewer else "no")
    wanted = [known_tokens(prompt, count, ("key",)) for prompt, count in zip(prompts, counts, strict=True)]
    assert answered["answers"] == wanted and answered["seconds"] > 0
    assert "3 rows, not 2" in refused["error"]
