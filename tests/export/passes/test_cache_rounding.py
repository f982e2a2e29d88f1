"""int8 KV cache: contents, size, manifest entries, and cases that are rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from partita.errors import ProviderError, UnsupportedModelError, UsageError
from partita.export.options import ExportOptions, check_options
from partita.export.passes import cache_rounding
from partita.export.target import Target
from partita.library.exporting import export
from partita.library.place.target import supported_by_cpu
from partita.package.folder import Manifest, read_manifest
from partita.providers.resolve import parse_chain
from partita.runtime.generate.runner import load_runner
from partita.runtime.verify.quality import Scorer
from tests.checkpoints import save_random_model
from tests.conftest import BASE, TinyCheckpoint

TOKENS = list(range(3, 43))


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A package with a rounded cache and sliding windows, and the same with a cache of floats."""
    checkpoint, folder = tiny_checkpoint("mistral"), tmp_path_factory.mktemp("rounded")
    made = folder / "rounded", folder / "floats"
    export(checkpoint, made[0], max_length=64, cache_precision="int8")
    export(checkpoint, made[1], max_length=64)
    return made


def read(folder: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What a package caches of a text, and the logits of its last token."""
    heard: list[np.ndarray] = []
    with load_runner(folder, parse_chain("cpu"), threads=1) as runner:
        scorer = Scorer(runner)
        scorer.score([TOKENS], lambda row, position, logits: heard.append(np.array(logits)))
        return {past: np.array(values) for past, values in scorer.cached()}, heard[-1]


def scales(folder: Path) -> dict[str, np.ndarray]:
    """The scale of every state, by its past input."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    pairs = [(node.input[place], node.input[12 + place - 3]) for node in nodes for place in (3, 4)]
    return {past: numpy_helper.to_array(held[scale]) for past, scale in pairs}


@pytest.mark.parametrize("interleaved", [0, 1])
def test_largest_keys_hold_at_every_position(interleaved: int) -> None:
    """A rotation of a pair of channels keeps its length."""
    table = ir.Value(name="cos", shape=ir.Shape([64, 3]))
    inputs = [None] * cache_rounding.COS + [table]
    node = ir.node("GroupQueryAttention", inputs, {"do_rotary": 1, "rotary_interleaved": interleaved})
    pairs = cache_rounding.rotated_pairs(node)
    assert pairs is not None
    keys = np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype(np.float32)
    most, (one, other) = cache_rounding.largest_at_any(keys, pairs), ([0, 2, 4], [1, 3, 5])
    if not interleaved:
        one, other = [0, 1, 2], [3, 4, 5]
    for angle in np.linspace(0, 2 * np.pi, 100):
        turned = keys.copy()
        turned[..., one] = keys[..., one] * np.cos(angle) - keys[..., other] * np.sin(angle)
        turned[..., other] = keys[..., one] * np.sin(angle) + keys[..., other] * np.cos(angle)
        assert (np.abs(turned).max(axis=(0, 2)) <= most + 1e-5).all()
    np.testing.assert_array_equal(most[:, 6:], np.abs(keys[..., 6:]).max(axis=(0, 2)))


def test_int8_cache_is_within_half_a_step_of_float_cache(pair: tuple[Path, Path]) -> None:
    """Checked in the first layer, whose input is exact; logits differ by at most 0.1 of the maximum."""
    (rounded, logits), (floats, reference) = read(pair[0]), read(pair[1])
    step = scales(pair[0])
    assert rounded.keys() == floats.keys() == step.keys() and len(step) == 4
    for past in sorted(step)[:2]:
        assert rounded[past].dtype == np.int8
        error = np.abs(rounded[past] * step[past] - floats[past])
        within = np.abs(floats[past]) <= 127 * step[past]
        assert (error[within] <= 0.501 * np.broadcast_to(step[past], error.shape)[within]).all()
        assert within.mean() > 0.9 and np.abs(rounded[past]).max() > 60
    assert np.abs(logits - reference).max() < 0.1 * np.abs(reference).max()


def test_manifest_records_int8_cache_verification_and_quality(pair: tuple[Path, Path]) -> None:
    """A quarter of the bytes, verification through a float-cache copy, and the quality loss."""
    manifest, floats = (read_manifest(folder) for folder in pair)
    assert manifest.quantised_cache is not None and manifest.quality is not None
    assert manifest.graph.cache_bytes * 4 == floats.graph.cache_bytes == manifest.quantised_cache.float_bytes
    assert {state.dtype for state in manifest.graph.states} == {"int8"}
    assert (
        manifest.quantised_cache.states == 4
        and not manifest.quantised_cache.float_states
        and manifest.quantised_cache.tokens > 256
    )
    found = manifest.verification
    assert found.status == "verified" and found.tolerance == 1e-4 and "float32 cache" in str(found.converted_copy)
    assert manifest.tolerance > found.tolerance, "what is replayed later rounds"
    assert 0 < manifest.quality.kl_mean < 0.05 and abs(manifest.quality.perplexity_ratio - 1) < 0.01
    assert Manifest.model_validate_json(manifest.model_dump_json(by_alias=True)) == manifest


def test_int8_cache_requires_group_query_attention(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """bloom exports primitive attention nodes; the error occurs before anything is published."""
    checkpoint = tiny_checkpoint("bloom", num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="this model has no states kept by GroupQueryAttention"):
        export(checkpoint, tmp_path / "package", max_length=64, cache_precision="int8")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_precision": "int4"}, "the only value is int8"),
        ({"cache_precision": "int8", "attention": "onnx24"}, "use `attention=gqa`"),
        ({"cache_precision": "int8", "verify": False}, "`verify=False` does not support"),
        ({"cache_precision": "int8", "precision": "bf16"}, "add `activations=fp32`"),
    ],
    ids=str,
)
def test_conflicting_int8_cache_options_are_usage_errors(given: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        check_options(ExportOptions("checkpoint", tmp_path / "out", **given))


def test_target_without_int8_cache_kernel_is_rejected(tmp_path: Path) -> None:
    assert list(supported_by_cpu([cache_rounding.question("float32")])) == [True]
    asked = ExportOptions("checkpoint", tmp_path, cache_precision="int8")
    target = Target("chip", "--target", "gqa", "itself", supports=lambda questions: [False for _ in questions])
    with pytest.raises(ProviderError, match="chip has no kernel for GroupQueryAttention .* a cache of int8"):
        cache_rounding.ask(asked, target)
    cache_rounding.ask(ExportOptions("checkpoint", tmp_path), target)


@pytest.mark.heavy
def test_key_scale_covers_positions_beyond_the_calibration_text(tmp_path: Path) -> None:
    """The bias of one channel rotates slowly into its partner channel, beyond the 512 calibration positions."""
    from safetensors.torch import load_file, save_file

    checkpoint, settings = tmp_path / "checkpoint", {**BASE, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    save_random_model(checkpoint, "qwen2", settings, "float32", 1)
    weights = load_file(checkpoint / "model.safetensors")
    bias = weights["model.layers.0.self_attn.k_proj.bias"]
    bias.zero_()
    bias[16 // 2 + 7] = 30.0  # of the pair that turns slowest
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    export(checkpoint, tmp_path / "p", max_length=2048, cache_precision="int8", attention="gqa")
    (key,) = [scale for past, scale in scales(tmp_path / "p").items() if past.endswith("key")]
    slowest = 10_000.0 ** (-7 / 8)
    assert 127 * key[0, 0, 0, 7] > 30 * np.sin(2047 * slowest), "it gets this large at the end of the cache"
