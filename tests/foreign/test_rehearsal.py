"""Test run before the first prompt of a foreign graph; its next token is the sum of all tokens modulo 64."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

import partita
from partita.errors import PackageError
from partita.foreign.folder import Choice, open_folder
from partita.providers.resolve import parse_chain
from partita.runtime.generate.runner import load_runner
from tests.foreign.conftest import Sample
from tests.foreign.test_any_decoder import PROMPT, decoder, folder_of, tokens
from tests.foreign.test_bad_input import altered
from tests.foreign.test_generate import PROMPT as SAMPLE_PROMPT
from tests.runtime.handmade_packages import adding

SHOWN, HIDDEN = "shown = Identity(given)", "shown = Sub(unit, given)"
SUMMED = "all = ReduceSum<keepdims = 0>(counted)"
LAST_ALONE = """had = Shape<start = 2, end = 3>(past_key_0)
  own = Slice(counted, last, huge, rows)
  before = Slice(counted, zero, had, rows)
  old = ReduceSum<keepdims = 0>(before)
  fresh = ReduceSum<keepdims = 0>(own)
  parts = Add(old, fresh)
  everything = ReduceSum<keepdims = 0>(counted)
  begins = Equal(had, zero)
  all = Where(begins, everything, parts)"""
"""After past, a step adds its last token alone: right for a step of one token, and for a text read as a whole."""
OLDER_TWICE = """had = Shape<start = 2, end = 3>(past_key_0)
  before = Slice(counted, zero, had, rows)
  old = ReduceSum<keepdims = 0>(before)
  everything = ReduceSum<keepdims = 0>(counted)
  all = Add(old, everything)"""
"""What was cached counts twice: no way to read in parts is right."""


def counting(mask: str = "int64[1,T]", seen: str = SHOWN, summed: str = SUMMED) -> str:
    """A decoder whose cache grows, and that counts the tokens which its mask shows."""
    return decoder(
        f"int64[1,S] input_ids, {mask} attention_mask, float[1,1,P,1] past_key_0",
        "float[1,1,64] logits, float[1,1,T,1] present_key_0",
        f"""
  numbers = Cast<to = 1>(input_ids)
  new = Reshape(numbers, four)
  present_key_0 = Concat<axis = 2>(past_key_0, new)
  given = Cast<to = 1>(attention_mask)
  {seen}
  column = Reshape(shown, four)
  counted = Mul(present_key_0, column)
  {summed}
  flat = Reshape(all, single)""",
        ", float unit = {1}",
    )


def whole(order: str = "") -> str:
    """A decoder without a cache; in reverse the sum of a token and all after it, as encoders see them."""
    body = f"""
  numbers = Cast<to = 1>(input_ids)
  flat = CumSum{order}(numbers, axis)"""
    return decoder("int64[1,S] input_ids", "float[1,S,64] logits", body)


@pytest.mark.parametrize(
    "text",
    [
        counting("int64[1,T]"),
        counting("bool[1,T]"),
        counting().replace("int64[1,S]", "int64[1,1]"),
        counting(summed=LAST_ALONE),
    ],
    ids=["integer mask", "boolean mask", "one token per step", "last token alone"],
)
def test_decoder_with_mask_generates_expected_tokens(text: str, tmp_path: Path) -> None:
    """The last graph is right only for one token after past: its prompt is not split."""
    folder = folder_of(text, tmp_path / "decoder")
    for chunk in (100, 3):
        assert tokens(folder, [PROMPT], Choice(), chunk) == [adding(PROMPT, 6)]


OWN = ("counted = Mul(present_key_0, column)", "own = Mul(new, column)\n  counted = Add(new, own)")
"""The mask is that of the new tokens."""
HIDES = r"decoder\.onnx: the input 'attention_mask' hides tokens where it is 1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (counting("int64[1,T]", HIDDEN), HIDES),
        (counting(summed=OLDER_TWICE), "the logits of 6 tokens run at once and one by one differ by"),
        (counting().replace(*OWN), r"odd: the test run of 6 tokens before .* --contract FILE\.toml"),
        (whole("<reverse = 1>"), r"decoder\.onnx: logits of a token change by .* the model is an encoder"),
    ],
    ids=["hidden", "older twice", "mask of new tokens", "encoder"],
)
def test_graph_of_another_meaning_is_rejected(text: str, said: str, tmp_path: Path) -> None:
    """Names, shapes and types are those of a decoder, but its tokens would be wrong."""
    folder = folder_of(text, tmp_path / "odd")
    with pytest.raises(PackageError, match=said):
        load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder))


def test_prefill_is_not_chunked_if_steps_after_past_take_1_token(tmp_path: Path) -> None:
    """The graph's inputs do not show the limit; the test run detects it."""
    folder = folder_of(counting(summed=LAST_ALONE), tmp_path / "single")
    assert open_folder(folder).graph.appends_chunks
    with load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder)) as runner:
        assert not runner.contract.appends_chunks and not runner.capacity.appends_chunks


def test_decoder_pair_with_different_weights_is_rejected(sample: Sample) -> None:
    """Names and shapes of both graphs match config.json, but their caches are incompatible."""

    def other(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2:
                values = numpy_helper.to_array(tensor)
                tensor.CopyFrom(numpy_helper.from_array(values[::-1].copy(), tensor.name))

    folder = altered(sample("pair"), other, "decoder_with_past_model.onnx")
    said = r"so the models in decoder_model\.onnx and decoder_with_past_model\.onnx, its cache, positions or mask are"
    with pytest.raises(PackageError, match=said):
        load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder))


def test_report_excludes_test_run(sample: Sample) -> None:
    with partita.load(sample("optimum"), "cpu") as model:
        model.generate(SAMPLE_PROMPT, max_new_tokens=4, stop_token_ids=()).run()
        report = model.report(probe_seconds=0)
    assert {phase.name: phase.observed_runs for phase in report.phases} == {"prefill": 1, "decode": 3}


def test_decoder_without_cache_generates_expected_tokens(tmp_path: Path) -> None:
    folder = folder_of(whole(), tmp_path / "decoder")
    assert tokens(folder, [PROMPT], Choice(), 100) == [adding(PROMPT, 6)]


@pytest.mark.parametrize("variant", ["fp16", "int8"])
def test_fp16_or_int8_decoder_without_cache_and_config_loads(variant: str, sample: Sample) -> None:
    """Dynamic quantisation makes the logits of a token depend on the other tokens of the step."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16

    folder = sample("whole")
    (folder / "config.json").unlink()
    plain = folder / "model.onnx"
    if variant == "fp16":
        onnx.save(convert_float_to_float16(onnx.load(plain)), plain)
    else:
        quantize_dynamic(plain, folder / "rounded.onnx", weight_type=QuantType.QInt8)
        (folder / "rounded.onnx").replace(plain)
    load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder)).close()
