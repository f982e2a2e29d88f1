"""Runs in the environment of optimum: `python -I child.py`, a request as a line of JSON on stdin, the answer in a file.

Knows no Partita. Its parent keeps stdin open: when that ends, so does this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

TASK = "text-generation-with-past"
TOOLS = ("optimum-onnx", "optimum", "transformers", "torch", "onnx")


def versions() -> dict[str, str]:
    """What is installed of that which has a part in an export."""
    found = {}
    for name in TOOLS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def tasks_of(model_type: str) -> list[str]:
    """Tasks that optimum's ONNX exporter has for a model type; none for one that it does not know."""
    import optimum.exporters.onnx.model_configs  # type: ignore[import-not-found]  # noqa: F401 - registers the types
    from optimum.exporters.tasks import TasksManager  # type: ignore[import-not-found]

    try:
        return list(TasksManager.get_supported_tasks_for_model_type(model_type, "onnx", library_name="transformers"))
    except KeyError:
        return []


def export(request: dict[str, Any]) -> dict[str, Any]:
    """Write the folder `out`; what was written."""
    from optimum.exporters.onnx import main_export

    main_export(
        request["checkpoint"],
        output=request["out"],
        task=TASK,
        opset=request["opset"],
        dtype=request["precision"],
        do_validation=False,  # Partita compares with the original model itself
        local_files_only=True,
        trust_remote_code=False,
        library_name="transformers",
        framework="pt",
    )
    return {"files": sorted(path.name for path in Path(request["out"]).iterdir())}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What came of a request."""
    tasks = tasks_of(request["model_type"])
    found: dict[str, Any] = {"versions": versions(), "tasks": tasks}
    if request["do"] == "export" and TASK in tasks:
        found |= export(request)
    return found


def end_with_parent() -> None:
    """Wait for the end of stdin, which is the end of the parent, and end this process."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Answer the request on stdin."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        found = answer(request)
    except ModuleNotFoundError as error:
        found = {"lacks": error.name}
    except Exception as error:  # noqa: BLE001 - the parent says it in one line; the log has the traceback
        import traceback

        traceback.print_exc()
        found = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    Path(request["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
