"""Operator forms and typed variants: the written models have the intended types, inputs and attributes."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest

from partita.runtime.lab.forms import Form, assignments, forms, ranks
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.schema import Operator, operators, parse_type, spell_type
from partita.runtime.lab.tables import Table
from partita.runtime.lab.variant import variant_model


def version(name: str, since: int, domain: str = "") -> Operator:
    (found,) = [op for op in operators() if (op.domain, op.name, op.since) == (domain, name, since)]
    return found


def written(form: Form) -> onnx.ModelProto:
    return variant_model(form.build())


def test_older_opset_writes_input_as_attribute():
    for since in (1, 11):
        nodes = [node for form in forms(version("Squeeze", since)) for node in written(form).graph.node]
        assert all(len(node.input) == 1 for node in nodes)
        assert ["axes"] in [[attribute.name for attribute in node.attribute] for node in nodes]


def test_inputs_are_matched_by_name_across_versions():
    """Resize 10 has no roi: its second input is the third input of version 19."""
    form = forms(version("Resize", 10))[0]
    assert [form.name_of(index) for index in range(len(form.inputs))] == ["X", "scales"]
    model = written(form)
    (scales,) = model.graph.initializer
    assert onnx.numpy_helper.to_array(scales).shape == (4,)


def test_cast_is_written_for_every_type_pair():
    cast = version("Cast", 13)
    form = forms(cast)[0]
    listed, more = assignments(form)
    assert (len(listed), more) == (14 * 14, 0)
    for types in listed:
        (node,) = written(replace(form, types=types)).graph.node
        to = onnx.helper.get_node_attr_value(node, "to")
        assert f"tensor({onnx.TensorProto.DataType.Name(to).lower()})" == dict(types)["T2"]


def test_type_assignments_above_limit_are_sampled_and_counted():
    form = forms(version("QLinearMatMul", 21))[0]
    listed, more = assignments(form)
    assert 0 < len(listed) <= 200 and more > 0
    assert len({tuple(types) for types in listed}) == len(listed)


def test_reshape_shape_input_is_constant_and_add_inputs_are_not():
    gather = forms(version("Reshape", 14))[0]
    assert gather.constant == {1}
    assert forms(version("Add", 14))[0].constant == frozenset()
    notes = [form.note for form in forms(version("Reshape", 14)) if form.kind == "constants"]
    assert notes == ["shape not constant"]


def test_ranks_vary_only_for_operators_without_fixed_rank():
    assert [form.note for form in ranks(forms(version("Add", 14))[0])] == [
        f"rank {rank}" for rank in (0, 1, 2, 4, 5, 6)
    ]
    assert not list(ranks(forms(version("Conv", 22))[0]))


@pytest.mark.parametrize("text", ["tensor(float)", "seq(tensor(int64))", "optional(seq(tensor(bool)))"])
def test_type_text_round_trips_through_parse_type(text):
    assert spell_type(parse_type(text, (2, 3))) == text


def test_types_are_probed_with_first_supported_form():
    table = Table({version("Resize", 19): frozenset()}, by_need=False)
    waves = table.batches()
    first = next(waves)
    table.answers |= {form: Placement("rejected") for form in first}
    table.answers[first[2]] = Placement("supported")
    assert all(form.attributes is first[2].attributes for form in next(waves))
