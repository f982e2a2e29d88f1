"""Exported graphs match transformers: logits, and greedy tokens of `generate`, beyond every sliding window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from partita.options.export import Attention
from partita.package.folder import TOLERANCES, read_manifest
from tests.conftest import MODELS, Exported, TinyCheckpoint

NEW_TOKENS = 24
PROMPT = [1, *(3 + (37 * i) % 280 for i in range(19))]


def original_tokens(checkpoint: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate`, in float32, end-of-text ignored."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def our_tokens(package: Path, prompts: list[list[int]], new_tokens: int, prefill_chunk: int = 512) -> list[list[int]]:
    """Greedy tokens of our loop, per row."""
    from benchmarks.engine_steps import generate
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.choice.sampling import greedy
    from partita.runtime.generate.runner import load_runner

    rows: list[list[int]] = [[] for _ in prompts]
    with load_runner(package, parse_chain("cpu")) as runner:
        sampler = greedy
        for step in generate(runner, prompts, max_new_tokens=new_tokens, sampler=sampler, prefill_chunk=prefill_chunk):
            for row, tokens in zip(rows, step.tokens, strict=True):
                row.extend(tokens)
    return rows


def sampled(cases: Iterable[tuple[str, str]], kept: Collection[tuple[str, str]]) -> list[Any]:
    """All cases, of which only those that are kept run with `make test`."""
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.heavy) for case in cases]


# Every lowering with those that ask most of it; test_breadth has many more, `make breadth` all of them in all three.
FP32 = sampled(
    [(model_type, "gqa") for model_type in sorted(MODELS)]
    + [(kind, name) for kind in ("gemma2", "gemma3_text", "llama") for name in ("onnx24", "primitives")],
    {("llama", "gqa"), ("gemma2", "gqa"), ("llama", "primitives")},
)


@pytest.mark.parametrize(("model_type", "attention"), FP32)
def test_fp32_export_is_verified_and_matches_generate(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, attention: str
) -> None:
    checkpoint = tiny_checkpoint(model_type)
    package = exported(checkpoint, attention=attention)
    result = read_manifest(package).verification
    assert result.status == "verified" and result.tolerance == TOLERANCES["fp32"] == 1e-4
    assert {s.step for s in result.steps} == {"prefill", "chunked prefill", *(f"decode {i}" for i in range(1, 9))}
    assert "not reached" not in result.detail and "not run" not in result.detail
    assert max(s.max_rel_error for s in result.steps) < 2e-5
    expected = original_tokens(checkpoint, PROMPT, NEW_TOKENS)
    assert len(set(expected)) > 3, "the reference repeats itself: the comparison would prove little"
    assert our_tokens(package, [PROMPT], NEW_TOKENS) == [expected]
    assert our_tokens(package, [PROMPT], NEW_TOKENS, prefill_chunk=7) == [expected]


@pytest.mark.parametrize(
    ("model_type", "attention"),
    sampled(itertools.product(("llama", "gemma3_text"), ("gqa", "onnx24", "primitives")), {("llama", "onnx24")}),
)
def test_static_prefill_and_decode_graphs_match_generate(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, attention: str
) -> None:
    checkpoint = tiny_checkpoint(model_type)
    package = exported(checkpoint, attention=attention, static_shapes=True, prefill_chunk=6)
    expected = original_tokens(checkpoint, PROMPT, NEW_TOKENS)
    assert our_tokens(package, [PROMPT], NEW_TOKENS) == [expected]


@pytest.mark.parametrize(
    ("model_type", "attention"),
    sampled(itertools.product(("qwen2", "gemma2"), ("gqa", "onnx24", "primitives")), {("qwen2", "gqa")}),
)
def test_batch_with_unequal_prompts_matches_generate(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, attention: str
) -> None:
    checkpoint = tiny_checkpoint(model_type)
    package = exported(checkpoint, attention=attention, batch_size=2)
    prompts = [PROMPT, PROMPT[3:9]]
    expected = [original_tokens(checkpoint, prompt, NEW_TOKENS) for prompt in prompts]
    assert our_tokens(package, prompts, NEW_TOKENS) == expected
    assert our_tokens(package, prompts, NEW_TOKENS, prefill_chunk=4) == expected


ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1] * 4,
        "long_factor": [1.5, 4.0] * 4,
    },
}


@pytest.mark.parametrize(
    ("kind", "attention"),
    sampled(itertools.product(sorted(ROPE), ("gqa", "primitives")), {("dynamic", "gqa"), ("longrope", "gqa")}),
)
def test_rope_scaling_beyond_original_context_matches_generate(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str, attention: str
) -> None:
    """The original context has 16 or 32 positions; the prompt has 20 tokens and the completion 24."""
    longest = 16 if kind == "dynamic" else 64
    model_type = "phi3" if kind == "longrope" else "llama"
    settings: dict[str, Any] = {
        "max_position_embeddings": longest,
        "rope_parameters": {"rope_theta": 1e4, **ROPE[kind]},
    }
    if kind == "longrope":
        settings["original_max_position_embeddings"] = 32
    checkpoint = tiny_checkpoint(model_type, **settings)
    package = exported(checkpoint, attention=attention)
    expected = original_tokens(checkpoint, PROMPT, NEW_TOKENS)
    assert our_tokens(package, [PROMPT], NEW_TOKENS) == [expected]
    assert our_tokens(package, [PROMPT], NEW_TOKENS, prefill_chunk=7) == [expected]


LONG_PROMPT = [1, *(3 + (37 * i) % 280 for i in range(69))]


@pytest.mark.parametrize(
    ("model_type", "attention"),
    sampled(itertools.product(("bamba", "kimi_linear", "jamba"), ("gqa", "primitives")), {("jamba", "gqa")}),
)
def test_chunked_prefill_of_recurrent_models_matches_generate(
    tmp_path: Path, model_type: str, attention: Attention
) -> None:
    """Four chunks of 16 tokens and single tokens; two rows, the second much shorter."""
    from partita.export.pipeline import ExportOptions, export
    from partita.library.exporting import replay
    from tests.export.breadth import recipes

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    recipes.save(checkpoint, model_type)
    prompts, package = [LONG_PROMPT, LONG_PROMPT[:9]], tmp_path / "package"
    expected = [original_tokens(checkpoint, prompt, 8) for prompt in prompts]
    options = ExportOptions(str(checkpoint), package, max_length=96, attention=attention, batch_size=2)
    export(options, replay=replay)
    assert our_tokens(package, prompts, 8) == expected


@pytest.mark.heavy
def test_wrong_chunk_computation_fails_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification prompt is long enough to run prefill.onnx of a model without padding support."""
    from partita.errors import ParityError
    from partita.export.pipeline import ExportOptions, export
    from partita.export.trace.recurrence import delta_rule
    from partita.library.exporting import replay
    from tests.export.breadth import recipes

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    recipes.save(checkpoint, "kimi_linear")
    right = delta_rule.chunk
    monkeypatch.setattr(delta_rule, "chunk", lambda *given: (right(*given)[0] * 2, right(*given)[1]))
    with pytest.raises(ParityError, match="first difference in prefill"):
        export(ExportOptions(str(checkpoint), tmp_path / "out", max_length=64, attention="primitives"), replay=replay)


@pytest.mark.parametrize(
    ("model_type", "precision"), sampled(itertools.product(("llama", "gemma2"), ("fp16", "bf16")), {("llama", "fp16")})
)
def test_half_precision_export_is_verified(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, precision: str
) -> None:
    manifest = read_manifest(exported(tiny_checkpoint(model_type), precision=precision))
    result = manifest.verification
    assert result.status == "verified" and result.tolerance == TOLERANCES[precision]
    assert {s.dtype for s in manifest.graph.states} == {{"fp16": "float16", "bf16": "bfloat16"}[precision]}
    assert ("float32 arithmetic" in result.detail) == (precision == "bf16")


def test_fp16_export_keeps_values_of_table_cast_at_run_time(tmp_path: Path) -> None:
    """ctrl casts its float32 position buffer to the type of its hidden states and stores the result."""
    from partita.export.pipeline import ExportOptions, export
    from partita.library.exporting import replay
    from tests.export.breadth import recipes

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    recipes.save(checkpoint, "ctrl")
    options = ExportOptions(str(checkpoint), tmp_path / "out", max_length=64, attention="gqa", precision="fp16")
    export(options, replay=replay)
    assert read_manifest(tmp_path / "out").verification.status == "verified"


@pytest.mark.parametrize(
    "model_type", [*(pytest.param(name, marks=pytest.mark.heavy) for name in ("helium", "apertus")), "gpt_neox"]
)
def test_special_checkpoint_layouts_match_generate(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str
) -> None:
    """A head stored under another name (gpt_neox), a norm epsilon of 1e-8 (helium), buffers (apertus)."""
    extra: dict[str, Any] = {"head_dim": 16} if model_type == "helium" else {}
    checkpoint = tiny_checkpoint(model_type, **extra)
    assert our_tokens(exported(checkpoint), [PROMPT], NEW_TOKENS) == [original_tokens(checkpoint, PROMPT, NEW_TOKENS)]


def test_wrong_graph_raises_parity_error_at_first_difference(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lowering that omits the softcap."""
    from dataclasses import replace

    from partita.errors import ParityError
    from partita.export.pipeline import ExportOptions, export
    from partita.export.trace.attention import gqa
    from partita.library.exporting import replay

    def without_softcap(call: Any) -> Any:
        return gqa.emit(replace(call, reading=replace(call.reading, softcap=0.0)))

    wrong = replace(gqa.LOWERING, fused_call=without_softcap)
    monkeypatch.setattr(gqa, "LOWERING", wrong)
    with pytest.raises(ParityError, match="first difference in prefill, output logits") as caught:
        export(ExportOptions(str(tiny_checkpoint("gemma2")), tmp_path / "out", max_length=64), replay=replay)
    assert caught.value.exit_code == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_buffers_are_read_from_checkpoint(
    tiny_checkpoint: TinyCheckpoint, own_copy: Callable[[Path], Path], exported: Exported
) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = own_copy(tiny_checkpoint("apertus"))
    tensors = load_file(checkpoint / "model.safetensors")
    changed = [name for name in tensors if name.endswith("act_fn.beta")]
    assert changed
    for name in changed:
        tensors[name].fill_(3.0)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert our_tokens(exported(checkpoint), [PROMPT], NEW_TOKENS) == [original_tokens(checkpoint, PROMPT, NEW_TOKENS)]


@pytest.mark.heavy
def test_tiny_norm_epsilon_is_kept(
    tiny_checkpoint: TinyCheckpoint, own_copy: Callable[[Path], Path], exported: Exported
) -> None:
    """The embedding of one token is zero: without the epsilon its norm divides by zero."""
    from safetensors.torch import load_file, save_file

    checkpoint = own_copy(tiny_checkpoint("llama", rms_norm_eps=1e-9))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][PROMPT[5]] = 0
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert our_tokens(exported(checkpoint), [PROMPT], NEW_TOKENS) == [original_tokens(checkpoint, PROMPT, NEW_TOKENS)]
