"""Changed nodes are run as well as placed: a change that fails at run time is not a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import onnx
import pytest
from onnx import TensorProto, helper

from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab import placement
from partita.runtime.lab.change import at_opset, with_attributes, with_elements, with_sizes
from partita.runtime.lab.exploration import UNCHANGED, Subject, _experiment
from partita.runtime.lab.factors import single_changes
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.schema import spell_type
from partita.runtime.lab.variant import MOST_RUN, to_run, variant_model

if TYPE_CHECKING:
    from partita.runtime.ort.session import Session

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
    session = SimpleNamespace(
        metadata=lambda key: next((entry.value for entry in model.metadata_props if entry.key == key), ""),
        inputs=[SimpleNamespace(type=spell_type(port.type)) for port in model.graph.input],
    )
    found = placement._run(cast("Session", session), placement.Placement("supported"), model.SerializeToString())
    assert found.outcome == outcome and (outcome == "invalid") == ("cannot run" in found.message)
