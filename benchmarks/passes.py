"""`python -m benchmarks.passes [CHECKPOINT]`: what each graph pass brings, one left out at a time.

A checkpoint is exported with all passes, and once without each of them. Of each package: nodes of a layer as ONNX
Runtime runs them, and the time of a prompt and of a step relative to the package with all passes, by `partita bench`
with all packages. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ALL = "all passes"
LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")
FILE = "model.onnx"
HEAD = f"{'left out':20} {'nodes':>6} {'a layer':>8} {'step ms':>8} {'ratio':>6} {'prompt ms':>9} {'ratio':>6}"


@dataclass(slots=True)
class Left:
    """A package without one pass, or with all."""

    name: str
    places: int | None = None
    """What the pass changes where it is not left out."""
    failed: str = ""
    """Why there is no such package."""
    same: bool = False
    """The graph is the one with all passes, so nothing is timed."""
    nodes: int | None = None
    """Of the graph as ONNX Runtime runs it."""
    nodes_per_layer: float | None = None
    decode_ms: float | None = None
    """The median step."""
    decode_ratio: float = 1.0
    """Time relative to the package with all passes: the median of the ratios of the rounds."""
    prefill_ms: float | None = None
    """The median prompt."""
    prefill_ratio: float = 1.0


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="Default: a random llama of the shape below.")
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--attention", default="gqa")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--passes", nargs="*", help="Default: all that can be left out.")
    parser.add_argument("--rounds", type=int, default=7, help="0: nothing is timed.")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="Keep checkpoint and packages here.")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


SHAPE = {
    "layers": 4,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "attention_heads": 12,
    "key_value_heads": 4,
    "vocabulary": 8192,
}
"""Of the default checkpoint: 34 million parameters."""


def make(folder: Path, asked: argparse.Namespace) -> None:
    """Write a random llama."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=asked.layers,
        hidden_size=asked.hidden_size,
        intermediate_size=asked.intermediate_size,
        num_attention_heads=asked.attention_heads,
        num_key_value_heads=asked.key_value_heads,
        vocab_size=asked.vocabulary,
        max_position_embeddings=4096,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def export(checkpoint: Path, out: Path, asked: argparse.Namespace, without: str | None) -> tuple[dict[str, int], str]:
    """Places that each pass changed, and why nothing was written; empty when it was."""
    command = [sys.executable, "-m", "partita", "export", str(checkpoint), str(out), "--force", "--json"]
    command += ["--attention", asked.attention, "--precision", asked.precision]
    command += ["--max-length", str(max(256, asked.prompt + asked.new_tokens + 16))]
    command += [] if asked.precision in ("int8", "int4") else ["--no-verify"]
    command += [] if without is None else ["--without-pass", without]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    places: dict[str, int] = json.loads(done.stdout)["passes"]
    return places, ""


def optimised(package: Path) -> tuple[int, float]:
    """Nodes of the graph as ONNX Runtime runs it on the CPU provider, and how many of them a layer has."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder) / FILE)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(package / FILE, options, providers=["CPUExecutionProvider"])
        graph = onnx.load(Path(folder) / FILE, load_external_data=False).graph
    layers: dict[str, int] = {}
    for node in graph.node:
        found = next(filter(None, map(LAYER.search, (node.name, *node.output))), None)
        if found is not None:
            layers[found[1]] = layers.get(found[1], 0) + 1
    return len(graph.node), statistics.median(layers.values()) if layers else 0.0


def packages(checkpoint: Path, folder: Path, asked: argparse.Namespace) -> list[Left]:
    """Export with all passes, and without each."""
    from partita.export.passes import check_skipped, optional

    names = asked.passes if asked.passes is not None else optional()
    check_skipped(names)
    places, failed = export(checkpoint, folder / ALL, asked, None)
    if failed:
        raise SystemExit(failed)
    whole = Left(ALL)
    whole.nodes, whole.nodes_per_layer = optimised(folder / ALL)
    found = [whole]
    for name in names:
        made = Left(name, places.get(name, 0))
        _, made.failed = export(checkpoint, folder / name, asked, name)
        if not made.failed:
            made.same = (folder / name / FILE).read_bytes() == (folder / ALL / FILE).read_bytes()
            made.nodes, made.nodes_per_layer = optimised(folder / name)
        found.append(made)
    return found


def timed(found: Sequence[Left], folder: Path, asked: argparse.Namespace) -> None:
    """Add the times of `partita bench`, in whose rounds the packages take turns."""
    there = [each for each in found if not each.failed and not each.same]
    first, *others = [str(folder / each.name) for each in there]
    command = [sys.executable, "-m", "partita", "bench", first, "--provider", "cpu", "--json"]
    command += [word for package in others for word in ("--against", package)]
    command += ["--rounds", str(asked.rounds), "--prompt-tokens", str(asked.prompt)]
    done = subprocess.run([*command, "--max-new-tokens", str(asked.new_tokens)], check=True, stdout=subprocess.PIPE)
    for each, row in zip(there, json.loads(done.stdout)["contenders"], strict=True):
        each.decode_ms = row["decode"]["p50_ms"]
        each.prefill_ms = 1e3 * asked.prompt / row["prefill"]["tokens_per_second"]["median"]
        speeds = {ratio["phase"]: ratio["median"] for ratio in row["ratios"]}
        each.decode_ratio, each.prefill_ratio = (1 / speeds.get(phase, 1.0) for phase in ("decode", "prefill"))


def lines(found: Sequence[Left]) -> list[str]:
    """The table."""
    rows = [HEAD]
    for each in found:
        if each.failed:
            rows.append(f"{each.name:20} {each.failed}")
            continue
        row = f"{each.name:20} {each.nodes:>6} {each.nodes_per_layer:>8.1f}"
        for time, ratio in ((each.decode_ms, each.decode_ratio), (each.prefill_ms, each.prefill_ratio)):
            row += f" {time:>8.2f} {ratio:>6.3f} " if time is not None else f" {'':>8} {'':>6} "
        rows.append(f"{row.rstrip()}  the same graph" if each.same else row.rstrip())
    return rows


def run(folder: Path, asked: argparse.Namespace) -> None:
    """Make what is needed in `folder`, measure, and print."""
    checkpoint = asked.checkpoint or folder / "checkpoint"
    if asked.checkpoint is None and not checkpoint.is_dir():
        shape = [word for name in SHAPE for word in (f"--{name.replace('_', '-')}", str(getattr(asked, name)))]
        subprocess.run([sys.executable, "-m", "benchmarks.passes", "--make", str(checkpoint), *shape], check=True)
    found = packages(checkpoint, folder, asked)
    if asked.rounds:
        timed(found, folder, asked)
    print("\n".join(lines(found)))


def main() -> None:
    """All passes, or a part of the work in a child."""
    asked = arguments()
    if asked.make is not None:
        make(asked.make, asked)
    elif asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
        run(asked.folder, asked)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), asked)


if __name__ == "__main__":
    main()
