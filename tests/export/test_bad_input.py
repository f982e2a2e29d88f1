"""Common user errors on the command line: one-line message, exit code, no files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.cli import run
from partita.errors import PartitaError
from partita.export.checkpoint.description import open_checkpoint
from tests.checkpoints import edit_config, edit_tensors
from tests.conftest import TinyCheckpoint

Copy = Callable[[Path], Path]
Captured = pytest.CaptureFixture[str]


def refused(folder: Path, tmp_path: Path, capsys: Captured) -> str:
    """Export from the command line, which must end with exit code 1, one line, and nothing left."""
    out = tmp_path / "made" / "out"
    assert run(["export", str(folder), str(out), "--max-length", "64"]) == 1
    printed, err = capsys.readouterr()
    assert printed == "" and err.startswith(f"partita: {folder}") and err.count("\n") == 1, err
    assert not out.parent.exists()
    assert "Traceback" not in err and "internal error" not in err
    return err


# config and weights that disagree


def test_missing_misshapen_and_extra_tensors_share_a_message(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: Captured
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.1.")]:
            del tensors[name]
        tensors["model.norm.weight"] = torch.ones(65)
        for index in range(7):
            tensors[f"adapter.{index}.weight"] = torch.ones(2)

    error = refused(edit_tensors(own_copy(tiny_checkpoint("llama")), change), tmp_path, capsys)
    assert (
        "weights and config.json do not match: missing from the weight files: model.layers.1.input_layernorm.we"
        in error
    )
    assert "and 4 more (9 in all)" in error
    assert "not expected by the model: model.norm.weight is [65], but config.json requires [64]" in error
    assert "not in the model: adapter.0.weight, adapter.1.weight" in error and "and 2 more (7 in all)" in error


def test_extra_tensors_are_noted(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: Captured
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for index in range(3):
            tensors[f"vision_tower.blocks.{index}.weight"] = torch.ones(100, 100)
        tensors["model.layers.7.mlp.weight"] = torch.ones(2)
        tensors["model.norm.extra"] = torch.ones(2)

    folder = edit_tensors(own_copy(tiny_checkpoint("llama")), change)
    assert run(["export", str(folder), str(tmp_path / "out"), "--max-length", "64", "--no-verify"]) == 0
    err = capsys.readouterr().err
    told = "vision_tower (3 tensors, 117 KiB), model.layers.7 (1 tensor, 8 B), model.norm.extra"
    assert f"omitted, because the logits do not depend on it: {told}" in err


# rope settings


ROPE: dict[str, tuple[dict[str, Any], str]] = {
    "old_type": ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope type 'spiral' is unknown"),
    "new_type": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "knows default, dynamic, linear"),
    "old_key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "swirl": 3}}, "rope settings 'swirl' are unknown"),
    "new_key": ({"rope_parameters": {"rope_type": "default", "swirl": 3}}, "rope settings 'swirl' are unknown"),
    "old_text": ({"rope_scaling": "linear"}, "rope_scaling in config.json is 'linear'"),
    "new_list": ({"rope_parameters": [1, 2]}, "rope_parameters in config.json is '[1, 2]'"),
    "missing_key": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "Missing required keys"),
    "type_of_another_kind": ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}, "rope type \"['yarn']\""),
}


def with_rope(folder: Path, settings: dict[str, Any]) -> Path:
    """Replace the rope settings of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}
    (folder / "config.json").write_text(json.dumps({**kept, **settings}))
    return folder


@pytest.mark.parametrize("kind", sorted(ROPE))
def test_unknown_rope_settings_are_rejected(tiny_checkpoint: TinyCheckpoint, own_copy: Copy, kind: str) -> None:
    changes, words = ROPE[kind]
    with pytest.raises(PartitaError, match=re.escape(words)):
        open_checkpoint(str(with_rope(own_copy(tiny_checkpoint("llama")), changes)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_type": "spiral"}, "rope type 'spiral' of sliding_attention is unknown"),
        ({"swirl": 1}, "rope settings 'swirl' of sliding_attention are unknown"),
    ],
)
def test_invalid_rope_settings_of_a_layer_type_are_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, change: dict[str, Any], words: str
) -> None:
    folder = own_copy(tiny_checkpoint("gemma3_text"))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    rope["sliding_attention"].update(change)
    with pytest.raises(PartitaError, match=re.escape(words)):
        open_checkpoint(str(with_rope(folder, {"rope_parameters": rope})))


def test_model_specific_rope_settings_are_accepted(tiny_checkpoint: TinyCheckpoint) -> None:
    """phimoe has two settings of its own, about which transformers' check warns."""
    from transformers import AutoConfig

    from partita.export.checkpoint.config_values import check_known

    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 128}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.3, **factors}
    check_known(Path("x"), AutoConfig.for_model("phimoe", rope_parameters=rope))


# remote code


def test_custom_class_with_known_model_type_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: Captured
) -> None:
    """transformers would load it as plain llama, and verification against that would pass."""
    folder = edit_config(
        own_copy(tiny_checkpoint("llama")),
        architectures=["TwistedForCausalLM"],
        auto_map={"AutoModelForCausalLM": "someone/twisted--modeling_twisted.TwistedForCausalLM"},
    )
    error = refused(folder, tmp_path, capsys)
    assert "custom code in the checkpoint (auto_map in config.json)" in error
    assert "has LlamaForCausalLM for model type 'llama', not TwistedForCausalLM" in error


def test_known_architecture_with_auto_map_is_accepted(tiny_checkpoint: TinyCheckpoint, own_copy: Copy) -> None:
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    folder = edit_config(own_copy(tiny_checkpoint("llama")), auto_map=code)
    assert open_checkpoint(str(folder)).architecture == "LlamaForCausalLM"
    seeing = edit_config(folder, architectures=["LlavaForConditionalGeneration"])
    assert open_checkpoint(str(seeing)).architecture == "LlavaForConditionalGeneration"


@pytest.mark.parametrize("auto_map", ["evil", ["a.b"], {"AutoConfig": 3}, {"AutoConfig": ["x.Y", None]}])
def test_malformed_auto_map_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: Captured, auto_map: object
) -> None:
    folder = own_copy(tiny_checkpoint("llama"))
    refused(edit_config(folder, model_type="evil", auto_map=auto_map), tmp_path, capsys)


# tokenizer


def test_export_without_tokenizer_requires_token_ids_in_generate(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: Captured
) -> None:
    folder, out = tiny_checkpoint("llama", tokenizer=False), tmp_path / "out"
    assert run(["export", str(folder), str(out), "--max-length", "64"]) == 0
    assert "has no tokenizer: generate will need token ids" in capsys.readouterr().err
    generate = ["generate", str(out), "--provider", "cpu", "--max-new-tokens", "2"]
    assert run([*generate, "some text"]) != 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--token-ids" in err
    assert run([*generate, "1,5,9", "--token-ids"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("damage", ["damaged", "code"])
def test_unloadable_tokenizer_is_noted_and_export_succeeds(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: Captured, damage: str
) -> None:
    folder, out = own_copy(tiny_checkpoint("llama")), tmp_path / "out"
    (folder / "tokenizer.json").write_text("{")
    if damage == "code":
        (folder / "tokenizer.json").unlink()
        code = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(code))
    assert run(["export", str(folder), str(out), "--max-length", "64", "--no-verify"]) == 0
    generate = ["generate", str(out), "--provider", "cpu", "--max-new-tokens", "2"]
    assert "note: the checkpoint's tokenizer cannot be loaded (" in capsys.readouterr().err
    assert run([*generate, "1,5,9", "--token-ids"]) == 0
    capsys.readouterr()
    assert run([*generate, "some text"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "tokenizer" in err
