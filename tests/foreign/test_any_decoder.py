"""Decoders with unknown port names and cache layouts; the model sums tokens modulo 64."""

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
from tests.foreign.conftest import length_and_notes
from tests.runtime.handmade_packages import adding

PROMPT = [5, 9, 1, 7]
CONSTANTS = """int64[1] last = {-1}, int64[1] one = {1}, int64[1] huge = {1000000}, int64[1] zero = {0},
 int64[1] rows = {2}, int64[1] most = {-32}, int64[4] four = {1, 1, -1, 1}, int64[2] single = {1, 1},
 int64 along = {0}, int64 axis = {1}, int64 depth = {64}, float[2] values = {0, 1}"""


def decoder(inputs: str, outputs: str, body: str, constants: str = "", logits: str = "logits") -> str:
    """A graph that computes logits [.., 64] from `flat`, the sums of its tokens."""
    return f"""<ir_version: 10, opset_import: ["": 17]>
g ({inputs}) => ({outputs})
<{CONSTANTS}{constants}>
{{{body}
  whole = Cast<to = 7>(flat)
  next = Mod(whole, depth)
  {logits} = OneHot(next, depth, values)
}}"""


LOOKED_UP = decoder(
    "int64[rows,S] token_ids, float[rows,P,1] memory_in_7, int64[1] num_logits_to_keep",
    "float[rows,K,64] scores, float[rows,T,1] memory_out_7",
    """
  first = Constant<value = int64 {0}>()
  step = Constant<value = int64 {1}>()
  ramp = Range(first, depth, step)
  column = Unsqueeze(ramp, last)
  table = Cast<to = 1>(column)
  new = Gather<axis = 0>(table, token_ids)
  memory_out_7 = Concat<axis = 1>(memory_in_7, new)
  sums = CumSum(memory_out_7, axis)
  begin = Neg(num_logits_to_keep)
  own = Slice(sums, begin, huge, one, one)
  flat = Squeeze(own, last)""",
    logits="scores",
)
"""The cache grows; logits of as many of the last positions as is asked for."""
SUMMED = decoder(
    "int32[1,S] token_ids, int64[1] past_len, float[1,1] past_ssm_0",
    "float[1,1,64] logits, float[1,1] present_ssm_0",
    """
  numbers = Cast<to = 1>(token_ids)
  sums = CumSum(numbers, axis)
  all = Add(sums, past_ssm_0)
  present_ssm_0 = Slice(all, last, huge, one, one)
  length = Cast<to = 1>(past_len)
  none = Sub(length, length)
  flat = Add(present_ssm_0, none)""",
)
"""A state of fixed shape that the graph hands over; logits of the last position alone; a length of the past."""


def growing(past: str, present: str, new: str, axis: int) -> str:
    """A decoder whose cache grows along an axis, and has every token twice; `new` makes its new rows."""
    return decoder(
        f"int64[batch,S] input_ids, float[{past}] past_key_values_0",
        f"float[batch,1,64] logits, float[{present}] present_0",
        f"""
  numbers = Cast<to = 1>(input_ids)
  {new}
  present_0 = Concat<axis = {axis}>(past_key_values_0, new)
  all = ReduceSum<keepdims = 0>(present_0)
  each = Div(all, copies)
  flat = Reshape(each, single)""",
        ", float copies = {2}",
    )


FUSED = growing(
    "batch,past_length,2", "batch,total_length,2", "u = Unsqueeze(numbers, rows)\n  new = Concat<axis = 2>(u, u)", 1
)
GPT2 = growing(
    "2,batch,1,past_sequence,1",
    "2,batch,1,all_sequence,1",
    "u = Reshape(numbers, four)\n  v = Unsqueeze(u, zero)\n  new = Concat<axis = 0>(v, v)",
    3,
)


def arranged(
    past: str, present: str, axis: int, order: str, ids: str = "int64[batch,S]", logits: str = "batch,S"
) -> str:
    """A decoder whose cache [.., T, ..] grows along an axis, in an order of its own; `order` makes its new rows."""
    return decoder(
        f"{ids} input_ids, float[{past}] past_key_0",
        f"float[{logits},64] logits, float[{present}] present_key_0",
        f"""
  numbers = Cast<to = 1>(input_ids)
  fours = Reshape(numbers, four)
  new = Transpose<perm = [{order}]>(fours)
  present_key_0 = Concat<axis = {axis}>(past_key_0, new)
  listed = Reshape(present_key_0, last)
  sums = CumSum(listed, along)
  size = Size(input_ids)
  less = Neg(size)
  count = Reshape(less, one)
  own = Slice(sums, count, huge)
  shape = Shape(input_ids)
  flat = Reshape(own, shape)""",
    )


def fixed(present: str, positions: str = "int64[1,S]", cache: str = "1,1,32,1") -> str:
    """A decoder whose cache has 32 rows, of which the mask says which are valid; `present` writes them."""
    return decoder(
        f"int64[1,S] input_ids, int64[1,32] attention_mask, {positions} position_ids, float[{cache}] past_key_0",
        f"float[1,1,64] logits, float[{cache}] present_key_0",
        f"""
  numbers = Cast<to = 1>(input_ids)
  new = Reshape(numbers, four)
  {present}
  valid = Cast<to = 1>(attention_mask)
  seen_rows = Reshape(present_key_0, four)
  column = Reshape(valid, four)
  seen = Mul(seen_rows, column)
  all = ReduceSum<keepdims = 0>(seen)
  flat = Reshape(all, single)""",
    )


WRITTEN = "place = Reshape({}, four)\n  present_key_0 = ScatterElements<axis = 2>(past_key_0, place, new)"
SCATTERED = WRITTEN.format("position_ids")
ROWS_FIRST = """place = Reshape(position_ids, four)
  turned = Transpose<perm = [0, 2, 1, 3]>(past_key_0)
  written = ScatterElements<axis = 2>(turned, place, new)
  present_key_0 = Transpose<perm = [0, 2, 1, 3]>(written)"""
IN_THREE = f"own = Gather<axis = 0>(position_ids, which)\n  {WRITTEN.format('own')}"
"""Of positions of time, row and column of a picture."""
MOVED = "all_rows = Concat<axis = 2>(past_key_0, new)\n  present_key_0 = Slice(all_rows, most, huge, rows, one)"
AT_ONE_PLACE = f"none = Sub(position_ids, position_ids)\n  {WRITTEN.format('none')}"


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


def check(text: str, home: Path, length: int, *shape: int) -> None:
    """The only state has a shape, and the tokens are right with and without chunks."""
    folder = folder_of(text, home / "folder")
    manifest = open_folder(folder)
    (state,) = manifest.graph.states
    assert (state.shape, state.in_place, manifest.graph.max_length) == (shape, False, length)
    assert (state.growing_axis is not None) is (length == 2048)
    for chunk in (100, 3):
        assert tokens(folder, [PROMPT], Choice(), chunk) == [adding(PROMPT, 6)]


ROWS = ("1,1,past,1", "1,1,all,1", 2, "0, 1, 2, 3")
LAST = FUSED.replace("float[batch,1,64] logits", "float[batch,64] logits")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (LOOKED_UP, (1, 2048, 1)),
        (FUSED, (1, 2048, 2)),
        (GPT2, (2, 1, 1, 2048, 1)),
        (arranged("batch,past,1,1", "batch,all,1,1", 1, "0, 2, 1, 3"), (1, 2048, 1, 1)),
        (arranged("past,batch,1,1", "all,batch,1,1", 0, "2, 0, 1, 3"), (2048, 1, 1, 1)),
        (arranged("batch,1,1,past", "batch,1,1,all", 3, "0, 1, 3, 2"), (1, 1, 1, 2048)),
        (arranged(*ROWS, "int64[S]", "S"), (1, 1, 2048, 1)),
        (arranged(*ROWS), (1, 1, 2048, 1)),
        (arranged("batch,past,1,1", "batch,past,1,1", 1, "0, 2, 1, 3"), (1, 2048, 1, 1)),
        (LAST.replace("Reshape(each, single)", "Reshape(each, one)"), (1, 2048, 2)),
        (FUSED.replace("past_key_values_0", "past").replace("present_0", "present"), (1, 2048, 2)),
    ],
    ids=[
        *("logits to keep", "keys and values as one", "gpt2", "rows before heads", "rows first", "rows last"),
        *("ids [S]", "no batch axis", "one name", "logits [B, vocab]", "no number"),
    ],
)
def test_growing_cache_is_supported_in_any_layout(text: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """The usual length axis may hold the heads or have size 1."""
    check(text, tmp_path, 2048, *shape)


@pytest.mark.parametrize(
    ("text", "shape"),
    [(fixed(SCATTERED), (1, 1, 32, 1)), (fixed(ROWS_FIRST, cache="1,32,1,1"), (1, 32, 1, 1))],
    ids=["scattered", "rows first"],
)
def test_fixed_cache_written_at_cursor_is_supported(text: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    check(text, tmp_path, 32, *shape)


@pytest.mark.parametrize("heads", [4, 64])
def test_written_axis_is_the_length_where_the_mask_has_no_size(heads: int, tmp_path: Path) -> None:
    text = fixed(ROWS_FIRST, cache=f"1,32,{heads},1").replace("[1,32] attention_mask", "[1,T] attention_mask")
    graph = open_folder(folder_of(text, tmp_path / "folder")).graph
    assert (graph.max_length, graph.states[0].growing_axis) == (32, None)


def test_cycle_in_a_damaged_graph_is_refused(tmp_path: Path) -> None:
    model = parser.parse_model(fixed(SCATTERED))
    next(node for node in model.graph.node if "present_key_0" in node.output).input[0] = "a"
    model.graph.node.extend(onnx.helper.make_node("Identity", [one], [other]) for one, other in ("ab", "ba"))
    onnx.save(model, tmp_path / "decoder.onnx")
    with pytest.raises(PackageError):
        load_runner(tmp_path, parse_chain("cpu"), manifest=open_folder(tmp_path))


def test_state_without_rows_and_past_length_are_supported(tmp_path: Path) -> None:
    folder = folder_of(SUMMED, tmp_path / "summed")
    (state,) = open_folder(folder).graph.states
    assert (state.kind, state.growing_axis, state.in_place) == ("recurrent", None, False)
    for chunk in (100, 3):
        assert tokens(folder, [PROMPT], Choice(), chunk) == [adding(PROMPT, 6)]


def test_inferred_roles_record_their_source(tmp_path: Path) -> None:
    manifest = open_folder(folder_of(LOOKED_UP, tmp_path / "odd"))
    assert manifest.foreign is not None and manifest.foreign.layout == "onnx"
    sources = {port.name: (port.meaning, port.source) for port in manifest.foreign.ports}
    assert sources["token_ids"] == ("tokens", "name, type and shape")
    assert sources["memory_in_7"] == ("key of layer 7", "name, type and shape")
    assert sources["scores"][0] == "logits"
    assert any("2,048" in note for note in manifest.foreign.notes)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_three_dimensional_positions_are_filled_for_text(which: int, tmp_path: Path) -> None:
    """As in decoders of vision models with token ids by onnxruntime-genai's builder."""
    text = fixed(IN_THREE, "int64[3,1,S]").replace("int64 along", f"int64 which = {{{which}}}, int64 along")
    check(text, tmp_path, 32, 1, 1, 32, 1)
    odd = folder_of(text.replace("int64[3,1,S]", "int64[4,1,S]"), tmp_path / "odd")
    with pytest.raises(PackageError, match=r"position_ids int64\[4,1,S\] cannot be identified"):
        open_folder(odd)


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (MOVED, "two texts of 6 tokens that differ in one have the same logits"),
        (WRITTEN.format("input_ids"), "the test run of 6 tokens before the first prompt failed"),
        (AT_ONE_PLACE, "two texts of 6 tokens that differ in one have the same logits"),
    ],
    ids=["moved", "at the token", "at one place"],
)
def test_fixed_cache_not_written_at_positions_fails_test_run(present: str, said: str, tmp_path: Path) -> None:
    """The mask marks the first rows valid, but the graph stores rows elsewhere: every token would be wrong."""
    folder = folder_of(fixed(present), tmp_path / "odd")
    manifest = open_folder(folder)
    assert (manifest.graph.states[0].growing_axis, manifest.graph.max_length) == (None, 32)
    with pytest.raises(PackageError, match=f"{said}.*--contract"):
        load_runner(folder, parse_chain("cpu"), manifest=manifest)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("int32[1,S] input_ids", "'token_ids' and 'input_ids' could both be for tokens"),
        ("float[1,1,S,T] attention_mask", r"the input attention_mask .* cannot be identified .*--contract"),
        ("int64[1,S,T] attention_mask", r"the input attention_mask .* cannot be identified .*--contract"),
        ("float[1,T] attention_mask", r"the input attention_mask .* cannot be identified .*--contract"),
    ],
)
def test_ambiguous_and_unsupported_inputs_are_reported(added: str, said: str, tmp_path: Path) -> None:
    """A mask of rank 4 is not mistaken for a cache."""
    text = SUMMED.replace("int64[1] past_len,", f"int64[1] past_len, {added},")
    with pytest.raises(PackageError, match=said):
        open_folder(folder_of(text, tmp_path / "odd"))


def test_prefix_saving_requires_batch_as_first_cache_axis(tmp_path: Path) -> None:
    """In the gpt2 layout the first axis separates keys and values."""
    for name, text in (("fused", FUSED), ("gpt2", GPT2)):
        folder = folder_of(text, tmp_path / name)
        with load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder)) as runner:
            assert runner.cache.saves(3, 3) is (name == "fused")


def test_fixed_cache_longer_than_requested_length_is_noted(tmp_path: Path) -> None:
    length, notes = length_and_notes(folder_of(fixed(SCATTERED), tmp_path / "p"), 8)
    assert length == 32 and "has a fixed length of 32 tokens" in notes
