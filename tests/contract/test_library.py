"""A program that loads a package on a provider: in a process of its own, with the tokens and the report of the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.cases import cases, packages_of
from tests.contract.commands import NEW_TOKENS, PROMPT, chain_entry, execute, honoured, nodes_on, refused
from tests.runtime.handmade_packages import ALL, VOCAB, handmade, known_tokens

SCRIPT = """
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
@pytest.mark.usefixtures("device")
def test_a_program_gets_the_tokens_of_the_cpu(environment, target, package, packages, cpu_tokens, tmp_path):
    chain = f"{target.provider},cpu"
    done = execute("-c", SCRIPT, packages / package, chain, PROMPT, NEW_TOKENS, folder=tmp_path)
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
@pytest.mark.usefixtures("device")
def test_each_row_of_a_file_is_what_it_is_alone(environment, target, package, packages, tmp_path):
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


def package(folder: Path, shapes: str) -> Path:
    return handmade(folder / "package", batch=3, shapes=shapes, adapters=RANKS)


@cases("target, shapes", packages_of("adapters"), sample=True)
@pytest.mark.usefixtures("device")
def test_each_row_has_the_tokens_of_its_adapter(environment, target, shapes, partita, tmp_path):
    source, out, report = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "report.json"))
    rows: list[dict[str, Any]] = [{"tokens": ADAPTER_PROMPT, "adapter": name} for name in NAMES]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = ("--input", source, "--output", out, "--report", report)
    asked = ("--token-ids", "--max-new-tokens", 5, "--provider", f"{target.provider},cpu")
    honoured(partita("generate", package(tmp_path, shapes), *files, *asked))
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
@pytest.mark.usefixtures("device")
def test_a_provider_that_would_not_read_an_adapter_is_refused(environment, target, shapes, partita, tmp_path):
    """Its tokens would be those of no adapter, or of nothing at all."""
    folder = package(tmp_path, shapes)
    done = partita("generate", folder, "1,2,3", "--token-ids", "--provider", f"{target.provider},cpu")
    refused(done, f"{target.provider} treats inputs with a default as constants", "--static-shapes")
