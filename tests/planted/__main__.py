"""`python -m tests.planted [NAMES…]`: how many reasons are right, by environment, and which are not.

Run from the repository, in the main environment; the others are those of `make envs`. `--inside ENVIRONMENT` is what it
calls itself with in their Pythons.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.contract.expectations import ENVIRONMENTS, MAIN
from tests.planted.cases import CASES, NO_FALLBACK
from tests.planted.judge import judge, outcomes, plainly

INSIDE = "--inside"


def inside(environment: str, wanted: list[str]) -> list[dict[str, Any]]:
    """The verdicts on the cases of one environment, as JSON values; in its own Python."""
    cases = [case for case in CASES if case.environment == environment and (not wanted or case.name in wanted)]
    with tempfile.TemporaryDirectory() as name:
        ended = outcomes(cases, Path(name) / "planted")
        plain = plainly(cases, Path(name) / "plain")
    verdicts = [judge(case, ended[case.command]) for case in cases]
    return [
        {
            "name": verdict.case.name,
            "expected": verdict.case.expected,
            "reason": verdict.reason,
            "kind": verdict.kind,
            "wrong": verdict.wrong,
            "evidence": verdict.evidence,
            "variants": verdict.variants,
            "said": verdict.message,
            "planted": plain[verdict.case.name, False],
            "control": plain.get((verdict.case.name, True), "-"),
            "checked": verdict.case.plain,
        }
        for verdict in verdicts
    ]


def ask(environment: str, wanted: list[str]) -> list[dict[str, Any]]:
    """The same, from the main environment. Raises RuntimeError when that environment is not there or fails."""
    own = REPOSITORY / ".venvs" / environment / "bin" / "python"
    python = sys.executable if ENVIRONMENTS[environment].python_of == MAIN else str(own)
    done = subprocess.run(
        [python, "-m", "tests.planted", INSIDE, environment, *wanted], cwd=REPOSITORY, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{environment}: {done.stderr[-1000:]}")
    return json.loads(done.stdout)


def lines(environment: str, verdicts: list[dict[str, Any]]) -> list[str]:
    """What is said of one environment: its row, and a few lines for each case that is wrong or not true."""
    count: Counter[str] = Counter()
    details = []
    for verdict in verdicts:
        count["unexplained" if verdict["reason"] == "unexplained" else "wrong" if verdict["wrong"] else "right"] += 1
        if verdict["wrong"]:
            details.append(f"  {verdict['name']}: {verdict['wrong']} ({verdict['kind'] or 'no evidence'})")
            details.append(f"    {verdict['evidence'] or verdict['said']}"[:400])
            details += [f"    {trial}"[:200] for trial in verdict["variants"]]
        whole = verdict["expected"] == NO_FALLBACK
        surprise = verdict["checked"] and (verdict["planted"] == "supported") != whole
        if surprise or verdict["control"] not in ("-", "supported"):
            details.append(f"  {verdict['name']}: NOT TRUE: planted {verdict['planted']}, control {verdict['control']}")
    row = [environment, str(len(verdicts)), *(str(count[name]) for name in ("right", "wrong", "unexplained"))]
    return ["  ".join(cell.ljust(11) for cell in row).rstrip(), *details]


def main(arguments: list[str]) -> None:
    """Print the table, or as a child the verdicts."""
    if arguments[:1] == [INSIDE]:
        sys.stdout.write(json.dumps(inside(arguments[1], arguments[2:])))
        return
    names = list(dict.fromkeys(case.environment for case in CASES))
    wanted = [case for case in CASES if not arguments or case.name in arguments or case.environment in arguments]
    assert wanted, "no case or environment of these names"
    header = ["environment", "cases", "right", "wrong", "unexplained"]
    sys.stdout.write("  ".join(cell.ljust(11) for cell in header) + "\n")
    for environment in names:
        own = [case.name for case in wanted if case.environment == environment]
        if own:
            sys.stdout.write("\n".join(lines(environment, ask(environment, own))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
