"""`python -m benchmarks.layer_nodes`: how many nodes a layer of a llama is, before the graph passes and after them.

A small random llama is exported in every lowering and precision, once without any pass that can be left out and once
with all. What is counted is what ONNX Runtime runs after its own optimiser: on the CPU provider, on CUDA in the dry
run, and on WebGPU in the environment that has it. Packages are written for the provider: on the CPU and CUDA with
`--target`, which decides what is multiplied in which type; on WebGPU without a target, because `gqa` is refused over a
software driver that computes it wrongly. Nothing is timed, so the machine need not be idle; it takes some minutes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from benchmarks.passes import SHAPE, make, optimised

LOWERINGS = ("gqa", "onnx24", "primitives")
FORMS: Mapping[str, tuple[str, ...]] = {
    "fp32": ("--precision", "fp32"),
    "fp16": ("--precision", "fp16"),
    "int4": ("--precision", "int4"),
    "int8 x int8": ("--precision", "int8", "--activations", "int8"),
}
"""Precisions by the name in the table, with what the export is told."""
TARGETS = ("cpu", "cuda", "webgpu")
ASKED: Mapping[str, tuple[str, ...]] = {name: ("--target", name) for name in ("cpu", "cuda")}
"""What the export is told beside the precision, by the provider that it is for."""
LAYERS = 2
TINY = {"layers": LAYERS, "hidden_size": 256, "intermediate_size": 512, "attention_heads": 4, "key_value_heads": 2}
LENGTH = 64
SENTENCES = 60
"""Of the text on which the quality of a package is measured."""
DEMO = Path("partita/demo/checkpoint")
"""Where a tokenizer is."""
WEBGPU = Path(".venvs/webgpu/bin/python")
"""The environment that `make envs` makes."""
SOFTWARE_VULKAN = {"VK_ICD_FILENAMES": "/usr/lib/chromium/vk_swiftshader_icd.json", "XDG_RUNTIME_DIR": "/tmp"}
"""SwiftShader, where the machine has no GPU; what is set already counts."""
Count = tuple[float, float] | None
"""Nodes of a layer, and how many of them are on another provider; None where they could not be counted."""


def export(checkpoint: Path, out: Path, lowering: str, form: Sequence[str], without: Sequence[str]) -> str:
    """Write a package; returns why there is none, empty when there is."""
    from partita import cli

    words = ["export", str(checkpoint), str(out), "--force", *form, "--attention", lowering]
    words += ["--max-length", str(LENGTH), *(word for name in without for word in ("--without-pass", name))]
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        code = cli.run(words)
    return (said.getvalue().strip().splitlines() or [f"exit code {code}"])[-1] if code else ""


def counted(package: Path, target: str, webgpu: Path) -> Count:
    """Nodes of a layer in a decode step on a target."""
    if target == "cpu":
        return optimised(package)[1], 0.0
    python = str(webgpu) if target == "webgpu" else sys.executable
    report = package.with_name(f"{target}.json")
    report.unlink(missing_ok=True)
    command = [python, "-m", "partita", "place", str(package), "--provider", f"{target},cpu", "--report", str(report)]
    command += ["--probe-seconds", "0", *(["--dry-run"] if target == "cuda" else [])]
    there = {"PYTHONPATH": str(Path.cwd()), **(SOFTWARE_VULKAN if target == "webgpu" else {}), **os.environ}
    subprocess.run(command, check=False, capture_output=True, text=True, env=there)
    if not report.is_file():
        return None
    (decode,) = [each for each in json.loads(report.read_text())["phases"] if each["name"] == "decode"]
    layers: dict[int, list[bool]] = {}
    for node in decode["nodes"]:
        if node["layer"] is not None:
            layers.setdefault(node["layer"], []).append("CPU" in node["provider"])
    if not layers:
        return None
    return statistics.median(map(len, layers.values())), statistics.median(map(sum, layers.values()))


def told(before: Count, after: Count) -> str:
    """A cell of the table: before and after, and how many of those after are on the CPU."""
    first, last = ("?" if each is None else f"{each[0]:g}" for each in (before, after))
    elsewhere = f" ({after[1]:g} on the CPU)" if after is not None and after[1] else ""
    return f"{first} → {last}{elsewhere}"


def table(rows: Mapping[tuple[str, str], Mapping[str, str]], targets: Sequence[str]) -> list[str]:
    """The rows as Markdown."""
    lines = [f"| lowering | precision | {' | '.join(targets)} |", "|---|---|" + "---|" * len(targets)]
    lines += [
        f"| {lowering} | {form} | {' | '.join(cells[target] for target in targets)} |"
        for (lowering, form), cells in rows.items()
    ]
    return lines


def with_tokenizer(checkpoint: Path, folder: Path) -> tuple[str, ...]:
    """Give the checkpoint a tokenizer, and say what the export reads for its quality: little, as the figure is not
    looked at.
    """
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, checkpoint)
    text = folder / "text"
    text.write_text(" ".join(f"{number} times {number} is {number * number}." for number in range(SENTENCES)))
    return ("--quality-text", str(text))


def run(asked: argparse.Namespace, folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Export, count, and say how far it is."""
    from partita.export.passes import optional

    checkpoint = folder / "checkpoint"
    make(checkpoint, argparse.Namespace(**{**SHAPE, **TINY}))
    text = with_tokenizer(checkpoint, folder)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for lowering in asked.lowerings:
        for form in asked.precisions:
            counts: dict[str, list[Count]] = {target: [] for target in asked.targets}
            failures = []
            for words in dict.fromkeys(ASKED.get(target, ()) for target in asked.targets):
                failed = ""
                for without in (optional(), ()):
                    package = folder / "package"
                    told_all = (*FORMS[form], *(text if form != "fp32" else ()), *words)
                    failed = failed or export(checkpoint, package, lowering, told_all, without)
                    for target in asked.targets:
                        if ASKED.get(target, ()) == words:
                            counts[target].append(None if failed else counted(package, target, asked.webgpu))
                failures += [failed] if failed else []
            rows[lowering, form] = {target: told(*pair) for target, pair in counts.items()}
            said = [*(f"{target} {cell}" for target, cell in rows[lowering, form].items()), *failures]
            print(f"{lowering} {form}: {', '.join(said)}", file=sys.stderr, flush=True)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lowerings", nargs="+", choices=LOWERINGS, default=LOWERINGS)
    parser.add_argument("--precisions", nargs="+", choices=tuple(FORMS), default=tuple(FORMS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--webgpu", type=Path, default=WEBGPU, help="Python with onnxruntime-webgpu.")
    asked = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(table(run(asked, Path(folder)), asked.targets)))


if __name__ == "__main__":
    main()
