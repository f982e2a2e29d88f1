"""GroupQueryAttention path, chosen by processor and head sizes, and other CPU provider settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partita import process
from partita.errors import UsageError
from partita.providers.resolve import parse_chain, resolve
from partita.runtime.cpu import settings
from partita.runtime.cpu.attention import (
    MOST_SCRATCH,
    VARIABLE,
    Attention,
    attention_path,
    choose,
    find_attention,
)
from partita.runtime.ort.session import open_native
from partita.runtime.ort.session_options import Opening

ATTENTION = Attention(frozenset({8}), head_size=64, has_window=False, batch=1, tokens=512, length=512)
CPU = resolve(parse_chain("cpu"), ["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("change", "threads", "avx512", "path", "why"),
    [
        ({}, 1, True, "naive", "faster"),
        ({"heads": frozenset({8, 4})}, 4, True, "naive", "faster"),
        ({}, 8, True, "naive", "faster"),  # a head for each thread
        ({}, 3, True, "naive", "faster"),  # three turns in place of 2.7
        ({}, 7, True, "flash", "8 heads do not divide evenly among 7 threads"),
        ({}, 64, True, "flash", "among 64 threads"),
        ({}, 1, False, "flash", "AVX-512"),
        ({"head_size": 256}, 1, True, "flash", "head size 256 is above 64"),
        ({"has_window": True}, 1, True, "flash", "sliding window"),
    ],
)
def test_naive_attention_is_chosen_only_where_it_is_faster(change, threads, avx512, path, why):
    choice = choose(replace(ATTENTION, **change), threads, avx512=avx512)
    assert choice is not None
    assert choice.path == path and why in f"{choice.reason}: {choice.detail}"


def test_score_matrix_above_memory_limit_selects_flash():
    length = MOST_SCRATCH // (4 * 8 * 512)
    fits, exceeds = (choose(replace(ATTENTION, length=each), 1, avx512=True) for each in (length, length + 1))
    assert fits is not None and fits.path == "naive"
    assert exceeds is not None and (exceeds.path, exceeds.reason) == ("flash", "memory")


def graph(*, kind: int = TensorProto.FLOAT, past: tuple[int | str, ...] = (1, 2, 1024, 64), sink: bool = False, **more):
    """A graph with one node."""
    names = ["query", "key", "value", "past_key", "past_value", "last", "total"]
    inputs = [helper.make_tensor_value_info(name, kind, past if "past" in name else None) for name in names]
    beside = ["", "", "", "", "query"] if sink else []
    node = helper.make_node(
        "GroupQueryAttention", [*names, *beside], ["o", "pk", "pv"], domain="com.microsoft", num_heads=8, **more
    )
    return helper.make_model(helper.make_graph([node], "g", inputs, []))


def test_attention_with_two_paths_is_found_with_parameters():
    found = find_attention(graph())
    assert found == replace(ATTENTION, length=1024)
    windowed = find_attention(graph(local_window_size=128, scale=0.5))
    assert windowed is not None and windowed.has_window
    alone = attention_path(found, 1)
    assert alone is not None and alone == replace(found, tokens=1)
    assert choose(alone, 1, avx512=True) is None, "a token takes about as long on both paths"


@pytest.mark.parametrize(
    "other",
    [
        {"kind": TensorProto.FLOAT16},
        {"past": (1, 2, "length", 64)},
        {"softcap": 30.0},
        {"smooth_softmax": 1},
        {"sink": True},
    ],
    ids=str,
)
def test_attention_with_single_path_is_not_found(other):
    assert find_attention(graph(**other)) is None


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    """A processor with AVX-512, and nothing in the environment."""
    monkeypatch.setattr(settings, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    monkeypatch.delenv(VARIABLE, raising=False)


def chosen(attention, active=CPU, opening=None):
    opened, cpu = settings.set_up(Path("model.onnx"), active, opening or Opening(), attention)
    assert cpu is not None
    return dict(opened.environment), cpu.attention


@pytest.mark.parametrize(("flags", "path"), [({"avx512f"}, "naive"), ({"avx2"}, "flash"), (set(), "flash")])
def test_chosen_path_is_set_in_environment(monkeypatch, flags, path):
    monkeypatch.setattr(settings, "cpu_flags", lambda: flags)
    environment, choice = chosen(ATTENTION, opening=Opening(threads=1))
    assert environment == {VARIABLE: "1" if path == "naive" else "0"} and choice.path == path


def test_no_path_is_chosen_if_attention_is_short_or_not_on_cpu():
    cuda = resolve(parse_chain("cuda,cpu"), ["CUDAExecutionProvider", "CPUExecutionProvider"])
    for attention, active in ((None, CPU), (replace(ATTENTION, tokens=16, length=16), CPU), (ATTENTION, cuda)):
        assert chosen(attention, active) == ({}, None)


def test_option_overrides_environment_and_choice(monkeypatch):
    naive, flash = (
        resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"attention": path}})
        for path in ("naive", "flash")
    )
    assert chosen(ATTENTION, naive)[0] == {VARIABLE: "1"}
    assert chosen(None, naive)[0] == {VARIABLE: "1"}
    monkeypatch.setenv(VARIABLE, "1")
    assert chosen(ATTENTION, flash)[0] == {VARIABLE: "0"}, "the option goes before the environment"
    assert chosen(ATTENTION)[1].reason == "environment"


def test_naive_attention_in_foreign_process_requires_variable(monkeypatch):
    monkeypatch.setattr(process, "own_process", False)
    assert chosen(ATTENTION)[1].path == "flash"
    naive = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"attention": "naive"}})
    with pytest.raises(UsageError, match=f"{VARIABLE}=1"):
        chosen(ATTENTION, naive)
    monkeypatch.setenv(VARIABLE, "1")
    assert chosen(ATTENTION, naive)[1].reason == "option" and chosen(ATTENTION)[1].path == "naive"


@pytest.mark.parametrize(
    ("threads", "option", "spinning", "reason"),
    [
        (None, None, True, "default"),
        (512, None, False, "crowded"),
        (512, "1", True, "option"),
        (1, "0", False, "option"),
    ],
)
def test_spinning_is_off_when_oversubscribed_unless_set_by_option(threads, option, spinning, reason):
    active = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"spinning": option} if option else {}})
    opened, cpu = settings.set_up(Path("model.onnx"), active, Opening(threads=threads), None)
    assert cpu is not None
    assert (cpu.spinning, cpu.spinning_reason) == (spinning, reason)
    assert opened.config[settings.SPINNING] == str(int(spinning))
    assert active[0].provider_options == {}, "ONNX Runtime has no such options"


@pytest.mark.parametrize(
    ("chain", "options", "key", "value"),
    [
        ("cpu", {}, settings.STOPPING, "0"),
        ("cpu", {"spinning_after": "0"}, settings.STOPPING, "1"),
        ("cpu", {}, settings.PACKING, "1"),
        ("cpu", {"parallel_packing": "0"}, settings.PACKING, "0"),
        ("cpu,cuda", {}, settings.PACKING, "0"),
    ],
)
def test_cpu_options_set_session_config(chain, options, key, value):
    active = resolve(parse_chain(chain), ["CUDAExecutionProvider", "CPUExecutionProvider"], {"cpu": options})
    assert settings.set_up(Path("model.onnx"), active, Opening(), None)[0].config.get(key) == value


WEIGHT = np.array([[100, -100], [1, 2], [-128, 127], [90, 3]])
"""Beyond seven bits: ONNX Runtime leaves others as they are."""


def rounded_product(path: Path, kind: type[np.int8 | np.uint8], form: str, *, zero_point: bool) -> np.ndarray:
    """Writes the product of `x` [1, 4] and a weight of 8-bit integers [4, 2] to a file; the weight as numbers."""
    weight = WEIGHT.astype(kind)
    stored = numpy_helper.from_array(weight.T.copy() if form == "Transpose" else weight, "stored")
    given = {"scale": np.ones(2, np.float32), **({"zero": np.zeros(2, kind)} if zero_point else {})}
    values = [numpy_helper.from_array(value, name) for name, value in given.items()]
    before = {
        "initializer": [],
        "Constant": [helper.make_node("Constant", [], ["weight"], value=stored)],
        "Transpose": [helper.make_node("Transpose", ["stored"], ["weight"], perm=[1, 0])],
    }[form]
    if form == "initializer":
        stored.name = "weight"
    if form != "Constant":
        values.append(stored)
    nodes = [
        *before,
        helper.make_node("DequantizeLinear", ["weight", *given], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in (("x", 4), ("y", 2))]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return weight.astype(np.float32)


@pytest.mark.parametrize("form", ["initializer", "Constant", "Transpose"])
@pytest.mark.parametrize(("kind", "zero_point"), [(np.int8, True), (np.int8, False), (np.uint8, True)])
@pytest.mark.parametrize("unit", ["", "avx512_vnni", None])
def test_integer_matmul_is_exact_for_every_weight_form(monkeypatch, tmp_path, unit, kind, zero_point, form):
    monkeypatch.setattr(settings, "integer_unit", lambda: unit)
    path = tmp_path / "model.onnx"
    weight = rounded_product(path, kind, form, zero_point=zero_point)
    opened, _ = settings.set_up(path, CPU, Opening(), None)
    assert opened.config.get(settings.EXACT) == ("1" if unit == "" and zero_point else None)
    session = open_native(path, CPU, opened)
    outputs, failure = session.run_once({"x": np.ones((1, 4), np.float32)})
    session.close()
    assert outputs is not None and not failure, failure
    assert outputs[0].tolist() == [weight.sum(0).tolist()]
