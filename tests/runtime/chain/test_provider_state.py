"""Providers that ONNX Runtime leaves out: the provider at fault, the cause and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import parser

from partita.diagnosis.explanation import refused_nodes
from partita.observations.names import EXPERIMENTS, RUN
from partita.observations.records import ChainEntry
from partita.providers.resolve import Resolution, failure, known_providers, parse_chain, resolve
from partita.runtime.chain import open_chain, provider_state
from partita.runtime.chain.open_chain import open_session, opened_facts
from partita.runtime.chain.provider_state import (
    CRASHED,
    register_plugins,
    settle_one,
    to_blame,
    unavailable,
    without_crashed,
)
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.ort.session import NativeFailureError
from partita.runtime.ort.session_options import Opening
from partita.runtime.place.onnx_model import read_onnx

TENSORRT, CUDA, CPU = CHAIN = tuple(
    Resolution(known_providers()[name], "active") for name in ("tensorrt", "cuda", "cpu")
)
OPENVINO = known_providers()["openvino"]
NO_DEVICE = "CUDA failure 100: no CUDA-capable device is detected ; GPU=-1 ; hostname=x"


def failed(text: str) -> NativeFailureError:
    return NativeFailureError(RuntimeError(text), ())


def missing(provider: str, library: str) -> str:
    """The line in which ONNX Runtime says why it cannot load the library of a provider."""
    return (
        "[E:onnxruntime:Default, provider_bridge_ort.cc:2251 Get] [ONNXRuntimeError] : 1 : FAIL : Failed to load "
        f"library /x/libonnxruntime_providers_{provider}.so with error: {library}: cannot open shared object file: "
        "No such file or directory"
    )


def test_named_provider_is_blamed_else_the_one_without_which_the_model_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    path, working = Path("/models/tensorrt/cuda/model.onnx"), {"tensorrt", "cuda", "cpu"}
    monkeypatch.setattr(
        provider_state, "opens_on", lambda path, active, _: {entry.provider.name for entry in active} <= working
    )

    def blamed(text: str, chain: Sequence[Resolution] = CHAIN) -> Resolution | None:
        return to_blame(path, chain, failed(text), Opening())

    assert blamed(NO_DEVICE) is CUDA
    assert blamed("TensorrtExecutionProvider: out of memory") is TENSORRT
    assert blamed("bad allocation") is TENSORRT, "the first, if the model opens without any"
    working.remove("cuda")
    assert blamed("bad allocation") is CUDA
    assert blamed(f"Load model from {path} failed: bad allocation") is CUDA, "the folder names both"
    assert blamed("tensorrt_rtx: no device") is CUDA, "another provider's name"
    assert blamed(NO_DEVICE, (CPU,)) is None


def opened(log: tuple[str, ...]) -> Any:
    """A session with this log on the CPU provider only."""
    return SimpleNamespace(registered=("CPUExecutionProvider",), log=log, assigned=tuple)


def test_missing_library_is_attributed_to_its_provider() -> None:
    log = (missing("cuda", "libcublasLt.so.13"), missing("tensorrt", "libnvinfer.so.10"))
    tensorrt, cuda, cpu = (settle_one(entry, opened(log), CHAIN) for entry in CHAIN)
    assert (tensorrt.reason, cuda.reason, cpu.status) == ("library_missing", "library_missing", "active")
    assert (tensorrt.evidence or "").startswith("libnvinfer.so.10: ")
    assert (cuda.evidence or "").startswith("libcublasLt.so.13: ")
    silent = settle_one(TENSORRT, opened(log[:1]), CHAIN)
    assert (silent.reason, silent.evidence) == (
        "initialisation_failed",
        "ONNX Runtime did not start it and gave no reason",
    )


@pytest.mark.parametrize(
    ("options", "sets_it"), [({}, False), ({"device_type": "CPU"}, False), ({"device_type": "GPU"}, True)]
)
def test_remedy_omits_option_value_already_set(options: Mapping[str, str], sets_it: bool) -> None:
    """device_type defaults to CPU."""
    for reason in ("device_missing", "initialisation_failed"):
        why = failure(OPENVINO, reason, "no message")
        remedy = unavailable(Resolution(OPENVINO, "active", options=options), why).remedy
        assert remedy is not None and (remedy.options[1:] == ("openvino.device_type=CPU",)) is sets_it
        assert "plugin" not in str(remedy), "which the wheel is not"


def test_plugin_without_device_suggests_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin ignores device_type."""
    monkeypatch.setattr(provider_state, "register_library", lambda name, path: ())
    (found,) = register_plugins([Resolution(OPENVINO, "active", library=Path("libopenvino_plugin.so"))])
    assert found.reason == "device_missing" and found.remedy is not None and not found.remedy.options
    assert found.remedy.command == ("pip", "install", "onnxruntime-openvino")


def test_crashed_provider_gets_crash_remedy() -> None:
    how = "native code ended the run with SIGSEGV"
    chain = [Resolution(provider, "active") for provider in known_providers().values()]
    assert without_crashed(chain, {RUN: how, EXPERIMENTS: how}) == tuple(chain)
    for entry in chain:
        found = next(
            each for each in without_crashed(chain, {entry.provider.name: how}) if each.provider is entry.provider
        )
        assert (found.status, found.reason, found.evidence) == ("unavailable", "initialisation_failed", how)
        assert found.crashed and found.remedy == CRASHED


# What is known of a session that was opened and is not run: what a refusal speaks of


NAMELESS = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2,4] x, bool c) => (float[2,4] y) {
  h = Relu (x)
  y = If (c) <
    then_branch = t () => (float[2,4] a) { a = Asin (h) },
    else_branch = e () => (float[2,4] b) { b = Neg (h) }
  >
}"""


def test_refused_unnamed_nodes_use_generated_names(tmp_path: Path) -> None:
    proto = parser.parse_model(NAMELESS)
    proto.graph.node[0].metadata_props.add(key="partita.module", value="model.act")
    onnx.save(proto, tmp_path / "m.onnx")
    model = read_onnx(tmp_path / "m.onnx")
    chain = resolve(parse_chain("cpu"), available_ort_names())
    session = open_session(model.path, chain, threads=1, observe=True, model=model.to_bytes())
    facts = opened_facts(model.path, session, chain)
    session.close()
    assert [node.name for node in facts.graph] == ["Relu_0", "If_1"]
    assert [node.name for node in facts.subgraph_nodes] == ["Asin_2", "Neg_3"]
    rows = refused_nodes(facts, (ChainEntry(provider="CUDAExecutionProvider", status="active"),))
    assert ("Relu_0", "model.act") in [(row.node, row.module) for row in rows]


def test_no_kernel_error_names_node_of_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry without the provider fails on the CPU provider's own first unsupported node."""
    unplaced = RuntimeError("Exception: Provider type for Conv node with name 'conv' is not set.")
    lacking = type("NotImplemented", (Exception,), {})(
        "Could not find an implementation for BiasAdd(1) node with name 'b'"
    )
    attempts = iter((unplaced, lacking))

    def fail(*_: object) -> None:
        raise NativeFailureError(next(attempts), ())

    monkeypatch.setattr(open_chain, "_open_quiet", fail)
    monkeypatch.setattr(open_chain, "register_plugins", tuple)
    chain = tuple(Resolution(known_providers()[name], "active") for name in ("webgpu", "cpu"))
    with pytest.raises(NoKernelError, match="WebGpuExecutionProvider, CPUExecutionProvider cannot run it") as raised:
        open_session(Path("m.onnx"), chain, threads=1, observe=False)
    assert raised.value.node == "conv"
