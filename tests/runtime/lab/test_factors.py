"""Models of experiments: one change at a time, valid, told apart, in bounded memory, without files of the user."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from partita.diagnosis.probe_conclusions import conclusions
from partita.diagnosis.reasons import reason_from_probes
from partita.providers.base import Option, ProbeValue
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab import placement
from partita.runtime.lab.change import at_opset, with_attributes, with_constants, with_elements, with_sizes
from partita.runtime.lab.exploration import UNCHANGED, Subject, _experiment, explore
from partita.runtime.lab.factors import MOST_PAIRS, pairs, single_changes
from partita.runtime.lab.graph import cut_graph, known_values
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.neighbours import MOST_TOGETHER, neighbourhoods
from partita.runtime.lab.placement import ZEROS, Placement
from partita.runtime.lab.probes import _subjects
from partita.runtime.lab.schema import spell_type
from partita.runtime.lab.variant import (
    MOST_RUN,
    Variant,
    fingerprint,
    node_variant,
    part_model,
    to_run,
    variant_model,
    zeros_needed,
)
from partita.runtime.place.onnx_model import read_onnx
from partita.runtime.place.tensor_types import tensor_types
from tests.runtime.lab.conftest import HEAD, ScriptedLab

ATTENTION = (
    "g (float[1,1,64] x, float[1,1,32] k, float[1,1,32] v, float[1,2,16,16] pk, float[1,2,16,16] pv, int32[1] s, "
    "int32 t) => (float[1,1,64] y, float[1,2,16,16] nk, float[1,2,16,16] nv) {\n"
    "  [n] y, nk, nv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2, scale=0.5>(x, k, v, pk, pv, s, t)"
    "\n}"
)


def opens(case: Variant) -> bool:
    """Whether ONNX Runtime takes the model for a legal one: its CPU provider may have no kernel for it."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(variant_model(case).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its exceptions have no common class of their own
        assert type(error).__name__ in ("NotImplemented", "InvalidGraph", "Fail"), error
        return type(error).__name__ == "NotImplemented"
    return True


TEXTS = {
    "Elu": "g (float[N,4] x) => (float[N,4] y) {\n  [n] y = Elu<alpha=2.0>(x)\n}",
    "Clip": "g (float[4] x, float low) => (float[4] y) {\n  [n] y = Clip(x, low)\n}",
    "Gather": "g (int64[4,4] x, int64[2] i) => (int64[2,4] y) {\n  [n] y = Gather(x, i)\n}",
    "Squeeze": "g (float[1,4] x) => (float[4] y) <int64[1] a = {0}> {\n  [n] y = Squeeze(x, a)\n}",
    "Softmax": "g (float[4,8] x) => (float[4,8] y) {\n  [n] y = Softmax(x)\n}",
    "GroupQueryAttention": ATTENTION,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("in_version", [False, True])
def test_variations_are_distinct_and_do_not_modify_the_case(case, name, in_version):
    plain = case(TEXTS[name], N=(2, 4))
    before = fingerprint(variant_model(plain))
    found = [*single_changes(plain), *pairs(plain, in_version=in_version)]
    assert found and fingerprint(variant_model(plain)) == before
    for trial, changed in found:
        assert trial.change and changed.node.op_type == plain.node.op_type
        assert fingerprint(variant_model(changed)) != before, trial.change
    assert len({trial.change for trial, _ in found}) == len(found), "each is told in words of its own"


@pytest.mark.parametrize("name", ["Elu", "Clip", "Gather", "Squeeze", "Softmax"])
@pytest.mark.parametrize("factor", ["static_shape", "type", "attribute", "input"])
def test_single_variations_load_in_onnxruntime(case, name, factor):
    for trial, changed in single_changes(case(TEXTS[name], x=(2, 4))):
        assert trial.factor != factor or opens(changed), trial.change


PAIRS = {
    # Node, whether its version is supported, and a pair that comes early.
    "removed and added attribute": (
        "g (float[5,2,16] x, float[1,24,16] w, float[1,24,8] r) => (float[5,1,2,8] y) {\n"
        "  [n] y = GRU<hidden_size=8, clip=3.0>(x, w, r)\n}",
        True,
        "linear_before_reset=1 in place of linear_before_reset=0 and without clip=3",
    ),
    "type and rank": (
        "g (float[1,1,3,2,2] x, float[1,2,4,2,3] grid) => (float[A,B,C,D,E] y) {\n  [n] y = GridSample(x, grid)\n}",
        True,
        "float16 in place of float32 and 4 dimensions (sizes of an example) in place of 5",
    ),
    "older version without an attribute that it lacks": (
        "g (float[1,4,8,8] x) => (float[A,B,C,D] y) {\n"
        "  [n] y = AveragePool<kernel_shape=[2,2], dilations=[2,2]>(x)\n}",
        False,
        "AveragePool of opset 11 in place of 19 and without dilations=[2,2]",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_kind_are_among_the_first(case, name):
    text, in_version, words = PAIRS[name]
    plain = case(text)
    invalid = {trial.change for trial, changed in single_changes(plain) if not opens(changed)}
    assert words in [trial.change for trial, _ in pairs(plain, invalid, in_version=in_version)[:MOST_PAIRS]]


OLD = {
    "TopK": "g (float[4,16] x) => (float[4,2] y, int64[4,2] i) {\n  [n] y, i = TopK<k=2>(x)\n}",
    "Slice": "g (float[4,16] x) => (float[4,8] y) {\n  [n] y = Slice<starts=[0], ends=[8], axes=[1]>(x)\n}",
}


@pytest.mark.parametrize("name", OLD)
def test_attribute_becomes_constant_input_in_newer_opset(case, name):
    newer = [each for each in single_changes(case(OLD[name], opset=9)) if each[0].factor == "opset"]
    assert newer, "the attributes of the old version are no reason not to try a newer one"
    assert any(feed.constant is not None for _, changed in newer for feed in changed.feeds)
    for trial, changed in newer:
        assert opens(changed), trial.change


def test_option_named_by_provider_is_probed_at_its_default(case, monkeypatch):
    """Only the library knows this option, whose value is a file."""
    asked: list[tuple[str, str]] = []

    def try_with(lab, option, value, models, **_):
        asked.append((option, value))
        return [Placement("supported") for _ in models]

    monkeypatch.setattr(ScriptedLab, "try_with", try_with)
    named = Placement("rejected", "Relu filtered off by the affinity provider option")
    options = {"affinity": "a.json", "speed": "1"}
    webgpu = known_providers()["webgpu"]
    subject = Subject(case("g (float[2] x) => (float[2] y) {\n  [n] y = Relu(x)\n}"), [(0, "n")])
    explore([subject], ScriptedLab(lambda _: named, Resolution(webgpu, "active", options=options)))
    assert asked == [("affinity", "")]
    assert (reason_from_probes(subject.probe(0, "n"), webgpu.ort_name) or ("",))[0] == "option_needed"


def test_option_and_change_together_are_the_cause(case, monkeypatch):
    """The provider supports other nodes of the operator, and this node with an option and without its attribute."""

    def other_sizes(model: onnx.ModelProto) -> Placement:
        given = [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
        return Placement("supported" if given == [3, 4, 5] else "rejected")

    def try_with(lab, option, value, models, **_):
        attributes = [any(node.attribute for node in model.graph.node) for model in models]
        return [Placement("rejected" if each else "supported") for each in attributes]

    monkeypatch.setattr(ScriptedLab, "try_with", try_with)
    wide = Option("wide", "bool", "0", "", probe_value=ProbeValue("1", operators=("Elu",)))
    webgpu = replace(known_providers()["webgpu"], options=(wide,))
    subject = Subject(case("g (float[2] x) => (float[2] y) {\n  [n] y = Elu<alpha=2.0>(x)\n}"), [(0, "n")])
    explore([subject], ScriptedLab(other_sizes, Resolution(webgpu, "active")))
    found = conclusions(subject.probe(0, "n"))
    assert [each.code for each in found] == ["option_needed", "attribute_unsupported"]
    assert "with webgpu.wide=1 in place of webgpu.wide=0 and without alpha=2 the provider" in found[0].evidence


def test_neighbourhoods_of_node_with_many_consumers_are_bounded(cut):
    lines = "".join(f"  [r{n}] h{n} = Relu(h)\n" for n in range(MOST_TOGETHER + 1))
    outputs = ", ".join(f"float[2] h{n}" for n in range(MOST_TOGETHER + 1))
    found = list(neighbourhoods(cut(f"g (float[2] x) => ({outputs}) {{\n  [hub] h = Neg(x)\n{lines}}}"), "hub"))
    assert found and max(len(model.graph.node) for _, model in found) == 2


def parsed(text: str) -> onnx.ModelProto:
    return parser.parse_model(HEAD.format(opset=21) + text)


@pytest.fixture
def opened(tmp_path):
    """Opens a model in ONNX Runtime, as the child does, and returns the session."""

    def open_model(model: onnx.ModelProto) -> ort.InferenceSession:
        onnx.save(model, tmp_path / "opened.onnx")
        with (tmp_path / ZEROS).open("wb") as file:
            file.truncate(zeros_needed(model))
        return ort.InferenceSession(str(tmp_path / "opened.onnx"), providers=["CPUExecutionProvider"])

    return open_model


PLAIN = "g (float[2,S] x) => (float[2,S] y) { [n] y = MatMul(x, w) }"
BRANCH = (
    "g (float[2,S] x, bool c) => (float[2,S] y) { [n] y = If(c)<then_branch = t () => (float[2,S] a) {"
    " [m] a = MatMul(x, w) }, else_branch = e () => (float[2,S] b) { [o] b = Neg(x) }> }"
)


@pytest.mark.parametrize(("size", "value"), [(4, 0.5), (256, 0.0)])
@pytest.mark.parametrize("text", [PLAIN, BRANCH])
@pytest.mark.parametrize(
    "cut_out", [lambda graph: variant_model(node_variant(graph, "n")), lambda graph: part_model(graph, "n")]
)
def test_small_external_constants_are_read_and_large_are_zero(tmp_path, opened, text, cut_out, size, value):
    """An experiment needs no file of the user's."""
    (tmp_path / "model").mkdir()
    path, proto = tmp_path / "model" / "m.onnx", parsed(text.replace("S]", f"{size}]"))
    holder = proto.graph if text is PLAIN else proto.graph.node[0].attribute[0].g
    holder.initializer.append(numpy_helper.from_array(np.full((size, size), 0.5, np.float32), "w"))
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=0)
    session = opened(cut_out(cut_graph(read_onnx(path), {})))
    values = {"tensor(bool)": np.array(True), "tensor(float)": np.ones((2, size), np.float32)}
    (answer,) = session.run(None, {port.name: values[port.type] for port in session.get_inputs()})
    assert (answer == size * value).all()


SIZED = """g () => (float[M] made) {{
  one = Constant <value_floats = [1.0]> ()
  sizes = Constant <value_ints = [{count}]> ()
  made = {node}
}}"""


@pytest.mark.parametrize("node", ["Expand (one, sizes)", "Tile (one, sizes)"])
def test_constant_folding_is_limited_to_small_results(node):
    small, large = (parsed(SIZED.format(node=node, count=count)) for count in (3, 1 << 24))
    few = known_values(small, tensor_types(small))
    assert list(few["made"].dims) == [3]
    tracemalloc.start()
    try:
        many = known_values(large, tensor_types(large))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "made" not in many
    assert peak < 1 << 22, "a mask of a long text would take all memory"


# Changed nodes are run as well as placed: a change that fails at run time is not a remedy


CPU = Resolution(known_providers()["cpu"], "active")
ADD = "g (float[N] x, float[M] y) => (float[K] z) {\n  [n] z = Add(x, y)\n}"
SLICE = "g (float[4] x, int64[1] a, int64[1] b) => (float[K] z) {\n  [n] z = Slice(x, a, a, a, b)\n}"


def tried(model: onnx.ModelProto) -> placement.Placement:
    return placement._measure(model.SerializeToString(), CPU, one_node=True)


def test_assigned_node_with_failing_run_is_not_supported(case) -> None:
    broken = case(ADD, x=(2,), y=(3,))
    assert tried(variant_model(broken)).outcome == "supported"
    found = tried(to_run(variant_model(broken), broken))
    assert found.outcome == "failed" and found.message.startswith("it is assigned the node, but the run fails: ")
    sound = case(ADD, x=(3,), y=(3,))
    assert tried(to_run(variant_model(sound), sound)).outcome == "supported"


def sizes(model: onnx.ModelProto) -> dict[str, list[int]] | None:
    """Sizes with which a model is to be run."""
    (found,) = (entry.value for entry in model.metadata_props if entry.key == placement.RUN)
    return json.loads(found)


def test_nodes_with_unsafe_inputs_are_not_run(case) -> None:
    """Integer inputs may be positions or sizes: a Slice with step 0 fails on every provider."""
    stepping = case(SLICE)
    assert tried(to_run(variant_model(stepping), stepping)).outcome == "supported"
    adding = case(ADD, x=(3,), y=(3,))
    declaring = replace(adding, declared={"o0": adding.feeds[0].run_kind})
    assert sizes(to_run(variant_model(declaring), declaring)) is None


def test_changed_nodes_run_only_with_known_small_sizes(case) -> None:
    plain, lab = case(ADD, x=(2,), y=(3,)), Lab(CPU, Cache(None), 0.0, {})
    found = [_experiment(Subject(plain, []), *each, lab) for each in single_changes(plain)]
    marked = {each.trial.change: sizes(each.model) for each in found}
    assert marked["float64 in place of float32"] == marked["Add of opset 13 in place of 14"] == {"i0": [2], "i1": [3]}
    assert not _experiment(Subject(plain, []), UNCHANGED, plain, lab).model.metadata_props
    for unknown in (case(ADD, x=(2,)), case(ADD, x=(MOST_RUN,), y=(1,))):
        assert sizes(to_run(variant_model(unknown), unknown)) is None
    weighted = with_constants(case(ADD, x=(1,), y=(MOST_RUN,)), ["i1"])
    assert sizes(to_run(variant_model(weighted), weighted)) == {"i0": [1]}, "weights of any size"


@pytest.mark.parametrize(("length", "subjects"), [(8, 2), (512, 1)])
def test_nodes_that_differ_only_in_weights_are_tested_once(cut, length: int, subjects: int) -> None:
    kind = f"float[{length}]"
    text = f"g ({kind} x) => ({kind} y, {kind} z) {{\n  [a] y = Add(x, v)\n  [b] z = Add(x, w)\n}}"
    model = parser.parse_model(HEAD.format(opset=21) + text)
    weights = {"v": np.ones(length, np.float32), "w": np.zeros(length, np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    graph = cut(model)
    found, _ = _subjects({(0, name): partial(node_variant, graph, name) for name in ("a", "b")})
    assert len(found) == subjects


# in a dry run, where the provider runs nothing and the CPU provider runs the node

POOL = "g (float[1,2,8,8] x) => (float[K] z) {\n  [n] z = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)\n}"
GATHER = "g (float[4] x, int64[2] i) => (float[K] z) {\n  [n] z = Gather(x, i)\n}"
UNKNOWN = "g (float[N] x) => (float[K] z) {\n  [n] z = Relu(x)\n}"
BRAINS = "g (bfloat16[2] x) => (bfloat16[K] z) {\n  [n] z = Relu(x)\n}"
ADDED = {"x": (2,), "y": (2,)}
PADS = helper.make_attribute("pads", [3, 3, 3, 3])
DRY = {
    "mixed types": (ADD, ADDED, lambda node: with_elements(node, {"i0": TensorProto.FLOAT16}, {}), "invalid"),
    "pads": (POOL, {}, lambda node: with_attributes(node, {"pads": PADS}), "invalid"),
    "sizes": (ADD, ADDED, lambda node: with_sizes(node, {"i1": (5,)}), "invalid"),
    "opset": (POOL, {}, lambda node: at_opset(node, 12), "supported"),
    "type": (POOL, {}, lambda node: with_elements(node, {"i0": TensorProto.FLOAT16}, {}), "supported"),
    "integers": (GATHER, {}, lambda node: with_elements(node, {"i1": TensorProto.INT32}, {}), "supported"),
    "rank of integers": (GATHER, {}, lambda node: with_sizes(node, {"i0": ()}), "placed"),
    "unknown sizes": (UNKNOWN, {}, lambda node: at_opset(node, 13), "placed"),
    "no kernel on the CPU provider": (BRAINS, {}, lambda node: at_opset(node, 13), "placed"),
}


@pytest.mark.parametrize("name", DRY)
def test_dry_run_runs_changed_node_on_cpu_provider(name: str, case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}NAME", "h100")
    text, known, change, outcome = DRY[name]
    changed = change(case(text, **known))
    assert changed is not None
    model = to_run(variant_model(changed), changed)
    session: Any = SimpleNamespace(
        metadata=lambda key: next((entry.value for entry in model.metadata_props if entry.key == key), ""),
        inputs=[SimpleNamespace(type=spell_type(port.type)) for port in model.graph.input],
    )
    found = placement._run(session, placement.Placement("supported"), model.SerializeToString())
    assert found.outcome == outcome and (outcome == "invalid") == ("cannot run" in found.message)
