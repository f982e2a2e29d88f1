"""Variants of operators: every one that is written is a model that says what it was meant to say."""

from __future__ import annotations

import onnx
import pytest

from partita.runtime.lab.forms import TypedForm, as_example, assignments, forms, ranks
from partita.runtime.lab.laboratory import ModelOutcome
from partita.runtime.lab.schema import Operator, operators, parse_type, spell_type
from partita.runtime.lab.tables import Table
from partita.runtime.lab.variant import variant_model


def version(name: str, since: int, domain: str = "") -> Operator:
    (found,) = [op for op in operators() if (op.domain, op.name, op.since) == (domain, name, since)]
    return found


def written(variant: TypedForm) -> onnx.ModelProto:
    return variant_model(variant.build())


def test_an_older_version_has_as_attribute_what_a_newer_one_has_as_input():
    (node,) = written(as_example(forms(version("Squeeze", 11))[0])).graph.node
    assert len(node.input) == 1
    (attribute,) = node.attribute
    assert (attribute.name, list(attribute.ints)) == ("axes", [0])


def test_inputs_of_another_version_go_by_their_names():
    """Resize 10 has no roi: its second input is what is the third of version 19."""
    form = forms(version("Resize", 10))[0]
    assert [form.name_of(index) for index in range(len(form.inputs))] == ["X", "scales"]
    model = written(as_example(form))
    (scales,) = model.graph.initializer
    assert onnx.numpy_helper.to_array(scales).shape == (4,)


def test_a_cast_is_written_for_every_pair_of_types():
    cast = version("Cast", 13)
    form = forms(cast)[0]
    listed, more = assignments(form)
    assert (len(listed), more) == (14 * 14, 0)
    for types in listed:
        (node,) = written(TypedForm(form, types, "types")).graph.node
        to = onnx.helper.get_node_attr_value(node, "to")
        assert f"tensor({onnx.TensorProto.DataType.Name(to).lower()})" == dict(types)["T2"]


def test_too_many_assignments_are_sampled_and_the_rest_is_counted():
    form = forms(version("QLinearMatMul", 21))[0]
    listed, more = assignments(form)
    assert 0 < len(listed) <= 200 and more > 0
    assert len({tuple(types) for types in listed}) == len(listed)


def test_small_inputs_after_the_first_are_constants_and_data_are_none():
    gather = forms(version("Reshape", 14))[0]
    assert gather.constant == {1}
    assert forms(version("Add", 14))[0].constant == frozenset()
    notes = [form.note for form in forms(version("Reshape", 14)) if form.kind == "constants"]
    assert notes == ["shape not constant"]


def test_ranks_are_varied_where_the_data_have_one_shape():
    assert [form.note for form in ranks(forms(version("Add", 14))[0])] == [
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 4",
        "rank 5",
        "rank 6",
    ]
    assert not list(ranks(forms(version("Conv", 22))[0]))


@pytest.mark.parametrize("text", ["tensor(float)", "seq(tensor(int64))", "optional(seq(tensor(bool)))"])
def test_types_are_read_as_they_are_written(text):
    assert spell_type(parse_type(text, (2, 3))) == text


def test_types_are_asked_about_in_a_form_that_is_taken():
    table = Table({version("Resize", 19): frozenset()}, by_need=False)
    waves = table.batches()
    first = next(waves)
    table.answers |= {variant.key: ModelOutcome("rejected") for variant in first}
    table.answers[first[2].key] = ModelOutcome("supported")
    assert all(variant.form is first[2].form for variant in next(waves))
