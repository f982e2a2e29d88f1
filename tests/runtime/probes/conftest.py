"""A laboratory whose child process is scripted: what becomes of a model stands in the model's own name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from partita.providers.resolve import Resolution, known_providers
from partita.runtime.probes import lab as lab_module
from partita.runtime.probes.cache import Cache
from partita.runtime.probes.lab import Lab

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from threading import Timer
from partita.runtime.probes.child import Order, say, set_alarm

here = Path(__file__).parent
mode = (here / "mode").read_text() if (here / "mode").exists() else ""
poisoned = started = False


def batch(request, out):
    global poisoned, started
    order = Order(request.get("turns", {}))
    with (here / "calls").open("a") as calls:
        calls.write(json.dumps(request["models"]) + "\\n")
    if not started:
        with (here / "pids").open("a") as pids:
            pids.write(f"{os.getpid()}\\n")
        say(out, {"begun": "start"})
        set_alarm(request["start_seconds"])
        if mode == "refuse":
            say(out, {"unusable": "device_missing: no adapter"})
            sys.exit(0)
        if mode == "abort":
            os.abort()
        if mode == "sleep":
            time.sleep(60)
        started = True
    for name in request["models"]:
        if not order.comes(name):
            continue
        say(out, {"begun": name})
        set_alarm(request["model_seconds"])
        text = (Path(request["folder"]) / name).read_bytes()
        if b"crash" in text or poisoned:
            sys.stderr.write("assertion failed in the driver\\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        if b"kill" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"leave" in text:
            sys.exit(3)
        if b"slow" in text:
            time.sleep(1.7)
        if b"hang" in text:
            time.sleep(60)
        poisoned = b"poison" in text
        said = "no kernel" if b"left" in text else ""
        say(out, {"model": name, "outcome": "left" if said else "taken", "said": said, "unfolded": False})
        if not said:
            order.taken(name)
        if b"last words" in text:
            Timer(0.2, os.abort).start()
    set_alarm(0)


for line in sys.stdin:
    request = json.loads(line)
    with Path(request["answers"]).open("a") as out:
        batch(request, out)
    print('{"done": true}', flush=True)
"""


class Bench:
    """Labs with the scripted child, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lab(self, *, seconds: float = 60.0, cache: Cache | None = None) -> Lab:
        """A lab that has this much time."""
        provider = Resolution(known_providers()["cuda"], "active")
        return Lab(provider, cache or Cache(None), time.monotonic() + seconds)

    def mode(self, name: str) -> None:
        """How the child starts: refuse, abort, sleep."""
        (self.folder / "mode").write_text(name)

    @property
    def processes(self) -> list[int]:
        """The process of every child that was started, by its number."""
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def batches(self) -> list[int]:
        """Number of models that each child was asked about."""
        path = self.folder / "calls"
        return [len(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Replaces the child process of experiments by a scripted one."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "scripted_child.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(lab_module, "CHILD", "scripted_child")
    return Bench(folder)


@pytest.fixture
def model() -> Callable[[str], onnx.ModelProto]:
    """Factory of one-node models whose graph has this name."""

    def make(name: str) -> onnx.ModelProto:
        ports = [helper.make_tensor_value_info(port, TensorProto.FLOAT, [2]) for port in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], name, ports[:1], ports[1:])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    return make
