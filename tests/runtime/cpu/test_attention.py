"""The path through GroupQueryAttention: chosen by what was measured, only where it matters, and never on doubt."""

from __future__ import annotations

import os

import pytest
from onnx import TensorProto, helper

from partita.providers.resolve import parse_chain, resolve
from partita.runtime.cpu import settings
from partita.runtime.cpu.attention import (
    MOST_SCRATCH,
    VARIABLE,
    Attention,
    Form,
    Times,
    choose,
    find_attention,
    too_large,
    within,
)
from partita.runtime.cpu.timing import Kept, kept_timings, measure, times_of
from partita.runtime.ort.session import Opening

FORM = Form(8, 2, 64, None)
ATTENTION = Attention({FORM: 4}, batch=1, tokens=512, length=512)
CPU = resolve(parse_chain("cpu"), ["CPUExecutionProvider"])


def times(
    flash: float,
    naive: float,
    *,
    short: tuple[float, float] = (1.0, 0.5),
    single: tuple[float, float] = (0.01, 0.01),
    spread: float = 1.01,
) -> Times:
    """Steady times in seconds of a token, a short and a long prompt, unless `spread` says otherwise."""
    return Times(
        (1, 128, 512),
        tuple((value, value * spread) for value in (single[0], short[0], flash)),
        tuple((value, value * spread) for value in (single[1], short[1], naive)),
    )


@pytest.mark.parametrize(
    ("found", "threads", "path", "reason"),
    [
        (times(10, 6), 1, "naive", "faster"),
        (times(10, 9.5), 1, "flash", "not_faster"),  # not clearly
        (times(10, 14), 1, "flash", "not_faster"),
        (times(10, 6, short=(1, 1.2)), 1, "flash", "not_faster"),  # only for long prompts
        (times(10, 6, single=(0.02, 0.025)), 1, "naive", "faster"),
        (times(10, 6, single=(0.02, 0.05)), 1, "flash", "not_faster"),  # what is won is lost on what follows
        (times(10, 6, spread=1.5), 1, "flash", "unclear"),
        (times(10, 6), 8, "naive", "faster"),  # a head for each thread
        (times(10, 6), 7, "flash", "not_faster"),  # eight heads over seven threads are two turns
        (times(10, 6), 64, "flash", "not_faster"),  # most threads have no head
    ],
)
def test_naive_is_taken_when_it_is_clearly_faster(found, threads, path, reason):
    choice = choose(ATTENTION, {FORM: found}, threads, kept=False)
    assert (choice.path, choice.reason) == (path, reason)
    assert list(choice.timings[0].flash_us) == pytest.approx([rounds[0] * 1e6 for rounds in found.flash])


def test_forms_count_by_how_many_nodes_have_them():
    wide = Form(8, 1, 256, None)
    both = {FORM: times(10, 6), wide: times(10, 16)}
    few, many = (Attention({FORM: 5, wide: count}, 1, 512, 512) for count in (1, 5))
    assert choose(few, both, 1, kept=False).path == "naive"
    assert choose(many, both, 1, kept=False).path == "flash"


def test_a_matrix_of_scores_beyond_the_limit_rules_naive_out():
    length = MOST_SCRATCH // (4 * 8 * 512)
    assert too_large(Attention({FORM: 1}, 1, 512, length)) is None
    refused = too_large(Attention({FORM: 1}, 1, 512, length + 1))
    assert refused is not None and (refused.path, refused.reason) == ("flash", "memory")


def graph(*, kind: int = TensorProto.FLOAT, past: tuple[int | str, ...] = (1, 2, 1024, 64), sink: bool = False, **more):
    """A graph with one node."""
    names = ["query", "key", "value", "past_key", "past_value", "last", "total"]
    inputs = [helper.make_tensor_value_info(name, kind, past if "past" in name else None) for name in names]
    beside = ["", "", "", "", "query"] if sink else []
    node = helper.make_node(
        "GroupQueryAttention", [*names, *beside], ["o", "pk", "pv"], domain="com.microsoft", num_heads=8, **more
    )
    return helper.make_model(helper.make_graph([node], "g", inputs, []))


def test_attention_with_two_paths_is_found_with_its_form():
    found = find_attention(graph())
    assert found is not None and found == Attention({FORM: 1}, batch=1, tokens=512, length=1024)
    windowed = find_attention(graph(local_window_size=128, scale=0.5))
    assert windowed is not None and list(windowed.forms) == [Form(8, 2, 64, 128)]
    alone = within(found, 1)
    assert alone is not None and alone == Attention({FORM: 1}, 1, 1, 1024) and not alone.matters
    assert found.matters


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
def test_attention_that_has_one_path_is_left_alone(other):
    assert find_attention(graph(**other)) is None


def test_timings_are_kept_on_disk_unless_they_were_disturbed(tmp_path):
    asked = []

    def measured(form, lengths, cpu):
        asked.append(form)
        return times(10, 6, spread=1.5 if len(asked) == 1 else 1.01)

    kept = Kept(tmp_path / "deep" / "timings.json")
    assert times_of(FORM, (1, 128, 512), CPU[0], kept, measured)[1] is False
    assert not (tmp_path / "deep").exists(), "a machine under load is asked again"
    assert times_of(FORM, (1, 128, 512), CPU[0], kept, measured)[1] is False
    again = Kept(tmp_path / "deep" / "timings.json")
    found, known = times_of(FORM, (1, 128, 512), CPU[0], again, measured)
    assert known and found == times(10, 6) and len(asked) == 2
    Kept(again.path).put(Form(4, 4, 32, None), times(1, 1))
    assert set(Kept(again.path).times) == {"8/2x64 at 1,128,512", "4/4x32 at 1,128,512"}, "what others kept stays"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": 0, "times": {}}',
        '{"format": 2, "times": {"8/2x64 at 512": {"lengths": [512]}}}',
        '{"format": 2, "times": {"8/2x64 at 512": {"lengths": [512], "flash": [[]], "naive": [[0]]}}}',
    ],
)
def test_a_damaged_file_of_timings_counts_for_nothing(tmp_path, text):
    path = tmp_path / "timings.json"
    path.write_text(text)
    assert Kept(path).times == {}


def test_both_paths_are_really_measured(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    found = measure(Form(4, 2, 16, 8), (1, 16, 64), CPU[0])
    assert found.lengths == (1, 16, 64)
    assert all(len(rounds) == 3 and min(rounds) > 0 for rounds in (*found.flash, *found.naive))
    assert VARIABLE not in os.environ


@pytest.fixture
def measured(monkeypatch):
    """Timings that a test makes up, and what was asked for."""
    asked: list[Form] = []

    def measure_(form, lengths, cpu):
        asked.append(form)
        return times(10, 6)

    monkeypatch.setattr("partita.runtime.cpu.timing.measure", measure_)
    monkeypatch.delenv(VARIABLE, raising=False)
    return asked


def chosen(attention, active=CPU, opening=None):
    opened, cpu = settings.set_up("model.onnx", active, opening or Opening(), attention)
    assert cpu is not None
    return dict(opened.environment), cpu.attention


def test_what_is_chosen_reaches_the_session(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path))
    environment, choice = chosen(ATTENTION)
    assert environment == {VARIABLE: "1"} and choice.path == "naive" and not choice.kept
    assert chosen(ATTENTION)[1].kept and len(measured) == 1


def test_nothing_is_timed_where_it_cannot_matter(measured):
    cuda = resolve(parse_chain("cuda,cpu"), ["CUDAExecutionProvider", "CPUExecutionProvider"])
    for attention, active in (
        (None, CPU),
        (Attention({FORM: 4}, 1, 16, 16), CPU),
        (ATTENTION, cuda),
        (Attention({FORM: 4}, 1, 512, 10**6), CPU),  # too much memory: no need to know
    ):
        environment, _ = chosen(attention, active)
        assert environment in ({}, {VARIABLE: "0"})
    assert not measured


def test_whoever_said_something_is_obeyed(measured, monkeypatch):
    naive, flash = (
        resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"attention": path}})
        for path in ("naive", "flash")
    )
    assert chosen(ATTENTION, naive)[0] == {VARIABLE: "1"}
    assert chosen(None, naive)[0] == {VARIABLE: "1"}
    monkeypatch.setenv(VARIABLE, "1")
    assert chosen(ATTENTION, flash)[0] == {VARIABLE: "0"}, "the option goes before the environment"
    assert chosen(ATTENTION)[1].reason == "environment"
    assert not measured


def test_an_operator_that_cannot_be_timed_leaves_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    odd = Form(4, 3, 7, None)  # heads that do not divide, of a width that the kernel refuses
    _, choice = chosen(Attention({odd: 1}, 1, 4096, 64))
    assert (choice.path, choice.reason) == ("flash", "failed") and "could not be timed" in choice.detail


@pytest.mark.parametrize(
    ("threads", "option", "spinning", "reason"),
    [
        (None, None, True, "default"),
        (512, None, False, "crowded"),
        (512, "1", True, "option"),
        (1, "0", False, "option"),
    ],
)
def test_threads_do_not_spin_when_there_are_more_than_cores(threads, option, spinning, reason):
    active = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"spinning": option} if option else {}})
    opened, cpu = settings.set_up("model.onnx", active, Opening(threads=threads), None)
    assert cpu is not None
    assert (cpu.spinning, cpu.spinning_reason) == (spinning, reason)
    assert opened.config[settings.SPINNING] == str(int(spinning))
    assert active[0].provider_options == {}, "ONNX Runtime has no such options"


@pytest.mark.parametrize(("options", "stopping"), [({}, "0"), ({"spinning_after": "0"}, "1")])
def test_threads_leave_their_loop_with_the_run_where_that_is_asked(options, stopping):
    active = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": options})
    config = settings.set_up("model.onnx", active, Opening(), None)[0].config
    assert config[settings.STOPPING] == stopping


@pytest.mark.parametrize(
    ("chain", "options", "packing"),
    [("cpu", {}, "1"), ("cpu", {"cpu": {"parallel_packing": "0"}}, "0"), ("cpu,cuda", {}, "0")],
)
def test_all_threads_pack_weights_where_the_cpu_provider_is_alone(chain, options, packing):
    active = resolve(parse_chain(chain), ["CUDAExecutionProvider", "CPUExecutionProvider"], options)
    assert settings.set_up("model.onnx", active, Opening(), None)[0].config[settings.PACKING] == packing


def test_timings_are_kept_apart_by_processor_and_build(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path))
    here = kept_timings().path
    monkeypatch.setattr("partita.runtime.cpu.timing.cpu_identity", lambda: ("another", ""))
    assert kept_timings().path != here


@pytest.mark.parametrize(("unit", "exact"), [("", "1"), ("avx512_vnni", None), (None, None)])
def test_products_of_integers_are_exact_where_the_processor_would_let_them_saturate(monkeypatch, unit, exact):
    monkeypatch.setattr(settings, "integer_unit", lambda: unit)
    active = resolve(parse_chain("cpu"), ["CPUExecutionProvider"])
    assert settings.set_up("model.onnx", active, Opening(), None)[0].config.get(settings.EXACT) == exact
