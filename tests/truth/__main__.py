"""`python -m tests.truth [PROVIDERS…] [--sample N] [--models NAMES…] [--keep FOLDER [--resume]]`: onnx's own models.

Run from the repository in the main environment, after `make envs`; `make truth` does. Every model of the onnx package's
backend tests is placed, and compared with plain ONNX Runtime. Prints a row per provider and a line per model that does
not agree; exits with 1 when there is one. With `--keep`, FOLDER/PROVIDER.jsonl has a line per model as soon as it is
known, and `--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.truth.compare import Compared, compare, contradicted
from tests.truth.models import names, sample, spread

WHERE = {"cpu": "main", "cuda": "main", "webgpu": "webgpu", "openvino": "openvino", "qnn": "qnn"}
"""Provider -> the environment that has it."""
USUAL = ("cpu", "webgpu", "cuda")
INSIDE = "--inside"
SUPPORT = "--support"
Entry = dict[str, Any]
"""A `Compared`, as JSON has it."""


def inside(provider: str, models: Mapping[str, str]) -> Iterator[Compared]:
    """What comes of the models, in base64, on one provider, one after the other; in the Python of its environment."""
    with tempfile.TemporaryDirectory() as folder:
        read = {name: base64.b64decode(text) for name, text in models.items()}
        yield from compare(read, WHERE[provider], provider, Path(folder))


def _child(provider: str, *arguments: str, asked: object) -> subprocess.Popen[str]:
    """This module in the Python of the provider's environment, with something to read."""
    own = REPOSITORY / ".venvs" / WHERE[provider] / "bin" / "python"
    python = sys.executable if WHERE[provider] == "main" else str(own)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as question:
        json.dump(asked, question)
        question.seek(0)
        return subprocess.Popen(
            [python, "-m", "tests.truth", *arguments, provider],
            cwd=REPOSITORY,
            stdin=question,
            stdout=subprocess.PIPE,
            text=True,
        )


def ask(provider: str, models: Mapping[str, bytes], known: dict[str, Entry], keep: Path | None) -> dict[str, Any]:
    """All findings of one provider, those that are known already among them; new ones are kept as they come.

    Raises RuntimeError when its environment is not there or fails.
    """
    began = time.monotonic()
    found = {name: known[name] for name in models if name in known}
    missing = {name: base64.b64encode(raw).decode() for name, raw in models.items() if name not in found}
    with _child(provider, INSIDE, asked=missing) as child:
        for line in child.stdout or ():
            entry = json.loads(line)
            found[entry["name"]] = entry
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(line)
    if child.returncode:
        raise RuntimeError(f"{provider}: exit code {child.returncode} after {len(found)} of {len(models)} models")
    with _child(provider, SUPPORT, asked=list(found.values())) as child:
        contradictions = json.loads(child.stdout.read() if child.stdout else "")
    return {
        "models": list(found.values()),
        "contradictions": contradictions,
        "new": len(missing),
        "seconds": time.monotonic() - began,
    }


def read(path: Path) -> dict[str, Entry]:
    """What an earlier run has kept; a line that was cut off is left out."""
    found: dict[str, Entry] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            found[entry["name"]] = entry
    return found


def lines(provider: str, found: dict[str, Any]) -> list[str]:
    """The row of one provider, and what does not agree."""
    models = found["models"]
    wrong = [entry for entry in models if entry["problem"]]
    reasons = Counter(reason for entry in models for _, reason in entry["fallbacks"])
    told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    opened = sum(entry["plain"] == "opens" for entry in models)
    row = f"{provider}: {len(models)} models, {opened} open; {len(models) - len(wrong)} agree, "
    row += f"{len(found['contradictions'])} contradict the support table; "
    row += f"{found['seconds']:.0f} s for {found['new']} of them; reasons: {told}"
    return [
        row,
        *(f"  {entry['name']}: {entry['problem']} ({entry['reported']})"[:400] for entry in wrong),
        *(f"  {name}: no_kernel_op, but {what}" for name, what in found["contradictions"].items()),
    ]


def as_child(given: Sequence[str]) -> None:
    """Answer what the main environment asks: findings, a line each, or what contradicts the support table."""
    asked, provider = json.load(sys.stdin), given[1]
    if given[0] == INSIDE:
        for entry in inside(provider, asked):
            sys.stdout.write(json.dumps(asdict(entry)) + "\n")
            sys.stdout.flush()
        return
    found = [Compared(**{**entry, "fallbacks": tuple(map(tuple, entry["fallbacks"]))}) for entry in asked]
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(contradicted(found, provider, Path(folder))))


def main(given: Sequence[str]) -> int:
    """Print the table, or as a child the findings."""
    if given[:1] in ([INSIDE], [SUPPORT]):
        as_child(given)
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.truth")
    parser.add_argument("providers", nargs="*", choices=[*WHERE, []], help=f"default: {', '.join(USUAL)}")
    parser.add_argument("--sample", type=int, default=0, help="so many models, spread evenly; default: all")
    parser.add_argument("--models", nargs="*", default=[], help="these alone, as node/test_abs")
    parser.add_argument("--keep", type=Path, help="a folder; PROVIDER.jsonl there gets a line per model at once")
    parser.add_argument("--resume", action="store_true", help="what is kept there already is not asked again")
    chosen = parser.parse_args(given)
    models = names()
    picked = chosen.models or (sample(models, chosen.sample) if chosen.sample else spread(models))
    wanted = {name: models[name] for name in picked}
    found = {}
    for provider in chosen.providers or USUAL:
        keep = chosen.keep / f"{provider}.jsonl" if chosen.keep else None
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            if not chosen.resume:
                keep.unlink(missing_ok=True)
        found[provider] = ask(provider, wanted, read(keep) if keep else {}, keep)
        sys.stdout.write("\n".join(lines(provider, found[provider])) + "\n")
        sys.stdout.flush()
    wrong = [entry for each in found.values() for entry in each["models"] if entry["problem"]]
    return 1 if wrong or any(each["contradictions"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
