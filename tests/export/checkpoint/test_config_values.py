"""config.json: overridden runtime settings and invalid values; weight files in other formats."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from partita.errors import CheckpointError, PartitaError, UnsupportedModelError, UsageError
from partita.export.checkpoint import config_values
from partita.export.checkpoint.description import open_checkpoint
from partita.export.options import max_length
from partita.export.pipeline import ExportOptions, export
from partita.export.publish import ExportResult
from partita.library.exporting import replay, smoke
from tests.checkpoints import edit_config
from tests.conftest import TinyCheckpoint

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def checkpoint(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """A copy of its own."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint("llama", num_hidden_layers=1), folder)
    return folder


def exported(folder: Path, **options: Any) -> ExportResult:
    wanted = ExportOptions(str(folder), folder.parent / "out", max_length=64, **options)
    return export(wanted, replay=replay, smoke=smoke)


def refused(folder: Path, *words: str) -> None:
    """Also where nothing is verified."""
    with pytest.raises(CheckpointError) as caught:
        exported(folder, verify=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (folder.parent / "out").exists()


def test_runtime_settings_in_config_are_overridden(checkpoint: Path) -> None:
    summary = exported(
        edit_config(
            checkpoint,
            return_dict=False,
            attn_implementation="flash_attention_2",
            dtype="float99",
            use_cache=False,
            _attn_implementation="flash_attention_2",
            output_attentions=True,
            experts_implementation="nosuch",
        )
    )
    assert summary.manifest.verification.status == "verified"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rms_norm_eps", NAN),
        ("rms_norm_eps", INFINITY),
        ("rms_norm_eps", 0.0),
        ("layer_norm_epsilon", -1e-6),
        ("rope_theta", "x"),
        ("hidden_size", "64"),
        ("hidden_size", -64),
        ("head_dim", -1),
        ("hidden_act", 3),
        ("text_config", [[1]]),
    ],
)
def test_invalid_value_is_rejected_by_field_name(checkpoint: Path, name: str, value: Any) -> None:
    refused(edit_config(checkpoint, **{name: value}), name, "config.json")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_attention_heads", 0, "num_attention_heads in config.json is '0', not a size"),
        ("num_key_value_heads", 0, "num_key_value_heads in config.json is '0', not a size"),
        ("hidden_act", "bogus", "KeyError: 'bogus'"),
        ("pad_token_id", 99999, "Padding_idx must be within num_embeddings"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}, "'NoneType'"),
    ],
)
def test_model_that_transformers_cannot_build_is_rejected_with_its_message(
    checkpoint: Path, name: str, value: Any, words: str
) -> None:
    with pytest.raises(PartitaError, match=rf"checkpoint: .*{words}"):
        exported(edit_config(checkpoint, **{name: value}), verify=False)
    assert not (checkpoint.parent / "out").exists()


def test_nested_value_and_single_position_are_rejected(checkpoint: Path) -> None:
    refused(edit_config(checkpoint, max_position_embeddings=1), "max_position_embeddings in config.json is 1", "take 2")
    refused(edit_config(checkpoint, text_config={"rms_norm_eps": NAN}), "text_config.rms_norm_eps")


def test_current_folder_checkpoint_is_named_after_its_folder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint)
    assert open_checkpoint(".").source_name == open_checkpoint(str(checkpoint)).source_name == "checkpoint"


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_zip_weights_export_and_legacy_weights_are_rejected(checkpoint: Path, zipped: bool) -> None:
    """Files by torch before 1.6 are not zip archives."""
    weights, target = checkpoint / "model.safetensors", checkpoint / "pytorch_model.bin"
    torch.save(load_file(weights), target, _use_new_zipfile_serialization=zipped)
    weights.unlink()
    assert exported(checkpoint).manifest.verification.status == "verified"


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_not_executed(checkpoint: Path, tmp_path: Path, zipped: bool) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    (checkpoint / "model.safetensors").unlink()
    target = checkpoint / "pytorch_model.bin"
    torch.save({"model.norm.weight": Trap()}, target, _use_new_zipfile_serialization=zipped)
    refused(checkpoint, "plain weights")
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.json"])
def test_git_lfs_pointer_is_rejected_with_pull_command(checkpoint: Path, name: str) -> None:
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n")
    refused(checkpoint, name, "git lfs pull")


def test_adapter_in_model_folder_is_rejected(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"the model folder contains an adapter .* with `adapter`"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float99"},
        {"use_cache": None},
        {"quantization_config": False},
    ],
)
def test_packaged_config_is_loadable_by_transformers(checkpoint: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"."):
        AutoConfig.from_pretrained(edit_config(checkpoint, **settings))
    out = checkpoint.parent / "out"
    exported(checkpoint, attention="gqa", verify=False)
    assert AutoConfig.from_pretrained(out).hidden_size == 64


def test_loadable_config_is_not_rewritten(checkpoint: Path) -> None:
    edit_config(checkpoint, attn_implementation="flash_attention_2", use_cache=False)
    assert config_values.without_overridden_settings(checkpoint) is None


@pytest.mark.parametrize(
    ("model_type", "name", "settings"),
    [
        ("mpt", "max_seq_len", {"max_seq_len": 48}),
        ("dbrx", "max_seq_len", {"max_seq_len": 48}),
        ("ctrl", "n_positions", {"n_positions": 48}),
        ("gpt2", "n_positions", {"n_positions": 48, "n_ctx": 1024}),
        ("bloom", "seq_length", {"seq_length": 48}),
        ("kimi_linear", "model_max_length", {"model_max_length": 48}),
        ("gemma3", "max_position_embeddings", {"text_config": {"max_position_embeddings": 48}}),
        ("llama", "max_position_embeddings", {"max_position_embeddings": 48}),
    ],
)
def test_max_length_uses_the_position_field_of_the_model_type(
    checkpoint: Path, model_type: str, name: str, settings: dict[str, Any]
) -> None:
    opened = replace(open_checkpoint(str(checkpoint)), config=AutoConfig.for_model(model_type, **settings))
    options = ExportOptions(str(checkpoint), checkpoint.parent / "out")
    assert max_length(options, opened) == 48
    with pytest.raises(UsageError, match=rf"at most 48 positions \({name} in config.json\)"):
        max_length(replace(options, max_length=49), opened)
