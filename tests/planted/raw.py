"""Where plain ONNX Runtime puts the nodes of graphs: `python raw.py`, requests as JSON on stdin, answers on stdout.

Knows nothing of Partita. Each request is answered in a fork of its own, because some end in a crash.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any

CPU = "CPUExecutionProvider"


def opened(request: dict[str, Any]) -> Any:
    """A session on the provider of the request, and the CPU after it."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.set_default_logger_severity(4)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in request["config"].items():
        options.add_session_config_entry(key, value)
    name, given = request["provider"], request["options"]
    if not request["wheel"]:
        return ort.InferenceSession(
            request["model"],
            options,
            providers=[(name, given), CPU] if given else list(dict.fromkeys([name, CPU])),
            enable_fallback=0,
        )
    module = importlib.import_module(request["wheel"])
    ort.register_execution_provider_library(name, request["library"] or module.get_library_path())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if hasattr(module, "get_qnn_htp_path"):
        given = {"backend_path": module.get_qnn_htp_path(), **given}
    if not devices:
        raise RuntimeError(f"{name} offers no device")
    options.add_provider_for_devices(devices[:1], given)
    return ort.InferenceSession(request["model"], options, enable_fallback=0)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Nodes on the CPU and elsewhere, as name and operator; or why there is no session with the provider in it."""
    try:
        session = opened(request)
    except Exception as error:  # noqa: BLE001 - whatever it is, the provider has no node then
        return {"error": f"{type(error).__name__}: {error}"}
    if request["provider"] not in session.get_providers():
        return {"error": "the provider was not registered"}
    placed: dict[str, list[list[str]]] = {"cpu": [], "elsewhere": []}
    for part in session.get_provider_graph_assignment_info():
        side = placed["cpu" if part.ep_name == CPU else "elsewhere"]
        side += [[node.name, node.op_type] for node in part.get_nodes()]
    return placed


def in_a_fork(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a child process; a crash is one as well."""
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.dup2(2, 1)
            json.dump(answer(request), file)
            file.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        text = file.read()
    return json.loads(text) if text else {"error": f"its process ended with {status}"}


if __name__ == "__main__":
    importlib.import_module("onnxruntime")  # once, and not in every fork
    sys.stdout.write(json.dumps([in_a_fork(request) for request in json.load(sys.stdin)]))
