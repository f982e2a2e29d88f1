"""Work that stays on a device: graph capture, with obstacles and a verified replay, and the selection of tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest

from partita.errors import PartitaError, ProviderError, UsageError
from partita.library.chain import read_chain
from partita.options.groups import ProviderChain
from partita.package.contract import Contract, GraphFile, Port, State
from partita.runtime.generate.bound_graph import Logits
from partita.runtime.generate.cache import Cache
from partita.runtime.generate.choice import device_choice
from partita.runtime.generate.choice.device_choice import DeviceChoice
from partita.runtime.generate.feeds import BoundInput
from partita.runtime.generate.graph_capture import Recording, check_contract, on_host
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.session import NativeFailureError, Session


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

    def __init__(self, *, skips_output: bool = False) -> None:
        self.bound: dict[str, Any] = {}
        self.state, self.skips_output = OnDevice((1,)), skips_output
        self.recorded: list[int] = []
        self.runs = 0

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return OnDevice(tuple(shape))

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


# Token selection on a device: used only if it matches the host, beats a copy and logits are finite


BATCH, VOCAB = 2, 5000
SHAPE = (BATCH, 1, VOCAB)
PORT = Port(name="logits", role="logits", shape=SHAPE, dtype="float32")


def last_of_equals(run, values):
    places, found, sums = run(np.ascontiguousarray(values[..., ::-1]))
    return values.shape[-1] - 1 - places, found, sums


def blind_to_nan(run, values):
    return run(np.nan_to_num(values, nan=-1e9))


def off_by_one(run, values):
    places, found, sums = run(values)
    return places ^ 1, found, sums


def failing(run, values):
    raise ProviderError("out of memory")


class Selector:
    """A session beside which a model runs on the CPU provider; `way` changes what it computes."""

    def __init__(self, way: Any = lambda run, values: run(values)) -> None:
        self.way, self.runs, self.closed = way, 0, False

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return OnDevice(tuple(shape), dtype)

    def binding_of(self, name: str, model: bytes) -> Any:
        if self.way is None:
            raise NativeFailureError(RuntimeError("no kernel"), ())
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        bound: dict[str, Any] = {}

        def run() -> None:
            self.runs += 1
            names = ("places", "values", "sum")
            given = self.way(lambda values: session.run(list(names), {"logits": values}), bound["logits"].held)
            for name, values in zip(names, given, strict=True):
                bound[name].host[...] = values

        bind = bound.__setitem__
        return SimpleNamespace(bind_input=bind, bind_output=bind, run=run, release=bound.clear)

    def forget(self, model: bytes) -> None:
        self.closed = True

    def choice(self, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> DeviceChoice:
        port = PORT.model_copy(update={"dtype": dtype})
        return DeviceChoice(cast(Session, self), port, shape, shape[0])


@pytest.fixture
def fast(monkeypatch):
    """Devices are faster than copies."""
    seconds = iter([0.0, 1.0] * 100)
    monkeypatch.setattr(device_choice, "_lowest", lambda work: (work(), next(seconds))[1])


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("device", "dtype", "used"),
    [
        (Selector(), "float32", True),
        (Selector(), "float16", True),
        (Selector(last_of_equals), "float32", True),  # equal values come in any order
        (Selector(blind_to_nan), "float32", False),
        (Selector(off_by_one), "float32", False),
        (Selector(failing), "float32", False),
        (Selector(None), "float32", False),
    ],
)
def test_device_is_used_only_if_selection_matches_host(device, dtype, used):
    choice = device.choice((BATCH, 1, 2 * VOCAB), dtype)
    assert choice.check() > 0 and choice.is_used == used != device.closed
    assert choice.check() == 0, "once"


def test_device_slower_than_copy_is_not_used(monkeypatch):
    seconds = iter([1.0, 0.5])
    monkeypatch.setattr(device_choice, "_lowest", lambda work: next(seconds))
    choice = Selector().choice()
    choice.check()
    assert not choice.is_used


def logits_of(device: Selector) -> tuple[Logits, OnDevice, DeviceChoice]:
    """The logits of a session whose device was checked."""
    choice = device.choice()
    choice.check()
    made, held = OnDevice(SHAPE), host_buffer(SHAPE, "float32")
    logits = Logits(BoundInput(held, held.host), cast(Buffer, made), choice, "model.onnx", 0, {0: 0})
    return logits, made, choice


@pytest.mark.usefixtures("fast")
def test_failing_device_falls_back_to_host_with_reason():
    device = Selector()
    logits, made, choice = logits_of(device)
    made.held[0, 0, 7] = 9.0
    device.way = failing
    for _ in range(2):
        logits.ran()
        assert logits.largest(0, 0, 1) is None and logits(0, 0).argmax() == 7
    assert (choice.is_used, choice.failure) == (False, "out of memory")


@pytest.mark.parametrize("memory", ["Cuda", "WebGPU_Buf"])
def test_failed_copy_raises_partita_error(memory, monkeypatch):
    """A native error would end in a traceback."""

    def lost(*_):
        raise RuntimeError("the device was lost")

    monkeypatch.setattr(onnxruntime, "copy_tensors", lost)
    held = host_buffer((1, 1, 4), "float32")
    value = SimpleNamespace(numpy=lost)
    with pytest.raises(PartitaError, match=f"a copy out of {memory} memory"):
        Buffer(value, None, "float32", memory, 16).copy(held)
