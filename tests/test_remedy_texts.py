"""Text remedies: each case raises the error, applies the remedy and checks that the error is gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import partita
from partita.diagnosis.reasons import REASONS as TABLE
from partita.errors import PartitaError
from partita.foreign import inference
from partita.foreign.folder import Choice, open_folder
from partita.library.engine import remote
from partita.observations.codes import PROVIDER_CODES
from partita.providers import cuda
from partita.providers.cuda_dry_run import devices
from partita.providers.resolve import parse_chain
from partita.remedies import Remedy
from partita.runtime.generate.runner import load_runner
from partita.runtime.ort import errors
from partita.runtime.place import run_phases as place
from tests.conftest import Exported, TinyCheckpoint, require_dry_run
from tests.foreign.conftest import Sample, changed, sample  # noqa: F401 - the fixture
from tests.planted import cases
from tests.planted.graphs import build
from tests.planted.judge import dry_environment
from tests.remedies import alternatives, pattern


@dataclass
class World:
    """What a case may use. `refused` checks that an action ends in the remedy of the case."""

    remedy: Remedy
    tmp: Path
    sample: Sample
    checkpoint: Callable[..., Path]
    exported: Callable[..., Path]
    raised: int = 0

    def refused(self, action: Callable[[], object]) -> None:
        """Fail unless the action raises an error with the remedy of this case."""
        with pytest.raises(PartitaError) as caught:
            action()
        texts = [each.text for each in alternatives(caught.value.remedy)]
        assert any(re.fullmatch(pattern(self.remedy), each) for each in texts), (texts, str(caught.value))
        self.raised += 1

    def package(self, **options: Any) -> Path:
        """A package that the case may change."""
        return shutil.copytree(self.exported(self.checkpoint("llama"), **options), self.tmp / f"p{len(options)}")


Case = Callable[[World], None]
CASES: dict[str, tuple[Remedy, Case]] = {}


def applies(*remedies: Remedy | None) -> Callable[[Case], Case]:
    """Register a case for remedies that say the same."""

    def register(case: Case) -> Case:
        for remedy in remedies:
            assert remedy is not None and remedy.text not in CASES
            CASES[remedy.text] = (remedy, case)
        return case

    return register


def opened(folder: Path, choice: Choice | None = None) -> None:
    """Open a folder of another exporter, and try it."""
    with load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder, choice or Choice())):
        pass


# packages, checkpoints and prompts


@applies(remote.LOAD_AGAIN, remote.WITHOUT)
def load_again(world: World) -> None:
    package = world.package()
    with partita.load(package, "cpu", process="child") as model:
        model.engine.target = replace(model.engine.target, chain=parse_chain("webgpu,cpu"))
        model.engine._worker.process.kill()  # type: ignore[attr-defined]
        world.refused(lambda: model.generate([5, 6], max_new_tokens=1).run())
    with partita.load(package, "cpu", process="child") as model:
        model.generate([5, 6], max_new_tokens=1).run()


# folders of other exporters


@applies(inference.CORRECT)
def correct_the_contract(world: World) -> None:
    folder, contract = world.sample("optimum"), world.tmp / "contract.toml"
    wrong = '[[states]]\npast = "past_key_values.0.key"\npresent = "present.0.key"\nkind = "key"\nshape = [1, 1]\n'
    contract.write_text(wrong)
    world.refused(lambda: opened(folder, Choice(contract=contract)))
    contract.write_text(wrong.replace("shape = [1, 1]\n", ""))
    opened(folder, Choice(contract=contract))


# ONNX files


def one_node(op_type: str, path: Path, *, ir_version: int = 10, opset: int = 17, **node: Any) -> Path:
    """A model of one node with an input x and an output y."""
    element, domain = node.pop("element", TensorProto.FLOAT), node.get("domain", "")
    ports = [helper.make_tensor_value_info(name, element, node.pop("sizes", [4])) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], name="n", **node)], "g", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), path)
    return path


ONNX_FILES: dict[str, tuple[Remedy, dict[str, Any]]] = {
    "type": (errors.OTHER_NODE, {"op_type": "Sin", "element": TensorProto.BFLOAT16, "opset": 22}),
    "attribute": (errors.OTHER_VERSION, {"op_type": "Relu", "newest": 1}),
    "opset": (errors.NEWER_RUNTIME, {"op_type": "Relu", "opset": 99}),
    "own operator": (errors.OTHER_RUNTIME, {"op_type": "Foo", "domain": "com.microsoft"}),
    "custom operator": (errors.CUSTOM_OPERATOR, {"op_type": "Foo", "domain": "my.operators"}),
    "IR version": (errors.LOWER_IR, {"op_type": "Relu", "ir_version": 99}),
}
"""A file that ONNX Runtime refuses; the remedy is to write it without what the name says."""


def rewrite_the_file(world: World) -> None:
    wrong = next(settings for remedy, settings in ONNX_FILES.values() if remedy is world.remedy)
    path = one_node(path=world.tmp / "model.onnx", **wrong)
    world.refused(lambda: partita.place(path, "cpu"))
    if world.remedy is errors.LOWER_IR:
        with pytest.raises(PartitaError) as caught:
            partita.place(path, "cpu")
        last = re.search(r"set ir_version in the file to (\d+)", str(caught.value))
        assert last is not None
        one_node("Relu", path, ir_version=int(last[1]))
    else:
        one_node("Relu", path)
    partita.place(path, "cpu")


for _remedy, _ in ONNX_FILES.values():
    applies(_remedy)(rewrite_the_file)


@applies(place.SMALLER_INPUTS)
def smaller_inputs(world: World) -> None:
    path = world.tmp / "model.onnx"
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "n"][: 2 - (name == "x")]) for name in "xy"]
    nodes = [helper.make_node("Unsqueeze", ["x", "axis"], ["column"]), helper.make_node("Mul", ["x", "column"], ["y"])]
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [axis])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    world.refused(lambda: partita.place(path, "cpu", shapes={"x": (1 << 22,)}))
    partita.place(path, "cpu", shapes={"x": (4,)})


@applies(cuda.DRIVER)
def install_the_driver(world: World) -> None:
    """A stand-in for the driver's library is there in a dry run."""
    on_cuda_stand_ins(world, "library_missing", lambda folder, _: (folder / "libcuda.so.1").unlink())


@applies(cuda.NO_GPU)
def where_there_is_a_gpu(world: World) -> None:
    """A dry run shows ONNX Runtime the GPU that environment variables describe."""
    on_cuda_stand_ins(world, "device_missing", lambda _, environment: environment.pop(f"{devices.PREFIX}MEMORY_BYTES"))


def on_cuda_stand_ins(world: World, reason: str, harm: Callable[[Path, dict[str, str]], object]) -> None:
    """CUDA is missing after the harm with the remedy of the case, and there without the harm."""
    require_dry_run()
    whole = dry_environment(os.environ)
    folder = shutil.copytree(whole["LD_LIBRARY_PATH"].partition(os.pathsep)[0], world.tmp / "libraries")
    harmed = {**whole, "LD_LIBRARY_PATH": str(folder)}
    harm(folder, harmed)
    path = one_node("Relu", world.tmp / "model.onnx")
    for environment, expected in ((harmed, reason), (whole, None)):
        words = (sys.executable, "-m", "partita", "place", path, "--provider", "cuda,cpu", "--json")
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120)
        entry = json.loads(done.stdout)["chain"][0]
        assert entry["reason"] == expected, entry
        if expected:
            assert entry["remedy"].startswith(world.remedy.text), entry
            world.raised += 1


@pytest.mark.parametrize("case", CASES)
def test_text_remedy_resolves_the_error(
    case: str,
    tmp_path: Path,
    sample: Sample,  # noqa: F811
    tiny_checkpoint: TinyCheckpoint,
    exported: Exported,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    remedy, apply = CASES[case]
    world = World(remedy, tmp_path, sample, tiny_checkpoint, exported)
    apply(world)
    assert world.raised, "the case does not raise the problem"


# Reasons of nodes: tests/planted has a cause and a graph without it for all but two


@pytest.mark.usefixtures("stand_ins")
def test_inserted_cast_disappears_with_supported_operator(tmp_path: Path) -> None:
    planted = next(case.run.model for case in cases.CASES if case.name == "cuda-inserted-cast")
    found = []
    for model in (planted, planted.replace("Asin", "Cos")):
        onnx.save(build(model), tmp_path / "model.onnx")
        report = partita.place(tmp_path / "model.onnx", "cuda,cpu", dry_run=True, probe_seconds=0)
        found.append("runtime_inserted" in {fallback.reason for fallback in report.fallbacks})
    assert found == [True, False]


def test_every_node_reason_has_a_planted_case_with_control_graph() -> None:
    of_nodes = set(TABLE).difference(PROVIDER_CODES)
    planted = {case.expected for case in cases.CASES if case.control}
    assert of_nodes - planted == {"runtime_inserted", "unexplained"}
