"""ONNX Runtime's attention operators in folders of onnxruntime-genai: what each keeps, and the tokens of a plain loop.

The graphs have one layer with random weights, and no positions: what follows a token is what attention makes of the
tokens before it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from partita.foreign.folder import Choice, open_folder
from tests.foreign.conftest import SAMPLES
from tests.foreign.plain import plain_tokens
from tests.foreign.test_any_decoder import tokens

VOCAB, HEADS, WIDTH, LONGEST, WINDOW = 64, 2, 8, 32, 4
PROMPT = [5, 9, 1, 7, 40, 33, 2, 61, 17, 28]
COUNT = 8
LENGTHS = """
  one = Constant<value = int64[1] {1}>()
  sums = ReduceSum<keepdims = 0>(attention_mask, one)
  last = Sub(sums, one)
  seqlens_k = Cast<to = 6>(last)
  sizes = Shape(attention_mask)
  length = Gather<axis = 0>(sizes, one)
  total = Cast<to = 6>(length)
"""
GQA = LENGTHS.replace("{1}", "{{1}}")
GQA += """
  made, present_0_key, present_0_value = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1{window}>(
    q, k, v, past_key_values_0_key, past_key_values_0_value, seqlens_k, total)"""
MHA = """
  padding = Cast<to = 6>(attention_mask)
  made, present_0_key, present_0_value = com.microsoft.MultiHeadAttention<num_heads = 2, unidirectional = 1>(
    q, k, v, , padding, , past_key_values_0_key, past_key_values_0_value)"""


def folder_of(attention: str, kv_heads: int, home: Path, *, share_buffer: bool) -> Path:
    """A folder as onnxruntime-genai has it, with one layer whose attention is `attention`."""
    cache = [f"float[batch_size,{kv_heads},{{}}_sequence_length,{WIDTH}] {{}}_0_{kind}" for kind in ("key", "value")]
    pasts = ", ".join(each.format("past", "past_key_values") for each in cache)
    presents = ", ".join(each.format("total", "present") for each in cache)
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
g (int64[batch_size,sequence_length] input_ids, int64[batch_size,total_sequence_length] attention_mask, {pasts})
  => (float[batch_size,sequence_length,{VOCAB}] logits, {presents})
{{
  hidden = Gather<axis = 0>(table, input_ids)
  q = MatMul(hidden, of_q)
  k = MatMul(hidden, of_k)
  v = MatMul(hidden, of_v){attention}
  sum = Add(made, hidden)
  logits = MatMul(sum, head)
}}"""
    )
    random, hidden = np.random.default_rng(3), HEADS * WIDTH
    shapes = {"table": (VOCAB, hidden), "of_q": (hidden, hidden), "head": (hidden, VOCAB)}
    shapes |= dict.fromkeys(("of_k", "of_v"), (hidden, kv_heads * WIDTH))
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    home.mkdir()
    onnx.save(model, home / "model.onnx")
    raw = json.loads((SAMPLES / "genai-fp32-cpu" / "genai_config.json").read_text(encoding="utf-8"))
    decoder = raw["model"]["decoder"]
    for side, mapped in (("past", decoder["inputs"]), ("present", decoder["outputs"])):
        stem = "past_key_values" if side == "past" else side
        mapped |= {f"{side}_{kind}_names": f"{stem}_%d_{kind}" for kind in ("key", "value")}
    decoder |= {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_size": WIDTH}
    raw["model"]["context_length"] = LONGEST
    raw["search"]["past_present_share_buffer"] = share_buffer
    (home / "genai_config.json").write_text(json.dumps(raw), encoding="utf-8")
    return home


@pytest.mark.parametrize("chunk", [100, 3])
def test_multi_head_attention_grows(chunk: int, tmp_path: Path) -> None:
    folder = folder_of(MHA, HEADS, tmp_path / "mha", share_buffer=False)
    manifest = open_folder(folder)
    assert manifest.foreign is not None and manifest.foreign.layout == "onnxruntime-genai"
    assert manifest.graph.attention == "mha"
    kept = [(s.kind, s.shape, s.grows, s.in_place, s.window) for s in manifest.graph.states]
    assert kept == [(kind, (1, HEADS, LONGEST, WIDTH), 2, False, None) for kind in ("key", "value")]
    expected = plain_tokens(folder / "model.onnx", PROMPT, COUNT)
    assert len(set(expected)) > 2
    assert tokens(folder, [PROMPT], Choice(), chunk, COUNT) == [expected]


@pytest.mark.parametrize("share_buffer", [True, False])
@pytest.mark.parametrize("chunk", [100, 3])
def test_a_window_in_the_attention(chunk: int, share_buffer: bool, tmp_path: Path) -> None:
    """Prompts and answers are longer than it; without it other tokens follow."""
    windowed = GQA.format(window=f", local_window_size = {WINDOW}")
    folder = folder_of(windowed, 1, tmp_path / "windowed", share_buffer=share_buffer)
    manifest = open_folder(folder)
    kept = [(s.shape, s.window, s.in_place) for s in manifest.graph.states]
    assert kept == [((1, 1, LONGEST, WIDTH), WINDOW, True)] * 2
    expected = plain_tokens(folder / "model.onnx", PROMPT, COUNT)
    assert tokens(folder, [PROMPT], Choice(), chunk, COUNT) == [expected]
    whole = folder_of(GQA.format(window=""), 1, tmp_path / "whole", share_buffer=share_buffer)
    assert plain_tokens(whole / "model.onnx", PROMPT, COUNT) != expected
    assert {state.window for state in open_folder(whole).graph.states} == {None}


def test_what_attention_appends_to_has_any_names(tmp_path: Path) -> None:
    """Neither names nor sizes tell which output continues which input, and along which axis it is longer."""
    known = folder_of(MHA, HEADS, tmp_path / "known", share_buffer=False)
    model = onnx.load(known / "model.onnx")
    odd = {"past_key_values_0_key": "memory_a", "past_key_values_0_value": "memory_b"}
    odd |= {"present_0_key": "kept_c", "present_0_value": "kept_d"}
    for port in (*model.graph.input[2:], *model.graph.output[1:]):
        port.name = odd[port.name]
        port.type.tensor_type.shape.dim[2].dim_param = "rows"
    for node in model.graph.node:
        node.input[:] = [odd.get(name, name) for name in node.input]
        node.output[:] = [odd.get(name, name) for name in node.output]
    (tmp_path / "odd").mkdir()
    onnx.save(model, tmp_path / "odd" / "model.onnx")
    found = open_folder(tmp_path / "odd").graph.states
    assert {(s.past, s.present, s.kind, s.grows) for s in found} == {
        ("memory_a", "kept_c", "key", 2),
        ("memory_b", "kept_d", "value", 2),
    }
    expected = plain_tokens(known / "model.onnx", PROMPT, COUNT)
    assert tokens(tmp_path / "odd", [PROMPT], Choice(), 3, COUNT) == [expected]


@pytest.mark.parametrize("operator", ["Greater", "GreaterOrEqual"])
@pytest.mark.parametrize("as_node", [True, False])
def test_texts_end_where_a_graph_takes_other_frequencies(operator: str, as_node: bool, tmp_path: Path) -> None:
    """As onnxruntime-genai's builder writes LongRoPE models, with a node; its runtime reads all again there."""
    constant = "original = Constant<value = int64[1] {12}>()" if as_node else ""
    rotary = f"""
  {constant}{LENGTHS}
  beyond = {operator}(length, original)
  cos, sin = If(beyond) <
    then_branch = long () => (float[{LONGEST},4] cos_a, float[{LONGEST},4] sin_a)
      {{ cos_a = Identity(long_cos) sin_a = Identity(long_sin) }},
    else_branch = short () => (float[{LONGEST},4] cos_b, float[{LONGEST},4] sin_b)
      {{ cos_b = Identity(short_cos) sin_b = Identity(short_sin) }}>
  made, present_0_key, present_0_value = com.microsoft.GroupQueryAttention<
    num_heads = 2, kv_num_heads = 1, do_rotary = 1>(
    q, k, v, past_key_values_0_key, past_key_values_0_value, seqlens_k, total, cos, sin)"""
    folder = folder_of(rotary, 1, tmp_path / "long", share_buffer=True)
    model = onnx.load(folder / "model.onnx")
    for name in ("long_cos", "long_sin", "short_cos", "short_sin"):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((LONGEST, 4), np.float32), name))
    if not as_node:
        model.graph.initializer.append(numpy_helper.from_array(np.array([12], np.int64), "original"))
    onnx.save(model, folder / "model.onnx")
    limit = 12 if operator == "Greater" else 11
    for choice, length, says in ((Choice(), limit, "were taken"), (Choice(max_length=LONGEST), LONGEST, "longer")):
        manifest = open_folder(folder, choice)
        assert manifest.graph.max_length == length and manifest.foreign is not None
        (note,) = [note for note in manifest.foreign.notes if "other frequencies" in note]
        assert says in note and f"more than {limit} tokens" in note


@pytest.mark.parametrize("share_buffer", [True, False])
def test_texts_end_at_a_window_that_the_graph_lacks(share_buffer: bool, tmp_path: Path) -> None:
    """As builders write some models; beyond it the tokens are another model's, so they have to be asked for."""
    folder = folder_of(GQA.format(window=""), 1, tmp_path / "whole", share_buffer=share_buffer)
    raw = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    slides = {"slide_key_value_cache": False, "slide_inputs": False, "layers": []}
    raw["model"]["decoder"]["sliding_window"] = {"window_size": WINDOW, **slides}
    (folder / "genai_config.json").write_text(json.dumps(raw), encoding="utf-8")
    for choice, length, says in ((Choice(), WINDOW, "were taken"), (Choice(max_length=LONGEST), LONGEST, "longer")):
        manifest = open_folder(folder, choice)
        assert manifest.graph.max_length == length and manifest.foreign is not None
        (note,) = [note for note in manifest.foreign.notes if "a window of" in note]
        assert says in note
    windowed = folder_of(
        GQA.format(window=f", local_window_size = {WINDOW}"), 1, tmp_path / "windowed", share_buffer=share_buffer
    )
    (windowed / "genai_config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert open_folder(windowed).graph.max_length == LONGEST, "its attention has the window"
