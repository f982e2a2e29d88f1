"""A laboratory whose worker is scripted: what becomes of a model is in the name of its graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper, parser

from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab import laboratory
from partita.runtime.lab.graph import Graph, cut_graph
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.variant import Variant, node_variant
from partita.runtime.place.onnx_model import read_onnx

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from partita.runtime.lab.placement import Placement

here = Path(__file__).parent
mode = (here / "mode").read_text() if (here / "mode").exists() else ""
poisoned = False


def note(name):
    with (here / name).open("a") as file:
        file.write(f"{os.getpid()}\\n")


def start(described):
    note("pids")
    if mode == "abort":
        os.abort()
    if mode == "sleep":
        time.sleep(60)
    return "device_missing: no adapter" if mode == "refuse" else ""


def measure(text, zeros, one_node):
    global poisoned
    note("models")
    if b"crash" in text or poisoned:
        sys.stderr.write("assertion failed in the driver\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if b"kill" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    if b"leave" in text:
        os._exit(3)
    if b"slow" in text:
        time.sleep(1.7)
    if b"hang" in text:
        time.sleep(60)
    poisoned = b"poison" in text
    return Placement("rejected", "no kernel") if b"left" in text or b"rejected" in text else Placement("supported")


HANDLERS = {"start": start, "measure": measure}
"""


class Bench:
    """Labs with the scripted worker, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lab(self, *, seconds: float = 60.0, cache: Cache | None = None, provider: str = "cuda") -> Lab:
        """A lab that has this much time."""
        stored = Cache(None) if cache is None else cache
        return Lab(Resolution(known_providers()[provider], "active"), stored, time.monotonic() + seconds)

    def mode(self, name: str) -> None:
        """How the worker starts: refuse, abort, sleep."""
        (self.folder / "mode").write_text(name)

    def notes(self, name: str) -> list[int]:
        """Process ids: of every worker that was started (`pids`), or of each model that was begun (`models`)."""
        path = self.folder / name
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Replaces the child process of experiments by a scripted one."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "scripted_child.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(laboratory, "CHILD", "scripted_child")
    return Bench(folder)


@pytest.fixture
def model() -> Callable[[str], onnx.ModelProto]:
    """Factory of one-node models whose graph has this name."""

    def make(name: str) -> onnx.ModelProto:
        ports = [helper.make_tensor_value_info(port, TensorProto.FLOAT, [2]) for port in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], name, ports[:1], ports[1:])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    return make


HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "ai.onnx.ml" : 3, "com.microsoft" : 1, "own" : 1]>\n'


Answer = Callable[[onnx.ModelProto], Placement | None]


class ScriptedLab(Lab):
    """Answers by a function of the model, without a process. `models`: the tested models."""

    def __init__(self, answer: Answer, resolution: Resolution) -> None:
        super().__init__(resolution, Cache(None), time.monotonic() + 60)
        self.answer, self.models = answer, list[onnx.ModelProto]()

    def try_all(self, models: Sequence[onnx.ModelProto], *, one_node: bool = True) -> list[Placement | None]:
        self.models += models
        return [self.answer(model) for model in models]


@pytest.fixture
def cut(tmp_path: Path) -> Callable[..., Graph]:
    """Factory: the graph of a model text or a model, with the sizes of its inputs in a run."""

    def make(model: str | onnx.ModelProto, opset: int = 21, **sizes: tuple[int, ...]) -> Graph:
        path = tmp_path / "m.onnx"
        onnx.save(parser.parse_model(HEAD.format(opset=opset) + model) if isinstance(model, str) else model, path)
        return cut_graph(read_onnx(path), sizes)

    return make


@pytest.fixture
def case(cut: Callable[..., Graph]) -> Callable[..., Variant]:
    """Factory: the variant of the node `n` of a model; see `cut`."""
    return lambda *model, **sizes: node_variant(cut(*model, **sizes), "n")
