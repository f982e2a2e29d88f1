"""`python -m tests.truth.agree [PATHS…] [--types N] [--backend N] [--planted]`: the dry run against a real GPU.

Every package or ONNX model is placed on CUDA twice, on the GPU and over stub libraries, and what the two reports say is
compared: nodes and their providers, copies and their bytes, where the cache is, and the reasons of what fell back.
`make test-cuda` does it for a few packages; this is for as many as time allows. Prints what differs, a line each, and
exits with 1 when something does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.contract.commands import variables
from tests.contract.plans import differences

PLACE_SECONDS = 120
LATE = "no end after"
EXPORT_SECONDS = 300
Work = tuple[str, Callable[[], Path | None], tuple[str, ...]]
"""A name, what gives the package or model, and options of `place`."""
COMBINATIONS = (
    ("gqa", "fp16"),
    ("gqa", "int4"),
    ("onnx24", "fp32"),
    ("gqa", "bf16"),
    ("onnx24", "int4"),
    ("primitives", "fp16"),
    ("gqa", "int8"),
)
"""Lowering and precision: each type is exported in the next one of these."""


@dataclass(frozen=True)
class Agreement:
    """What came of one model."""

    name: str
    plan: tuple[str, ...] = ()
    """What the reports do not agree on, a line each."""
    reasons: tuple[str, ...] = ()
    """Nodes with another reason."""
    problem: str = ""
    """Why there is nothing to compare."""
    nodes: int = 0
    refused: bool = False
    """Both refuse it, and say the same."""


def agreement(name: str, path: Path, folder: Path, device: str, *given: str) -> Agreement:
    """Both reports of one package or model, placed with further options."""
    folder.mkdir(parents=True, exist_ok=True)
    real, dry = (
        _placed(path, folder / f"{side}.json", *given, *extra)
        for side, extra in (("real", ()), ("dry", ("--dry-run", "--device", device)))
    )
    if isinstance(real, str) or isinstance(dry, str):
        both = [report if isinstance(report, str) else "a report" for report in (real, dry)]
        alike = both[0] == both[1] and not both[0].startswith(LATE)
        return Agreement(name, problem="" if alike else f"real: {both[0]}; dry run: {both[1]}", refused=alike)
    said = [f"{report['chain'][0]['status']} {report['chain'][0]['reason']}" for report in (real, dry)]
    if said[0] != said[1]:
        return Agreement(name, problem=f"real: {said[0]}; dry run: {said[1]}"[:600])
    nodes = sum(len(phase["nodes"]) for phase in real["phases"])
    return Agreement(name, tuple(differences(real, dry)), tuple(_unlike_reasons(real, dry)), nodes=nodes)


def _placed(path: Path, report: Path, *extra: str) -> dict[str, Any] | str:
    """The report of a placement, or how the command ended without one."""
    command = ["-m", "partita", "place", str(path), "--provider", "cuda,cpu", "--runs", "1", "--report", str(report)]
    try:
        done = subprocess.run(
            [sys.executable, *command, *extra],
            env=variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PLACE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"{LATE} {PLACE_SECONDS} s"
    if not report.exists():
        return f"exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def _unlike_reasons(real: dict[str, Any], dry: dict[str, Any]) -> Iterator[str]:
    """A line for each node whose reason differs."""
    ran, foretold = (
        {(row["node"], row["phase"]): row["reason"] for row in report["fallbacks"]} for report in (real, dry)
    )
    for key in sorted(ran.keys() | foretold.keys(), key=str):
        if ran.get(key) != foretold.get(key):
            yield f"{key[0]}: {ran.get(key, 'no reason')} really, {foretold.get(key, 'no reason')} in the dry run"


def exported(model_type: str, number: int, folder: Path) -> Path | None:
    """The package of a tiny checkpoint; None where it cannot be exported that way."""
    lowering, precision = COMBINATIONS[number % len(COMBINATIONS)]
    package = folder / f"{model_type}-{lowering}-{precision}"
    script = (
        "import sys, pathlib, torch; torch.set_num_threads(1); from tests.export.breadth import recipes; "
        "folder = pathlib.Path(sys.argv[1]); folder.mkdir(); recipes.save(folder, sys.argv[2]); "
        "from partita.cli import main; sys.argv = ['partita', 'export', str(folder), sys.argv[3], "
        "'--attention', sys.argv[4], '--precision', sys.argv[5], '--max-length', '64', *sys.argv[6:]]; main()"
    )
    checkpoint = folder / f"checkpoint-{model_type}"
    # Packed weights are written with their quality, which takes the original model.
    fast = () if precision.startswith("int") else ("--no-verify",)
    try:
        subprocess.run(
            [sys.executable, "-c", script, str(checkpoint), model_type, str(package), lowering, precision, *fast],
            env={**variables(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=EXPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    return package if package.is_dir() else None


def backend(count: int, folder: Path) -> list[Work]:
    """Some of the models of the onnx package's backend tests."""
    from tests.truth.models import names, sample

    models = names()

    def written(name: str) -> Callable[[], Path]:
        def write() -> Path:
            path = folder / "models" / name.replace("/", "-") / "model.onnx"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(models[name])
            return path

        return write

    return [(name, written(name), ()) for name in sample(models, count)]


def planted(folder: Path) -> list[Work]:
    """The planted graphs of CUDA and their controls, where nothing but the graph is planted."""
    from tests.planted.cases import CASES
    from tests.planted.graphs import save

    found: dict[object, Work] = {}
    for case in CASES:
        for kind, run in (("planted", case.run), ("control", case.control)):
            if case.provider == "cuda" and run and run.dry_run:
                path = folder / "planted" / f"{case.name}-{kind}.onnx"
                path.parent.mkdir(parents=True, exist_ok=True)
                options = tuple(f"--provider-option=cuda.{key}={value}" for key, value in run.options.items())
                found[run.model, options, case.arguments] = (
                    path.stem,
                    lambda model=run.model, path=path: save(model, path),  # type: ignore[misc]
                    (*options, *case.arguments),
                )
    return list(found.values())


def main(arguments: Sequence[str]) -> int:
    """Print what differs, and the totals."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth.agree")
    parser.add_argument("paths", nargs="*", type=Path, help="packages or ONNX models, or folders of packages")
    parser.add_argument("--types", type=int, default=0, help="export and place so many model types, spread evenly")
    parser.add_argument("--backend", type=int, default=0, help="so many models of onnx's backend tests")
    parser.add_argument("--planted", action="store_true", help="the planted graphs of CUDA")
    parser.add_argument("--device", default="h100", help="what the dry run simulates; the GPU that is there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing new after that")
    parser.add_argument("--keep", type=Path, help="leave packages, models and reports in this folder")
    parser.add_argument("--json", type=Path, help="keep what was found there")
    chosen = parser.parse_args(arguments)
    until = time.monotonic() + chosen.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = chosen.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        work: list[Work] = []
        for path in chosen.paths:
            inner = sorted(entry.parent for entry in path.glob("*/manifest.json")) or [path]
            work += [(each.name, lambda each=each: each, ()) for each in inner]  # type: ignore[misc]
        if chosen.types:
            from tests.export.breadth.recipes import IMPOSSIBLE
            from tests.export.breadth.records import all_types

            types = [each for each in all_types() if each not in IMPOSSIBLE]
            step = max(len(types) / chosen.types, 1.0)
            spread = [types[int(position * step)] for position in range(min(chosen.types, len(types)))]
            work += [
                (each, lambda each=each, number=number: exported(each, number, folder), ())  # type: ignore[misc]
                for number, each in enumerate(spread)
            ]
        if chosen.planted:
            work += planted(folder)
        if chosen.backend:
            work += backend(chosen.backend, folder)

        def one(position: int) -> Agreement | None:
            title, make, given = work[position]
            if time.monotonic() > until:
                return None
            path = make()
            if path is None:
                return Agreement(title, problem="not exported")
            return agreement(
                path.name if path.is_dir() else title, path, folder / f"reports-{position}", chosen.device, *given
            )

        with ThreadPoolExecutor(chosen.jobs) as pool:
            found = [entry for entry in pool.map(one, range(len(work))) if entry is not None]
    return _tell(found, len(work), chosen.json)


def _tell(found: Sequence[Agreement], asked: int, path: Path | None) -> int:
    """Print it, keep it, and say whether everything agrees."""
    exported_ones = [entry for entry in found if entry.problem != "not exported"]
    lines = [
        f"{entry.name}: {line}"
        for entry in exported_ones
        for line in (*entry.plan, *entry.reasons, entry.problem)
        if line
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    compared = [entry for entry in exported_ones if not entry.refused]
    same = sum(not (entry.plan or entry.problem) for entry in compared)
    reasons = sum(not (entry.reasons or entry.problem) for entry in compared)
    sys.stdout.write(
        f"{len(found)} of {asked} were tried, {len(found) - len(exported_ones)} not exported, "
        f"{len(exported_ones) - len(compared)} refused alike; of {len(compared)} reports the plan is the same in "
        f"{same} ({sum(entry.nodes for entry in compared)} nodes), the reasons in {reasons}\n"
    )
    if path:
        path.write_text(json.dumps([asdict(entry) for entry in found], indent=1), encoding="utf-8")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
