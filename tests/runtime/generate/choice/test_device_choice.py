"""Token selection on a device: used only if it matches the host, beats a copy and logits are finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest

from partita.errors import PartitaError, ProviderError
from partita.package.contract import Port
from partita.runtime.generate.bound_graph import Logits
from partita.runtime.generate.choice import device_choice
from partita.runtime.generate.choice.device_choice import DeviceChoice
from partita.runtime.generate.feeds import BoundInput
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.session import NativeFailureError, Session
from tests.runtime.generate.test_graph_capture import OnDevice

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


class Device:
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
        (Device(), "float32", True),
        (Device(), "float16", True),
        (Device(last_of_equals), "float32", True),  # equal values come in any order
        (Device(blind_to_nan), "float32", False),
        (Device(off_by_one), "float32", False),
        (Device(failing), "float32", False),
        (Device(None), "float32", False),
    ],
)
def test_device_is_used_only_if_selection_matches_host(device, dtype, used):
    choice = device.choice((BATCH, 1, 2 * VOCAB), dtype)
    assert choice.check() > 0 and choice.is_used == used != device.closed
    assert choice.check() == 0, "once"


def test_device_slower_than_copy_is_not_used(monkeypatch):
    seconds = iter([1.0, 0.5])
    monkeypatch.setattr(device_choice, "_lowest", lambda work: next(seconds))
    choice = Device().choice()
    choice.check()
    assert not choice.is_used


def logits_of(device: Device) -> tuple[Logits, OnDevice, DeviceChoice]:
    """The logits of a session whose device was checked."""
    choice = device.choice()
    choice.check()
    made, held = OnDevice(SHAPE), host_buffer(SHAPE, "float32")
    logits = Logits(BoundInput(held, held.host), cast(Buffer, made), choice, "model.onnx", 0, {0: 0})
    return logits, made, choice


@pytest.mark.usefixtures("fast")
def test_failing_device_falls_back_to_host_with_reason():
    device = Device()
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
