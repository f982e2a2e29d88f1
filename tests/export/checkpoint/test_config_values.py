"""config.json: overridden runtime settings, invalid values and rope settings; weight files in other formats."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from partita.errors import PartitaError, UnsupportedModelError, UsageError
from partita.export.checkpoint.config_values import check_known
from partita.export.checkpoint.description import open_checkpoint
from partita.export.options import max_length
from partita.export.pipeline import ExportOptions, export
from partita.export.publish import ExportResult
from partita.library.exporting import replay, smoke
from tests.checkpoints import edit_config
from tests.conftest import TinyCheckpoint

NAN = float("nan")


def exported(folder: Path, **options: Any) -> ExportResult:
    wanted = ExportOptions(str(folder), folder.parent / "out", max_length=64, **options)
    return export(wanted, replay=replay, smoke=smoke)


def refused(folder: Path, *words: str) -> None:
    """Also where nothing is verified."""
    with pytest.raises(PartitaError) as caught:
        exported(folder, verify=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (folder.parent / "out").exists()


def test_runtime_settings_in_config_are_overridden(llama: Path) -> None:
    settings = {"attn_implementation": "flash_attention_2", "experts_implementation": "nosuch", "use_cache": None}
    edit_config(llama, return_dict=False, quantization_config=False, torch_dtype="auto", dtype="float99", **settings)
    with pytest.raises(Exception, match=r"."):
        AutoConfig.from_pretrained(llama)
    assert exported(llama).manifest.verification.status == "verified"
    assert AutoConfig.from_pretrained(llama.parent / "out").hidden_size == 64


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rms_norm_eps", NAN, "rms_norm_eps in config.json is 'nan', not a number above 0"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps in config.json is 'inf'"),
        ("layer_norm_epsilon", -1e-6, "layer_norm_epsilon in config.json is '-1e-06'"),
        ("rope_theta", "x", "rope_theta in config.json is 'x'"),
        ("hidden_size", "64", "hidden_size"),
        ("hidden_size", -64, "hidden_size in config.json is '-64', not a size"),
        ("num_attention_heads", 0, "num_attention_heads in config.json is '0', not a size"),
        ("hidden_act", 3, "hidden_act"),
        ("text_config", [[1]], "text_config in config.json is '[[1]]', not an object"),
        ("text_config", {"rms_norm_eps": NAN}, "text_config.rms_norm_eps in config.json is 'nan'"),
        ("max_position_embeddings", 1, "max_position_embeddings in config.json is 1, but a prompt and a new token"),
        # messages of transformers and torch
        ("hidden_act", "bogus", "KeyError: 'bogus'"),
        ("pad_token_id", 99999, "Padding_idx must be within num_embeddings"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}, "'NoneType'"),
    ],
)
def test_invalid_value_is_rejected(llama: Path, name: str, value: Any, words: str) -> None:
    refused(edit_config(llama, **{name: value}), words)


ROPE: dict[str, tuple[dict[str, Any], str]] = {
    "old_type": ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope type 'spiral' is unknown"),
    "new_type": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "knows default, dynamic, linear"),
    "old_key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "swirl": 3}}, "rope settings 'swirl' are unknown"),
    "old_text": ({"rope_scaling": "linear"}, "rope_scaling in config.json is 'linear'"),
    "no_layer": ({"rope_parameters": {"full_attention": "x"}}, "rope settings 'full_attention' are unknown"),
    "missing_key": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "Missing required keys"),
    "type_of_another_kind": ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}, "rope type \"['yarn']\""),
    "factor": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "rope_parameters.factor in config.json is '0'",
    ),
    "digits": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 10**400}},
        "00', not a number above 0",
    ),
}


def with_rope(folder: Path, settings: dict[str, Any]) -> Path:
    """Replace the rope settings of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}
    (folder / "config.json").write_text(json.dumps({**kept, **settings}))
    return folder


@pytest.mark.parametrize("kind", sorted(ROPE))
def test_unknown_or_invalid_rope_settings_are_rejected(llama: Path, kind: str) -> None:
    changes, words = ROPE[kind]
    with pytest.raises(PartitaError, match=re.escape(words)):
        open_checkpoint(str(with_rope(llama, changes)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_type": "spiral"}, "rope type 'spiral' of sliding_attention is unknown"),
        ({"swirl": 1}, "rope settings 'swirl' of sliding_attention are unknown"),
        ({"rope_theta": -1}, "rope_parameters.sliding_attention.rope_theta in config.json is '-1'"),
    ],
)
def test_invalid_rope_settings_of_a_layer_type_are_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Any, change: dict[str, Any], words: str
) -> None:
    folder = own_copy(tiny_checkpoint("gemma3_text"))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    rope["sliding_attention"].update(change)
    with pytest.raises(PartitaError, match=re.escape(words)):
        open_checkpoint(str(with_rope(folder, {"rope_parameters": rope})))


def test_model_specific_rope_settings_are_accepted() -> None:
    """phimoe has two settings of its own, about which transformers' check warns."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 128}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.3, **factors}
    check_known(Path("x"), AutoConfig.for_model("phimoe", rope_parameters=rope))


def test_current_folder_checkpoint_is_named_after_its_folder(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama)
    assert open_checkpoint(".").source_name == open_checkpoint(str(llama)).source_name == llama.name


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_weights_export_and_pickled_code_is_not_executed(llama: Path, tmp_path: Path, zipped: bool) -> None:
    """Files by torch before 1.6 are not zip archives."""

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    weights, target = llama / "model.safetensors", llama / "pytorch_model.bin"
    tensors = load_file(weights)
    weights.unlink()
    torch.save({"model.norm.weight": Trap()}, target, _use_new_zipfile_serialization=zipped)
    refused(llama, "plain weights")
    assert not (tmp_path / "trapped").exists()
    torch.save(tensors, target, _use_new_zipfile_serialization=zipped)
    assert exported(llama).manifest.verification.status == "verified"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.json"])
def test_git_lfs_pointer_is_rejected_with_pull_command(llama: Path, name: str) -> None:
    if name == "pytorch_model.bin":
        (llama / "model.safetensors").unlink()
    (llama / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n")
    refused(llama, name, "a Git LFS pointer", "lfs pull")


def test_adapter_in_model_folder_is_rejected(llama: Path) -> None:
    (llama / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"the model folder contains an adapter .* with `adapter`"):
        open_checkpoint(str(llama))


@pytest.mark.parametrize(
    ("model_type", "name", "settings"),
    [
        ("mpt", "max_seq_len", {"max_seq_len": 48}),
        ("gpt2", "n_positions", {"n_positions": 48, "n_ctx": 1024}),
        ("bloom", "seq_length", {"seq_length": 48}),
        ("kimi_linear", "model_max_length", {"model_max_length": 48}),
        ("gemma3", "max_position_embeddings", {"text_config": {"max_position_embeddings": 48}}),
    ],
)
def test_max_length_uses_the_position_field_of_the_model_type(
    llama: Path, model_type: str, name: str, settings: dict[str, Any]
) -> None:
    opened = replace(open_checkpoint(str(llama)), config=AutoConfig.for_model(model_type, **settings))
    options = ExportOptions(str(llama), llama.parent / "out")
    assert max_length(options, opened) == 48
    with pytest.raises(UsageError, match=rf"at most 48 positions \({name} in config.json\)"):
        max_length(replace(options, max_length=49), opened)
