"""Graph capture: obstacles are reported before a run, and a replayed step is verified."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from partita.errors import ProviderError, UsageError
from partita.library.chain import read_chain
from partita.options.groups import ProviderChain
from partita.package.contract import Contract, GraphFile, Port, State
from partita.runtime.generate.cache import Cache
from partita.runtime.generate.feeds import BoundInput
from partita.runtime.generate.graph_capture import Recording, check_contract, on_host
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.session import Session


class OnDevice:
    """A buffer in memory that only copies reach, as that of a GPU; `copies` counts those to the host."""

    memory = "Device"

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.dtype, self.held, self.copies = dtype, np.zeros(shape, dtype), 0
        self.value = SimpleNamespace(shape=lambda: list(shape))
        self.size_bytes = self.held.nbytes

    def write(self, buffer: Buffer) -> None:
        self.held[...] = buffer.host

    def copy(self, buffer: Buffer) -> Any:
        self.copies += 1
        buffer.host[...] = self.held
        return buffer.host

    def host_copy(self) -> Buffer:
        target = host_buffer(self.held.shape, self.dtype)
        self.copy(target)
        return target

    def clear(self) -> None:
        self.held.fill(0)


FILE = Path("model.onnx")
TOKENS = Port(name="ids", role="tokens", shape=(1, "S"), dtype="int64")
LENGTH = Port(name="total", role="total_length", shape=(), dtype="int32")
AT = Port(name="at", role="last_index", shape=(1,), dtype="int32")
ROWS = Port(name="rows", role="logits_rows", shape=("K",), dtype="int64")
LOGITS = Port(name="logits", role="logits", shape=(1, "K", 8), dtype="float32")
KEY = State(past="past", present="present", layer=0, kind="key", shape=(1, 1, 16, 4), dtype="float32")


def contract(*inputs: Port, state: State = KEY, output: Port = LOGITS, cacheless: bool = False) -> Contract:
    graph = GraphFile(
        file="model.onnx", phase="any", sequence_length=None, nodes=3, inputs=(TOKENS, *inputs), outputs=(output,)
    )
    return Contract(
        files=(graph,),
        states=(state,),
        appends_chunks=True,
        batch_size=1,
        max_length=16,
        vocab_size=8,
        weight_bytes=0,
        cacheless=cacheless,
    )


BFLOAT16 = contract(output=LOGITS.model_copy(update={"dtype": "bfloat16"}))


@pytest.mark.parametrize(
    ("described", "memory", "on_host_ports", "message"),
    [
        (contract(LENGTH, AT, ROWS), "Cuda", (), ""),
        # One is a bound, the other equal in every step.
        (contract(LENGTH, AT, ROWS), "Cuda", ("total", "rows"), ""),
        (contract(LENGTH, AT), "Cuda", ("at",), "at in host memory"),
        (contract(), "Cuda", ("past",), "1 state of its cache in host memory"),
        (contract(), "Cuda", ("logits",), "logits is computed in host memory"),
        (BFLOAT16, "Cuda", (), "logits is bfloat16"),
        (BFLOAT16, "WebGPU_Buf", (), ""),
    ],
)
def test_step_data_in_host_memory_is_reported(described, memory, on_host_ports, message):
    graph = described.files[0]
    names = [*(port.name for port in (*graph.inputs, *graph.outputs)), "past"]
    found = on_host(graph, described, {**dict.fromkeys(names, memory), **dict.fromkeys(on_host_ports, "Cpu")})
    assert len(found) == bool(message) and message in "".join(found)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (contract(cacheless=True), "input grows with every step"),
        (contract(state=KEY.model_copy(update={"growing_axis": 2})), "grows with every token"),
        (contract(Port(name="mask", role="mask", shape=(1, "T"), dtype="int64")), "mask grows with every step"),
    ],
)
def test_graph_with_varying_step_shapes_raises_provider_error(described, said):
    with pytest.raises(ProviderError, match=said):
        check_contract(FILE, described, described.files[0])
    fixed = contract(Port(name="mask", role="mask", shape=(1, 16), dtype="int64"))
    check_contract(FILE, fixed, fixed.files[0])


def test_graph_capture_option_is_set_for_first_provider():
    for chain, option in (("cuda,cpu", ("cuda", "enable_cuda_graph")), ("webgpu", ("webgpu", "enableGraphCapture"))):
        target = read_chain(ProviderChain(chain), graph_capture=True)
        assert target.options[option[0]] == {option[1]: "1"}
    with pytest.raises(UsageError, match="cpu, the first provider, does not support graph capture; cuda and webgpu do"):
        read_chain(ProviderChain("cpu"), graph_capture=True)
    with pytest.raises(UsageError, match="is set to off"):
        off = {"cuda": {"enable_cuda_graph": "0"}}
        read_chain(ProviderChain("cuda", provider_options=off), graph_capture=True)


RUNS_TO_RECORD = 3
"""What CUDA does: two that allocate memory, and the one that is recorded."""


class Device:
    """A session, its binding and its one state: each run adds its token to the state, which is what it gives."""

    def __init__(self, *, skips_output: bool = False, on_host: tuple[str, ...] = ()) -> None:
        self.bound: dict[str, Any] = {}
        self.state, self.skips_output, self.on_host = OnDevice((1,)), skips_output, on_host
        self.recorded: list[int] = []
        self.runs = 0

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return host_buffer(shape, dtype) if name in self.on_host else OnDevice(tuple(shape))

    def next_recording(self) -> int:
        return 1

    def bind_input(self, name: str, buffer: Any) -> None:
        self.bound[name] = buffer

    bind_output = bind_input

    def run(self) -> None:
        self.runs += 1
        self.state.held += self.bound["token"].held
        self.bound["logits"].held[...] = self.state.held

    def replay(self, number: int) -> None:
        for _ in range(1 if self.recorded else RUNS_TO_RECORD):
            before = self.bound["logits"].held.copy()
            self.run()
            if self.skips_output:
                self.bound["logits"].held[...] = before
        self.recorded.append(number)

    def recording(self) -> Recording:
        store = SimpleNamespace(padding_is_safe=False, buffer=self.state)
        cache = SimpleNamespace(stores=(store,))
        return Recording(cast(Session, self), cast(Binding, self), cast(Cache, cache))


def steps(device: Device, tokens: list[float], observed: int = 0) -> list[float]:
    """What each step gives."""
    recording = device.recording()
    token, logits = host_buffer((1,), "float32"), OnDevice((1,))
    recording.bind_input("token", token)
    recording.bind_output("logits", cast(Buffer, logits))
    given = []
    for index, value in enumerate(tokens):
        token.host[0] = value
        recording.run(observed=index < observed)
        given.append(float(logits.held[0]))
    return given


@pytest.mark.parametrize("observed", [0, 2])
def test_state_consumes_each_token_once_despite_repeated_runs(observed):
    device = Device()
    assert steps(device, [1, 2, 4, 8, 16], observed) == [1, 3, 7, 15, 31]
    assert set(device.recorded) == {1} and len(device.recorded) == 5 - observed


def test_incorrect_replay_raises_provider_error():
    device = Device(skips_output=True)
    with pytest.raises(ProviderError, match="a replayed step computes a different result"):
        steps(device, [1, 2, 4])
    assert steps(Device(skips_output=True), [1]) == [1]  # the step that is recorded is a run like any other


def test_total_length_on_host_is_fixed_to_cache_length():
    recording = Device(on_host=("total",)).recording()
    total = host_buffer((), "int32")
    recording.bind_input("total", total)
    assert recording.fix({"total_length": BoundInput(total, total.host)}, 512) == {"total_length"}
    assert total.host == 512
