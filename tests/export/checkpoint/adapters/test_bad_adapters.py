"""Invalid adapters, and adapters of another model: one-line errors with cause and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from partita.cli import run
from partita.errors import CheckpointError, PackageError, PartitaError, UnsupportedModelError, UsageError
from partita.export.checkpoint import auto_class
from partita.export.checkpoint.adapters import read_adapter
from partita.export.checkpoint.adapters.branches import match_switchable
from partita.export.checkpoint.adapters.merge import merge_adapter
from partita.export.checkpoint.description import open_checkpoint
from partita.export.pipeline import ExportOptions, export
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"peft_type": "IA3"},
            "adapter type IA3: only LoRA and DoRA are supported; if it modifies weights, merge it with",
        ),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 is set, which is not supported"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set, which is not supported"),
        ({"something_new": {"a": 1}}, "something_new is set, which is not supported and may change the result"),
        ({"lora_bias": True}, "lora_bias is set, which is not supported"),
        ({"rank_pattern": {r"(.|..|...)*\dq": 4}}, r"the pattern '(.|..|...)*\\dq' is set, which is not supported"),
        ({"alpha_pattern": {"q_proj(": 4, "x" * 10_000: 4}}, "the pattern 'q_proj(', the pattern 'xxx"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_unsupported_adapter_types_and_settings_are_named(changes: dict[str, Any], said: str, adapter: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_adapter(settings(adapter, **changes))
    assert said in str(caught.value) and "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_non_finite_adapter_weights_raise_error(number: float, adapter: Path) -> None:
    name = sorted(load_file(adapter / "adapter_model.safetensors"))[-1]
    edit_tensors(adapter, lambda tensors: tensors[name][-1, -1].fill_(number), "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} contains NaN or infinity; the adapter is damaged"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is "),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern.q_proj is 1.5"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj'] (Input should be a valid dictionary)"),
        ({"r": 8}, "has lora_A [4, 64] and lora_B [32, 4], but its rank is 8"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_adapter_settings_raise_error(changes: dict[str, Any], said: str, adapter: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_adapter(settings(adapter, **changes))
    assert said in str(caught.value)


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
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="a Git LFS pointer"):
        read_adapter(adapter)
    weights.unlink()
    with pytest.raises(CheckpointError, match="is there, but no weights"):
        read_adapter(adapter)
    (adapter / "adapter_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_adapter(adapter)


def test_pickled_adapter_is_loaded_without_running_code(adapter: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    import torch
    from safetensors.torch import load_file

    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()
    assert len(read_adapter(adapter).modules) == 8

    class Bomb:
        def __reduce__(self) -> Any:
            return print, ("run",)

    torch.save({"a": Bomb()}, adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as plain weights"):
        read_adapter(adapter)


def test_tensors_not_saved_by_peft_raise_error(adapter: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"some.weight": torch.zeros(2, 2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"not weights of an adapter saved by peft.*some\.weight"):
        read_adapter(adapter)
    save_file({f"{PREFIX}a.lora_A.weight": torch.zeros(4, 2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"a has no lora_B"):
        read_adapter(adapter)


@pytest.mark.parametrize("option", ["adapter", "with_adapters"])
def test_adapter_of_another_model_raises_error(option: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "adapter", tiny_checkpoint("gpt2"), ("c_attn", "c_proj", "c_fc"), turned=True)
    value = other if option == "adapter" else {"name": other}
    error = refuse(tiny_checkpoint("llama"), tmp_path / "out", **{option: value})
    assert "this adapter belongs to another model: transformer.h.0.attn.c_attn.weight is not in" in str(error)
    assert "it was trained on" in str(error)
    wider = save_adapter(tmp_path / "wider", tiny_checkpoint("llama", hidden_size=32))
    error = refuse(
        tiny_checkpoint("llama"), tmp_path / "out", **{option: wider if option == "adapter" else {"a": wider}}
    )
    assert "has lora_A [4, 32]" in str(error) and "but the model's is [" in str(error)


def test_dora_adapter_is_rejected_as_switchable(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    dora = save_adapter(tmp_path / "dora", tiny_checkpoint("llama"), use_dora=True)
    error = refuse(tiny_checkpoint("llama"), tmp_path / "out", with_adapters={"dora": dora})
    assert "it also changes magnitudes (DoRA), which cannot be switched; merge it with `adapter`" in str(error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"with_adapters": {"a b": Path("x")}}, "'a b' is not a valid adapter name"),
        ({"with_adapters": {"Chat": Path("x"), "chat": Path("y")}}, "Chat is set twice"),
        ({"with_adapters": {"a": Path("x")}, "adapter": Path("y")}, "does not support `adapter=y`"),
        (
            {"with_adapters": {"a": Path("x")}, "precision": "int4", "prefill_precision": "int8"},
            "does not support `prefill_precision=int8`",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_adapter_options_raise_usage_error(
    options: Any, said: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    error = refuse(tiny_checkpoint("llama"), tmp_path / "out", **options)
    assert isinstance(error, UsageError) and said in str(error)


def test_duplicate_adapter_name_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ("--with-adapters", "a=x", "--with-adapters", "a=y")
    assert run(["export", str(tmp_path), str(tmp_path / "out"), *twice]) == 2
    assert "--with-adapters a=y: a is set twice" in capsys.readouterr().err


def test_force_does_not_replace_the_source_adapter(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, own_copy: Any, tmp_path: Path
) -> None:
    package = own_copy(exported(tiny_checkpoint("llama")))
    inside = save_adapter(package / "adapter", tiny_checkpoint("llama"))
    with pytest.raises(PackageError, match="contains the adapter that is being exported"):
        export(
            ExportOptions(str(tiny_checkpoint("llama")), package, adapter=inside, force=True),
            replay=lambda *args: pytest.fail("nothing may be written"),
        )
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
        beside = match_switchable(opened, model, "name", read_adapter(adapter)).notes
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
    assert (
        list(found.replaced_tensors) == ["lm_head.weight"]
        and "modules_to_save" in found.replaced_tensors["lm_head.weight"].name
    )


def test_package_without_adapters_names_export_option(exported: Exported, tiny_checkpoint: TinyCheckpoint) -> None:
    import partita

    with (
        partita.load(exported(tiny_checkpoint("llama")), providers="cpu") as model,
        pytest.raises(PartitaError, match=r"has no adapter of this name; it has none; export it with `with_adapters`"),
    ):
        model.generate([[1, 2]], adapter="any")
