"""Decoders with unknown port names: names, types, shapes and use give the roles. The model sums tokens mod 64."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from benchmarks.engine_steps import generate
from partita.errors import PackageError
from partita.foreign.folder import Choice, open_folder
from partita.providers.resolve import parse_chain
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.runner import load_runner
from tests.runtime.generate.test_cache import adding

CONSTANTS = """int64[1] last = {-1}, int64[1] one = {1}, int64[1] huge = {1000000}, int64[1] time = {1},
 int64 axis = {1}, int64 depth = {64}, float[2] values = {0, 1}"""
LOOKED_UP = f"""<ir_version: 10, opset_import: ["": 17]>
g (int64[rows,S] token_ids, float[rows,P,1] memory_in_7, int64[1] num_logits_to_keep)
  => (float[rows,K,64] scores, float[rows,T,1] memory_out_7)
<{CONSTANTS}>
{{
  zero = Constant<value = int64 {{0}}>()
  step = Constant<value = int64 {{1}}>()
  ramp = Range(zero, depth, step)
  column = Unsqueeze(ramp, last)
  table = Cast<to = 1>(column)
  new = Gather<axis = 0>(table, token_ids)
  memory_out_7 = Concat<axis = 1>(memory_in_7, new)
  sums = CumSum(memory_out_7, axis)
  begin = Neg(num_logits_to_keep)
  own = Slice(sums, begin, huge, time, one)
  flat = Squeeze(own, last)
  whole = Cast<to = 7>(flat)
  next = Mod(whole, depth)
  scores = OneHot(next, depth, values)
}}"""
"""The cache grows; logits of as many of the last positions as is asked for."""
SUMMED = f"""<ir_version: 10, opset_import: ["": 17]>
g (int32[1,S] token_ids, int64[1] past_len, float[1,1] past_ssm_0) => (float[1,1,64] logits, float[1,1] present_ssm_0)
<{CONSTANTS}>
{{
  numbers = Cast<to = 1>(token_ids)
  sums = CumSum(numbers, axis)
  all = Add(sums, past_ssm_0)
  present_ssm_0 = Slice(all, last, huge, time, one)
  whole = Cast<to = 7>(present_ssm_0)
  none = Sub(past_len, past_len)
  same = Add(whole, none)
  next = Mod(same, depth)
  logits = OneHot(next, depth, values)
}}"""
"""A state of fixed shape that the graph hands over; logits of the last position alone; a length of the past."""
PROMPT = [5, 9, 1, 7]


def folder_of(text: str, home: Path) -> Path:
    home.mkdir()
    onnx.save(parser.parse_model(text), home / "decoder.onnx")
    return home


def tokens(folder: Path, prompts: list[list[int]], choice: Choice, chunk: int, count: int = 6) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    with load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder, choice)) as runner:
        samplers = [greedy] * len(prompts)
        steps = generate(runner, prompts, max_new_tokens=count, sampler=samplers, prefill_chunk=chunk)
        for step in steps:
            for row, new in zip(found, step.tokens, strict=True):
                row += new
    return found


@pytest.mark.parametrize("chunk", [100, 3])
@pytest.mark.parametrize("text", [LOOKED_UP, SUMMED], ids=["looked up", "summed"])
def test_port_roles_are_inferred_from_graph(text: str, chunk: int, tmp_path: Path) -> None:
    folder = folder_of(text, tmp_path / "odd")
    assert tokens(folder, [PROMPT], Choice(), chunk) == [adding(PROMPT, 6)]


def test_inferred_roles_record_their_source(tmp_path: Path) -> None:
    manifest = open_folder(folder_of(LOOKED_UP, tmp_path / "odd"))
    assert manifest.foreign is not None and manifest.foreign.layout == "onnx"
    sources = {port.name: (port.meaning, port.source) for port in manifest.foreign.ports}
    assert sources["token_ids"] == ("tokens", "name, type and shape")
    assert sources["memory_in_7"] == ("key of layer 7", "name, type and shape")
    assert sources["scores"][0] == "logits"
    (state,) = manifest.graph.states
    assert (state.growing_axis, state.shape, state.in_place) == (1, (1, 2048, 1), False)
    assert any("2,048" in note for note in manifest.foreign.notes)
    (summed,) = open_folder(folder_of(SUMMED, tmp_path / "summed")).graph.states
    assert (summed.kind, summed.growing_axis, summed.in_place) == ("recurrent", None, False)


def test_ambiguous_inputs_for_a_role_are_reported(tmp_path: Path) -> None:
    text = SUMMED.replace("int64[1] past_len,", "int64[1] past_len, int32[1,S] input_ids,")
    with pytest.raises(PackageError, match="'token_ids' and 'input_ids' could both be for tokens"):
        open_folder(folder_of(text, tmp_path / "odd"))


@pytest.mark.parametrize("mask", ["float[1,1,S,T]", "bool[1,1,S,T]", "int64[1,S,T]", "float[1,T]"])
def test_mask_of_unsupported_type_or_rank_is_rejected(mask: str, tmp_path: Path) -> None:
    """A mask of rank 4 is not mistaken for a cache."""
    text = SUMMED.replace("int64[1] past_len,", f"int64[1] past_len, {mask} attention_mask,")
    with pytest.raises(PackageError, match=r"the input attention_mask .* cannot be identified .*--contract"):
        open_folder(folder_of(text, tmp_path / "odd"))
