"""Cache layouts of known exporters, recognised by how the graph uses its rows. The model sums tokens modulo 64."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.errors import PackageError
from partita.foreign.folder import Choice, open_folder
from partita.providers.resolve import parse_chain
from partita.runtime.generate.runner import load_runner
from tests.foreign.conftest import length_and_notes
from tests.foreign.test_any_decoder import PROMPT, folder_of, tokens
from tests.runtime.generate.test_cache import adding

CONSTANTS = """int64[1] huge = {1000000}, int64[1] one = {1}, int64[1] zero = {0}, int64[1] least = {-8},
 int64[1] rows = {2}, int64 depth = {64}, float[2] values = {0, 1}, int64[4] four = {1, 1, -1, 1},
 int64[2] single = {1, 1}"""
LOGITS = """
  whole = Cast<to = 7>(flat)
  next = Mod(whole, depth)
  logits = OneHot(next, depth, values)
}"""
"""Of the last position, from flat [1, 1]."""


def growing(past: str, present: str, new: str, axis: int, copies: int) -> str:
    """A decoder whose cache grows along an axis, and has every token `copies` times; `new` makes its new rows."""
    return f"""<ir_version: 10, opset_import: ["": 17]>
g (int64[batch,S] input_ids, float[{past}] past_key_values_0) => (float[batch,1,64] logits, float[{present}] present_0)
<{CONSTANTS}, float copies = {{{copies}}}>
{{
  numbers = Cast<to = 1>(input_ids)
  {new}
  present_0 = Concat<axis = {axis}>(past_key_values_0, new)
  all = ReduceSum<keepdims = 0>(present_0)
  each = Div(all, copies)
  flat = Reshape(each, single){LOGITS}"""


GROWING = {
    "fused": growing(
        "batch,past_length,2",
        "batch,total_length,2",
        "u = Unsqueeze(numbers, rows)\n  new = Concat<axis = 2>(u, u)",
        1,
        2,
    ),
    "gpt2": growing(
        "2,batch,1,past_sequence,1",
        "2,batch,1,all_sequence,1",
        "u = Reshape(numbers, four)\n  v = Unsqueeze(u, zero)\n  new = Concat<axis = 0>(v, v)",
        3,
        2,
    ),
}


def check(text: str, home: Path, length: int, *shape: int) -> None:
    """The only state has a shape, and the tokens are right with and without chunks."""
    folder = folder_of(text, home / "folder")
    manifest = open_folder(folder)
    (state,) = manifest.graph.states
    assert (state.shape, state.in_place, manifest.graph.max_length) == (shape, False, length)
    assert (state.growing_axis is not None) is (length == 2048)
    for chunk in (100, 3):
        assert tokens(folder, [PROMPT], Choice(), chunk) == [adding(PROMPT, 6)]


def fixed(present: str, cursor: str = "position_ids") -> str:
    """A decoder whose cache has 32 rows, of which the mask says which are valid."""
    return f"""<ir_version: 10, opset_import: ["": 17]>
g (int64[1,S] input_ids, int64[1,32] attention_mask, int64[1,S] position_ids, float[1,1,32,1] past_key_0)
  => (float[1,1,64] logits, float[1,1,32,1] present_key_0)
<{CONSTANTS}, int64[1] most = {{-32}}>
{{
  numbers = Cast<to = 1>(input_ids)
  new = Reshape(numbers, four)
  place = Reshape({cursor}, four)
  {present}
  valid = Cast<to = 1>(attention_mask)
  column = Reshape(valid, four)
  seen = Mul(present_key_0, column)
  all = ReduceSum<keepdims = 0>(seen)
  flat = Reshape(all, single){LOGITS}"""


SCATTERED = "present_key_0 = ScatterElements<axis = 2>(past_key_0, place, new)"
IN_THREE = "int64[3,1,S] position_ids"
"""Positions of time, row and column of a picture."""
MOVED = "all_rows = Concat<axis = 2>(past_key_0, new)\n  present_key_0 = Slice(all_rows, most, huge, rows, one)"


TURN = "Transpose<perm = [0, 2, 1, 3]>"
TURNED = f"""turned = {TURN}(past_key_0)
  own = {TURN}(new)
  there = {TURN}(place)
  written = ScatterElements<axis = 1>(turned, there, own)
  present_key_0 = {TURN}(written)"""
ROWS_FIRST = f"""turned = {TURN}(past_key_0)
  written = ScatterElements<axis = 2>(turned, place, new)
  present_key_0 = {TURN}(written)"""


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (fixed(SCATTERED), (1, 1, 32, 1)),
        (fixed(TURNED), (1, 1, 32, 1)),
        (
            fixed(ROWS_FIRST).replace("[1,1,32,1]", "[1,32,1,1]").replace("Mul(present_key_0, c", "Mul(written, c"),
            (1, 32, 1, 1),
        ),
    ],
    ids=["scattered", "turned", "rows first"],
)
def test_fixed_cache_written_at_cursor_is_supported(text: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    check(text, tmp_path, 32, *shape)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_three_dimensional_positions_are_filled_for_text(which: int, tmp_path: Path) -> None:
    """As in decoders of vision models with token ids by onnxruntime-genai's builder."""
    text = fixed(f"own = Gather<axis = 0>(position_ids, which)\n  at = Reshape(own, four)\n  {SCATTERED}")
    text = text.replace("int64[1,S] position_ids", IN_THREE).replace("past_key_0, place", "past_key_0, at")
    text = text.replace("  place = Reshape(position_ids, four)\n", "")
    text = text.replace("int64[1] most", f"int64 which = {{{which}}}, int64[1] most")
    check(text, tmp_path, 32, 1, 1, 32, 1)
    odd = folder_of(text.replace(IN_THREE, IN_THREE.replace("3", "4")), tmp_path / "odd")
    with pytest.raises(PackageError, match=r"position_ids int64\[4,1,S\] cannot be identified"):
        open_folder(odd)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (fixed(MOVED), "two texts of 6 tokens that differ in one have the same logits"),
        (fixed(SCATTERED, "input_ids"), "the test run of 6 tokens before the first prompt failed"),
        (fixed(SCATTERED.replace("place", "none")), "two texts of 6 tokens that differ in one have the same logits"),
    ],
    ids=["moved", "at the token", "at one place"],
)
def test_fixed_cache_not_written_at_positions_fails_test_run(text: str, said: str, tmp_path: Path) -> None:
    """The mask marks the first rows valid, but the graph stores rows elsewhere: every token would be wrong."""
    text = text.replace("  place = Reshape", "  none = Sub(position_ids, position_ids)\n  place = Reshape")
    text = text.replace("past_key_0, none, new", "past_key_0, nowhere, new")
    text = text.replace("  present_key_0 = Scatter", "  nowhere = Reshape(none, four)\n  present_key_0 = Scatter")
    folder = folder_of(text, tmp_path / "odd")
    manifest = open_folder(folder)
    assert (manifest.graph.states[0].growing_axis, manifest.graph.max_length) == (None, 32)
    with pytest.raises(PackageError, match=f"{said}.*--contract"):
        load_runner(folder, parse_chain("cpu"), manifest=manifest)


def arranged(
    past: str, present: str, axis: int, order: str, ids: str = "int64[batch,S]", logits: str = "batch,S"
) -> str:
    """A decoder whose cache [.., T, ..] grows along an axis, in an order of its own; `order` makes its new rows."""
    return f"""<ir_version: 10, opset_import: ["": 17]>
g ({ids} input_ids, float[{past}] past_key_0) => (float[{logits},64] logits, float[{present}] present_key_0)
<{CONSTANTS}, int64[4] wide = {{1, 1, -1, 1}}, int64[1] each = {{-1}}, int64 along = {{0}}>
{{
  numbers = Cast<to = 1>(input_ids)
  fours = Reshape(numbers, wide)
  new = Transpose<perm = [{order}]>(fours)
  present_key_0 = Concat<axis = {axis}>(past_key_0, new)
  listed = Reshape(present_key_0, each)
  sums = CumSum(listed, along)
  shape = Shape(input_ids)
  own = Slice(sums, count, huge)
  flat = Reshape(own, shape){LOGITS}""".replace(
        "  own = Slice", "  size = Size(input_ids)\n  less = Neg(size)\n  count = Reshape(less, one)\n  own = Slice"
    )


LAST = GROWING["fused"].replace("float[batch,1,64] logits", "float[batch,64] logits")
ROWS = ("1,1,past,1", "1,1,all,1", 2, "0, 1, 2, 3")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (GROWING["fused"], (1, 2048, 2)),
        (GROWING["gpt2"], (2, 1, 1, 2048, 1)),
        (arranged("batch,past,1,1", "batch,all,1,1", 1, "0, 2, 1, 3"), (1, 2048, 1, 1)),
        (arranged("past,batch,1,1", "all,batch,1,1", 0, "2, 0, 1, 3"), (2048, 1, 1, 1)),
        (arranged("batch,1,1,past", "batch,1,1,all", 3, "0, 1, 3, 2"), (1, 1, 1, 2048)),
        (arranged(*ROWS, "int64[S]", "S"), (1, 1, 2048, 1)),
        (arranged(*ROWS), (1, 1, 2048, 1)),
        (LAST.replace("Reshape(each, single)", "Reshape(each, one)"), (1, 2048, 2)),
        (GROWING["fused"].replace("past_key_values_0", "past").replace("present_0", "present"), (1, 2048, 2)),
    ],
    ids=[
        *("keys and values as one", "gpt2", "rows before heads", "rows first", "rows last", "ids [S]", "no batch axis"),
        *("logits [B, vocab]", "no number"),
    ],
)
def test_growing_cache_is_supported_in_any_layout(text: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """The usual length axis may hold the heads or have size 1."""
    check(text, tmp_path, 2048, *shape)


def test_prefix_saving_requires_batch_as_first_cache_axis(tmp_path: Path) -> None:
    """In the gpt2 layout the first axis separates keys and values."""
    for layout, wanted in (("fused", True), ("gpt2", False)):
        folder = folder_of(GROWING[layout], tmp_path / layout)
        with load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder)) as runner:
            assert runner.cache.saves(3, 3) is wanted


def test_fixed_cache_longer_than_requested_length_is_noted(tmp_path: Path) -> None:
    length, notes = length_and_notes(folder_of(fixed(SCATTERED), tmp_path / "p"), 8)
    assert length == 32 and "has a fixed length of 32 tokens" in notes
