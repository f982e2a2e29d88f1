"""Invalid checkpoints: one-line errors that name file and problem; no files remain."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.errors import CheckpointError, PackageError, PartitaError, ResourceError, UnsupportedModelError, UsageError
from partita.export.checkpoint.companions import stop_tokens
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.weight_files import find_tensors
from partita.export.options import max_length
from partita.export.pipeline import ExportOptions, export
from partita.export.weights.external_data import translate_space
from tests.checkpoints import edit_config, edit_tensors
from tests.conftest import TinyCheckpoint

Copy = Callable[[Path], Path]


def never(*args: object) -> Any:
    raise AssertionError("a bad checkpoint must be refused before anything is replayed")


def refuse(checkpoint: Path | str, out: Path, **options: object) -> PartitaError:
    """Export, which must fail, and check that one line says so and nothing is left."""
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
        ("", "CHECKPOINT is empty"),
    ],
)
def test_path_without_checkpoint_is_rejected(tmp_path: Path, given: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert words in str(refuse(tmp_path / given if given else "", tmp_path / "out"))


Damage = Callable[[Path], object]
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def set_config(**changes: object) -> Damage:
    return lambda folder: edit_config(folder, **changes)


def link(name: str, target: str = "gone") -> Damage:
    """A symbolic link in place of a file."""

    def damage(folder: Path) -> None:
        for gone in {name, "model.safetensors"} if "index" in name else {name}:
            (folder / gone).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Other tensors in the weight file."""
    return lambda folder: edit_tensors(folder, change)


def rename_shards(folder: Path) -> None:
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").rename(
            folder / f"model-0000{number}-of-00003.safetensors"
        )


DAMAGES: dict[str, tuple[Damage, type[PartitaError], tuple[str, ...]]] = {
    "config": (lambda folder: (folder / "config.json").write_text("{"), CheckpointError, ("config.json: damaged",)),
    "config that cannot be read": (link("config.json", "/proc/self/mem"), CheckpointError, ("config.json",)),
    "model type": (set_config(model_type="llama99"), UnsupportedModelError, ("'llama99'",)),
    "quantised": (
        set_config(quantization_config={"quant_method": "aqlm", "bits": 4}),
        UnsupportedModelError,
        ("quantised: aqlm",),
    ),
    "no layers": (set_config(num_hidden_layers=0, layer_types=[]), CheckpointError, ("num_hidden_layers is 0",)),
    **{
        f"{field} null": (set_config(**{field: None}), CheckpointError, ())
        for field in ("vocab_size", "num_hidden_layers")
    },
    "a size of 400 digits": (set_config(bos_token_id=10**400), PartitaError, ("bos_token_id in config.json is '1000",)),
    "rope factor of 400 digits": (
        set_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 10**400}),
        PartitaError,
        ("factor is 1000", "not a number above 0"),
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, ("no weights",)),
    "integers": (
        tensors(lambda held: held.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        PartitaError,
        ("model.norm.weight is I8",),
    ),
    **{
        f"{name} that is a broken link": (link(name), CheckpointError, (f"{name}: a broken symbolic link to gone;",))
        for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json")
    },
}
SHARDS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "missing": (lambda folder: (folder / SECOND).unlink(), (SECOND, "missing")),
    "truncated": (
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-100]),
        (FIRST, "truncated"),
    ),
    "broken link": (link(FIRST), (f"{FIRST}: a broken symbolic link to gone;",)),
    "index of another save": (
        rename_shards,
        (f"{FIRST}: this shard of model.safetensors.index.json is missing",),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, name: str
) -> None:
    damage, kind, words = DAMAGES[name]
    folder = own_copy(tiny_checkpoint("llama"))
    damage(folder)
    error = refuse(folder, tmp_path / "o" / "out", max_length=64)
    assert isinstance(error, kind) and all(word in str(error) for word in words)


@pytest.mark.parametrize("name", SHARDS)
def test_damaged_shards_are_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, name: str
) -> None:
    damage, words = SHARDS[name]
    folder = own_copy(tiny_checkpoint("llama", shards=2))
    damage(folder)
    error = str(refuse(folder, tmp_path / "o" / "out"))
    assert all(word in error for word in words)


def test_value_outside_float16_range_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path
) -> None:
    folder = own_copy(tiny_checkpoint("llama"))
    tensors(lambda held: held["model.layers.0.mlp.up_proj.weight"][3, 4].fill_(1e6))(folder)
    error = str(refuse(folder, tmp_path / "o" / "out", precision="fp16"))
    assert "up_proj.weight" in error and "does not fit float16" in error


def test_hub_id_is_rejected_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refuse("partita-nobody/no-such-model", tmp_path / "out")
    assert "download from the Hugging Face hub" in str(error) and "partita-nobody/no-such-model" in str(error)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_shard_path_outside_the_folder_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, name: str
) -> None:
    folder = own_copy(tiny_checkpoint("llama", shards=2))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = name
    index.write_text(json.dumps(content))
    error = refuse(folder, tmp_path / "o" / "out")
    assert repr(name) in str(error) and "outside the checkpoint folder" in str(error)


def test_leftover_shard_index_is_ignored(tiny_checkpoint: TinyCheckpoint, own_copy: Copy) -> None:
    """`save_pretrained` removes old shards but not their index; transformers reads the single file."""
    folder = own_copy(tiny_checkpoint("llama"))
    content = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    tensors, files = find_tensors(folder)
    assert files == ("model.safetensors",) and "model.norm.weight" in tensors


def test_remote_code_is_not_run(tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path) -> None:
    folder = own_copy(tiny_checkpoint("llama"))
    marker = tmp_path / "was-run"
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Config: pass\n")
    edit_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    error = refuse(folder, tmp_path / "o" / "out")
    assert isinstance(error, UnsupportedModelError) and "does not run" in str(error)
    assert not marker.exists()


@pytest.mark.parametrize(("model_type", "words"), [("bert", "no language-model head"), ("t5", "encoder-decoder")])
def test_non_decoder_model_is_rejected(tmp_path: Path, model_type: str, words: str) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        d_model=32,
        d_ff=32,
        d_kv=8,
        num_layers=1,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_heads=2,
        intermediate_size=32,
    )
    AutoModel.from_config(config).save_pretrained(tmp_path / "checkpoint")
    error = refuse(tmp_path / "checkpoint", tmp_path / "o" / "out")
    assert isinstance(error, UnsupportedModelError) and words in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "`precision=fp8`"),
        ({"max_length": 0}, "`max_length` is 0"),
        ({"max_length": 1}, "must be between 2 and"),
        ({"max_length": 64.0}, "must be an integer"),
        ({"max_length": -5}, "`max_length` is -5"),
        ({"max_length": 1 << 40}, "`max_length`"),
        ({"max_length": 257}, "the model supports at most 256 positions"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"batch_size": 1 << 30}, "`batch_size`"),
        ({"prefill_chunk": 8}, "needs `static_shapes=True`"),
        ({"prefill_chunk": 0, "static_shapes": True}, "`prefill_chunk` is 0"),
        ({"attention": "flash"}, "choose one of auto, gqa, onnx24"),
        ({"attention": "onnx24", "opset": 21}, "needs opset 24"),
        ({"opset": 7}, "`opset=7`"),
        ({"opset": 99}, "`opset=99`"),
    ],
)
def test_invalid_options_are_usage_errors(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    error = refuse(tiny_checkpoint("llama"), tmp_path / "out", **options)
    assert isinstance(error, UsageError) and words in str(error)


def test_existing_folder_is_not_overwritten(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    error = refuse(tiny_checkpoint("llama"), out)
    assert isinstance(error, PackageError) and "exists already" in str(error)
    error = refuse(tiny_checkpoint("llama"), out, force=True)
    assert "`force=True` replaces only packages" in str(error)
    assert (out / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("model_type", "tensor", "value", "precision"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", "nan", "fp32"),
        ("llama", "model.layers.1.mlp.up_proj.weight", "inf", "int4"),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "nan", "int4"),  # of a weight that is three tensors
        ("llama", "model.layers.0.self_attn.v_proj.weight", "-inf", "fp16"),
        ("llama", "model.layers.1.input_layernorm.weight", "inf", "int8"),
        ("llama", "model.embed_tokens.weight", "inf", "int4"),  # tied
        pytest.param(  # of a stack
            "qwen3_moe", "model.layers.0.mlp.experts.1.down_proj.weight", "nan", "int4", marks=pytest.mark.heavy
        ),
        pytest.param("qwen3_moe", "model.layers.0.mlp.gate.weight", "inf", "int4", marks=pytest.mark.heavy),
    ],
)
def test_non_finite_weight_is_rejected_by_tensor_name(
    tiny_checkpoint: TinyCheckpoint,
    own_copy: Copy,
    tmp_path: Path,
    model_type: str,
    tensor: str,
    value: str,
    precision: str,
) -> None:
    folder = own_copy(tiny_checkpoint(model_type, tied=True))
    edit_tensors(folder, lambda held: held[tensor].view(-1)[3].fill_(float(value)))
    said = str(refuse(folder, tmp_path / "o" / "out", precision=precision))
    assert f"tensor {tensor} contains {'NaN' if value == 'nan' else 'infinite numbers'}" in said


def test_unreadable_checkpoint_folder_is_a_read_error(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.stat is patched, because root may read every folder."""
    folder, usual, refused = own_copy(tiny_checkpoint("llama")), Path.stat, list[Path]()

    def stat(path: Path, **kwargs: Any) -> Any:
        if path == folder and not refused:
            refused.append(path)
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, **kwargs)

    monkeypatch.setattr(Path, "stat", stat)
    error = refuse(folder, tmp_path / "o" / "out")
    assert isinstance(error, CheckpointError) and str(error).startswith(f"{folder}: cannot be read (Permission denied)")


def test_unreadable_stop_token_file_raises_checkpoint_error() -> None:
    def denied(folder: Path) -> frozenset[int]:
        raise PermissionError(13, "Permission denied", str(folder / "genai_config.json"))

    with pytest.raises(CheckpointError, match=r"c/genai_config.json: cannot be read \(Permission denied\)"):
        stop_tokens(denied, Path("c"))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (None, True),
        ("{home}/.out.partial-abcdefgh/model.onnx", True),
        ("{home}/.out.old-abcdefgh", True),
        ("{home}/out", True),
        ("{home}/tmpabcdefgh", True),
        ("{home}/tokenizer.json", False),
        ("/somewhere/model.safetensors", False),
    ],
)
def test_os_error_names_package_or_checkpoint_file(name: str | None, written: bool, tmp_path: Path) -> None:
    file = None if name is None else name.format(home=tmp_path)
    error = OSError(5, "Input/output error") if file is None else OSError(5, "Input/output error", file)
    found = translate_space(error, tmp_path / ".out.partial-abcdefgh")
    said = f"{tmp_path}: cannot write the package" if written else f"{file}: cannot be read"
    assert str(found) == f"{said} (Input/output error)"
    assert isinstance(found, ResourceError if written else CheckpointError)
    full = OSError(28, "No space left on device", file)
    assert "no space left" in str(translate_space(full, tmp_path / ".out.partial-abcdefgh"))


def test_broken_symlink_is_not_treated_as_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to("gone")
    said = str(refuse("models/mine", tmp_path / "o" / "out"))
    assert said.startswith("models/mine: a broken symbolic link to gone;")


def test_max_length_accepts_position_limits_beyond_float_range(tiny_checkpoint: TinyCheckpoint, own_copy: Copy) -> None:
    """GGUF files have no validated config.json, and RoPE scaling may overflow the limit."""
    checkpoint = open_checkpoint(str(own_copy(tiny_checkpoint("llama"))))
    config: Any = checkpoint.config
    for longest, factor in ((10**400, 2.0), (10**307, 1e3)):
        config.max_position_embeddings = longest
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": factor}
        assert max_length(ExportOptions("c", Path("o"), max_length=64), checkpoint) == 64


def test_full_temporary_folder_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, folder = tmp_path / "small", tmp_path / "out" / ".out.partial-abcdefgh"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(small))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=0 if Path(place) == small else 1 << 40))
    full = OSError(28, "No space left on device")
    said = str(translate_space(full, folder))
    assert said.startswith(f"{small}: cannot write a temporary file") and "TMPDIR" in said
    gone = FileNotFoundError(2, "No such file or directory", str(small / "partita-abcdefgh" / "x"))
    assert str(translate_space(gone, folder)).startswith(
        f"{small / 'partita-abcdefgh' / 'x'}: cannot write a temporary file"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=0 if Path(place) != small else 1 << 40))
    assert str(translate_space(full, folder)).startswith(f"{folder.parent}: no space left while writing the package")
