"""`--graph-capture`: captured and replayed decode steps give the CPU's tokens, or an error with its cause."""

from __future__ import annotations

import json

from partita.runtime.generate.graph_capture import WITHOUT
from tests.contract.cases import cases, packages_of
from tests.contract.commands import NEW_TOKENS, PROMPT, execute, generated, honoured, nodes_on, refused


@cases("target, package", packages_of("captured"), sample=True)
def test_captured_decode_steps_give_cpu_tokens(environment, target, package, packages, partita, cpu_tokens, tmp_path):
    """The CPU is not in the chain, so every node runs on the provider."""
    report = tmp_path / "report.json"
    done = honoured(generated(partita, packages / package, target.provider, "--graph-capture", "--report", report))
    assert done.out == cpu_tokens(package)
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0 and nodes_on(content, "CPUExecutionProvider") == 0
    assert content["fallbacks"] == []
    attention = [entry for entry in content["kernel_paths"] if entry["op_type"] == "GroupQueryAttention"]
    found = {(entry["phase"], entry["path"], entry["evidence_kind"]) for entry in attention}
    kernels = {("prefill", "flash", "logged"), ("decode", "flash, split over the cache", "logged")}
    assert found == (kernels if "gqa" in package else set())
    longer = ("--max-new-tokens", 11, "--graph-capture", "--report", report)
    honoured(partita("generate", packages / package, "1 2 3 4", "--token-ids", "--provider", target.provider, *longer))
    notes = json.loads(report.read_text())["notes"]  # of 10 decode steps 4 are profiled, 1 captured and 1 verified
    assert "graph capture: 4 decode steps replayed a captured run; profiled steps did not" in notes


@cases("target, package", packages_of("off_capture"))
def test_fallback_nodes_prevent_graph_capture_with_error(environment, target, package, packages, partita):
    """test_generate.py runs the same packages without graph capture."""
    said = ("graph capture is not possible", f"would not run on {target.provider}", target.off_capture[package])
    done = generated(partita, packages / package, f"{target.provider},cpu", "--graph-capture")
    refused(done, *said, WITHOUT.text)


@cases("target, package", packages_of("miscaptured"))
def test_wrong_replay_exits_3_before_a_wrong_token(environment, target, package, packages, partita, cpu_tokens):
    done = generated(partita, packages / package, target.provider, "--graph-capture")
    assert done.code == 3 and "a replayed step computes a different result" in done.err, done
    assert cpu_tokens(package).startswith(done.out.strip())  # what came before is right


# Tokens chosen on the device: those that the host would choose, and little crosses


SCRIPT = """
import itertools, json, sys, partita
from partita.runtime.generate.choice import device_choice
package, chain, prompts, count, capture = json.loads(sys.argv[1])
seconds = itertools.cycle([0.0, 1.0])  # a device that is quicker than a copy, whatever it is
device_choice._lowest = lambda work: (work(), next(seconds))[1]
draws = partita.Sampling(temperature=0.7, seed=3)
few = partita.Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=4)
mixed = [draws, few, partita.Sampling()][: len(prompts)]

def answers(model):
    greedy = model.generate(prompts, max_new_tokens=count).run()
    first = model.report(probe_seconds=0)
    drawn = model.generate(prompts, max_new_tokens=count, sampling=[draws] * len(prompts)).run()
    beside = model.generate(prompts, max_new_tokens=count, sampling=mixed).run()
    several = model.generate(prompts, max_new_tokens=count, sampling=[few] * len(prompts)).run()
    last = model.report(probe_seconds=0)
    return [list(map(list, each.tokens)) for each in (greedy, drawn, beside, several)], (first, last)

def loaded(chain, least_bytes, **options):
    device_choice.LEAST_BYTES = least_bytes
    with partita.load(package, chain, **options) as model:
        return answers(model)

chosen, not_chosen = (loaded(chain, bytes, process="this", graph_capture=capture) for bytes in (0, 1e9))
(there, reports), (here, plain) = chosen, not_chosen
notes = [sum("selected on the device (" in note for note in each.notes) for each in (*reports, *plain)]
copies = [
    copy.bytes_per_run for each in reports for copy in each.phases[-1].copies if copy.kind == "session_output"
]
known = loaded("cpu", 0)[0][0]
print(json.dumps({"there": there, "here": here, "known": known, "notes": notes, "copies": copies}))
"""
BYTES_OF_A_ROW = [64 * (8 + 4) + 4] * 2
"""Of the largest logits, after greedy steps and after draws among the likeliest."""
NOTES = [1, 1, 0, 0]


def run(tmp_path, package, target, rows, *, capture=False):
    prompts = [[int(word) for word in PROMPT.split(",")]] * rows
    given = json.dumps([str(package), f"{target.provider}", prompts, NEW_TOKENS, capture])
    done = execute("-c", SCRIPT, given, folder=tmp_path)
    assert done.code == 0, done
    return done.json


def devices(kind):
    """The same for targets whose memory is their own."""
    return lambda environment: [row for row in packages_of(kind)(environment) if row[0].kind == "device"]


@cases("target, package", devices("rows"), sample=True)
def test_device_token_choice_matches_host_for_mixed_sampling(environment, target, package, packages, tmp_path):
    found = run(tmp_path, packages / package, target, 3)
    assert found["there"][0] == found["known"] and found["there"] == found["here"]
    assert found["copies"] == [3 * count for count in BYTES_OF_A_ROW], found


@cases("target, package", devices("captured"), sample=True)
def test_device_token_choice_with_graph_capture_matches_host(environment, target, package, packages, tmp_path):
    found = run(tmp_path, packages / package, target, 1, capture=True)
    assert found["there"][0] == found["known"] and found["there"] == found["here"]
    assert found["notes"] == NOTES, found
