"""`python -m tests.truth [PROVIDERS…] [--sample N] [--models NAMES…] [--resume]`: onnx's own models.

Run from the repository in the main environment, after `make envs`; `make truth` does. Every model of the onnx package's
backend tests is placed, and compared with plain ONNX Runtime, in the Python of the provider's environment. Prints a row
per provider and a line per model that does not agree; exits with 1 when there is one. build/truth/PROVIDER.jsonl has a
line per model as soon as it is known, and `--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.truth.compare import Compared, compare, contradicted
from tests.truth.models import names, sample

WHERE = {"cpu": "main", "cuda": "main", "webgpu": "webgpu", "openvino": "openvino", "qnn": "qnn"}
"""Provider -> the environment that has it."""
USUAL = ("cpu", "webgpu", "cuda")


def judge(provider: str, picked: Sequence[str], *, resume: bool) -> bool:
    """Print what comes of the models on one provider of this environment; whether everything agrees."""
    kept, models, found = REPOSITORY / "build" / "truth" / f"{provider}.jsonl", names(), dict[str, Compared]()
    kept.parent.mkdir(parents=True, exist_ok=True)
    for line in kept.read_text(encoding="utf-8").splitlines() if resume and kept.exists() else ():
        known = json.loads(line)
        found[known["name"]] = Compared(**{**known, "fallbacks": tuple(map(tuple, known["fallbacks"]))})
    missing = {name: models[name] for name in picked if name not in found}
    with tempfile.TemporaryDirectory() as folder, kept.open("a" if resume else "w", encoding="utf-8") as file:
        for entry in compare(missing, WHERE[provider], provider, Path(folder)):
            found[entry.name] = entry
            file.write(json.dumps(asdict(entry)) + "\n")
            file.flush()
        contradictions = contradicted(list(found.values()), provider, Path(folder))
    wrong = [entry for entry in found.values() if entry.problem]
    reasons = Counter(reason for entry in found.values() for _, reason in entry.fallbacks)
    opened = sum(entry.plain == "opens" for entry in found.values())
    lines = [
        f"{provider}: {len(found)} models, {opened} open; {len(found) - len(wrong)} agree, {len(contradictions)} "
        f"contradict the support table; reasons: {dict(reasons.most_common())}",
        *(f"  {entry.name}: {entry.problem} ({entry.reported})"[:400] for entry in wrong),
        *(f"  {name}: no_kernel_op, but {what}" for name, what in contradictions.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return not wrong and not contradictions


def main(given: Sequence[str]) -> int:
    """Judge each provider, in a process of its environment."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth")
    parser.add_argument("providers", nargs="*", choices=[*WHERE, []], help=f"default: {', '.join(USUAL)}")
    parser.add_argument("--sample", type=int, default=0, help="so many models, spread evenly; default: all")
    parser.add_argument("--models", nargs="*", default=[], help="these alone, as node/test_abs")
    parser.add_argument("--resume", action="store_true", help="what is kept already is not asked again")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    if chosen.inside:
        return 0 if judge(chosen.providers[0], chosen.models, resume=chosen.resume) else 1
    models, codes = names(), []
    picked = chosen.models or sample(models, chosen.sample or len(models))
    for provider in chosen.providers or USUAL:
        own = REPOSITORY / ".venvs" / WHERE[provider] / "bin" / "python"
        python = sys.executable if WHERE[provider] == "main" else str(own)
        command = [python, "-m", "tests.truth", provider, "--inside", *(["--resume"] if chosen.resume else [])]
        codes.append(subprocess.run([*command, "--models", *picked], cwd=REPOSITORY, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
