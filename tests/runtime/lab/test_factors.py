"""Variations of a node for probes: a single factor at a time, valid, with distinct descriptions."""

from __future__ import annotations

import onnxruntime as ort
import pytest

from partita.diagnosis.probe_conclusions import CAUSES
from partita.observations.facts import OPTION
from partita.runtime.lab.change import other_attributes
from partita.runtime.lab.factors import FACTORS, MOST_PAIRS, pairs, single_changes
from partita.runtime.lab.forms import forms
from partita.runtime.lab.schema import operators
from partita.runtime.lab.variant import Variant, fingerprint, variant_model

ATTENTION = (
    "g (float[1,1,64] x, float[1,1,32] k, float[1,1,32] v, float[1,2,16,16] pk, float[1,2,16,16] pv, int32[1] s, "
    "int32 t) => (float[1,1,64] y, float[1,2,16,16] nk, float[1,2,16,16] nv) {\n"
    "  [n] y, nk, nv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2, scale=0.5>(x, k, v, pk, pv, s, t)"
    "\n}"
)


def changes(case: Variant, factor: str) -> list[str]:
    return [trial.change for trial, _ in single_changes(case) if trial.factor == factor]


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


def test_known_rank_keeps_declared_outputs(case):
    plain = case("g (float[] x) => (float[2,4] y) {\n  [n] y = Elu(x)\n}", x=(2, 4))
    (ranked,) = (changed for trial, changed in single_changes(plain) if trial.factor == "rank")
    assert ranked.declared == plain.declared != {}


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


def test_each_factor_belongs_to_a_single_reason(case):
    known = list(CAUSES)
    own = [OPTION, *FACTORS]
    assert sorted(known) == sorted(own), "each factor shows one reason"
    for text in TEXTS.values():
        assert {trial.factor for trial, _ in single_changes(case(text))} <= set(known)


def test_opset_without_required_feature_is_skipped(case):
    dilated = "g (float[1,4,8,8] x) => (float[1,4,C,D] y) {\n  [n] y = MaxPool<kernel_shape=[2,2], ceil_mode=1>(x)\n}"
    assert "MaxPool of opset 8 in place of 12" not in changes(case(dilated), "opset"), "ceil_mode came with opset 10"
    half = "g (bfloat16[4,8] x) => (bfloat16[4,8] y) {\n  [n] y = Softmax(x)\n}"
    assert "Softmax of opset 11 in place of 13" not in changes(case(half), "opset"), "bfloat16 came with opset 13"


def test_attributes_vary_for_every_operator_and_version():
    """Empty lists in examples and attributes without a default do not raise."""
    found = [form.build() for operator in operators() for form in forms(operator)[:2]]
    assert sum(len(list(other_attributes(variant))) for variant in found) > 1000


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
