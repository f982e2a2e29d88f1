"""Runs a planted case through the command line, and says whether what it answers is the truth.

One `partita place` per case, all of an environment in one batch; plain ONNX Runtime is asked about all of its graphs at
once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.diagnosis.probe_conclusions import ALONE, WITH_NEG
from partita.observations.facts import AS_IS
from tests.conftest import REPOSITORY
from tests.contract.commands import COMMAND_SECONDS, variables
from tests.planted.cases import NO_FALLBACK, Case, Run
from tests.planted.graphs import save

CONFIGURED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("cuda", "memory_budget_kb"): ("session.resource_cuda_partitioning_settings", "{},"),
}
"""Provider and option of Partita's -> entry of the session's configuration, and how it is written."""
PLUGIN = Path(__file__).with_name("failing_plugin.c")
"""A provider library that loads and gives an error."""
ORT_NAMES: Mapping[str, str] = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "qnn": "QNNExecutionProvider",
}
WHEELS: Mapping[tuple[str, str], str] = {
    ("qnn", "qnn"): "onnxruntime_qnn",
    ("plugins", "openvino"): "onnxruntime_ep_openvino",
    ("plugins", "webgpu"): "onnxruntime_ep_webgpu",
}
"""Environment and provider -> module of the wheel that carries its library."""
OPTION_PREFIX: Mapping[tuple[str, str], str] = {("webgpu", "webgpu"): "ep.webgpuexecutionprovider."}
"""Where options are entries of the session's configuration."""
BATCH_SECONDS = 600
SECONDS_PER_COMMAND = 10
"""So much more for each: a machine may have other work."""
RAW = Path(__file__).with_name("raw.py")
UNLISTED = {("webgpu", "webgpu")}
"""Environments and providers whose own nodes are not in the list."""


@dataclass(frozen=True)
class Outcome:
    """How `partita place` ended."""

    code: int
    report: dict[str, Any] | None
    err: str


@dataclass(frozen=True)
class Verdict:
    """What came of a case."""

    case: Case
    reason: str
    """The code that was given, or why there is none."""
    kind: str = ""
    evidence: str = ""
    remedy: str = ""
    variants: tuple[str, ...] = ()
    message: str = ""
    """What the command wrote when it gave no code."""
    neg_added: bool | None = None
    """Whether something stood beside the node when it was tried as it is; None where it was not."""

    @property
    def wrong(self) -> str:
        """What is not, in one line."""
        if self.reason != self.case.expected:
            return f"{self.reason} in place of {self.case.expected}"
        if self.case.expected == NO_FALLBACK:
            return ""
        if self.kind not in self.case.kinds:
            return f"evidence is {self.kind}, which cannot show it"
        if self.case.sentence not in self.evidence:
            return f"the evidence does not say {self.case.sentence!r}"
        if self.neg_added is not None and (ALONE if self.neg_added else WITH_NEG) in self.evidence:
            return f"the node was tried {'in company' if self.neg_added else 'alone'}, and the evidence says otherwise"
        return "" if self.evidence and self.remedy else "it comes without evidence or remedy"


def dry_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a process that sees stub CUDA libraries."""
    from partita.providers.cuda_dry_run.devices import DEFAULT_DEVICE, device
    from partita.providers.cuda_dry_run.stub_build import child_environment, prepare, provider_library

    return child_environment(prepare(provider_library()), device(DEFAULT_DEVICE), base)


def compile_library(definition: str, folder: Path) -> Path:
    """The plugin that fails, compiled with a definition."""
    compiler = next(name for name in ("cc", "gcc", "clang") if shutil.which(name))
    path = folder / f"lib{definition.replace('=', '')}.so"
    subprocess.run([compiler, "-shared", "-fPIC", f"-D{definition}", "-o", path, PLUGIN], check=True)
    return path


def pretend_wheel(site: Path, name: str, version: str) -> None:
    """The metadata of a wheel of ONNX Runtime, as pip leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "RECORD").write_text("onnxruntime/__init__.py,sha256=x,1\n", encoding="utf-8")


def place_arguments(case: Case, run: Run, model: Path, folder: Path) -> list[str]:
    """`partita place` on this case."""
    options = [f"--provider-option={case.provider}.{key}={value}" for key, value in run.options.items()]
    library = [f"--provider-library={case.provider}={compile_library(run.library, folder)}"] if run.library else []
    dry = ["--dry-run"] if run.dry_run else []
    return [
        "place",
        str(model),
        "--provider",
        f"{case.provider},cpu",
        "--json",
        "--runs",
        "1",
        *options,
        *library,
        *dry,
        *case.arguments,
    ]


def command(case: Case, folder: Path) -> dict[str, Any]:
    """What `batch.py` is to run for a case."""
    site = folder / "site"
    folder.mkdir(parents=True)
    if case.two_wheels:
        pretend_wheel(site, *case.two_wheels.split(" "))
    path = [str(site)] if case.two_wheels else []
    found = {**variables(), **case.run.variables}
    return {
        "folder": str(folder),
        "arguments": place_arguments(case, case.run, save(case.run.model, folder / "model.onnx"), folder),
        "variables": {**found, "PYTHONPATH": os.pathsep.join([*path, found["PYTHONPATH"]])},
        "path": path,
    }


def outcomes(cases: Iterable[Case], folder: Path) -> dict[str, Outcome]:
    """How the runs of all cases ended, by what is run; cases that share a run are run once."""
    runs = {case.command: command(case, folder / case.name) for case in {c.command: c for c in cases}.values()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.planted.batch"],
        input=json.dumps(list(runs.values())),
        cwd=REPOSITORY,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=BATCH_SECONDS + SECONDS_PER_COMMAND * len(runs),
        check=True,
    )
    return {
        key: Outcome(one["code"], json.loads(one["out"]) if one["out"].startswith("{") else None, one["err"][-1000:])
        for key, one in zip(runs, json.loads(done.stdout), strict=True)
    }


def judge(case: Case, outcome: Outcome) -> Verdict:
    """What the report says of the planted node."""
    if outcome.report is None or "fallbacks" not in outcome.report:
        return Verdict(case, f"no report, exit code {outcome.code}", message=outcome.err)
    if case.expected == NO_FALLBACK:
        return judge_whole(case, outcome.report)
    fallbacks = outcome.report["fallbacks"]
    row = next((row for row in fallbacks if names(case, row["node"], row["op_type"])), None)
    if row is None:
        told = [f"{row['node']} ({row['op_type']}): {row['reason']}" for row in fallbacks]
        return Verdict(case, "no reason given for the node", message=f"reasons: {told}; {outcome.err}")
    trials = tuple(f"{trial['factor']} {trial['change']}: {trial['outcome']}" for trial in row["variants"])
    company = next((trial["neg_added"] for trial in row["variants"] if trial["factor"] == AS_IS), None)
    return Verdict(case, row["reason"], row["evidence_kind"], row["evidence"], row["remedy"], trials, neg_added=company)


def judge_whole(case: Case, report: Mapping[str, Any]) -> Verdict:
    """Whether the report has all of the graph on the provider, and adds up."""
    told = [f"{row['node']} ({row['op_type']}): {row['reason']}" for row in report["fallbacks"]]
    told += [f"check failed: {check['name']}" for check in report["checks"] if not check["passed"]]
    told += [f"sources disagree on {entry['node']}" for entry in report["conflicts"]]
    wanted = report["summary"]["preferred_provider"]
    told += [
        f"{node['name']} on {node['provider']}"
        for phase in report["phases"]
        for node in phase["nodes"]
        if node["provider"] != wanted
    ]
    return Verdict(case, "a fallback" if told else NO_FALLBACK, message="; ".join(told))


def names(case: Case, name: str, op_type: str | None) -> bool:
    """Whether this is the planted node."""
    return name == case.node if case.node else op_type == case.op_type


def raw_request(case: Case, run: Run, model: Path, folder: Path) -> dict[str, Any]:
    """What plain ONNX Runtime is asked."""
    key = (case.environment, case.provider)
    options, config = dict(run.options), {}
    for name in run.options:
        entry, how = CONFIGURED.get((case.provider, name), (OPTION_PREFIX.get(key, "") + name, "{}"))
        if entry != name:
            config[entry] = how.format(options.pop(name))
    return {
        "model": str(model),
        "provider": ORT_NAMES[case.provider],
        "wheel": WHEELS.get(key, ""),
        "library": str(compile_library(run.library, folder)) if run.library else "",
        "options": options,
        "config": config,
    }


def plainly(cases: Iterable[Case], folder: Path) -> dict[tuple[str, bool], str]:
    """Where plain ONNX Runtime has the node of each case: by name, and whether it is the control.

    `taken`, `left`, or why there is no session.
    """
    groups: dict[tuple[Any, ...], list[tuple[Case, bool, dict[str, Any]]]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        for control, run in ((False, case.run), (True, case.control)):
            if run is not None:
                model = save(run.model, folder / f"{case.name}-{'control' if control else 'planted'}.onnx")
                key = (run.dry_run, tuple(run.variables.items()))
                groups.setdefault(key, []).append((case, control, raw_request(case, run, model, folder)))
    answers: dict[tuple[str, bool], str] = {}
    for (dry, extra), asked in groups.items():
        base = {**variables(), **dict(extra)}
        told = ask_plainly([request for _, _, request in asked], dry_environment(base) if dry else base)
        for (case, control, _), one in zip(asked, told, strict=True):
            answers[case.name, control] = placement(case, one)
    return answers


def ask_plainly(requests: Sequence[dict[str, Any]], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Answers of `raw.py`."""
    done = subprocess.run(
        [sys.executable, RAW],
        input=json.dumps(requests),
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS + SECONDS_PER_COMMAND * len(requests),
        check=True,
    )
    return json.loads(done.stdout)


def placement(case: Case, answer: Mapping[str, Any]) -> str:
    """Where the node of a case is.

    WebGPU's own nodes are missing from the list of 1.27, those of the CPU never. A node that changed its layout has a
    new name that begins with the old one.
    """
    if "error" in answer:
        return str(answer["error"])
    if case.expected == NO_FALLBACK:
        return f"{answer['cpu']} left" if answer["cpu"] else "supported"
    case = replace(case, node=case.plain_node or case.node)
    if any(names(case, name, op) for name, op in answer["cpu"]):
        return "rejected"
    listed = [(re.sub(r"_token_\d+$", "", name), op) for name, op in answer["elsewhere"]]
    if any(names(case, name, op) for name, op in listed) or (case.environment, case.provider) in UNLISTED:
        return "supported"
    return "not in the list of nodes"
