"""`python -m tests.truth [PROVIDERS…] [--sample N] [--json FILE]`: the backend tests of onnx, placed and compared.

Run from the repository in the main environment, after `make envs`; `make truth` does. Prints a row per provider and a
line per model that does not agree; exits with 1 when there is one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.truth.compare import compare, contradicted
from tests.truth.models import names, sample

WHERE = {"cpu": "main", "cuda": "main", "webgpu": "webgpu", "openvino": "openvino", "qnn": "qnn"}
"""Provider -> the environment that has it."""
USUAL = ("cpu", "webgpu", "cuda")
INSIDE = "--inside"


def inside(provider: str, count: int) -> dict[str, Any]:
    """What comes of the models on one provider; in the Python of its environment."""
    models = names()
    chosen = sample(models, count) if count else sorted(models)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        found = compare({each: models[each] for each in chosen}, WHERE[provider], provider, Path(name))
        contradictions = contradicted(found, provider, Path(name))
    return {
        "models": [asdict(entry) for entry in found],
        "contradictions": contradictions,
        "seconds": time.monotonic() - began,
    }


def ask(provider: str, count: int) -> dict[str, Any]:
    """The same, from the main environment. Raises RuntimeError when that environment is not there or fails."""
    own = REPOSITORY / ".venvs" / WHERE[provider] / "bin" / "python"
    python = sys.executable if WHERE[provider] == "main" else str(own)
    done = subprocess.run(
        [python, "-m", "tests.truth", INSIDE, provider, str(count)], cwd=REPOSITORY, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{provider}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def lines(provider: str, found: dict[str, Any]) -> list[str]:
    """The row of one provider, and what does not agree."""
    models = found["models"]
    wrong = [entry for entry in models if entry["problem"]]
    reasons = Counter(reason for entry in models for _, reason in entry["fallbacks"])
    told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    opened = sum(entry["plain"] == "opens" for entry in models)
    row = f"{provider}: {len(models)} models, {opened} open; {len(models) - len(wrong)} agree, "
    row += f"{len(found['contradictions'])} contradict the support table; {found['seconds']:.0f} s; reasons: {told}"
    return [
        row,
        *(f"  {entry['name']}: {entry['problem']} ({entry['reported']})"[:400] for entry in wrong),
        *(f"  {name}: no_kernel_op, but {what}" for name, what in found["contradictions"].items()),
    ]


def main(given: Sequence[str]) -> int:
    """Print the table, or as a child the findings."""
    if given[:1] == [INSIDE]:
        sys.stdout.write(json.dumps(inside(given[1], int(given[2]))))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.truth")
    parser.add_argument("providers", nargs="*", choices=[*WHERE, []], help=f"default: {', '.join(USUAL)}")
    parser.add_argument("--sample", type=int, default=0, help="so many models, spread evenly; default: all")
    parser.add_argument("--json", type=Path, help="keep the findings there")
    chosen = parser.parse_args(given)
    found = {}
    for provider in chosen.providers or USUAL:
        found[provider] = ask(provider, chosen.sample)
        sys.stdout.write("\n".join(lines(provider, found[provider])) + "\n")
        sys.stdout.flush()
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    wrong = [entry for each in found.values() for entry in each["models"] if entry["problem"]]
    return 1 if wrong or any(each["contradictions"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
