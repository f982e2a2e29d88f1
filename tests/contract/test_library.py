"""A program that loads a package on a provider: in a process of its own, with the tokens and the report of the verb."""

from __future__ import annotations

import pytest

from tests.contract.cases import cases, packages_of
from tests.contract.commands import NEW_TOKENS, PROMPT, execute

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
