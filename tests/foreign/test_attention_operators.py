"""Attention operators in onnxruntime-genai folders (one layer, random weights, no positions) match a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from partita.errors import PackageError
from partita.foreign.folder import Choice, open_folder
from tests.foreign.conftest import SAMPLES, Sample, changed, length_and_notes
from tests.foreign.reference_loop import plain_tokens
from tests.foreign.test_any_decoder import tokens

VOCAB, HEADS, WIDTH, LONGEST, WINDOW = 64, 2, 8, 32, 4
ORIGINAL = 12
"""The length that a LongRoPE model was trained for first."""
PROMPT = [5, 9, 1, 7, 40, 33, 2, 61, 17, 28]
COUNT = 8
MASK = "int64[batch_size,total_sequence_length] attention_mask"
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


def folder_of(attention: str, kv_heads: int, home: Path, told: str = MASK, width: int = WIDTH) -> Path:
    """A folder as onnxruntime-genai has it, with one layer whose attention is `attention`.

    `told`: the inputs that say how many tokens there are, and where; `width`: of a head.
    """
    cache = [f"float[batch_size,{kv_heads},{{}}_sequence_length,{width}] {{}}_0_{kind}" for kind in ("key", "value")]
    pasts = ", ".join(each.format("past", "past_key_values") for each in cache)
    presents = ", ".join(each.format("total", "present") for each in cache)
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
g (int64[batch_size,sequence_length] input_ids, {told}, {pasts})
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
    random, hidden = np.random.default_rng(3), HEADS * width
    shapes = {"table": (VOCAB, hidden), "of_q": (hidden, hidden), "head": (hidden, VOCAB)}
    shapes |= dict.fromkeys(("of_k", "of_v"), (hidden, kv_heads * width))
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
    decoder |= {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_size": width}
    raw["model"]["context_length"] = LONGEST
    (home / "genai_config.json").write_text(json.dumps(raw), encoding="utf-8")
    return home


@pytest.mark.parametrize("chunk", [100, 3])
def test_multi_head_attention_cache_grows(chunk: int, tmp_path: Path) -> None:
    folder = folder_of(MHA, HEADS, tmp_path / "mha")
    manifest = open_folder(folder)
    assert manifest.foreign is not None and manifest.foreign.layout == "onnxruntime-genai"
    assert manifest.graph.attention == "mha"
    kept = [(s.kind, s.shape, s.growing_axis, s.in_place, s.window) for s in manifest.graph.states]
    assert kept == [(kind, (1, HEADS, LONGEST, WIDTH), 2, False, None) for kind in ("key", "value")]
    expected = plain_tokens(folder / "model.onnx", PROMPT, COUNT)
    assert len(set(expected)) > 2
    assert tokens(folder, [PROMPT], Choice(), chunk, COUNT) == [expected]


@pytest.mark.parametrize("chunk", [100, 3])
def test_attention_window_is_detected_and_matches(chunk: int, tmp_path: Path) -> None:
    """Prompts and completions exceed the window; without the window the tokens differ."""
    windowed = GQA.format(window=f", local_window_size = {WINDOW}")
    folder = folder_of(windowed, 1, tmp_path / "windowed")
    manifest = open_folder(folder)
    kept = [(s.shape, s.window, s.in_place) for s in manifest.graph.states]
    assert kept == [((1, 1, LONGEST, WIDTH), WINDOW, True)] * 2
    expected = plain_tokens(folder / "model.onnx", PROMPT, COUNT)
    assert tokens(folder, [PROMPT], Choice(), chunk, COUNT) == [expected]
    whole = folder_of(GQA.format(window=""), 1, tmp_path / "whole")
    assert plain_tokens(whole / "model.onnx", PROMPT, COUNT) != expected
    assert {state.window for state in open_folder(whole).graph.states} == {None}


def check_limit(folder: Path, limit: int, said: str, longest: int = LONGEST) -> None:
    """The length is limited, which a note says, and a longer one may be requested."""
    for asked, length, says in ((None, limit, "the maximum length is"), (longest, longest, "longer")):
        found, notes = length_and_notes(folder, asked)
        assert found == length
        assert (said in notes and says in notes) is (limit < longest), notes


@pytest.mark.parametrize("operator", ["Greater", "GreaterOrEqual"])
def test_length_is_limited_where_graph_switches_rotary_frequencies(operator: str, tmp_path: Path) -> None:
    """LongRoPE as written by onnxruntime-genai's builder; its runtime prefills again at the switch."""
    as_node = operator == "Greater"
    constant = f"original = Constant<value = int64[1] {{{ORIGINAL}}}>()" if as_node else ""
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
    folder = folder_of(rotary, 1, tmp_path / "long")
    model = onnx.load(folder / "model.onnx")
    for name in ("long_cos", "long_sin", "short_cos", "short_sin"):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((LONGEST, 4), np.float32), name))
    if not as_node:
        model.graph.initializer.append(numpy_helper.from_array(np.array([ORIGINAL], np.int64), "original"))
    onnx.save(model, folder / "model.onnx")
    limit = ORIGINAL if operator == "Greater" else ORIGINAL - 1
    check_limit(folder, limit, f"the graph uses other rotary frequencies beyond {limit} tokens")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_length_is_limited_where_config_switches_rotary_frequencies(key: str, tmp_path: Path) -> None:
    folder = folder_of(GQA.format(window=""), 1, tmp_path / "long")
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    for factors, length in ((rope, ORIGINAL), ({**rope, "long_factor": [1.0]}, LONGEST)):
        config = {key: factors, "original_max_position_embeddings": ORIGINAL}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        check_limit(folder, length, "config.json has other rotary frequencies beyond 12 tokens")


def test_length_is_limited_to_window_missing_from_graph(tmp_path: Path) -> None:
    """Beyond the window the tokens differ from the model's; a longer length must be requested."""
    folder = folder_of(GQA.format(window=""), 1, tmp_path / "whole")
    raw = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    slides = {"slide_key_value_cache": False, "slide_inputs": False, "layers": []}
    raw["model"]["decoder"]["sliding_window"] = {"window_size": WINDOW, **slides}
    (folder / "genai_config.json").write_text(json.dumps(raw), encoding="utf-8")
    check_limit(folder, WINDOW, "genai_config.json has a window of 4 tokens, but the graph's attention has none")
    windowed = folder_of(GQA.format(window=f", local_window_size = {WINDOW}"), 1, tmp_path / "windowed")
    (windowed / "genai_config.json").write_text(json.dumps(raw), encoding="utf-8")
    check_limit(windowed, LONGEST, "a window of")


@pytest.mark.parametrize(
    ("said", "length"),
    [
        ({"sliding_window": 20}, 20),
        ({"attention_chunk_size": 20}, 20),
        ({"text_config": {"sliding_window": 20, "layer_types": ["sliding_attention"]}}, 20),
        ({"sliding_window": 20, "layer_types": ["full_attention"]}, 64),
        ({"sliding_window": 20, "use_sliding_window": False}, 64),
    ],
)
def test_length_is_limited_to_config_window_missing_from_graph(
    said: dict[str, Any], length: int, sample: Sample
) -> None:
    folder = sample("optimum")
    changed(folder / "config.json", **said)
    check_limit(folder, length, "a window of 20 tokens, but the graph", 64)


def test_window_mask_in_standard_operators_does_not_limit_length(sample: Sample) -> None:
    """A control-flow subgraph has the window size as a constant, e.g. for a mask."""
    folder = sample("optimum")
    changed(folder / "config.json", sliding_window=20)
    model = onnx.load(folder / "model.onnx")
    nodes = "n = Constant<value_int = 20>() far = Sub(input_ids, n) at = Constant<value = bool {1}>()"
    body = parser.parse_graph(f"b () => (bool at) {{ {nodes} }}")
    yes = onnx.helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
    model.graph.node.extend([yes, onnx.helper.make_node("If", ["yes"], ["at"], then_branch=body, else_branch=body)])
    onnx.save(model, folder / "model.onnx")
    check_limit(folder, 64, "a window of", 64)


OLIVE = "int32[batch_size,1] past_seq_len, int32 total_seq_len"
"""As Olive's AttentionMaskToSequenceLengths puts them in the place of the mask."""
TOLD = """
  made, present_0_key, present_0_value = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>(
    q, k, v, past_key_values_0_key, past_key_values_0_value, past_seq_len, total_seq_len)"""


def test_length_inputs_replace_attention_mask(tmp_path: Path) -> None:
    plain = folder_of(GQA.format(window=""), 1, tmp_path / "plain")
    folder = folder_of(TOLD, 1, tmp_path / "told", OLIVE)
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    config["model"]["decoder"]["inputs"] |= {
        "past_sequence_length": "past_seq_len",
        "total_sequence_length": "total_seq_len",
    }
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    (file,) = open_folder(folder).graph.files
    roles = {port.name: port.role for port in file.inputs}
    assert roles == {"input_ids": "tokens", "past_seq_len": "last_index", "total_seq_len": "total_length"}
    others = [PROMPT, PROMPT[3:8]]
    expected = [plain_tokens(plain / "model.onnx", prompt, COUNT) for prompt in others]
    for chunk in (100, 3):
        assert tokens(folder, [PROMPT], Choice(), chunk, COUNT) == expected[:1]
    (contract := tmp_path / "two.toml").write_text("batch_size = 2\n")
    assert tokens(folder, others, Choice(contract=contract), 100, COUNT) == expected
    odd = folder_of(TOLD, 1, tmp_path / "odd", OLIVE.replace("batch_size,1", "batch_size,2"))
    with pytest.raises(PackageError, match=r"past_seq_len int32\[batch_size,2\] cannot be identified"):
        open_folder(odd)


def test_cache_with_another_reader_of_keys_is_not_in_place(tmp_path: Path) -> None:
    """The operator updates keys and values in place, or neither."""
    attention = GQA.replace("  made, present", "  all, present").format(window="")
    attention += """
  rows = Shape<start = 2, end = 3>(past_key_values_0_key)
  few = Cast<to = 1>(rows)
  none = Sub(few, few)
  made = Add(all, none)"""
    folder = folder_of(attention, 1, tmp_path / "read")
    states = open_folder(folder).graph.states
    assert {(state.kind, state.growing_axis, state.in_place) for state in states} == {
        ("key", 2, False),
        ("value", 2, False),
    }
    expected = plain_tokens(folder / "model.onnx", PROMPT, COUNT)
    for chunk in (100, 3):
        assert tokens(folder, [PROMPT], Choice(), chunk, COUNT) == [expected]
