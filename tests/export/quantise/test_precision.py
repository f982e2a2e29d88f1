"""int8 and int4 packages: quantised weights, verified graphs, and quality loss."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from partita.demo import heldout_path
from partita.errors import ResourceError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.pipeline import ExportOptions, export
from partita.export.publish import ExportResult
from partita.export.verify import known_answer
from partita.export.weights import external_data as weights
from partita.export.weights import memory_map
from partita.library.exporting import replay, scorer
from partita.package.folder import QUALITY, Manifest, check_files, read_manifest
from tests.conftest import Exported, TinyCheckpoint

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def operators(package: Path, file: str = "model.onnx") -> Counter[str]:
    """Nodes by operator."""
    return Counter(node.op_type for node in onnx.load(package / file, load_external_data=False).graph.node)


def nodes(package: Path, operator: str) -> dict[str, onnx.NodeProto]:
    """Nodes of an operator by name."""
    model = onnx.load(package / "model.onnx", load_external_data=False)
    return {node.name: node for node in model.graph.node if node.op_type == operator}


def initializers(package: Path) -> list[onnx.TensorProto]:
    """What is known of the weights without reading them."""
    return list(onnx.load(package / "model.onnx", load_external_data=False).graph.initializer)


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    """As plain values."""
    return {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}


def places(package: Path, file: str = "model.onnx") -> dict[str, tuple[str, str]]:
    """Offset and length of every initializer in the weight file."""
    model = onnx.load(package / file, load_external_data=False)
    told = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data}
    return {name: (entry["offset"], entry["length"]) for name, entry in told.items()}


def checked(package: Path) -> Manifest:
    """The manifest, after what holds of every packed package."""
    manifest = read_manifest(package)
    check_files(package, manifest, hashes=True)
    assert manifest.verification.status == "verified" and manifest.verification.tolerance == 1e-4
    assert max(step.max_rel_error for step in manifest.verification.steps) < 2e-5
    assert "rounded weights" in str(manifest.verification.reference)
    assert manifest.quality is not None and manifest.quality.tokens >= 256
    assert manifest.packed is not None and manifest.file(QUALITY) is not None
    return manifest


def test_int4_tied_model_shares_head_and_embedding_bytes(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    checkpoint = tiny_checkpoint("llama", tied=True)
    package, plain = exported(checkpoint, precision="int4"), exported(checkpoint)
    manifest = checked(package)
    assert manifest.packed is not None and manifest.quality is not None
    kinds = manifest.packed.kinds
    assert {(kind.precision, kind.zero_points, kind.quantiser) for kind in kinds} == {("int4", True, "refit")}
    assert {kind.block_size for kind in kinds} == {64, 32}, "rows of 64, and of 96 in down_proj"
    layers = len([s for s in manifest.graph.states if s.kind == "key"])
    found = operators(package)
    # The embedding is the head, and counts once; queries, keys and values come from one product.
    assert found["MatMulNBits"] == sum(kind.weights for kind in kinds) == 5 * layers + 1
    assert found["GatherBlockQuantized"] == 1
    assert "Gemm" not in found
    assert attributes(nodes(package, "MatMulNBits")["lm_head/MatMulNBits"])["accuracy_level"] == 4
    where = places(package)
    (name,) = [name for name in where if name.endswith(".rows")]
    assert where[name] == where[name.removesuffix(".rows")], "head and embedding are the same bytes"
    assert manifest.graph.weight_bytes < 0.35 * read_manifest(plain).graph.weight_bytes
    assert manifest.source.parameters == read_manifest(plain).source.parameters
    assert 0.9 < manifest.quality.perplexity_ratio < 1.2 and 0 < manifest.quality.kl_mean < manifest.quality.kl_p99


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2",  # biases, untied: the embedding is looked up in 8 bits
        pytest.param("gpt2", marks=pytest.mark.heavy),  # weights the other way round, learned positions
        pytest.param("gemma3_text", marks=pytest.mark.heavy),
        pytest.param("phi3", marks=pytest.mark.heavy),
    ],
)
def test_int8_package_is_verified_with_minor_quality_loss(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str
) -> None:
    package = exported(tiny_checkpoint(model_type), precision="int8", block_size=32)
    manifest = checked(package)
    assert manifest.packed is not None and manifest.quality is not None
    assert {kind.precision for kind in manifest.packed.kinds} == {"int8"}
    assert operators(package)["MatMul"] == 0 or model_type != "qwen2"
    assert abs(manifest.quality.perplexity_ratio - 1) < 0.01 and manifest.quality.top1_agreement > 0.9


def test_int8_activations_share_quantisation_nodes(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, short_text: Path
) -> None:
    """Integer products; weights that read the same activations share one QuantizeLinear."""
    package = exported(tiny_checkpoint("qwen2"), precision="int8", activations="int8", quality_text=short_text)
    manifest = checked(package)
    assert manifest.packed is not None and manifest.quality is not None
    assert (manifest.packed.form, manifest.packed.activations) == ("matmul_integer_to_float", "int8")
    assert {kind.block_size for kind in manifest.packed.kinds if kind.weights > 1} == {0}
    layers = len([s for s in manifest.graph.states if s.kind == "key"])
    found = operators(package)
    assert found["MatMulIntegerToFloat"] == 5 * layers + 1, "queries, keys and values are one product"
    assert found["QuantizeLinear"] == 4 * layers + 1, "gate and up read the same activations"
    assert abs(manifest.quality.perplexity_ratio - 1) < 0.01 and manifest.quality.top1_agreement > 0.8


def test_fp16_activations_use_a_float16_cache(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, short_text: Path
) -> None:
    """The logits have the same type as in an fp16 package."""
    checkpoint = tiny_checkpoint("llama", tied=True)
    package = exported(checkpoint, precision="int4", activations="fp16", quality_text=short_text)
    manifest = read_manifest(package)
    assert manifest.verification.status == "verified" and manifest.verification.tolerance == 2e-2
    assert manifest.packed is not None and manifest.packed.activations == "fp16"
    assert {state.dtype for state in manifest.graph.states} == {"float16"}
    plain = read_manifest(exported(checkpoint, precision="fp16"))
    logits = [next(o.dtype for o in m.graph.files[0].outputs if o.role == "logits") for m in (manifest, plain)]
    assert logits[0] == logits[1]
    quality = manifest.quality
    assert quality is not None and 0.9 < quality.perplexity_ratio < 1.2


def test_keep_sets_the_precision_of_modules(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    keep = {"lm_head": "int8", "layers.0": "fp32", "layers.0.mlp": "int8", "embed_tokens": "fp32"}
    package = exported(tiny_checkpoint("llama", tied=True), precision="int4", keep=keep, quantiser="nearest")
    manifest = checked(package)
    bits = {name.rpartition("/")[0]: attributes(node)["bits"] for name, node in nodes(package, "MatMulNBits").items()}
    assert bits["lm_head"] == 8 and "GatherBlockQuantized" not in operators(package), "head and embedding are apart"
    assert not [name for name in bits if name.startswith("model.layers.0.self_attn")]
    assert {bits[f"model.layers.0.mlp.{name}"] for name in LINEAR[4:]} == {8}
    attention = {width for name, width in bits.items() if name.startswith("model.layers.1.self_attn")}
    assert attention == {4}
    assert manifest.packed is not None and manifest.packed.keep == tuple(f"{m}={p}" for m, p in keep.items())
    assert {kind.quantiser for kind in manifest.packed.kinds} == {"nearest"} and not manifest.packed.not_packed


def test_keep_stores_modules_in_fp16_and_bf16(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """The graph matches a reference model with weights converted to these types."""
    keep = {"layers.0": "fp16", "layers.0.mlp.down_proj": "bf16", "embed_tokens": "bf16", "lm_head": "int8"}
    package = exported(tiny_checkpoint("llama", tied=True), precision="int4", keep=keep)
    manifest = checked(package)
    kinds = {i.name: onnx.TensorProto.DataType.Name(i.data_type) for i in initializers(package)}
    down = [kind for name, kind in kinds.items() if "layers.0.mlp.down_proj" in name]
    gate = [kind for name, kind in kinds.items() if "layers.0.mlp.gate_proj" in name]
    looked_up = {kinds.get(node.input[0]) for node in nodes(package, "Gather").values()}
    assert (down, gate) == (["BFLOAT16"], ["FLOAT16"]) and "BFLOAT16" in looked_up
    assert not [name for name in nodes(package, "MatMulNBits") if name.startswith("model.layers.0.")]
    assert manifest.packed is not None and manifest.packed.keep == tuple(f"{m}={p}" for m, p in keep.items())


def test_keep_without_quantisable_weight_is_noted(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, short_text: Path
) -> None:
    keep = {"input_layernorm": "fp32", "lm_head": "int8", "embed_tokens": "fp32"}
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=1)
    result = export_to(tmp_path / "out", checkpoint, precision="int4", keep=keep, quality_text=short_text)
    told = [note for note in result.notes if "`keep" in note]
    assert told == ["`keep=input_layernorm=fp32` has no effect: no quantisable weight matches"]


def test_fused_qkv_uses_the_highest_precision_in_keep(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """Queries, keys and values are one weight in the graph."""
    keep = {"layers.0.self_attn.v_proj": "int8"}
    package = exported(tiny_checkpoint("llama", tied=True), precision="int4", keep=keep, quantiser="nearest")
    checked(package)
    bits = {name: attributes(node)["bits"] for name, node in nodes(package, "MatMulNBits").items()}
    assert {bits[name] for name in bits if name.startswith("model.layers.0.self_attn")} == {4, 8}
    assert {bits[name] for name in bits if name.startswith("model.layers.1.")} == {4}


INT4 = {"precision": "int4"}
REFUSED: list[tuple[dict[str, object], str]] = [
    ({**INT4, "keep": {"lm_haed": "int8"}}, r"`keep=lm_haed=int8.*no such module; lm_head is"),
    (
        {**INT4, "activations": "fp16", "keep": {"lm_head": "fp32"}},
        r"`keep=lm_head=fp32`: choose one of fp16, int8, int4",
    ),
    (
        {"precision": "int8", "activations": "int8", "keep": {"lm_head": "int4"}},
        r"`keep=lm_head=int4`: .* only int8 weights",
    ),
    ({"keep": {"lm_head": "int8"}}, r"`keep` applies only to quantised weights; add `precision=int4`"),
    ({**INT4, "block_size": 48}, r"`block_size=48`: choose one of 32, 64, 128"),
    ({**INT4, "verify": False}, r"omit `verify=False`"),
    ({**INT4, "quantiser": "gptq"}, r"`quantiser=gptq` needs a calibration text; add `calibrate`"),
    ({**INT4, "activations": "int8"}, r"`activations=int8`: .* add `precision=int8`"),
    ({"precision": "fp16", "activations": "bf16"}, r"`activations=bf16`: with `precision=fp16` choose fp32 or fp16"),
    ({"max_perplexity_ratio": 1.01}, r"`max_perplexity_ratio=1\.01` applies to quantised weights"),
    ({**INT4, "max_perplexity_ratio": 1.0}, r"must be above 1"),
    (
        {"precision": "fp32", "quality_tokens": 100},
        r"measures the loss of quantisation, but `precision=fp32` quantises",
    ),
    ({"precision": "bf16", "verify": False, "quality_tokens": 100}, r"omit one of them"),
    (
        {"precision": "int8", "prefill_precision": "int8", "activations": "int8"},
        r"does not support `activations=int8`; omit one of them",
    ),
    ({**INT4, "prefill_precision": "int8", "activations": "fp16"}, r"does not support `activations=fp16`"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said[:32] for _, said in REFUSED])
def test_conflicting_quantisation_options_are_usage_errors(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        export_to(tmp_path / "package", tiny_checkpoint("llama"), **options)
    assert list(tmp_path.iterdir()) == []


def export_to(out: Path, checkpoint: Path, **options: object) -> ExportResult:
    """As the command line does, without a target."""
    if options.get("precision") in ("int8", "int4"):
        options.setdefault("quality_text", heldout_path())
    return export(ExportOptions(str(checkpoint), out, max_length=64, **options), replay=replay, scorer=scorer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "free", "use"),
    [
        ({}, None, "to verify the package"),
        ({"calibrate": heldout_path()}, 4e6, r"to calibrate on 8,192 tokens of heldout\.txt"),
        ({"max_perplexity_ratio": 1.01}, 1e6, r"to choose precisions on [\d,]+ tokens"),
    ],
)
def test_insufficient_memory_is_detected_before_loading_the_model(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    free: float | None,
    use: str,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the model was loaded, or weights were written")

    checkpoint = tiny_checkpoint("llama", tied=True)
    held = memory_map.resident_parameters(open_checkpoint(str(checkpoint)).tensors, tmp_path)
    monkeypatch.setattr(known_answer, "free_bytes", lambda: free or held * 4 * known_answer.MEMORY_MARGIN - 1000)
    monkeypatch.setattr(known_answer, "load", never)
    monkeypatch.setattr(weights, "write_data", never)
    said = rf"the source model needs about .* {use}, but .* are free; free memory, or make space"
    with pytest.raises(ResourceError, match=said) as caught:
        export_to(tmp_path / "package", checkpoint, precision="int4", **options)
    assert "`verify=False`" not in str(caught.value), "which would be refused"
    assert list(tmp_path.iterdir()) == []


def test_quality_uses_random_tokens_without_tokenizer(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    package = exported(tiny_checkpoint("llama", tokenizer=False), precision="int4", block_size=32)
    found = checked(package).quality
    assert found is not None and found.text == "random tokens" and found.tokens > 400 and found.top1_agreement > 0.2


@pytest.mark.heavy
def test_static_graphs_share_quantised_weights(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    checkpoint = tiny_checkpoint("llama", tied=True)
    package = exported(checkpoint, precision="int4", static_shapes=True, prefill_chunk=6, attention="onnx24")
    manifest = checked(package)
    assert "com.microsoft" not in manifest.graph.opsets, "weights are in standard operators as the lowering is"
    restored = operators(package, "prefill.onnx")["DequantizeLinear"]
    assert restored == operators(package, "decode.onnx")["DequantizeLinear"] > 0
    assert manifest.packed is not None and manifest.packed.form == "dequantize_linear"
    single = read_manifest(exported(checkpoint, precision="int4"))
    embedding = next(kind.size_bytes for kind in manifest.packed.kinds if kind.precision == "int8")
    assert manifest.graph.weight_bytes < 1.1 * single.graph.weight_bytes + embedding
