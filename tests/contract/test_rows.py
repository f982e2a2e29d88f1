"""A file of rows on a provider: each answer is what its row gets alone, whatever is beside it or came before."""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases, packages_of
from tests.contract.commands import execute

SCRIPT = """
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
PROMPTS = [[1, 45, 7], [99], [12, 3, 30, 8], [5, 6], [88, 2, 17], [41]]
"""Of several lengths; none longer than SwiftShader's GroupQueryAttention takes right (docs/limits.md)."""


@cases("target, package", packages_of("rows"), sample=True)
@pytest.mark.usefixtures("device")
def test_each_row_of_a_file_is_what_it_is_alone(environment, target, package, packages, tmp_path):
    chain = f"{target.provider},cpu"
    done = execute("-c", SCRIPT, packages / package, chain, tmp_path, json.dumps(PROMPTS), folder=tmp_path)
    assert done.code == 0, done
    assert done.json["together"] == done.json["alone"] and done.json["again"] == done.json["alone"]
    assert [len(tokens) for tokens in done.json["alone"]] == [2 + 3 * n % 7 for n in range(len(PROMPTS))]
    assert len({tuple(tokens[:2]) for tokens in done.json["alone"]}) > 2, "the rows differ"
