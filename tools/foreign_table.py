"""`python -m tools.foreign_table [NAME=PYTHON ...]`: which foreign folder runs on which provider, as a table.

The sample folders of tests/foreign, each with the command line of this Python and of those that are named, as
`openvino=.venvs/openvino/bin/python`; a name is that of the provider, which has the CPU behind it. WebGPU gets the
software driver of the contract tests where it is there. CUDA is placed in a dry run by this Python. Of each: whether it
runs, whether its tokens are the known ones, the bytes of cache that the last step copied, and the nodes that each
provider has in the graph of single tokens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.contract.expectations import ENVIRONMENTS

REPOSITORY = Path(__file__).parents[1]
SAMPLES = REPOSITORY / "tests" / "foreign" / "samples"
LAYOUTS = {
    "optimum": ("optimum, one file, fp32", "."),
    "merged": ("optimum, merged, fp32", "."),
    "genai-fp32-cpu": ("onnxruntime-genai, fp32", "."),
    "genai-int4-cpu": ("onnxruntime-genai, int4", "genai-int4-cpu"),
    "genai-int4-webgpu": ("onnxruntime-genai, int4 for WebGPU", "genai-int4-cpu"),
    "genai-fp16-cuda": ("onnxruntime-genai, fp16 for CUDA", ""),
}
"""Sample folder -> how it is called, and where the tokens are that it should give; nowhere: none are known."""
COUNT = 6
HEAD = ("folder", "provider", "runs", "tokens", "copied per token", "nodes of a step")
SECONDS = 300
STATUS = re.compile(r"Non-zero status code.*?Status Message: (\S+\.cc:\d+ \w+ )?")
"""What ONNX Runtime says before it comes to the point."""


def main(given: Sequence[str]) -> int:
    """Print the table."""
    pythons = dict(entry.split("=", 1) for entry in given)
    rows = [HEAD, ("---",) * len(HEAD)]
    with tempfile.TemporaryDirectory() as work:
        for layout, (called, answers) in LAYOUTS.items():
            folder = _folder(layout, Path(work))
            for provider, python in {"cpu": sys.executable, **pythons}.items():
                chain = provider if provider == "cpu" else f"{provider},cpu"
                rows.append((called, chain, *_ran(folder, python, chain, answers)))
            rows.append((called, "cuda,cpu, dry run", *_placed(folder)))
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in rows))
    return 0


def _folder(layout: str, work: Path) -> Path:
    """A copy of a sample, with its configuration."""
    shutil.copytree(SAMPLES / layout, work / layout)
    if layout == "merged":
        shutil.copy(SAMPLES / "optimum" / "config.json", work / layout)
    return work / layout


def _ran(folder: Path, python: str, chain: str, answers: str) -> tuple[str, ...]:
    """What becomes of a generation."""
    prompt = ",".join(map(str, json.loads((SAMPLES / "tokens.json").read_text())["prompt"]))
    report = folder.parent / "report.json"
    report.unlink(missing_ok=True)
    asked = ("--token-ids", "-n", COUNT, "--provider", chain, "--report", report, "--probe-seconds", 0)
    done = _command(python, "generate", folder, prompt, *asked)
    if done.returncode or not report.is_file():
        return ("no", _reason(done.stderr), "", "")
    found = [int(word) for word in done.stdout.split()]
    known = json.loads((SAMPLES / answers / "tokens.json").read_text())["tokens"][:COUNT] if answers else None
    content = json.loads(report.read_text())
    tokens = "not compared" if known is None else "equal" if found == known else "others"
    active = [entry["status"] for entry in content["chain"]]
    return ("yes" if active[0] == "active" else f"on the CPU alone: {active[0]}", tokens, *_facts(content))


def _placed(folder: Path) -> tuple[str, ...]:
    """What a dry run on CUDA says."""
    report = folder.parent / "placed.json"
    report.unlink(missing_ok=True)
    asked = ("--provider", "cuda,cpu", "--dry-run", "--report", report, "--probe-seconds", 0)
    done = _command(sys.executable, "place", folder, *asked)
    if not report.is_file():
        return ("no", _reason(done.stderr), "", "")
    return ("placed", "not computed", *_facts(json.loads(report.read_text())))


def _command(python: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**software_devices(), **os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [python, "-m", "partita", *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


def software_devices() -> dict[str, str]:
    """Variables by which drivers are found that compute on the CPU, as far as those are there."""
    wanted = {key: value for entry in ENVIRONMENTS.values() for key, value in entry.variables.items()}
    return {key: value for key, value in wanted.items() if Path(value).exists()}


def _facts(content: dict[str, Any]) -> tuple[str, str]:
    """Bytes of the cache that the last step copied, and nodes by provider."""
    cache = content.get("cache")
    copied = "no cache" if cache is None else f"{cache['copied_bytes']:,} bytes" if cache["copied_bytes"] else "none"
    return copied, ", ".join(_shares(content))


def _shares(content: dict[str, Any]) -> Iterator[str]:
    """`CPU 166`, for the providers that have nodes in the graph of single tokens."""
    phase = next(phase for phase in content["phases"] if phase["name"] == "decode")
    for share in phase["providers"]:
        if share["nodes"]:
            yield f"{share['provider'].removesuffix('ExecutionProvider')} {share['nodes']}"


def _reason(text: str) -> str:
    """The line of an error."""
    lines = [line for line in text.splitlines() if line.startswith("partita: ")]
    told = STATUS.sub("", lines[0].partition(": ")[2]) if lines else "no message"
    return told.partition("; ")[0][:120]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
