"""`partita generate` on each provider: CPU tokens with the CPU in the chain; without it, all nodes or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partita.bench.records import Bench
from tests.contract.cases import cases, packages_of
from tests.contract.commands import NEW_TOKENS, PROMPT, chain_entry, execute, generated, honoured, nodes_on, refused
from tests.runtime.handmade_packages import ALL, VOCAB, handmade, known_tokens


@cases("target, package", packages_of("with_cpu"), sample=True)
def test_provider_with_cpu_gives_cpu_tokens(environment, target, package, packages, partita, cpu_tokens, tmp_path):
    report = tmp_path / "report.json"
    name, value = target.option
    option = ("--provider-option", f"{target.provider}.{name}={value}") if name else ()
    done = honoured(generated(partita, packages / package, f"{target.provider},cpu", "--report", report, *option))
    assert done.out == cpu_tokens(package)
    content = json.loads(report.read_text())
    assert chain_entry(content, environment, target.ort_name)["status"] == "active"
    assert nodes_on(content, target.ort_name) > 0
    assert [check for check in content["checks"] if not check["passed"]] == []
    cache = content["cache"]
    assert cache["in_place_states"] == cache["states"] and cache["address_changes"] == 0, cache


@cases("target, package", packages_of("refused_alone"))
def test_provider_alone_fails_naming_unsupported_nodes(environment, target, package, packages, partita):
    done = refused(generated(partita, packages / package, target.provider), target.ort_name)
    table = done.err.partition("partita: ")[2].splitlines()[1:]
    assert table, done
    file = json.loads((packages / package / "manifest.json").read_text())["graph"]["files"][0]["file"]
    assert any(op in done.err for op in op_types(packages / package / file)), done
    assert "model." in done.err or "layers" in done.err, done


@cases("target, package", packages_of("fails"), sample=True)
def test_provider_failing_on_graph_is_skipped_with_note(
    environment, target, package, packages, partita, cpu_tokens, tmp_path
):
    refused(generated(partita, packages / package, target.provider), target.provider)
    report = tmp_path / "report.json"
    done = honoured(generated(partita, packages / package, f"{target.provider},cpu", "--report", report))
    assert done.out == cpu_tokens(package)
    assert any(target.provider in line and "initialisation_failed" in line for line in done.err.splitlines()), done
    entry = chain_entry(json.loads(report.read_text()), environment, target.ort_name)
    # By experiments the report may know more than the note: which part of the graph the provider fails over.
    assert entry["status"] == "unavailable" and entry["evidence"]
    assert entry["reason"] in ("initialisation_failed", "subgraph_rejected"), entry


def op_types(path):
    import onnx

    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


# `partita bench` on every provider: the tokens of the CPU, placement as `generate --report` has it, and no crash


WORK = ("--prompt", PROMPT, "--token-ids", "--max-new-tokens", 6, "--rounds", 1)


@cases("target, package", packages_of("with_cpu"), sample=True, heavy=("webgpu",))
def test_bench_compares_provider_with_cpu(environment, target, package, packages, partita, tmp_path):
    chain = f"{target.provider},cpu"
    done = honoured(partita("bench", packages / package, "--providers", chain, "cpu", *WORK, "--json"))
    found = Bench.model_validate_json(done.out)
    ours, cpu = found.contenders
    assert (ours.status, cpu.status, ours.rounds, cpu.rounds) == ("measured", "measured", 1, 1)
    assert ours.same_tokens is True and ours.repeatable is True, ours.difference
    assert ours.unused_providers == () and found.verdict[0].startswith(f"{chain} is ")
    report = tmp_path / "report.json"
    honoured(generated(partita, packages / package, chain, "--report", report))
    alone = json.loads(report.read_text())["summary"]
    assert ours.summary is not None and ours.summary.preferred_provider == target.ort_name
    here = next(phase for phase in ours.summary.phases if phase.phase == "decode")
    there = next(phase for phase in alone["phases"] if phase["phase"] == "decode")
    assert (here.nodes_by_provider, here.copies) == (there["nodes_by_provider"], there["copies"])


# A program that loads a package: a process of its own, with the tokens and the report of the verb


LIBRARY_SCRIPT = """
import sys, partita
package, chain, words, count = sys.argv[1:]
prompt, count = [int(word) for word in words.split(",")], int(count)
with partita.load(package, chain) as model:
    tokens = model.generate(prompt, max_new_tokens=count).run().tokens[0]
    report = model.report(probe_seconds=0)
provider = report.chain[0].provider
report.check(f"provider={provider},nodes>0")
partita.place(package, chain, runs=1, probe_seconds=0).check(f"provider={provider},nodes>0")
assert "onnxruntime" not in sys.modules
print(*tokens)
"""


@cases("target, package", packages_of("with_cpu"), sample=True)
def test_python_api_gives_cpu_tokens(environment, target, package, packages, cpu_tokens, tmp_path):
    chain = f"{target.provider},cpu"
    done = execute("-c", LIBRARY_SCRIPT, packages / package, chain, PROMPT, NEW_TOKENS, folder=tmp_path)
    assert (done.code, done.err) == (0, ""), done
    assert done.out.split() == cpu_tokens(package).split()


# A file of rows on a provider: each answer is what its row gets alone, whatever is beside it or came before


ROWS_SCRIPT = """
import json, sys, partita
from pathlib import Path
package, chain, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
prompts = json.loads(sys.argv[4])
rows = [json.dumps({"id": n, "tokens": prompt, "max_new_tokens": 2 + 3 * n % 7}) for n, prompt in enumerate(prompts)]

def answers(name, rows):
    source, out = folder / (name + ".jsonl"), folder / (name + "-answers.jsonl")
    source.write_text("".join(row + "\\n" for row in rows))
    done = partita.generate_file(model, source, out, stop_token_ids=())
    assert (done.rows, done.errors) == (len(rows), 0), out.read_text()
    return [json.loads(line)["tokens"] for line in out.read_text().splitlines()]

with partita.load(package, chain, observe=False) as model:
    together = answers("together", rows)
    again = answers("backwards", rows[::-1])[::-1]
    alone = [answers(f"alone-{n}", [row])[0] for n, row in enumerate(rows)]
print(json.dumps({"together": together, "again": again, "alone": alone}))
"""
ROWS_PROMPTS = [[1, 45, 7], [99], [12, 3, 30, 8], [5, 6], [88, 2, 17], [41]]
"""Of several lengths; none longer than SwiftShader's GroupQueryAttention takes right (docs/limits.md)."""


@cases("target, package", packages_of("rows"), sample=True)
def test_batched_rows_match_single_runs(environment, target, package, packages, tmp_path):
    chain = f"{target.provider},cpu"
    done = execute("-c", ROWS_SCRIPT, packages / package, chain, tmp_path, json.dumps(ROWS_PROMPTS), folder=tmp_path)
    assert done.code == 0, done
    assert done.json["together"] == done.json["alone"] and done.json["again"] == done.json["alone"]
    assert [len(tokens) for tokens in done.json["alone"]] == [2 + 3 * n % 7 for n in range(len(ROWS_PROMPTS))]
    assert len({tuple(tokens[:2]) for tokens in done.json["alone"]}) > 2, "the rows differ"


# Rows with adapters of their own in every environment: each gets the tokens that numpy knows for its adapter


RANKS = {"loud": 3, "small": 1}
ADAPTER_PROMPT = [(7 * i + 3) % VOCAB for i in range(17)]
NAMES = ["loud", None, "small", "small", "loud"]


def with_adapters(folder: Path, shapes: str) -> Path:
    return handmade(folder / "package", batch=3, shapes=shapes, adapters=RANKS)


@cases("target, shapes", packages_of("adapters"), sample=True)
def test_each_row_gives_known_tokens_of_its_adapter(environment, target, shapes, partita, tmp_path):
    source, out, report = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "report.json"))
    rows: list[dict[str, Any]] = [{"tokens": ADAPTER_PROMPT, "adapter": name} for name in NAMES]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = ("--input", source, "--output", out, "--report", report)
    asked = ("--token-ids", "--max-new-tokens", 5, "--provider", f"{target.provider},cpu")
    honoured(partita("generate", with_adapters(tmp_path, shapes), *files, *asked))
    wanted = [known_tokens(ADAPTER_PROMPT, 5, ALL, None if name is None else (name, RANKS[name])) for name in NAMES]
    assert [json.loads(line)["tokens"] for line in out.read_text("utf-8").splitlines()] == wanted
    assert wanted[0] != wanted[1] != wanted[2]
    content = json.loads(report.read_text("utf-8"))
    assert chain_entry(content, environment, target.ort_name)["status"] == "active"
    assert nodes_on(content, target.ort_name) > 0
    assert "lora_" not in json.dumps([phase["copies"] for phase in content["phases"]]), (
        "it is copied once, not per token"
    )


@cases("target, shapes", packages_of("constant_defaults"))
def test_provider_treating_adapter_inputs_as_constants_fails(environment, target, shapes, partita, tmp_path):
    """The provider would ignore the adapter."""
    folder = with_adapters(tmp_path, shapes)
    done = partita("generate", folder, "1,2,3", "--token-ids", "--provider", f"{target.provider},cpu")
    refused(done, f"{target.provider} treats inputs with a default as constants", "--static-shapes")
