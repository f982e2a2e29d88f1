"""Sizes of outputs that follow from values: declared in an experiment as the run had them, and kept where declared."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita.observations.facts import COMBINED
from partita.runtime.lab.factors import combined, single
from partita.runtime.lab.graph import cut_proto
from partita.runtime.lab.variant import Variant, node_variant, variant_model

NONZERO = "g (float[{batch},16] x) => (int64[2,{count}] y) {{\n  [n] y = NonZero(x)\n}}"


def case_of(batch: str = "4", count: str = "M", seen: str = "int64[2,9]") -> Variant:
    text = '<ir_version: 10, opset_import: ["" : 21]>\n' + NONZERO.format(batch=batch, count=count)
    graph = cut_proto(parser.parse_model(text), Path(), {"x": (4, 16)})
    return node_variant(graph.with_seen({"n": [seen]}), "n")


def declared(case: Variant) -> list[list[int]]:
    """Sizes of the outputs of the case's model; of one that is not declared none."""
    ports = variant_model(case).graph.output
    return [[size.dim_value for size in port.type.tensor_type.shape.dim] for port in ports]


def test_sizes_that_the_run_had_are_declared():
    case = case_of()
    assert declared(case) == [[]]
    (found,) = [entry for entry in single(case) if entry.factor == "output_shape"]
    assert found.change == "the sizes [2,9] declared of what it makes" and declared(found.variant) == [[2, 9]]
    onnx.checker.check_model(variant_model(found.variant))


def test_a_run_that_made_nothing_does_not_make_it_empty():
    (found,) = [entry for entry in single(case_of(seen="int64[2,0]")) if entry.factor == "output_shape"]
    assert declared(found.variant) == [[2, 1]]


def test_with_symbolic_inputs_both_are_fixed_and_said():
    (found,) = [entry for entry in single(case_of(batch="N")) if entry.factor == "output_shape"]
    assert found.change == "all sizes fixed and the sizes [2,9] declared of what it makes"
    assert found.parts == ("static_shape", "output_shape") and declared(found.variant) == [[2, 9]]


def test_what_the_file_declares_is_part_of_the_node_as_it_is():
    case = case_of(count="7")
    assert declared(case) == [[2, 7]]
    assert "output_shape" not in {entry.factor for entry in single(case)}


def test_what_follows_from_the_inputs_is_not_declared():
    text = '<ir_version: 10, opset_import: ["" : 21]>\ng (float[4,16] x) => (float[4,16] y) {\n  [n] y = Neg(x)\n}'
    case = node_variant(cut_proto(parser.parse_model(text), Path(), {}), "n")
    assert declared(case) == [[]] and "output_shape" not in {entry.factor for entry in single(case)}


@pytest.mark.parametrize("part", ["type", "opset"])
def test_it_is_combined_with_other_changes(part):
    found = [entry for entry in combined(case_of()) if set(entry.parts) == {"output_shape", part}]
    assert found and all(entry.factor == COMBINED for entry in found)
    assert all(declared(entry.variant) == [[2, 9]] for entry in found)
