"""Placement and reasons of models that nobody here chose, compared with plain ONNX Runtime and with the support table.

A model is placed by `partita place`, with experiments, and opened by `raw.py`, which knows nothing of Partita. They
have to agree on which operators the CPU provider has; no answer may be an internal error; and an operator of which a
node is said to have no kernel may not be in the measured support table of the provider.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.contract.commands import variables
from tests.planted.batch import FORKED
from tests.planted.judge import ORT_NAMES, RAW, WHEELS, dry_environment

CPU = "CPUExecutionProvider"
SECONDS_PER_MODEL = 30
AT_ONCE = 25
"""Models that share the start of a process; what is lost when a run is interrupted."""
BRIEFLY = ("--runs", "1", "--run-seconds", "10")
FAULTS = ("internal error", "Traceback (most recent call last)")


@dataclass(frozen=True)
class Compared:
    """What came of one model."""

    name: str
    plain: str
    """`opens`, or why plain ONNX Runtime does not open it with the provider."""
    reported: str
    """`a report`, or how the command ended without one."""
    problem: str
    """What does not agree; empty when everything does."""
    fallbacks: tuple[tuple[str, str], ...] = ()
    """(operator, reason) of each."""
    opset: int = 0
    """Of ONNX's own operators in the model."""


def compare(models: Mapping[str, bytes], environment: str, provider: str, folder: Path) -> Iterator[Compared]:
    """Every model on `provider,cpu`; CUDA as a dry run."""
    listed = list(models)
    for start in range(0, len(listed), AT_ONCE):
        part = {name: models[name] for name in listed[start : start + AT_ONCE]}
        try:
            yield from _together(part, environment, provider, folder / str(start))
        except subprocess.SubprocessError:
            # Whose fault it is shows alone.
            for number, (name, raw) in enumerate(part.items()):
                try:
                    yield from _together({name: raw}, environment, provider, folder / f"{start}-{number}")
                except subprocess.SubprocessError as error:
                    yield Compared(name, "?", "no end", f"{type(error).__name__}: {error}"[:300])


def _together(models: Mapping[str, bytes], environment: str, provider: str, folder: Path) -> list[Compared]:
    """Some models, each side in one process. Raises subprocess.SubprocessError where one of them does not end well."""
    dry = provider == "cuda"
    chain, extra = ("cpu" if provider == "cpu" else f"{provider},cpu"), ["--dry-run"] if dry else []
    opening, placing = [], []
    for name, raw in models.items():
        path = folder / name.replace("/", "-") / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(raw)
        request = {"model": str(path), "library": "", "options": {}, "config": {}}
        request |= {"provider": ORT_NAMES.get(provider, CPU), "wheel": WHEELS.get((environment, provider), "")}
        opening.append(request)
        words = ["place", str(path), "--provider", chain, "--json", *BRIEFLY, *_sizes(path), *extra]
        placing.append({"folder": str(path.parent), "arguments": words, "variables": variables(), "path": []})
    used = dry_environment(variables()) if dry else variables()
    plain = _answers([sys.executable, str(RAW)], opening, used)
    batch = [sys.executable, "-m", "tests.planted.batch", *([FORKED] if dry else [])]
    ended = _answers(batch, placing, used)
    return [_compared(name, *both) for name, both in zip(models, zip(plain, ended, strict=True), strict=True)]


def _sizes(path: Path) -> list[str]:
    """Sizes for the dimensions of inputs that a model only names: 2, 3, ... in the order in which it names them."""
    from onnx import load

    inputs = load(str(path)).graph.input
    tensors = [entry.type.tensor_type for entry in inputs if entry.type.HasField("tensor_type")]
    names = dict.fromkeys(size.dim_param for tensor in tensors for size in tensor.shape.dim if size.dim_param)
    return [word for size, name in enumerate(names, 2) for word in ("--shape", f"{name}={size}")]


def _answers(
    command: Sequence[str], requests: Sequence[dict[str, Any]], environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What a process answers to a list of requests."""
    done = subprocess.run(
        command,
        input=json.dumps(requests),
        cwd=REPOSITORY,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=60 + SECONDS_PER_MODEL * len(requests),
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def _compared(name: str, plain: Mapping[str, Any], ended: Mapping[str, Any]) -> Compared:
    """One model."""
    opens = str(plain.get("error", "opens"))
    report = json.loads(ended["out"]) if ended["out"].startswith("{") else {}
    fault = next((text for text in FAULTS if text in ended["err"] or text in ended["out"]), "")
    if fault:
        return Compared(name, opens, f"exit code {ended['code']}", f"{fault}: {ended['err'][-300:]}")
    if ended["code"] < 0:
        return Compared(name, opens, f"exit code {ended['code']}", "the command itself was killed by a signal")
    if "phases" not in report:
        problem = "plain ONNX Runtime opens it" if opens == "opens" else ""
        said = report.get("error", {}).get("message", "") or ended["err"][-300:]
        return Compared(name, opens, f"exit code {ended['code']}: {said}", problem)
    rows = tuple((row["op_type"] or "?", row["reason"]) for row in report["fallbacks"])
    opset = report["model"]["opsets"].get("", report["model"]["opsets"].get("ai.onnx", 0))
    return Compared(name, opens, "a report", "; ".join(_conflicts(plain, report)), rows, opset)


def _conflicts(plain: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """What a report says otherwise than plain ONNX Runtime, or than itself."""
    if "error" not in plain and report["chain"][0]["status"] == "active":
        # What ONNX Runtime rewrote after it had placed the nodes has other names on both sides.
        on_cpu, elsewhere = ({name for name, _ in plain[side]} for side in ("cpu", "elsewhere"))
        for node in (node for phase in report["phases"] for node in phase["nodes"]):
            other = elsewhere if node["provider"] == CPU else on_cpu
            if node["name"] in other and node["name"] not in (on_cpu & elsewhere):
                yield f"{node['name']} ({node['op_type']}) is said to be on {node['provider']}, and is not"
        told = any(node["provider"] == CPU for phase in report["phases"] for node in phase["nodes"])
        if bool(on_cpu) != (told or bool(report["fallbacks"])):  # nodes in bodies are in no phase's list
            yield f"on the CPU are {sorted(on_cpu)}, which the report has otherwise"
    first = report["chain"][0]
    if "error" not in plain and first["status"] != "active" and not _all_on_cpu(plain, report):
        yield f"plain ONNX Runtime opens it with the provider; the report: {first['reason']}: {first['evidence']}"
    if "error" in plain and first["status"] == "active":
        yield f"plain ONNX Runtime does not open it with the provider: {plain['error'][:200]}"
    yield from (f"check failed: {check['name']}" for check in report["checks"] if not check["passed"])
    yield from (f"sources disagree on {entry['node']}" for entry in report["conflicts"])
    for row in report["fallbacks"]:
        if not row["evidence"] and row["reason"] != "unexplained":
            yield f"{row['node']}: {row['reason']} without evidence"


def _all_on_cpu(plain: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether plain ONNX Runtime, too, has no node on the provider, although it has it in the session.

    An opset for which no layout can be changed keeps it from every node; those of the CPU then have other names.
    """
    everything = {node["name"] for phase in report["phases"] for node in phase["nodes"]}
    listed = {name for name, _ in plain["cpu"]}
    kept_away = report["chain"][0]["reason"] == "version_mismatch" and bool(listed) and not plain["elsewhere"]
    return kept_away or everything <= listed


def contradicted(compared: Sequence[Compared], provider: str, folder: Path) -> dict[str, str]:
    """Models with a node that is said to have no kernel for its operator, although the provider's support table has
    that version of the operator taken as itself in some form; and in which types.
    """
    lacking = sorted({op for entry in compared for op, reason in entry.fallbacks if reason == "no_kernel_op"} - {"?"})
    if not lacking:
        return {}
    out = folder / "support.json"
    dry = ["--dry-run"] if provider == "cuda" else []
    subprocess.run(
        [sys.executable, "-m", "partita", "support", *lacking, "--provider", provider, "--out", str(out), *dry],
        cwd=REPOSITORY,
        env=variables(),
        capture_output=True,
        check=True,
    )
    table = {
        entry["name"]: entry["versions"] for entry in json.loads(out.read_text())["operators"] if not entry["domain"]
    }
    found: dict[str, str] = {}
    for entry in compared:
        for operator in {op for op, reason in entry.fallbacks if reason == "no_kernel_op"}:
            fitting = [version for version in table.get(operator, []) if version["since"] <= entry.opset]
            types = fitting[-1]["types"] if fitting else {"supported": [], "replaced": []}
            taken = [kinds for kinds in types["supported"] if kinds not in types["replaced"]]
            if taken:
                found[entry.name] = f"{operator} is taken in {taken[:3]}"
    return found
