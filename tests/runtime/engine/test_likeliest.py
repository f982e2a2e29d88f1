"""A token that a device chooses: only where the device chooses as the host does, and quicker, and of finite logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest

from partita.contract import Port
from partita.errors import ProviderError
from partita.runtime.engine import likeliest
from partita.runtime.engine.feeds import Feed
from partita.runtime.engine.likeliest import FORMS, Choosing, likeliest_model
from partita.runtime.engine.logits import Logits
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.session import NativeFailureError, Session

BATCH, VOCAB = 2, 5000
PORT = Port(name="logits", role="logits", shape=(BATCH, 1, VOCAB), dtype="float32")


class OnDevice:
    """Memory that only copies reach; `copies` counts those to the host."""

    dtype, memory = "float32", "Device"

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.held, self.copies = np.zeros(shape, np.float32), 0
        self.value = SimpleNamespace(shape=lambda: list(shape))
        self.size_bytes = self.held.nbytes

    def write(self, buffer: Buffer) -> None:
        self.held[...] = buffer.host

    def copy(self, buffer: Buffer) -> Any:
        self.copies += 1
        buffer.host[...] = self.held
        return buffer.host


def right(values):
    return values.argmax(-1), values.max(-1)


def last_of_equals(values):
    return VOCAB - 1 - values[..., ::-1].argmax(-1), values.max(-1)


def blind_to_nan(values):
    return np.nan_to_num(values, nan=-1e9).argmax(-1), np.nan_to_num(values, nan=-1e9).max(-1)


def summing(values):
    with np.errstate(invalid="ignore"):
        return values.argmax(-1), values.sum(-1)


def failing(values):
    raise ProviderError("out of memory")


class Device:
    """A session whose device chooses in its own way, by form."""

    def __init__(self, **ways: Any) -> None:
        self.ways, self.opened, self.runs = ways, 0, 0

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return OnDevice(tuple(shape))

    def beside(self, name: str, model: bytes) -> Any:
        form = next(form for form in FORMS if likeliest_model(form, "float32", 3) == model)
        if form not in self.ways:
            raise NativeFailureError(RuntimeError("no kernel"), ())
        self.opened += 1
        bound: dict[str, Any] = {}

        def run() -> None:
            self.runs += 1
            token, figure = self.ways[form](bound["logits"].held)
            for name, value in (("token", token), ("figure", figure)):
                bound[name].host[...] = value.reshape(bound[name].host.shape)

        return SimpleNamespace(
            bind_input=bound.__setitem__, bind_output=bound.__setitem__, run=run, release=bound.clear
        )

    def choosing(self, shape: tuple[int, ...] = (BATCH, 1, VOCAB)) -> Choosing:
        return Choosing(cast(Session, self), PORT, shape, shape[:-1])


@pytest.fixture
def quick(monkeypatch):
    """Devices are quicker than copies."""
    seconds = iter([0.0, 1.0] * 100)
    monkeypatch.setattr(likeliest, "_lowest", lambda work: (work(), next(seconds))[1])


MAX, SUM, TOP = FORMS


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("ways", "form"),
    [
        ({MAX: right, SUM: summing, TOP: right}, MAX),
        ({MAX: blind_to_nan, SUM: summing, TOP: right}, SUM),
        ({MAX: last_of_equals, SUM: failing, TOP: right}, TOP),
        ({TOP: right}, TOP),
        ({MAX: last_of_equals, SUM: blind_to_nan, TOP: failing}, None),
        ({}, None),
    ],
)
def test_the_first_form_that_is_right_on_known_rows_is_taken(ways, form):
    choosing = Device(**ways).choosing()
    choosing.copied(1.0)
    assert choosing.find() > 0
    assert (choosing.chooser and choosing.chooser.form) == form


@pytest.mark.usefixtures("quick")
def test_nothing_is_tried_before_copies_have_taken_as_long_and_then_once():
    device = Device(**{MAX: right})
    choosing = device.choosing()
    choosing.copied(likeliest.PATIENCE_SECONDS / 2)
    assert choosing.find() == 0 and device.opened == 0
    choosing.copied(likeliest.PATIENCE_SECONDS)
    choosing.find()
    runs = device.runs
    assert choosing.find() == 0 and (device.opened, device.runs) == (1, runs)


def test_a_device_that_is_slower_than_a_copy_does_not_choose(monkeypatch):
    seconds = iter([1.0, 0.5])
    monkeypatch.setattr(likeliest, "_lowest", lambda work: next(seconds))
    choosing = Device(**{MAX: right, SUM: right, TOP: right}).choosing()
    choosing.copied(1.0)
    choosing.find()
    assert choosing.chooser is None


def test_a_few_logits_are_never_tried():
    device = Device(**{MAX: right})
    choosing = device.choosing((1, 1, 100))
    choosing.copied(1.0)
    assert choosing.find() == 0 and device.opened == 0


def logits_of(device: Device) -> tuple[Logits, OnDevice]:
    """The logits of a session, somebody having been found to choose."""
    choosing = device.choosing()
    choosing.copied(1.0)
    choosing.find()
    made, held = OnDevice((BATCH, 1, VOCAB)), host_buffer((BATCH, 1, VOCAB), "float32")
    return Logits(Feed(held, held.host), cast(Buffer, made), choosing), made


@pytest.mark.usefixtures("quick")
def test_one_look_serves_all_rows_and_what_is_drawn_copies_all():
    device = Device(**{MAX: right})
    logits, made = logits_of(device)
    runs = device.runs
    for step in range(3):
        made.held[:] = np.random.default_rng(step).standard_normal(made.held.shape)
        logits.ran()
        assert [logits.likeliest(row, 0) for row in range(BATCH)] == made.held.argmax(-1).ravel().tolist()
        assert (made.copies, logits.copied_bytes) == (0, BATCH * 12)
    assert device.runs == runs + 3
    assert np.array_equal(logits.row(1, 0), made.held[1, 0]) and np.array_equal(logits.row(0, 0), made.held[0, 0])
    assert (made.copies, logits.copied_bytes) == (1, BATCH * 12 + made.size_bytes)
    assert logits.likeliest(0, 0) is None, "they are here"
    logits.ran()
    assert logits.copied_bytes == 0, "nobody has asked"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_looked_at_on_the_host_from_then_on(value):
    logits, made = logits_of(Device(**{MAX: right}))
    made.held[0, 0, 7] = value
    logits.ran()
    assert logits.likeliest(0, 0) is None
    assert not np.isfinite(logits.row(0, 0).max())
    made.held[:] = 0
    logits.ran()
    assert logits.likeliest(1, 0) is None, "it did not pay"


def test_only_copies_of_which_the_largest_was_wanted_count():
    choosing = Device().choosing()
    made, held = OnDevice((BATCH, 1, VOCAB)), host_buffer((BATCH, 1, VOCAB), "float32")
    logits = Logits(Feed(held, held.host), cast(Buffer, made), choosing)
    logits.ran()
    logits.row(0, 0)
    assert choosing._copied_seconds == 0
    logits.ran()
    assert logits.likeliest(0, 0) is None
    logits.row(0, 0)
    assert choosing._copied_seconds > 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_models_say_what_their_names_say(form, dtype):
    session = onnxruntime.InferenceSession(likeliest_model(form, dtype, 3), providers=["CPUExecutionProvider"])
    values = (np.random.default_rng(0).standard_normal((2, 3, 40)) + 6000).astype(dtype)  # no sum for float16
    token, figure = session.run(["token", "figure"], {"logits": values})
    assert np.array_equal(token.reshape(2, 3), values.argmax(-1))
    wanted = values.astype(np.float32).sum(-1) if "Sum" in form else values.max(-1)
    np.testing.assert_allclose(figure.reshape(2, 3).astype(np.float32), wanted, rtol=1e-5)
