"""Runs optimum's exporter in its own environment: `python -I optimum_child.py REQUEST`, the answer as JSON in a file.

Imports nothing of Partita. The parent keeps stdin open: when stdin ends, this process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

TASK, LIBRARY = "text-generation-with-past", "transformers"
TOOLS = ("optimum-onnx", "optimum", "transformers", "torch", "onnx")


def config_for_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the rotary settings of transformers 5 (`rope_parameters`) where transformers 4 reads them."""
    found = {k: config_for_4(v) if isinstance(v, dict) and k.endswith("_config") else v for k, v in config.items()}
    rope = found.get("rope_parameters") or {}
    sliding, main = rope.get("sliding_attention") or {}, rope.get("full_attention", rope)
    settings = {key: main.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    if main.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {key: value for key, value in main.items() if key not in settings}
    settings |= {"rope_local_base_freq": sliding.get("rope_theta"), "torch_dtype": found.get("dtype")}
    return {**{key: value for key, value in settings.items() if value is not None}, **found}


def respond(request: Mapping[str, Any]) -> dict[str, Any]:
    """The installed versions and whether optimum covers `model_type`; with `out`, that folder is written."""
    import optimum.exporters.onnx as exporter  # type: ignore[import-not-found]
    import optimum.exporters.onnx.model_configs  # type: ignore[import-not-found]  # noqa: F401 - registers the types
    from optimum.exporters.tasks import TasksManager  # type: ignore[import-not-found]

    try:
        tasks = TasksManager.get_supported_tasks_for_model_type(request["model_type"], "onnx", library_name=LIBRARY)
    except KeyError:
        tasks = {}
    if TASK in tasks and "out" in request:
        copy, ignore = shutil.copy if os.name == "nt" else os.symlink, shutil.ignore_patterns("config.json")
        shutil.copytree(request["checkpoint"], "view", ignore=ignore, copy_function=copy)
        settings = json.loads(Path(request["checkpoint"], "config.json").read_text(encoding="utf-8"))
        Path("view", "config.json").write_text(json.dumps(config_for_4(settings)), encoding="utf-8")
        options = {"task": TASK, "library_name": LIBRARY, "framework": "pt", "local_files_only": True}
        exporter.main_export("view", request["out"], do_validation=False, **options, **request["options"])
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {"versions": {name: installed[name] for name in TOOLS if name in installed}, "covers": TASK in tasks}


def end_with_parent() -> None:
    """Wait for the end of stdin and end this process."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    asked = json.loads(sys.argv[1])
    try:
        result = respond(asked)
    except ModuleNotFoundError as error:
        result = {"lacks": error.name}
    except Exception as error:  # noqa: BLE001 - the parent reports it in one line
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    Path(asked["answer"]).write_text(json.dumps(result), encoding="utf-8")
