"""The likeliest token chosen on the device: the tokens of the CPU, and little crosses."""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases, packages_of
from tests.contract.commands import NEW_TOKENS, PROMPT, execute

SCRIPT = """
import itertools, json, sys, partita
from partita.runtime.engine import likeliest
package, chain, prompts, count, capture = json.loads(sys.argv[1])
seconds = itertools.cycle([0.0, 1.0])  # a device that is quicker than a copy, whatever it is
likeliest.LEAST_BYTES = 0
likeliest._lowest = lambda work: (work(), next(seconds))[1]
draws = partita.Sampling(temperature=0.7, seed=3)
mixed = [draws] + [partita.Sampling()] * (len(prompts) - 1)

def answers(model):
    greedy = model.generate(prompts, max_new_tokens=count).run()
    report = model.report(probe_seconds=0)
    drawn = model.generate(prompts, max_new_tokens=count, sampling=[draws] * len(prompts)).run()
    beside = model.generate(prompts, max_new_tokens=count, sampling=mixed).run()
    return [[list(map(list, each.tokens)) for each in (greedy, drawn, beside)], report]

def loaded(chain, patience, **options):
    likeliest.PATIENCE_SECONDS = patience
    with partita.load(package, chain, **options) as model:
        return answers(model)

chosen, not_chosen = (loaded(chain, patience, process="this", graph_capture=capture) for patience in (0, 1e9))
(there, report), (here, plain) = chosen, not_chosen
notes = [[note for note in each.notes if "chosen on the device" in note] for each in (report, plain)]
copies = [copy.bytes_per_run for copy in report.phases[-1].copies if copy.kind == "session_output"]
known = loaded("cpu", 0)[0][0]
print(json.dumps({"there": there, "here": here, "known": known, "notes": notes, "copies": copies}))
"""
BYTES_OF_A_ROW = 8 + 4


def run(tmp_path, package, target, rows, *, capture=False):
    prompts = [[int(word) for word in PROMPT.split(",")]] * rows
    given = json.dumps([str(package), f"{target.provider}", prompts, NEW_TOKENS, capture])
    done = execute("-c", SCRIPT, given, folder=tmp_path)
    assert done.code == 0, done
    return done.json


def devices(kind):
    """The same for targets whose memory is their own."""
    return lambda environment: [row for row in packages_of(kind)(environment) if row[0].kind == "device"]


@cases("target, package", devices("alone"))
@pytest.mark.usefixtures("device")
def test_a_token_crosses_in_place_of_its_logits(environment, target, package, packages, tmp_path):
    found = run(tmp_path, packages / package, target, 1)
    assert found["there"][0] == found["known"] and found["there"] == found["here"]
    assert [len(notes) for notes in found["notes"]] == [1, 0] and found["copies"] == [BYTES_OF_A_ROW], found


@cases("target, package", devices("rows"))
@pytest.mark.usefixtures("device")
def test_rows_that_draw_are_beside_rows_that_do_not(environment, target, package, packages, tmp_path):
    found = run(tmp_path, packages / package, target, 3)
    assert found["there"][0] == found["known"] and found["there"] == found["here"]
    assert found["copies"] == [3 * BYTES_OF_A_ROW], found


@cases("target, package", devices("captured"))
@pytest.mark.usefixtures("device")
def test_of_a_step_that_is_replayed_a_token_is_all_that_comes_back(environment, target, package, packages, tmp_path):
    found = run(tmp_path, packages / package, target, 1, capture=True)
    assert found["there"][0] == found["known"] and found["there"] == found["here"]
    assert [len(notes) for notes in found["notes"]] == [1, 0], found
