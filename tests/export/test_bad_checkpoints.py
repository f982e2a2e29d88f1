"""Invalid checkpoints and options: one-line errors that name file and problem; no files remain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.cli import run
from partita.errors import CheckpointError, PartitaError, UnsupportedModelError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.weight_files import find_tensors
from partita.export.pipeline import ExportOptions, export
from partita.export.weights.external_data import translate_space
from tests.checkpoints import edit_config, edit_tensors
from tests.conftest import TinyCheckpoint

Copy = Callable[[Path], Path]


def never(*args: object) -> Any:
    raise AssertionError("a bad checkpoint must be refused before anything is replayed")


def refuse(checkpoint: Path | str, out: Path, **options: object) -> PartitaError:
    """The error of an export that fails with one line and leaves nothing."""
    out.parent.mkdir(exist_ok=True)
    before = sorted(out.parent.iterdir())
    with pytest.raises(PartitaError) as caught:
        export(ExportOptions(str(checkpoint), out, **options), replay=never)  # type: ignore[arg-type]
    assert sorted(out.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("absent", "no such file or folder"),
        ("empty", "config.json is missing"),
        ("weights.bin", "a file, not a checkpoint folder"),
        ("link", "link: a broken symbolic link to gone;"),
        ("", "CHECKPOINT is empty"),
    ],
)
def test_path_without_checkpoint_is_rejected(tmp_path: Path, given: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "link").symlink_to("gone")
    assert words in str(refuse(tmp_path / given if given else "", tmp_path / "out"))


def test_command_line_prints_one_line_and_exits_1(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "out"
    edit_config(llama, quantization_config={"quant_method": "a\nb\x1b"})
    assert run(["export", str(llama), str(out)]) == 1
    printed, err = capsys.readouterr()
    assert printed == "" and err.startswith(f"partita: {llama}") and err.count("\n") == 1
    assert "quantised: a b?" in err
    assert not list(out.parent.iterdir())


Damage = Callable[[Path], object]
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "model.safetensors.index.json"


def set_config(**changes: object) -> Damage:
    return lambda folder: edit_config(folder, **changes)


def link(name: str) -> Damage:
    """A broken link in place of a file."""

    def damage(folder: Path) -> None:
        for gone in {name, "model.safetensors"} if "index" in name else {name}:
            (folder / gone).unlink(missing_ok=True)
        (folder / name).symlink_to("gone")

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Other tensors in the weight file."""
    return lambda folder: edit_tensors(folder, change)


def shard_named(name: str) -> Damage:
    """An index that names another file."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        content["weight_map"][next(iter(content["weight_map"]))] = name
        (folder / INDEX).write_text(json.dumps(content))

    return damage


DAMAGES: dict[str, tuple[Damage, type[PartitaError], tuple[str, ...]]] = {
    "model type": (set_config(model_type="llama99"), UnsupportedModelError, ("'llama99'",)),
    **{
        f"{field} null": (set_config(**{field: None}), CheckpointError, ())
        for field in ("vocab_size", "num_hidden_layers")
    },
    "a size of 400 digits": (set_config(bos_token_id=10**400), PartitaError, ("bos_token_id in config.json is '1000",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, ("no weights",)),
    "integers": (
        tensors(lambda held: held.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        PartitaError,
        ("model.norm.weight is I8",),
    ),
    **{
        f"{name} that is a broken link": (link(name), CheckpointError, (f"{name}: a broken symbolic link to gone;",))
        for name in ("tokenizer.json", INDEX)
    },
}
SHARDS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "missing": (lambda folder: (folder / SECOND).unlink(), (f"{SECOND}: this shard of {INDEX} is missing",)),
    "truncated": (
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-100]),
        (FIRST, "truncated"),
    ),
    "broken link": (link(FIRST), (f"{FIRST}: a broken symbolic link to gone;",)),
    **{
        name: (shard_named(name), (repr(name), "outside the checkpoint folder"))
        for name in ("../secret.safetensors", "/etc/passwd", "..")
    },
}


@pytest.mark.parametrize("name", [*DAMAGES, *SHARDS])
def test_damaged_checkpoint_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, name: str
) -> None:
    damage, kind, words = DAMAGES[name] if name in DAMAGES else (SHARDS[name][0], CheckpointError, SHARDS[name][1])
    folder = own_copy(tiny_checkpoint("llama", shards=1 if name in DAMAGES else 2))
    damage(folder)
    error = refuse(folder, tmp_path / "o" / "out", max_length=64)
    assert isinstance(error, kind) and all(word in str(error) for word in words)


def test_missing_misshapen_and_extra_tensors_share_a_message(llama: Path, tmp_path: Path) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        for name in [n for n in held if n.startswith("model.layers.1.")]:
            del held[name]
        held |= {"model.norm.weight": torch.ones(65), "model.layers": torch.ones(1)}
        held |= {f"adapter.{index}.weight": torch.ones(2) for index in range(6)}

    error = str(refuse(edit_tensors(llama, change), tmp_path / "o" / "out"))
    missing = "weights and config.json do not match: missing from the weight files: model.layers.1.input_layernorm.we"
    assert missing in error and "and 4 more (9 in all)" in error
    assert "not expected by the model: model.norm.weight is [65], but config.json requires [64]" in error
    assert "not in the model: adapter.0.weight, adapter.1.weight" in error and "and 2 more (7 in all)" in error


def test_value_outside_float16_range_is_rejected(llama: Path, tmp_path: Path) -> None:
    tensors(lambda held: held["model.layers.0.mlp.up_proj.weight"][3, 4].fill_(1e6))(llama)
    error = str(refuse(llama, tmp_path / "o" / "out", precision="fp16"))
    assert "up_proj.weight" in error and "does not fit float16" in error


def test_hub_id_is_rejected_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refuse("partita-nobody/no-such-model", tmp_path / "out")
    assert "download from the Hugging Face hub" in str(error) and "partita-nobody/no-such-model" in str(error)


def test_leftover_shard_index_is_ignored(llama: Path) -> None:
    """`save_pretrained` removes old shards but not their index; transformers reads the single file."""
    content = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (llama / INDEX).write_text(json.dumps(content))
    held, files = find_tensors(llama)
    assert files == ("model.safetensors",) and "model.norm.weight" in held


# custom code


def test_remote_code_is_not_run(llama: Path, tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    (llama / "evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Config: pass\n")
    for auto_map in ({"AutoConfig": "evil.Config"}, "evil", ["a.b"], {"AutoConfig": 3}, {"AutoConfig": ["x.Y", None]}):
        error = refuse(edit_config(llama, model_type="evil", auto_map=auto_map), tmp_path / "o" / "out")
        assert isinstance(error, UnsupportedModelError) and "does not run" in str(error)
    assert not marker.exists()


def test_custom_class_with_known_model_type_is_rejected(llama: Path, tmp_path: Path) -> None:
    """transformers would load it as plain llama, and verification against that would pass."""
    own = {"AutoModelForCausalLM": "someone/twisted--modeling_twisted.TwistedForCausalLM"}
    edit_config(llama, architectures=["TwistedForCausalLM"], auto_map=own)
    error = str(refuse(llama, tmp_path / "o" / "out"))
    assert "custom code in the checkpoint (auto_map in config.json)" in error
    assert "has LlamaForCausalLM for model type 'llama', not TwistedForCausalLM" in error
    for known in ("LlamaForCausalLM", "LlavaForConditionalGeneration"):
        assert open_checkpoint(str(edit_config(llama, architectures=[known]))).architecture == known


@pytest.mark.parametrize(("model_type", "words"), [("bert", "no language-model head"), ("t5", "encoder-decoder")])
def test_non_decoder_model_is_rejected(tmp_path: Path, model_type: str, words: str) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = dict.fromkeys(("hidden_size", "d_model", "d_ff", "intermediate_size"), 32)
    layers = dict.fromkeys(("num_layers", "num_hidden_layers"), 1)
    heads = dict.fromkeys(("num_attention_heads", "num_heads"), 2)
    config = AutoConfig.for_model(model_type, vocab_size=64, d_kv=8, **sizes, **layers, **heads)
    AutoModel.from_config(config).save_pretrained(tmp_path / "checkpoint")
    error = refuse(tmp_path / "checkpoint", tmp_path / "o" / "out")
    assert isinstance(error, UnsupportedModelError) and words in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "`precision=fp8`"),
        ({"max_length": 1}, "must be between 2 and"),
        ({"max_length": 257}, "the model supports at most 256 positions"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"prefill_chunk": 8}, "needs `static_shapes=True`"),
        ({"attention": "flash"}, "choose one of auto, gqa, onnx24"),
        ({"attention": "onnx24", "opset": 21}, "needs opset 24"),
        ({"opset": 99}, "`opset=99`"),
    ],
)
def test_invalid_options_are_usage_errors(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    error = refuse(tiny_checkpoint("llama"), tmp_path / "out", **options)
    assert isinstance(error, UsageError) and words in str(error)


LAYER = "model.layers.0"


@pytest.mark.parametrize(
    ("tensor", "value", "precision"),
    [
        ("model.layers.1.mlp.up_proj.weight", "nan", "fp32"),
        (f"{LAYER}.self_attn.k_proj.weight", "nan", "int4"),  # of a weight that is three tensors
        (f"{LAYER}.self_attn.v_proj.weight", "-inf", "fp16"),
        ("model.layers.1.input_layernorm.weight", "inf", "int8"),
        ("model.embed_tokens.weight", "inf", "int4"),  # tied
        pytest.param(f"{LAYER}.mlp.experts.1.down_proj.weight", "nan", "int4", marks=pytest.mark.heavy),  # of a stack
        pytest.param(f"{LAYER}.mlp.gate.weight", "inf", "int4", marks=pytest.mark.heavy),
    ],
)
def test_non_finite_weight_is_rejected_by_tensor_name(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, tensor: str, value: str, precision: str
) -> None:
    model_type = "qwen3_moe" if "experts" in tensor or "gate" in tensor else "llama"
    folder = own_copy(tiny_checkpoint(model_type, tied=True))
    edit_tensors(folder, lambda held: held[tensor].view(-1)[3].fill_(float(value)))
    said = str(refuse(folder, tmp_path / "o" / "out", precision=precision))
    assert f"tensor {tensor} contains {'NaN' if value == 'nan' else 'infinite numbers'}" in said


def test_unreadable_checkpoint_is_a_read_error(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("partita.export.checkpoint.description.check_text_file", denied)  # root may read every file
    error = refuse(folder := tiny_checkpoint("llama"), tmp_path / "o" / "out")
    assert isinstance(error, CheckpointError) and str(error).startswith(f"{folder}/")
    assert ": cannot be read (Permission denied)" in str(error)


def test_errors_of_disks_name_the_place(tmp_path: Path) -> None:
    folder = tmp_path / "out" / ".out.partial-abcdefgh"
    full = str(translate_space(OSError(28, "No space left on device", str(folder / "model.onnx")), folder))
    assert full.startswith(f"{folder.parent}: no space left while writing the package") and "TMPDIR" in full
    failed = OSError(5, "Input/output error", str(tmp_path / "model.safetensors"))
    assert str(translate_space(failed, folder)) == f"{failed.filename}: Input/output error; the package was not written"
