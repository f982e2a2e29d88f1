"""Recorded facts of real runs, and the report of each: `python -m tests.recordings.runs record|golden [NAMES]`.

`record` repeats runs in the environments of `make envs` and writes `facts/NAME.json.gz`; `golden` writes the reports of
the recorded facts to `golden/NAME.txt`, which `test_golden.py` compares. A planted run is the case of tests/planted of
that name, a package that of tests/contract.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from partita.partition_reports.records import Report
from partita.partition_reports.render.show import load_view
from tests.conftest import REPOSITORY
from tests.docs.recordings import rebuilt

HERE = Path(__file__).parent
FACTS, GOLDEN = HERE / "facts", HERE / "golden"
PLANTED = (
    # Control flow and functions.
    *("cuda-asin-in-a-branch", "cuda-atan-in-a-branch-of-a-branch", "cuda-cosh-in-a-loop"),
    *("cuda-gather-nd-int32-in-a-scan", "cuda-function-called-twice", "cuda-function-with-a-branch"),
    *("cuda-function-clip-int32", "cuda-sequence-map", "cuda-if-in-an-if"),
    *("webgpu-softsign-in-a-loop", "webgpu-functions-with-nodes-of-one-name", "webgpu-group-norm-unfolded"),
    *("openvino-loop", "openvino-if-around", "qnn-in-a-loop", "qnn-function-unfolded"),
    *("cuda-function-with-a-loop", "cuda-int32-in-a-branch-that-is-always-taken", "webgpu-local-function-twice"),
    *("openvino-local-function", "qnn-local-function", "webgpu-bernoulli-in-a-branch", "cuda-centre-crop-sizes"),
    *("cuda-centre-crop-sizes-in-a-branch", "cuda-grid-sample-half-after-group-norm"),
    # Fusion, layouts, copies and nodes that ONNX Runtime added.
    *("cuda-vision-net-in-blocks", "cuda-fused-conv-leaky-in-blocks", "cuda-pinned-and-fused", "cuda-inserted-cast"),
    *("cuda-blocks-inserted", "cuda-channels-last", "webgpu-layout-transpose-25", "webgpu-inserted-cast"),
    *("webgpu-inserted-quantize", "cuda-capture-with-a-gap", "cuda-fused-conv-one-of-two"),
    # Kernels, types, versions, sizes and budgets.
    *("cuda-celu", "cuda-gqa-fp32", "cuda-shape-arithmetic", "cuda-over-budget", "cuda-selu-of-two"),
    *("webgpu-two-culprits-operator", "webgpu-clip-6", "webgpu-range-int64", "webgpu-attention-with-mask"),
    # Compiled partitions.
    *("openvino-gqa", "openvino-attention-24-neighbour", "openvino-pad-wrap", "openvino-topk-after-a-gap"),
    *("openvino-whole-topk-by-default", "qnn-cumsum-neighbour", "qnn-quantise-output", "qnn-empty"),
    *("qnn-gelu-of-parts-beside-a-compiled-part", "qnn-group-of-two-types"),
    # Providers that do not start.
    *("main-cuda-libraries", "webgpu-no-adapter", "openvino-no-gpu", "qnn-plugin-with-an-error"),
)
PROMPT = ("1,45,7,99,12,3", "--token-ids", "--max-new-tokens", "4", "--report", "report.json")
PACKAGES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "generate-cpu": ("main", "llama-gqa-fp32", ("generate", *PROMPT, "--provider", "cpu")),
    "generate-webgpu": ("webgpu", "llama-onnx24-fp32", ("generate", *PROMPT, "--provider", "webgpu,cpu")),
    "generate-openvino": ("openvino", "llama-primitives-fp32", ("generate", *PROMPT, "--provider", "openvino,cpu")),
    "generate-qnn": ("qnn", "demo-primitives-fp16-static", ("generate", *PROMPT, "--provider", "qnn,cpu")),
    "place-cuda": ("main", "qwen3-primitives-fp32", ("place", "--provider", "cuda,cpu", "--dry-run", "--json")),
}
"""Environment, package and command of each run of a package."""
NAMES = (*PLANTED, *PACKAGES)
TO = "PARTITA_RECORD_TO"
SECONDS = 300


def record(name: str) -> None:
    """Repeat a run and keep its facts, without names of folders of this machine. Raises RuntimeError without facts."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        python, arguments, variables = command(name, folder)
        to = Path(temporary) / "facts.json"
        paths = os.pathsep.join([str(HERE / "site"), variables.get("PYTHONPATH", str(REPOSITORY))])
        done = subprocess.run(
            [python, "-m", "partita", *arguments],
            cwd=folder,
            env={**variables, "PYTHONPATH": paths, TO: str(to), "PARTITA_CACHE_DIR": temporary},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if not to.exists():
            raise RuntimeError(f"{name}: no report was built:\n{done.stderr[-1000:]}")
        text = to.read_text(encoding="utf-8").replace(f"{folder}/", "").replace(temporary, "/tmp")
    text = text.replace(str(REPOSITORY), "/partita")
    FACTS.mkdir(exist_ok=True)
    (FACTS / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def command(name: str, folder: Path) -> tuple[str, Sequence[str], dict[str, str]]:
    """Python, arguments and environment variables of a run; its folder is made."""
    from tests.contract.commands import variables
    from tests.contract.packages import ensure_packages
    from tests.planted import judge
    from tests.planted.cases import CASES

    if name in PACKAGES:
        environment, package, (verb, *words) = PACKAGES[name]
        folder.mkdir()
        path = ensure_packages(REPOSITORY / "build" / "contract") / package
        return python_of(environment), (verb, str(path), *words), variables()
    case = next(case for case in CASES if case.name == name)
    found = judge.command(case, folder)
    return python_of(case.environment), found["arguments"], found["variables"]


def python_of(environment: str) -> str:
    """The Python of an environment."""
    return sys.executable if environment == "main" else str(REPOSITORY / ".venvs" / environment / "bin" / "python")


def report(name: str) -> Report:
    """The report of recorded facts."""
    found = json.loads(gzip.decompress((FACTS / f"{name}.json.gz").read_bytes()))
    return rebuilt({**found, "created": "2026-11-29T00:00:00Z"})


def golden(made: Report) -> str:
    """The brief of a report (of a package the whole text), then nodes and copies of its last phase, and fallbacks."""
    view = "text" if made.package is not None else "brief"
    return "\n".join([load_view(view).to_text(made).rstrip(), "", *lines(made)]) + "\n"


def lines(made: Report) -> Iterator[str]:
    """Facts of a report in words."""
    for phase in made.phases[-1:]:
        yield f"{phase.name} of {phase.file}"
        for node in phase.nodes:
            replaces = f" <- {' '.join(node.replaces)}" if node.replaces else ""
            yield f"  {node.name} ({node.op_type}): {node.provider}{replaces}"
        for copy in phase.copies:
            yield f"  copy {copy.name}: {copy.tensor} {copy.direction}"
    for entry in made.fallbacks:
        yield f"{entry.phase} fallback {entry.node} ({entry.op_type}): {entry.provider}"
        for skipped in entry.preferred:
            yield f"  not on {skipped.provider}: {skipped.reason} ({skipped.evidence_kind}): {skipped.evidence}"
    for check in made.checks:
        if not check.passed:
            yield f"failed check {check.name}: {check.detail}"


def main() -> None:
    """Record runs or write golden reports."""
    action, *names = sys.argv[1:]
    for name in names or NAMES:
        if action == "record":
            try:
                record(name)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                sys.stdout.write(f"{error}\n")
                continue
        else:
            GOLDEN.mkdir(exist_ok=True)
            (GOLDEN / f"{name}.txt").write_text(golden(report(name)), encoding="utf-8")
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
