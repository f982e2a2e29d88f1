"""Modules, layers and replaced nodes parsed from node names."""

from __future__ import annotations

import pytest

from partita.diagnosis import naming
from partita.diagnosis.sources import lines_by_node


@pytest.mark.parametrize(
    ("module", "layer", "group"),
    [
        ("model.layers.3.self_attn.q_proj", 3, "self_attn"),
        ("model.layers.12.mlp", 12, "mlp"),
        ("model.layers.0", 0, naming.LAYER_ITSELF),
        ("model.layers.2.mlp.experts.7.gate", 2, "mlp"),
        ("transformer.h.5.attn", 5, "attn"),
        ("model.norm", None, "norm"),
        ("lm_head", None, "lm_head"),
        ("model.layers.²", None, "²"),
        (None, None, naming.NO_MODULE),
        ("", None, naming.NO_MODULE),
    ],
)
def test_module_is_parsed_into_layer_and_group(module, layer, group):
    assert naming.layer_of(module) == layer
    assert naming.module_group(module) == group


def test_module_of_returns_only_modules_of_the_file():
    modules = {"model.layers.0.mlp"}
    assert naming.module_of("model.layers.0.mlp/Mul/QuickGeluFusion/", modules) == "model.layers.0.mlp"
    assert naming.module_of("somewhere.else/Mul", modules) is None
    assert naming.module_of("model.layers.0.mlp", modules) is None
    assert naming.module_of("/Unsqueeze", modules) is None
    assert naming.module_of("/model/layers.0/mlp/Mul/QuickGeluFusion/", modules) == "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.1.mlp/MatMul_2", "model.layers.1.mlp"),
        ("/layers.1/mlp/MatMul", "layers.1.mlp"),
        ("/model/layers.0/self_attn/q_proj/MatMul", "model.layers.0.self_attn.q_proj"),
        ("model/layers/1/mlp/MatMul", "model.layers.1.mlp"),
        ("model/MatMul", "model"),
        ("Mul/QuickGeluFusion/", "Mul"),
        ("model.norm/Mul/Fusion", "model.norm"),
        ("/MatMul", None),
        ("MatMul_12", None),
        ("", None),
    ],
)
def test_module_in_parses_all_name_formats(name, module):
    assert naming.module_in(name) == module


def test_replaced_by_splits_fused_names_at_slashes_only():
    exported = {"a/Mul", "a/Mul_1", "a"}
    assert naming.replaced_by("a/Mul_1/Fusion/", exported) == ("a", "a/Mul_1")
    assert naming.replaced_by("a/Mul_12/Fusion/", exported) == ("a",)
    assert naming.replaced_by("a/Mul", {"a/Mul"}) == ()


def test_lines_by_node_matches_whole_names():
    lines = ("[I:x:, f.cc:1 g] fallback for node: a/Mul because", "about a/Mul_1.", "about 'a/Mul'")
    assert lines_by_node(lines, ("a/Mul", "a/Mul_1", "")) == {"a/Mul": (lines[0], lines[2]), "a/Mul_1": (lines[1],)}


@pytest.mark.parametrize(
    ("modules", "common"),
    [
        (["model.layers.0.mlp", "model.layers.0.mlp.act"], "model.layers.0.mlp"),
        (["model.layers.0", "model.layers.1"], "model.layers"),
        (["model.layers.1", "model.layers.10"], "model.layers"),
        (["model.norm", "lm_head"], None),
        (["model.norm", None], None),
        ([], None),
    ],
)
def test_common_module_returns_shared_prefix(modules, common):
    assert naming.common_module(modules) == common
