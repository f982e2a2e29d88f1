"""Quantised checkpoints: stored integers are exported unchanged; requantisation requires an option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import partita
from partita.cli import run
from partita.errors import CheckpointError, PartitaError, UnsupportedModelError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.options import ExportOptions, check_options
from partita.export.pipeline import export
from partita.export.quantise import stored_integers
from partita.export.quantise.stored_integers import AsStored
from partita.export.quantise.weight_source import InColumns, InRows, Layout, QuantisedSource, restored
from partita.export.verify.known_answer import load
from partita.export.weights.origins import JoinedOrigin, Origin
from partita.export.work import notes, with_stored
from partita.library.exporting import replay
from partita.package.folder import read_manifest
from tests import quantised_checkpoints as formats
from tests.checkpoints import edit_config, edit_tensors
from tests.conftest import Exported, TinyCheckpoint
from tests.export.nets import float_source

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
}
ORDER = torch.randperm(96, generator=torch.Generator().manual_seed(0))
ACT_ORDER = formats.gptq(order=ORDER)
DOWN = "model.layers.0.mlp.down_proj"
Quantised = Callable[..., Path]
INTEGERS: dict[str, tuple[dict[str, Any], formats.Packer]] = {
    "gptq": (GPTQ, formats.gptq()),
    "gptq_symmetric": (GPTQ, formats.gptq(symmetric=True)),
    "gptq_v2_of_8_bits": ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, formats.gptq(8, second=True)),
    "gptq_of_3_bits": ({**GPTQ, "bits": 3}, formats.gptq(3)),
    "gptq_of_2_bits": ({**GPTQ, "bits": 2}, formats.gptq(2)),
    "gptq_of_whole_rows": ({**GPTQ, "group_size": -1}, formats.gptq(group=-1)),
    "gptq_act_order": ({**GPTQ, "desc_act": True}, ACT_ORDER),
    "awq": (AWQ, formats.awq()),
    "compressed": (COMPRESSED, formats.compressed_integers()),
    "compressed_asymmetric": (COMPRESSED, formats.compressed_integers(symmetric=False)),
    "compressed_w8a8": ({"quant_method": "compressed-tensors"}, formats.compressed_rows),
}
ROWS: dict[str, tuple[dict[str, Any], formats.Packer]] = {
    "llm_int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, formats.scaled_rows),
    "torchao_int8": ({"quant_method": "torchao"}, formats.torchao_rows),
}


@pytest.fixture(scope="session")
def quantised(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """Makes quantised checkpoints of a tiny llama, each once."""
    made: dict[str, Path] = {}

    def factory(name: str, settings: dict[str, Any], packer: formats.Packer, dtype: str = "float32") -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("quantised-") / name
            made[name] = formats.save_quantised(tiny_checkpoint("llama", dtype=dtype), folder, settings, packer)
        return made[name]

    return factory


def dequantised(folder: Path, name: str) -> torch.Tensor:
    """A weight of a checkpoint, in float32."""
    info = open_checkpoint(str(folder)).tensors[name]
    with OpenFiles() as files:
        return files.read(info, tuple((0, size) for size in info.shape))


def read_back(packed: QuantisedSource) -> torch.Tensor:
    """What the bytes of a packed weight stand for, [N, K] float32."""
    raw = [b""] * len(packed.parts)
    for index, piece in packed.pieces():
        raw[index] += piece.contiguous().view(torch.uint8).numpy().tobytes()
    protos = [
        onnx.TensorProto(data_type=int(part.dtype), dims=part.shape, raw_data=data)
        for part, data in zip(packed.parts, raw, strict=True)
    ]
    return restored(packed.layout.read(packed, list(map(onnx.numpy_helper.to_array, protos)), 0, packed.rows))


@pytest.mark.parametrize("layout", [InRows(), InColumns()], ids=["rows", "columns"])
@pytest.mark.parametrize("name", sorted(INTEGERS))
def test_exported_integers_reproduce_stored_values(quantised: Quantised, name: str, layout: Layout) -> None:
    folder = quantised(name, *INTEGERS[name])
    checkpoint = open_checkpoint(str(folder))
    weights = [f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "down")]
    gate, up, down = (checkpoint.tensors[weight] for weight in weights)
    origins: list[Origin] = [down, JoinedOrigin.of((gate, up), 0)]
    for origin in origins:
        packing, (taken,) = AsStored(checkpoint).take([origin])
        packed = QuantisedSource.of(float_source(checkpoint, taken), packing, layout)
        with OpenFiles() as files:
            expected = taken.read_all(files)
            plain = origin.read_all(files)
        assert torch.equal(read_back(packed), expected)
        assert torch.equal(expected.sort(1).values, plain.sort(1).values)  # at most the columns are in another order
        assert torch.equal(expected, plain) is (name != "gptq_act_order")


def test_gptq_act_order_is_exported_with_sorted_columns(
    quantised: Quantised, exported: Exported, short_text: Path
) -> None:
    folder = quantised("half", *INTEGERS["gptq_act_order"], dtype="float16")
    package = exported(folder, quality_text=short_text)
    manifest = read_manifest(package)
    assert manifest.graph.precision == "int4" and manifest.verification.status == "verified"
    assert manifest.source.quantised is not None and manifest.source.quantised.method == "GPTQ"
    assert manifest.source.quantised.conversion == "as stored" and manifest.source.quantised.weights == 14
    assert manifest.packed is not None and manifest.quality is not None
    assert [(kind.quantiser, kind.block_size, kind.zero_points) for kind in manifest.packed.kinds] == [
        ("as stored", 32, True)
    ]
    assert manifest.packed.not_packed == ()
    assert abs(manifest.quality.perplexity_ratio - 1) < 0.02  # of 8-bit activations alone
    # What was not quantised stays what it was, in the 16 bits that it has.
    assert manifest.half_precision is not None and (manifest.half_precision.dtype, manifest.half_precision.rounded) == (
        "float16",
        0,
    )
    model = onnx.load(package / "model.onnx")
    sorting = {node.output[0] for node in model.graph.node if node.input[1:2] and "columns" in node.input[1]}
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert products and all(node.input[0] in sorting for node in products)


@pytest.mark.heavy
def test_mxfp4_experts_are_exported_as_int8_qmoe(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, short_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """gpt_oss: MXFP4 values are int8 integers times a scale, which QMoE reads."""
    settings: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "head_dim": 16,
    }
    source = tiny_checkpoint("gpt_oss", **settings)
    folder = tmp_path_factory.mktemp("mxfp4-") / "gpt_oss"
    formats.save_quantised(source, folder, {"quant_method": "mxfp4"}, formats.mxfp4, ("gate_up_proj", "down_proj"))
    package = exported(folder, quality_text=short_text)
    manifest = read_manifest(package)
    assert manifest.graph.precision == "int8" and manifest.verification.status == "verified"
    assert manifest.packed is not None and "experts by QMoE" in manifest.packed.operators
    assert [(kind.weights, kind.quantiser, kind.block_size) for kind in manifest.packed.kinds] == [(4, "as stored", 32)]


FLOATS: dict[str, tuple[dict[str, Any], formats.Packer]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, formats.float8()),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, formats.float8(None)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda weight: formats.nf4(weight, 32)),
    "compressed_fp8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        formats.float8(None, "_scale"),
    ),
    "torchao_int4_plain": ({"quant_method": "torchao"}, formats.torchao_plain),
}
SAMPLE = ("nf4", "torchao_int4_plain")


@pytest.mark.parametrize(
    "name",
    [
        each if each in SAMPLE else pytest.param(each, marks=pytest.mark.heavy)
        for each in (*FLOATS, *ROWS, "compressed", "gptq_act_order", "awq")
    ],
)
def test_tokens_match_the_dequantised_model(
    name: str, quantised: Quantised, exported: Exported, short_text: Path
) -> None:
    """Of transformers. Packages with stored integers round activations to 8 bits, except in the verified float copy."""
    folder = quantised(name, *{**INTEGERS, **ROWS, **FLOATS}[name])
    package = exported(folder, precision="auto", **({} if name in FLOATS else {"quality_text": short_text}))
    manifest = read_manifest(package)
    assert manifest.verification.status == "verified" and manifest.source.quantised is not None
    assert manifest.source.quantised.conversion == ("dequantised" if name in FLOATS else "as stored")
    assert name not in FLOATS or manifest.graph.precision == "fp32"
    if name not in FLOATS:
        package = exported(folder, precision="fp32")
    prompt, count = [5, 17, 9, 40, 3], 8
    model = load(open_checkpoint(str(folder)))
    with torch.no_grad():
        written = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    with partita.load(package, providers="cpu") as ours:
        made = ours.generate([prompt], max_new_tokens=count, stop_token_ids=()).run()
    assert list(made.tokens[0]) == written[0, len(prompt) :].tolist()


def test_fp8_error_suggests_float_precision_or_requantise(
    quantised: Quantised, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quantised("fp8", *FLOATS["fp8"])
    for precision in ("int4", "int8"):
        assert run(["export", str(made), str(tmp_path / "out"), "--precision", precision]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "quantised with fp8, and a package cannot store its numbers" in error
        assert "set --precision bf16, fp16 or fp32" in error and "add --requantise to --precision int8" in error


def test_requantisation_is_noted_and_recorded_in_manifest(
    quantised: Quantised, exported: Exported, short_text: Path
) -> None:
    folder = quantised("fp8", *FLOATS["fp8"])
    asked: dict[str, Any] = {"precision": "int4", "requantise": True}
    checkpoint = open_checkpoint(str(folder))
    options = with_stored(ExportOptions(str(folder), folder, **asked), checkpoint)
    assert any("quantised a second time" in note for note in notes(options, checkpoint))
    manifest = read_manifest(exported(folder, quality_text=short_text, **asked))
    assert manifest.source.quantised is not None and manifest.source.quantised.conversion == "requantised"
    assert manifest.packed is not None and {kind.quantiser for kind in manifest.packed.kinds} == {"refit"}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("gptq", {"precision": "int8"}, "as int4; omit"),
        ("gptq", {"precision": "int4", "quantiser": "nearest"}, "kept as stored"),
        ("compressed_w8a8", {"activations": "int8"}, "`activations=int8`: the weights are kept as stored"),
        ("gptq", {"precision": "fp16", "requantise": True}, "needs `precision=int4`"),
        ("gptq", {"requantise": True}, "needs `precision=int4`"),
        (None, {"precision": "int4", "requantise": True}, "are floats; omit it"),
    ],
)
def test_options_contradicting_stored_weights_are_usage_errors(
    quantised: Quantised,
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    kind: str | None,
    options: dict[str, Any],
    words: str,
) -> None:
    folder = tiny_checkpoint("llama") if kind is None else quantised(kind, *INTEGERS[kind])
    with pytest.raises(UsageError, match=words):
        export(ExportOptions(str(folder), tmp_path / "out", **options), replay=replay)
    assert not (tmp_path / "out").exists()


def test_keep_with_other_bits_than_stored_is_a_usage_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", num_hidden_layers=1)
    modules = (*formats.PROJECTIONS, "embed_tokens")
    folder = formats.save_quantised(
        source, tmp_path / "stored", COMPRESSED, formats.compressed_integers(), modules=modules
    )
    options = ExportOptions(str(folder), tmp_path / "out", precision="int4", keep={"embed_tokens": "int8"})
    with pytest.raises(UsageError, match=r"`keep`: .* is stored in 4 bits, and would be quantised a second time"):
        export(options, replay=replay)
    assert not (tmp_path / "out").exists()


def test_quantisation_options_are_checked_against_the_checkpoint(
    quantised: Quantised, tiny_checkpoint: TinyCheckpoint
) -> None:
    """The default precision is that of the checkpoint, which is unknown until it is read."""
    stored, floats = quantised("gptq", *INTEGERS["gptq"]), tiny_checkpoint("llama")
    options = ExportOptions("checkpoint", stored, keep={"lm_head": "int8"})
    check_options(options)
    assert with_stored(options, open_checkpoint(str(stored))).precision == "int4"
    with pytest.raises(UsageError, match="`keep` applies only to quantised weights"):
        with_stored(options, open_checkpoint(str(floats)))


BAD: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], dict[str, Any], str]] = {
    "no_scales": ("gptq", lambda t: t.pop(f"{DOWN}.scales"), {}, r"lacks model\.layers\.0\.mlp\.down_proj\.scales"),
    "odd_bits": ("gptq", lambda t: None, {"bits": 5}, r"qweight has integers of 5 bits; 2, 3, 4, 8 bits are supported"),
    "another_format": ("gptq", lambda t: None, {"checkpoint_format": "marlin"}, "GPTQ in the format marlin"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_invalid_quantised_checkpoint_errors_name_the_folder(
    quantised: Quantised, own_copy: Callable[[Path], Path], tmp_path: Path, name: str
) -> None:
    kind, change, settings, words = BAD[name]
    folder = edit_tensors(own_copy(quantised(kind, *{**INTEGERS, **FLOATS}[kind])), change)
    edit_config(folder, quantization_config={**{**INTEGERS, **FLOATS}[kind][0], **settings})
    with pytest.raises(PartitaError, match=words) as found:
        open_checkpoint(str(folder))
    assert str(found.value).startswith(f"{folder}: ") and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        ("qzeros", -1, r"down_proj\.qzeros has integers that exceed 4 bits, e.g. zero points stored as all ones"),
        ("scales", float("nan"), r"down_proj\.weight: a stored scale is NaN or infinite"),
    ],
)
def test_invalid_stored_integers_raise_checkpoint_error(
    quantised: Quantised, own_copy: Callable[[Path], Path], tensor: str, value: float, words: str
) -> None:
    folder = own_copy(quantised("gptq", *INTEGERS["gptq"]))
    edit_tensors(folder, lambda t: t[f"{DOWN}.{tensor}"].fill_(value))
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match=words):
        packing, (taken,) = AsStored(checkpoint).take([checkpoint.tensors[f"{DOWN}.weight"]])
        list(stored_integers.rows(checkpoint, taken, packing))


@pytest.mark.parametrize("kind", ["other_orders", pytest.param("floats_beside", marks=pytest.mark.heavy)])
def test_incompatible_qkv_weights_require_without_pass(
    tiny_checkpoint: TinyCheckpoint,
    quantised: Quantised,
    exported: Exported,
    short_text: Path,
    own_copy: Callable[[Path], Path],
    tmp_path: Path,
    kind: str,
) -> None:
    """The graph fuses Q, K and V; here their act-orders differ, or only some are quantised."""
    if kind == "other_orders":
        folder = own_copy(quantised("gptq_act_order", *INTEGERS["gptq_act_order"]))
        another = torch.randperm(64, generator=torch.Generator().manual_seed(5)).to(torch.int32) // 32
        queries = [f"model.layers.{layer}.self_attn.q_proj.g_idx" for layer in range(2)]
        edit_tensors(folder, lambda t: t.update({name: another.clone() for name in queries}))
    else:
        folder = tmp_path / "some"
        formats.save_quantised(tiny_checkpoint("llama"), folder, GPTQ, formats.gptq(), ("q_proj", "up_proj"))
    with pytest.raises(UnsupportedModelError, match="`without_pass=packed_attention` keeps queries"):
        exported(folder, quality_text=short_text)
    manifest = read_manifest(exported(folder, quality_text=short_text, without_pass=("packed_attention",)))
    assert manifest.verification.status == "verified" and manifest.packed is not None
    assert {kind.quantiser for kind in manifest.packed.kinds} == {"as stored"}
