"""Attributes that have another name in every type go along with a change of the type, as the schema has them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper, parser

from partita import dtypes
from partita.runtime.lab.factors import single
from partita.runtime.lab.graph import cut_proto
from partita.runtime.lab.schema import find_operator
from partita.runtime.lab.type_factors import _retyped
from partita.runtime.lab.variant import Variant, node_variant, variant_model

FLOAT, INT64, STRING = dtypes.numbers("float32", "int64", "string")


def case_of(text: str, *, ml: int = 3) -> Variant:
    head = f'<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : {ml}]>\n'
    return node_variant(cut_proto(parser.parse_model(head + text), Path(), {}), "n")


def attributes(case: Variant) -> dict[str, object]:
    return {entry.name: helper.get_attribute_value(entry) for entry in case.node.attribute}


LABELS = (
    "g (string[4] x) => (float[4] y) {\n  [n] y = ai.onnx.ml.LabelEncoder<"
    'keys_strings=["a","b"], values_floats=[0.5,0.75]>(x)\n}'
)


def test_keys_change_their_name_with_the_type_of_the_input():
    found = {entry.change: attributes(entry.variant) for entry in single(case_of(LABELS)) if entry.factor == "type"}
    assert found["int64 in place of string"] == {"keys_int64s": [0, 1], "values_floats": [0.5, 0.75]}
    assert found["float32 in place of string"] == {"keys_floats": [0.0, 1.0], "values_floats": [0.5, 0.75]}
    assert found["string in place of float32 as values"] == {
        "keys_strings": [b"a", b"b"],
        "values_strings": [b"0.5", b"0.75"],
    }


def test_tables_in_a_tensor_change_their_type():
    text = LABELS.replace('keys_strings=["a","b"]', 'keys_tensor=string[2] {"a","b"}')
    found = {entry.change: entry.variant for entry in single(case_of(text, ml=4)) if entry.factor == "type"}
    (table,) = [entry.t for entry in found["int64 in place of string"].node.attribute if entry.HasField("t")]
    assert table.data_type == INT64 and onnx.numpy_helper.to_array(table).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("operator", "given", "changed"),
    [
        ("CategoryMapper", {"cats_int64s": [1, 2], "default_int64": -1}, {}),
        ("OneHotEncoder", {"cats_strings": ["a", "b"]}, {"cats_int64s": [0, 1]}),
        ("DictVectorizer", {"string_vocabulary": ["a", "b"]}, {"int64_vocabulary": [0, 1]}),
        ("Imputer", {"imputed_value_floats": [1.0]}, {}),
        ("SVMClassifier", {"classlabels_strings": ["a", "b"]}, {"classlabels_ints": [0, 1]}),
        ("ZipMap", {"classlabels_strings": ["7", "8"]}, {"classlabels_int64s": [7, 8]}),
    ],
)
def test_names_are_read_from_the_schema_of_any_operator(operator, given, changed):
    schema = find_operator("ai.onnx.ml", operator, 3)
    entries = {name: helper.make_attribute(name, value) for name, value in given.items()}
    found = [(name, entry) for _, more in _retyped(entries, schema, STRING, INT64) for name, entry in more.items()]
    assert {name: helper.get_attribute_value(entry) for name, entry in found if entry is not None} == changed
    assert {name for name, entry in found if entry is None} == (set(given) if changed else set())


def test_a_changed_node_is_legal():
    for entry in single(case_of(LABELS)):
        if entry.factor == "type" and " as " not in entry.change:
            model = variant_model(entry.variant)
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
