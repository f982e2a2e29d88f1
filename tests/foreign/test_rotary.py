"""Graphs of LongRoPE models without an If, as onnxruntime-genai's builder writes them for some providers: one table
with the rows of both lengths, the short one first.

Within the original length they give what the model gives, beyond it not: keys that were cached have the other turn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

from partita.foreign.folder import Choice, open_folder
from tests.foreign.reference_loop import plain_tokens
from tests.foreign.test_any_decoder import tokens
from tests.foreign.test_attention_operators import LENGTHS, LONGEST, MASK, ORIGINAL, PROMPT, folder_of

POSITIONS = f"int64[batch_size,sequence_length] position_ids, {MASK}"
MOVED = """
  wide = Cast<to = {kind}>(position_ids)
  most = ReduceMax<keepdims = 0>(wide)
  beyond = {operator}(most, original)
  flag = Cast<to = {kind}>(beyond)
  shift = Mul(flag, original)
  sum_of = Add(shift, wide)
  places = Cast<to = 7>(sum_of)
"""
"""Positions of the second part of the table, where the largest of them is in it."""
TURNED = """
  turned_q = com.microsoft.RotaryEmbedding(q, {places}, cos, sin)
  turned_k = com.microsoft.RotaryEmbedding(k, {places}, cos, sin)
  made, present_0_key, present_0_value = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>(
    turned_q, turned_k, v, past_key_values_0_key, past_key_values_0_value, seqlens_k, total)"""
INSIDE = f"""{LENGTHS}
  made, present_0_key, present_0_value = com.microsoft.GroupQueryAttention<
    num_heads = 2, kv_num_heads = 1, do_rotary = 1>(
    q, k, v, past_key_values_0_key, past_key_values_0_value, seqlens_k, total, cos, sin)"""
WIDTH = 16
"""Of a head; the operator turns no narrower ones itself."""
KINDS = {"int64": onnx.TensorProto.INT64, "int32": onnx.TensorProto.INT32}


def angles(rows: int, base: float) -> npt.NDArray[np.float64]:
    """[rows, half of a head]."""
    return np.arange(rows)[:, None] / base ** (np.arange(WIDTH // 2) / (WIDTH // 2))


SHORT_AND_LONG = np.concatenate([angles(ORIGINAL, 100.0), angles(LONGEST, 10_000.0)])
SHORT_ALONE = angles(ORIGINAL + LONGEST, 100.0)


def with_tables(folder: Path, turns: npt.NDArray[np.float64], *, beside: bool = False, **others: object) -> Path:
    """The folder with cosines and sines of these turns, in the file or `beside` it, and other constants."""
    model = onnx.load(folder / "model.onnx")
    tables = {"cos": np.cos(turns).astype(np.float32), "sin": np.sin(turns).astype(np.float32)}
    for name, values in {**tables, **others}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    onnx.save(model, folder / "model.onnx", save_as_external_data=beside, location="model.data", size_threshold=0)
    return folder


def check_short(folder: Path, limit: int) -> None:
    """Texts are of `limit` tokens unless longer ones are asked for, and a note says why."""
    for choice, length, says in (
        (Choice(), limit, "the maximum length is"),
        (Choice(max_length=LONGEST), LONGEST, "longer"),
    ):
        manifest = open_folder(folder, choice)
        assert manifest.graph.max_length == length and manifest.foreign is not None
        (note,) = [note for note in manifest.foreign.notes if "other rotary frequencies" in note]
        assert says in note and f"beyond {limit} tokens" in note


@pytest.mark.parametrize(("operator", "limit"), [("Greater", ORIGINAL + 1), ("GreaterOrEqual", ORIGINAL)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_positions_that_move_to_another_part_of_the_table(operator: str, limit: int, kind: str, tmp_path: Path) -> None:
    moved = MOVED.format(operator=operator, kind=KINDS[kind])
    text = LENGTHS + moved + TURNED.format(places="places")
    folder = folder_of(text, 1, tmp_path / "moved", share_buffer=True, told=POSITIONS, width=WIDTH)
    # A table that does not begin anew: here the positions alone show it.
    check_short(with_tables(folder, SHORT_ALONE, original=np.array(ORIGINAL, kind)), limit)
    expected = plain_tokens(folder / "model.onnx", PROMPT[:6], 6)
    for chunk in (100, 3):
        assert tokens(folder, [PROMPT[:6]], Choice(), chunk, 6) == [expected]


@pytest.mark.parametrize("beside", [True, False])
def test_a_table_that_begins_anew(beside: bool, tmp_path: Path) -> None:
    folder = folder_of(INSIDE, 1, tmp_path / "anew", share_buffer=True, width=WIDTH)
    check_short(with_tables(folder, SHORT_AND_LONG, beside=beside), ORIGINAL)
    expected = plain_tokens(folder / "model.onnx", PROMPT[:6], 6)
    assert tokens(folder, [PROMPT[:6]], Choice(), 3, 6) == [expected]


def test_longer_tables_and_positions_as_they_are_change_nothing(tmp_path: Path) -> None:
    inside = folder_of(INSIDE, 1, tmp_path / "inside", share_buffer=True, width=WIDTH)
    text = LENGTHS + TURNED.format(places="position_ids")
    outside = folder_of(text, 1, tmp_path / "outside", share_buffer=True, told=POSITIONS, width=WIDTH)
    for folder in (inside, outside):
        manifest = open_folder(with_tables(folder, SHORT_ALONE))
        assert manifest.graph.max_length == LONGEST and manifest.foreign is not None and not manifest.foreign.notes


def test_a_table_that_is_cut_off_is_told_as_weights_are(tmp_path: Path) -> None:
    from partita.errors import PackageError
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.runner import load_runner

    folder = with_tables(
        folder_of(INSIDE, 1, tmp_path / "cut", share_buffer=True, width=WIDTH), SHORT_AND_LONG, beside=True
    )
    with (folder / "model.data").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(PackageError, match="truncated"):
        load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder))
