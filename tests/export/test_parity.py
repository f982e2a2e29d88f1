"""Exported graphs match transformers: logits, and greedy tokens of `generate`, beyond every sliding window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from partita.package.folder import TOLERANCES, read_manifest
from tests.conftest import MODELS, Exported, TinyCheckpoint
from tests.export.breadth import recipes

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
# gpt_neox stores its head under another name, helium has a norm epsilon of 1e-8, and apertus has buffers.
FP32 = sampled(
    [(model_type, "gqa") for model_type in sorted({*MODELS, "gpt_neox", "helium", "apertus"})]
    + [(kind, name) for kind in ("gemma2", "gemma3_text", "llama") for name in ("onnx24", "primitives")],
    {("llama", "gqa"), ("gemma2", "gqa"), ("gpt_neox", "gqa"), ("llama", "primitives")},
)


@pytest.mark.parametrize(("model_type", "attention"), FP32)
def test_fp32_export_is_verified_and_matches_generate(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, attention: str
) -> None:
    checkpoint = tiny_checkpoint(model_type, **({"head_dim": 16} if model_type == "helium" else {}))
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


LOWERINGS = ("gqa", "onnx24", "primitives")


@pytest.mark.parametrize(
    ("model_type", "attention"),
    sampled(
        itertools.product(("llama", "gemma3_text", "qwen2", "gemma2"), LOWERINGS),
        {("llama", "onnx24"), ("qwen2", "gqa")},
    ),
)
def test_static_graphs_and_batches_match_generate(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, attention: str
) -> None:
    """Two graphs of fixed sizes, or two rows of unequal length."""
    batch = model_type in ("qwen2", "gemma2")
    options: dict[str, Any] = {"batch_size": 2} if batch else {"static_shapes": True, "prefill_chunk": 6}
    checkpoint, prompts = tiny_checkpoint(model_type), [PROMPT, PROMPT[3:9]][: 1 + batch]
    package = exported(checkpoint, attention=attention, **options)
    expected = [original_tokens(checkpoint, prompt, NEW_TOKENS) for prompt in prompts]
    assert our_tokens(package, prompts, NEW_TOKENS) == expected
    assert not batch or our_tokens(package, prompts, NEW_TOKENS, prefill_chunk=4) == expected


ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
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
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **ROPE[kind]},
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
    tmp_path: Path, exported: Exported, model_type: str, attention: str
) -> None:
    """Four chunks of 16 tokens and single tokens; two rows, the second much shorter."""
    checkpoint, prompts = recipes.save(tmp_path / "checkpoint", model_type), [LONG_PROMPT, LONG_PROMPT[:9]]
    package = exported(checkpoint, max_length=96, attention=attention, batch_size=2)
    assert our_tokens(package, prompts, 8) == [original_tokens(checkpoint, prompt, 8) for prompt in prompts]


@pytest.mark.heavy
def test_wrong_chunk_computation_fails_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification prompt is long enough to run prefill.onnx of a model without padding support."""
    from partita.errors import ParityError
    from partita.export.pipeline import ExportOptions, export
    from partita.export.trace.recurrence import delta_rule
    from partita.library.exporting import replay

    checkpoint = recipes.save(tmp_path / "checkpoint", "kimi_linear")
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


def test_fp16_export_keeps_values_of_table_cast_at_run_time(tmp_path: Path, exported: Exported) -> None:
    """ctrl casts its float32 position buffer to the type of its hidden states and stores the result."""
    manifest = read_manifest(exported(recipes.save(tmp_path / "checkpoint", "ctrl"), attention="gqa", precision="fp16"))
    assert manifest.verification.status == "verified"


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
@pytest.mark.parametrize("model_type", ["apertus", "llama"])
def test_buffers_and_tiny_norm_epsilon_are_kept(
    tiny_checkpoint: TinyCheckpoint, own_copy: Callable[[Path], Path], exported: Exported, model_type: str
) -> None:
    """llama: the embedding of one token is zero, so that without the epsilon its norm divides by zero."""
    from safetensors.torch import load_file, save_file

    settings = {"rms_norm_eps": 1e-9} if model_type == "llama" else {}
    checkpoint = own_copy(tiny_checkpoint(model_type, **settings))
    tensors = load_file(checkpoint / "model.safetensors")
    changed = [name for name in tensors if name.endswith("act_fn.beta")]
    assert bool(changed) == (model_type == "apertus")
    for name in changed:
        tensors[name].fill_(3.0)
    if model_type == "llama":
        tensors["model.embed_tokens.weight"][PROMPT[5]] = 0
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert our_tokens(exported(checkpoint), [PROMPT], NEW_TOKENS) == [original_tokens(checkpoint, PROMPT, NEW_TOKENS)]
