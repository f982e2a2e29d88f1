"""`python -m tests.planted [NAMES…]`: how many reasons are right, by environment, and which are not.

Run from the repository, in the main environment; the others are those of `make envs`. `--inside ENVIRONMENT` is what it
calls itself with in their Pythons.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.contract.expectations import ENVIRONMENTS, MAIN
from tests.planted.cases import CASES, NO_FALLBACK
from tests.planted.judge import judge, outcomes, plainly

INSIDE = "--inside"


def row(*cells: object) -> str:
    """A line of the table."""
    return "  ".join(str(cell).ljust(11) for cell in cells).rstrip()


def lines(environment: str, wanted: Sequence[str]) -> list[str]:
    """The row of one environment, and a few lines for each case that is wrong or not true; in its own Python."""
    cases = [case for case in CASES if case.environment == environment and (not wanted or case.name in wanted)]
    with tempfile.TemporaryDirectory() as name:
        ended, plain = outcomes(cases, Path(name) / "planted"), plainly(cases, Path(name) / "plain")
    count: Counter[str] = Counter()
    details = []
    for case in cases:
        verdict = judge(case, ended[case.command])
        count["unexplained" if verdict.reason == "unexplained" else "wrong" if verdict.wrong else "right"] += 1
        if verdict.wrong:
            details.append(f"  {case.name}: {verdict.wrong} ({verdict.kind or 'no evidence'})")
            details.append(f"    {verdict.evidence or verdict.message}"[:400])
            details += [f"    {trial}"[:200] for trial in verdict.variants]
        planted, control = plain[case.name, False], plain.get((case.name, True), "supported")
        surprise = case.plain and (planted == "supported") != (case.expected == NO_FALLBACK)
        if surprise or control != "supported":
            details.append(f"  {case.name}: NOT TRUE: planted {planted}, control {control}")
    return [row(environment, len(cases), *(count[name] for name in ("right", "wrong", "unexplained"))), *details]


def main(arguments: list[str]) -> None:
    """Print the table, or as a child the lines of one environment."""
    if arguments[:1] == [INSIDE]:
        sys.stdout.write("\n".join(lines(arguments[1], arguments[2:])) + "\n")
        return
    wanted = [case for case in CASES if not arguments or case.name in arguments or case.environment in arguments]
    assert wanted, "no case or environment of these names"
    sys.stdout.write(row("environment", "cases", "right", "wrong", "unexplained") + "\n")
    for name in dict.fromkeys(case.environment for case in wanted):
        sys.stdout.flush()
        own = REPOSITORY / ".venvs" / name / "bin" / "python"
        python = sys.executable if ENVIRONMENTS[name].python_of == MAIN else str(own)
        names = [case.name for case in wanted if case.environment == name]
        subprocess.run([python, "-m", "tests.planted", INSIDE, name, *names], cwd=REPOSITORY, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
