"""GGUF settings that transformers does not read: copied to the config, listed in a note, or rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partita.errors import UnsupportedModelError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.gguf.conversion import prepare
from tests.conftest import TinyCheckpoint, require
from tests.gguf_files import save_gguf, save_settings


def config_of(folder: Path, architecture: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The config that is read of a file with such settings."""
    from transformers import AutoConfig

    _, written, _ = prepare(save_settings(folder / "model.gguf", architecture, settings))
    found: dict[str, Any] = AutoConfig.from_pretrained(str(written)).to_dict()
    return found


PUT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a base": ("starcoder2", {"rope.freq_base": 1e6}, {"rope_parameters.rope_theta": 1e6}),
    "a base of some layers": (
        "gemma3",
        {"rope.freq_base": 5e5, "rope.freq_base_swa": 5e3},
        {"rope_parameters.sliding_attention.rope_theta": 5e3, "rope_parameters.full_attention.rope_theta": 5e5},
    ),
    "limits": (
        "gemma2",
        {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 2.0},
    ),
    "an epsilon": ("nemotron", {"attention.layer_norm_epsilon": 0.25}, {"norm_eps": 0.25}),
    "a window": (
        "phi3",
        {"attention.sliding_window": 8, "rope.scaling.original_context_length": 64, "rope.dimension_count": 16},
        {"sliding_window": 8},
    ),
    "a scale by the head": ("gemma2", {"attention.key_length": 32}, {"query_pre_attn_scalar": 32}),
    "a scale by the width": (
        "gemma2",
        {"attention.key_length": 32, "block_count": 46, "embedding_length": 96},
        {"query_pre_attn_scalar": 24, "head_dim": 32},
    ),
    "nothing that changes logits": ("bloom", {"attention.causal": True, "pooling_type": 3}, {"n_layer": 2}),
    "a context of gpt2": ("gpt2", {"context_length": 256}, {"n_positions": 256}),
}


@pytest.mark.parametrize("case", PUT)
def test_settings_ignored_by_transformers_are_copied_to_config(case: str, tmp_path: Path) -> None:
    require("gguf")
    architecture, settings, wanted = PUT[case]
    found = config_of(tmp_path, architecture, settings)
    for path, value in wanted.items():
        here: Any = found
        for key in path.split("."):
            here = here[key]
        assert here == value, path


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "both ways": ("qwen2", {"attention.causal": False}, "it has attention.causal = False"),
    "a window that its config forgets": (
        "qwen2",
        {"attention.sliding_window": 8},
        "it has attention.sliding_window = 8",
    ),
    "something new": ("llama", {"something.new": [1, 2]}, "it has something.new = an array"),
    "other layers": (
        "gemma3",
        {"attention.sliding_window_pattern": [True, False]},
        "it has attention.sliding_window_pattern = an array",
    ),
    "a part of the head": (
        "stablelm",
        {"rope.dimension_count": 8},
        "rope.dimension_count is 8, but transformers' model rotates 4 numbers of each head",
    ),
    "a long phi": (
        "phi3",
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25},
        "it has rope.scaling.attn_factor = 1.25, rope.scaling.original_context_length = 64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_changing_settings_are_rejected_by_name(case: str, tmp_path: Path) -> None:
    require("gguf")
    architecture, settings, said = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as caught:
        config_of(tmp_path, architecture, settings)
    assert said in str(caught.value) and str(caught.value).startswith(f"{tmp_path / 'model.gguf'}: ")


@pytest.mark.parametrize(("name", "noted"), [("stablelm2", True), ("mpt", False), ("qwen2", False)])
def test_unknown_pre_tokenizer_adds_a_note(
    name: str, noted: bool, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    require("gguf")
    file = save_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama"), tokenizer__ggml__pre=name)
    notes = open_checkpoint(str(file)).notes
    assert any(f"names the pre-tokenizer '{name}' (tokenizer.ggml.pre)" in note for note in notes) is noted


def test_eos_tokens_match_llama_cpp(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """From the eos and eot settings, and from token texts such as <|im_end|>."""
    require("gguf")
    ends: Any = {"tokenizer__ggml__eos_token_id": 1, "tokenizer__ggml__eot_token_id": 10}
    file = save_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama"), tokenizer=False, **ends)
    assert open_checkpoint(str(file)).config.eos_token_id == [1, 10]
    tokens = [f"t{number}" for number in range(2045)] + ["<|im_end|>", "<end_of_turn>", "<|fim_pad|>"]
    tokens_too: Any = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__eos_token_id": 1}
    file = save_gguf(tmp_path / "text.gguf", tiny_checkpoint("llama"), tokenizer=False, **tokens_too)
    assert open_checkpoint(str(file)).config.eos_token_id == [1, 2045, 2046]
