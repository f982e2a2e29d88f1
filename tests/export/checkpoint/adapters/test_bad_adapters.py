"""Invalid adapters, and adapters of another model: one-line errors with cause and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from partita.errors import CheckpointError, PackageError, PartitaError, UnsupportedModelError, UsageError
from partita.export.checkpoint import auto_class
from partita.export.checkpoint.adapters import read_adapter
from partita.export.checkpoint.adapters.merge import base_note, merge_adapter
from partita.export.checkpoint.description import open_checkpoint
from tests.adapters import PREFIX, save_adapter
from tests.checkpoints import edit_tensors
from tests.conftest import Exported, TinyCheckpoint
from tests.export.test_bad_checkpoints import refuse


def settings(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture
def adapter(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", tiny_checkpoint("llama"))


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "adapter type IA3: only LoRA and DoRA are supported; if it modifies weights, merge it with"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 is set, which is not supported"),
    ({"something_new": {"a": 1}}, "something_new is set, which is not supported and may change the result"),
    ({"rank_pattern": {r"(.|..|...)*\dq": 4}}, r"the pattern '(.|..|...)*\\dq' is set, which is not supported"),
    ({"alpha_pattern": {"q_proj(": 4, "x" * 10_000: 4}}, "the pattern 'q_proj(', the pattern 'xxx"),
]
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r is 0"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern.q_proj is 1.5"),
    ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj'] (Input should be a valid dictionary)"),
    ({"r": 8}, "has lora_A [4, 64] and lora_B [32, 4], but its rank is 8"),
    ({"use_dora": True}, "has no lora_magnitude_vector"),
]


@pytest.mark.parametrize(("changes", "said"), [*UNSUPPORTED, *DAMAGED], ids=lambda value: str(value)[:30])
def test_unsupported_or_invalid_settings_are_named(changes: dict[str, Any], said: str, adapter: Path) -> None:
    with pytest.raises(UnsupportedModelError if (changes, said) in UNSUPPORTED else CheckpointError) as caught:
        read_adapter(settings(adapter, **changes))
    assert said in str(caught.value) and str(adapter) in str(caught.value)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_non_finite_adapter_weights_raise_error(number: float, adapter: Path) -> None:
    name = sorted(load_file(adapter / "adapter_model.safetensors"))[-1]
    edit_tensors(adapter, lambda tensors: tensors[name][-1, -1].fill_(number), "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} contains NaN or infinity; the adapter is damaged"):
        read_adapter(adapter)


def test_missing_or_damaged_adapter_files_raise_error(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_adapter(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"not an adapter: adapter_config\.json is missing"):
        read_adapter(tmp_path)
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read_adapter(adapter)
    weights.unlink()
    with pytest.raises(CheckpointError, match="is there, but no weights"):
        read_adapter(adapter)
    (adapter / "adapter_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_adapter(adapter)


def test_adapter_of_torch_is_read(adapter: Path) -> None:
    import torch
    from safetensors.torch import load_file

    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()
    assert len(read_adapter(adapter).modules) == 8


def test_tensors_not_saved_by_peft_raise_error(adapter: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for name, said in (
        ("some.weight", r"not weights of an adapter saved by peft.*some\.weight"),
        (f"{PREFIX}a.lora_A.weight", r"a has no lora_B"),
    ):
        save_file({name: torch.zeros(4, 2)}, adapter / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            read_adapter(adapter)


@pytest.mark.parametrize("option", ["adapter", "with_adapters"])
def test_adapter_of_another_model_raises_error(option: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "adapter", tiny_checkpoint("gpt2"), ("c_attn", "c_proj", "c_fc"), turned=True)
    wider = save_adapter(tmp_path / "wider", tiny_checkpoint("llama", hidden_size=32))
    for folder, words in (
        (other, ("belongs to another model: transformer.h.0.attn.c_attn.weight is not in", "it was trained on")),
        (wider, ("has lora_A [4, 32]", "but the model's is [")),
    ):
        value = folder if option == "adapter" else {"name": folder}
        error = str(refuse(tiny_checkpoint("llama"), tmp_path / "out", **{option: value}))
        assert all(word in error for word in words)


def test_dora_adapter_is_rejected_as_switchable(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    dora = save_adapter(tmp_path / "dora", tiny_checkpoint("llama"), use_dora=True)
    error = str(refuse(tiny_checkpoint("llama"), tmp_path / "out", with_adapters={"dora": dora}))
    assert "it also changes magnitudes (DoRA), which cannot be switched; merge it with `adapter`" in error


def test_invalid_adapter_options_raise_usage_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    for options, said in (
        ({"with_adapters": {"a b": Path("x")}}, "'a b' is not a valid adapter name"),
        ({"with_adapters": {"a": Path("x")}, "adapter": Path("y")}, "does not support `adapter=y`"),
    ):
        error = refuse(tiny_checkpoint("llama"), tmp_path / "out", **options)
        assert isinstance(error, UsageError) and said in str(error)


def test_force_does_not_replace_the_source_adapter(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, own_copy: Any
) -> None:
    package = own_copy(exported(tiny_checkpoint("llama")))
    inside = save_adapter(package / "adapter", tiny_checkpoint("llama"))
    error = refuse(tiny_checkpoint("llama"), package, adapter=inside, force=True)
    assert isinstance(error, PackageError) and "contains the adapter that is being exported" in str(error)
    assert (inside / "adapter_config.json").is_file()


def test_different_base_model_adds_a_note(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    import torch

    checkpoint = tiny_checkpoint("llama")
    opened = open_checkpoint(str(checkpoint))
    with torch.device("meta"):
        model = auto_class(opened.config).from_config(opened.config)
    for base, noted in (("someone/another-model", True), (f"someone/{checkpoint.name}", False)):
        adapter = save_adapter(tmp_path / "adapter", checkpoint, base_model_name_or_path=base)
        _, notes = merge_adapter(opened, model, read_adapter(adapter))
        beside = base_note(opened, read_adapter(adapter), "added as a branch to")
        for told, done in ((notes, "merged into"), (beside, "added as a branch to")):
            said = f"base model is someone/another-model, but it is {done} {opened.source_name}"
            assert any(said in note for note in told) is noted


def test_original_module_tensors_are_ignored(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """peft adds `original_module` for resized vocabularies; `modules_to_save` has the weights to merge."""
    import torch

    rows = {
        f"{PREFIX}lm_head.{part}weight": torch.full((2048, 64), number)
        for part, number in (("modules_to_save.", 1.0), ("original_module.", 2.0))
    }
    found = read_adapter(save_adapter(tmp_path / "a", tiny_checkpoint("llama"), extra=rows))
    (replaced,) = found.replaced_tensors.values()
    assert "modules_to_save" in replaced.name


def test_package_without_adapters_names_export_option(exported: Exported, tiny_checkpoint: TinyCheckpoint) -> None:
    import partita

    with (
        partita.load(exported(tiny_checkpoint("llama")), providers="cpu") as model,
        pytest.raises(PartitaError, match=r"has no adapter of this name; it has none; export it with `with_adapters`"),
    ):
        model.generate([[1, 2]], adapter="any")
