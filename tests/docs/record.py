"""Record anew what the pages show: `python -m tests.docs.record [NAMES]`, from the repository, in the main environment.

What the main environment has: exports for the CPU and for CUDA, the known answer, the quality of int4, and dry runs.
`python -m tests.docs.update` then writes the pages.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import TypeAdapter

from tests.conftest import DEMO_CHECKPOINT, REPOSITORY
from tests.docs.recordings import RECORDED

EXPORTS: dict[str, tuple[str, ...]] = {
    "export_demo": ("build/demo/package",),
    "export_onnx24": ("package-onnx24", "--attention", "onnx24"),
    "export_int4": ("package-int4", "--precision", "int4"),
    "export_cuda": ("build/for-cuda", "--target", "cuda"),
}
"""Of each export, its folder and options."""
DRY = {"fp32": (), "fp16": ("--precision", "fp16")}


def write(name: str, found: dict[str, Any]) -> None:
    """Keep a recording; the same facts are the same bytes."""
    text = json.dumps(found, separators=(",", ":"), sort_keys=True)
    (RECORDED / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def verb(*words: str) -> dict[str, Any]:
    """What a verb prints with --json. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "partita", *words, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def export(folder: str, *options: str) -> dict[str, Any]:
    """Export the embedded checkpoint into a folder below the current one."""
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    return verb("export", str(DEMO_CHECKPOINT), folder, "--force", *options)


@contextlib.contextmanager
def seen() -> Iterator[list[dict[str, Any]]]:
    """Everything that reports are built of while this lasts, as JSON."""
    from partita.library import run_report
    from partita.observations.facts import RunFacts
    from partita.partition_reports.build import build_report

    built: list[dict[str, Any]] = []

    def listen(facts: RunFacts, **given: Any) -> Any:
        made = build_report(facts, **given)
        built.append(
            {
                "facts": TypeAdapter(RunFacts).dump_python(facts, mode="json"),
                "created": given["created"],
                "partita_version": given["partita_version"],
                "limits": dict.fromkeys(("max_cpu_nodes", "max_copies", "max_copy_bytes_per_token")),
                "model": None,
                **{name: record and record.model_dump(mode="json") for name, record in of_report(given).items()},
                "chain": [entry.model_dump(mode="json") for entry in given["chain"]],
            }
        )
        return made

    with mock.patch.object(run_report, "build_report", listen):
        yield built


def of_report(given: dict[str, Any]) -> dict[str, Any]:
    """The records that a report is built of."""
    return {name: given.get(name) for name in ("environment", "package", "request", "played")}


def dry(name: str) -> None:
    """Place `package` as CUDA on an H100 would, in this process, whose environment points at stub libraries."""

    from partita.library.chain import read_chain
    from partita.library.place.place_run import place
    from partita.options.placement import PlaceOptions

    options = PlaceOptions(Path("package"), "cuda,cpu", dry_run=True, device="h100")
    with seen() as built:
        place(options, read_chain(options))
    write(name, built[0])


def dry_in_child(name: str, options: tuple[str, ...]) -> None:
    """Export `package`, and place it in a process whose loader finds the stub libraries."""
    from partita.providers.cuda_dry_run.devices import device
    from partita.providers.cuda_dry_run.stub_build import child_environment, prepare, provider_library

    export("package", *options)
    environment = child_environment(prepare(provider_library()), device("h100"), os.environ)
    code = f"from tests.docs.record import dry; dry({name!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, "PYTHONPATH": str(REPOSITORY)})


def evaluate() -> dict[str, Any]:
    """The quality of `package-int4` on the CPU provider."""
    export(*EXPORTS["export_int4"])
    return verb("evaluate", "package-int4", "--provider", "cpu")


def verify() -> dict[str, Any]:
    """The known answer of `package`, replayed on the CPU provider."""
    export("package")
    return verb("verify", "package", "--provider", "cpu")


def record(name: str) -> None:
    """Make one recording anew, in the current folder. Raises KeyError for an unknown one."""
    if name in EXPORTS:
        write(name, export(*EXPORTS[name]))
    elif name in DRY:
        dry_in_child(name, DRY[name])
    else:
        write(name, {"evaluate": evaluate, "verify": verify}[name]())


def main() -> None:
    """Record what is named, or everything that this environment can."""
    for name in sys.argv[1:] or (*EXPORTS, *DRY, "evaluate", "verify"):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            record(name)
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
