"""Models of experiments: one change at a time, valid, told apart, in bounded memory, without files of the user."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from partita.diagnosis.probe_conclusions import CAUSES
from partita.diagnosis.reasons import reason_from_probes
from partita.observations.facts import OPTION
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.exploration import Subject, explore
from partita.runtime.lab.factors import FACTORS, combine_factors, further_pairs, single_changes
from partita.runtime.lab.graph import cut_graph, known_values
from partita.runtime.lab.neighbours import MOST_TOGETHER, neighbourhoods
from partita.runtime.lab.placement import ZEROS, Placement
from partita.runtime.lab.variant import Variant, fingerprint, node_variant, part_model, variant_model, zeros_needed
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
def test_variations_are_distinct_and_do_not_modify_the_case(case, name):
    plain = case(TEXTS[name], N=(2, 4))
    before = fingerprint(variant_model(plain))
    found = [*single_changes(plain), *combine_factors(plain), *further_pairs(plain)]
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


def test_each_factor_belongs_to_a_single_reason(case):
    known = list(CAUSES)
    own = [OPTION, *FACTORS]
    assert sorted(known) == sorted(own), "each factor shows one reason"
    for text in TEXTS.values():
        assert {trial.factor for trial, _ in single_changes(case(text))} <= set(known)


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
    asked = []

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
