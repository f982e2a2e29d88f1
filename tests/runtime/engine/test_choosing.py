"""Tokens that a device chooses: only where it chooses as the host does, and quicker, and of finite logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest

from partita.contract import Port
from partita.errors import PartitaError, ProviderError
from partita.runtime import selection
from partita.runtime.engine import choosing
from partita.runtime.engine.choices import LARGEST, LIKELIEST, TAKEN, choice_model
from partita.runtime.engine.choosing import Choosing, every_choice
from partita.runtime.engine.feeds import Feed
from partita.runtime.engine.logits import MOST_IN_VAIN, Logits
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.session import NativeFailureError, Session
from partita.runtime.sampling import MOST_DRAWN

BATCH, VOCAB = 2, 5000
SHAPE = (BATCH, 1, VOCAB)
PORT = Port(name="logits", role="logits", shape=SHAPE, dtype="float32")
CHOICES = (LIKELIEST, LARGEST)
MAX, SUM, TOP = LIKELIEST.forms
FEW_MAX, FEW_SUM = LARGEST.forms


FORM_OF = {choice_model(choice, form, "float32", 3): form for choice in CHOICES for form in choice.forms}


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


def right(form, values):
    """What a form gives where the device computes as the host does."""
    count = TAKEN if form in LARGEST.forms else 1
    places = np.argsort(-np.nan_to_num(values, nan=np.inf), axis=-1, kind="stable")[..., :count]
    with np.errstate(invalid="ignore"):
        figure = values.sum(-1) if "Sum" in form else values.max(-1)
    return {"places": places, "figure": figure, "values": np.take_along_axis(values, places, -1)}


def last_of_equals(form, values):
    backwards = right(form, values[..., ::-1])
    return {**backwards, "places": VOCAB - 1 - backwards["places"]}


def blind_to_nan(form, values):
    return right(form, np.nan_to_num(values, nan=-1e9))


def off_by_one(form, values):
    given = right(form, values)
    return {**given, "places": given["places"] ^ 1}


def failing(form, values):
    raise ProviderError("out of memory")


class Device:
    """A session whose device chooses in its own way, by form."""

    def __init__(self, **ways: Any) -> None:
        self.ways, self.opened, self.runs = ways, 0, 0
        self.closed: list[str] = []

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return OnDevice(tuple(shape))

    def beside(self, name: str, model: bytes) -> Any:
        form = FORM_OF[model]
        if form not in self.ways:
            raise NativeFailureError(RuntimeError("no kernel"), ())
        self.opened += 1
        bound: dict[str, Any] = {}

        def run() -> None:
            self.runs += 1
            given = self.ways[form](form, bound["logits"].held)
            for name in bound.keys() - {"logits"}:
                bound[name].host[...] = given[name].reshape(bound[name].host.shape)

        bind = bound.__setitem__
        return SimpleNamespace(bind_input=bind, bind_output=bind, run=run, release=bound.clear)

    def forget(self, model: bytes) -> None:
        self.closed.append(FORM_OF[model])

    def choosing(self, shape: tuple[int, ...] = SHAPE) -> dict[Any, Choosing]:
        return every_choice(cast(Session, self), PORT, shape, shape[0])


@pytest.fixture
def quick(monkeypatch):
    """Devices are quicker than copies."""
    seconds = iter([0.0, 1.0] * 100)
    monkeypatch.setattr(choosing, "_lowest", lambda work: (work(), next(seconds))[1])


def due(made):
    """Copies have taken long enough."""
    made.copied(1.0)
    return made


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("choice", "ways", "form"),
    [
        (LIKELIEST, {MAX: right, SUM: right, TOP: right}, MAX),
        (LIKELIEST, {MAX: blind_to_nan, SUM: right, TOP: right}, SUM),
        (LIKELIEST, {MAX: last_of_equals, SUM: failing, TOP: right}, TOP),
        (LIKELIEST, {TOP: right}, TOP),
        (LIKELIEST, {MAX: last_of_equals, SUM: off_by_one, TOP: failing}, None),
        (LIKELIEST, {}, None),
        (LARGEST, {FEW_MAX: right, FEW_SUM: right}, FEW_MAX),
        (LARGEST, {FEW_MAX: blind_to_nan, FEW_SUM: right}, FEW_SUM),
        (LARGEST, {FEW_MAX: off_by_one, FEW_SUM: failing}, None),
        # Equal ones come in any order: all of them are taken, or the host looks.
        (LARGEST, {FEW_MAX: last_of_equals}, FEW_MAX),
    ],
)
def test_the_first_form_that_is_right_on_known_rows_is_taken(choice, ways, form):
    device = Device(**ways)
    found = due(device.choosing()[choice])
    assert found.find() > 0
    assert (found.chooser and found.chooser.form) == form
    before = choice.forms if form is None else choice.forms[: choice.forms.index(form)]
    assert device.closed == list(before), "what is not used is not kept open"


@pytest.mark.usefixtures("quick")
def test_nothing_is_tried_before_copies_have_taken_as_long_and_then_once():
    device = Device(**{MAX: right})
    found = device.choosing()[LIKELIEST]
    found.copied(choosing.PATIENCE_SECONDS / 2)
    assert found.find() == 0 and device.opened == 0
    found.copied(choosing.PATIENCE_SECONDS)
    found.find()
    runs = device.runs
    assert found.find() == 0 and (device.opened, device.runs) == (1, runs)


def test_a_device_that_is_slower_than_a_copy_does_not_choose(monkeypatch):
    seconds = iter([1.0, 0.5])
    monkeypatch.setattr(choosing, "_lowest", lambda work: next(seconds))
    found = due(Device(**{MAX: right, SUM: right, TOP: right}).choosing()[LIKELIEST])
    found.find()
    assert found.chooser is None


def test_a_few_logits_are_never_tried():
    device = Device(**{MAX: right})
    assert due(device.choosing((1, 1, 100))[LIKELIEST]).find() == 0 and device.opened == 0


def logits_of(device: Device) -> tuple[Logits, OnDevice]:
    """The logits of a session, somebody having been found to choose."""
    found = device.choosing()
    for each in found.values():
        due(each).find()
    made, held = OnDevice(SHAPE), host_buffer(SHAPE, "float32")
    return Logits(Feed(held, held.host), cast(Buffer, made), found), made


@pytest.mark.usefixtures("quick")
def test_one_look_serves_all_rows_and_what_is_drawn_from_all_copies_all():
    device = Device(**{MAX: right, FEW_MAX: right})
    logits, made = logits_of(device)
    runs, token, few = device.runs, 12, 12 * TAKEN + 4
    for step in range(3):
        made.held[:] = np.random.default_rng(step).standard_normal(SHAPE)
        logits.ran()
        found = [logits.chosen(LIKELIEST, row, 0) for row in range(BATCH)]
        assert [int(each[0][0]) for each in found if each] == made.held.argmax(-1).ravel().tolist()
        assert (made.copies, logits.copied_bytes) == (0, BATCH * token)
        for count in (1, 7, MOST_DRAWN):
            for row in range(BATCH):
                several = logits.chosen(LARGEST, row, 0, count)
                assert several is not None
                assert np.array_equal(several[0], selection.largest(made.held[row, 0], count))
                assert np.array_equal(several[1], made.held[row, 0][several[0]])
        assert (made.copies, logits.copied_bytes) == (0, BATCH * (token + few))
    assert device.runs == runs + 2 * 3
    assert np.array_equal(logits.row(1, 0), made.held[1, 0]) and np.array_equal(logits.row(0, 0), made.held[0, 0])
    assert (made.copies, logits.copied_bytes) == (1, BATCH * (token + few) + made.size_bytes)
    assert logits.chosen(LIKELIEST, 0, 0) is None, "they are here"
    logits.ran()
    assert logits.copied_bytes == 0, "nobody has asked"


@pytest.mark.usefixtures("quick")
def test_equal_logits_at_the_edge_are_all_there_or_the_host_looks():
    logits, made = logits_of(Device(**{FEW_MAX: right}))
    made.held[0, 0] = np.linspace(0, 1, VOCAB)
    made.held[1, 0] = np.linspace(0, 1, VOCAB)
    made.held[0, 0, 100:112] = 2.0  # 12 at the edge of 5
    made.held[1, 0, 100:180] = 2.0  # more than are taken
    logits.ran()
    found = logits.chosen(LARGEST, 0, 0, 5)
    assert found is not None and found[0].tolist() == list(range(100, 112))
    assert logits.chosen(LARGEST, 1, 0, 5) is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_looked_at_on_the_host_and_after_some_times_always(value):
    logits, made = logits_of(Device(**{MAX: right}))
    made.held[0, 0, 7] = value
    for _ in range(MOST_IN_VAIN):
        logits.ran()
        assert logits.chosen(LIKELIEST, 0, 0) is None
    assert not np.isfinite(logits.row(0, 0).max())
    made.held[:] = 0
    logits.ran()
    assert logits.chosen(LIKELIEST, 1, 0) is None, "it did not pay"


@pytest.mark.usefixtures("quick")
def test_rows_that_the_host_has_to_see_now_and_then_end_nothing():
    logits, made = logits_of(Device(**{MAX: right}))
    for step in range(4 * MOST_IN_VAIN):
        made.held[0, 0, 7] = 0.0 if step % 2 else np.nan
        logits.ran()
        assert (logits.chosen(LIKELIEST, 0, 0) is None) == (step % 2 == 0)


@pytest.mark.usefixtures("quick")
def test_a_device_that_fails_later_leaves_it_to_the_host_and_says_why():
    """Of a wider step than was tried there may be no memory: its logits are there all the same."""
    device = Device(**{MAX: right})
    choices = device.choosing()
    for each in choices.values():
        due(each).find()
    made, held = OnDevice(SHAPE), host_buffer(SHAPE, "float32")
    logits = Logits(Feed(held, held.host), cast(Buffer, made), choices)
    made.held[0, 0, 7] = 9.0
    device.ways[MAX] = failing
    for _ in range(2):
        logits.ran()
        assert logits.chosen(LIKELIEST, 0, 0) is None
        assert logits.row(0, 0).argmax() == 7
    assert choices[LIKELIEST].chooser is None and choices[LIKELIEST].failed == "out of memory"


def test_logits_that_the_host_rounds_are_left_to_it():
    """1 + 1e-12 and 1 are equal there, and are not on the device."""
    port = PORT.model_copy(update={"dtype": "float64"})
    assert every_choice(cast(Session, Device()), port, SHAPE, BATCH) == {}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_only_copies_of_which_a_choice_was_wanted_count(choice):
    found = Device().choosing()
    made, held = OnDevice(SHAPE), host_buffer(SHAPE, "float32")
    logits = Logits(Feed(held, held.host), cast(Buffer, made), found)
    logits.ran()
    logits.row(0, 0)
    assert not any(each._copied_seconds for each in found.values())
    logits.ran()
    assert logits.chosen(choice, 0, 0) is None
    logits.row(0, 0)
    assert [other for other, each in found.items() if each._copied_seconds] == [choice]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("choice", "form"), [(choice, form) for choice in CHOICES for form in choice.forms])
def test_the_models_say_what_their_names_say(choice, form, dtype):
    model = choice_model(choice, form, dtype, 3)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    values = (np.random.default_rng(0).permutation(600).reshape(2, 3, 100) + 1000).astype(dtype)  # no sum for float16
    given = dict(zip([each.name for each in session.get_outputs()], session.run(None, {"logits": values}), strict=True))
    wanted = right(form, values.astype(np.float32))
    assert np.array_equal(given["places"].reshape(2, 3, -1), wanted["places"])
    np.testing.assert_allclose(given["figure"].astype(np.float32), wanted["figure"], rtol=1e-5)
    if choice is LARGEST:
        assert np.array_equal(given["values"].astype(np.float32), wanted["values"])


@pytest.mark.parametrize("memory", ["Cuda", "WebGPU_Buf"])
def test_a_copy_that_fails_is_an_error_of_the_run(memory, monkeypatch):
    """Native errors are no errors of Partita's, and would end in a traceback."""

    def lost(*_):
        raise RuntimeError("the device was lost")

    monkeypatch.setattr(onnxruntime, "copy_tensors", lost)
    held = host_buffer((1, 1, 4), "float32")
    value = SimpleNamespace(numpy=lost)
    with pytest.raises(PartitaError, match=f"a copy out of {memory} memory"):
        Buffer(value, None, "float32", memory, 16).copy(held)
