"""Multimodal models: the text decoder matches transformers' generate on text; omitted modules are reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.cli import run
from partita.errors import UnsupportedModelError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.pipeline import ExportOptions, export
from partita.library.exporting import replay
from partita.package.folder import not_exported, read_manifest
from partita.runtime.chain.advice import package_facts
from tests.conftest import Exported, require
from tests.export.breadth import recipes
from tests.export.test_parity import NEW_TOKENS, PROMPT, our_tokens

LOWERINGS = {"llava": "gqa", "qwen2_vl": "onnx24", "gemma3": "primitives", "qwen2_audio": "gqa"}
"""An image projected into the tokens; positions in three rows; two rotations and windows; sound."""
TYPES = [pytest.param(name, marks=() if name == "qwen2_vl" else pytest.mark.heavy) for name in LOWERINGS]
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Checkpoints with towers, one per type."""
    require("torch")
    made: dict[str, Path] = {}

    def factory(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = recipes.save(tmp_path_factory.mktemp(f"whole-{model_type}-"), model_type)
        return made[model_type]

    return factory


def generated(checkpoint: Path) -> list[int]:
    """Greedy tokens of `generate` of the class that the checkpoint was saved from, given tokens alone."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model: Any = getattr(transformers, config.architectures[0]).from_pretrained(checkpoint, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, **greedy)
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.parametrize("model_type", TYPES)
def test_text_generation_matches_transformers(tiny: Tiny, exported: Exported, model_type: str) -> None:
    checkpoint = tiny(model_type)
    package = exported(checkpoint, attention=LOWERINGS[model_type])
    assert read_manifest(package).verification.status == "verified"
    expected = generated(checkpoint)
    assert len(set(expected)) > 3, "the reference repeats itself: the comparison would prove little"
    assert our_tokens(package, [PROMPT], NEW_TOKENS) == [expected]
    assert our_tokens(package, [PROMPT], NEW_TOKENS, prefill_chunk=7) == [expected]


def test_multimodal_rope_becomes_a_rotary_embedding_operator(tiny: Tiny, exported: Exported) -> None:
    """For text, all three position rows are equal."""
    import onnx

    package = exported(tiny("qwen2_vl"), attention=LOWERINGS["qwen2_vl"])
    operators = {node.op_type for node in onnx.load(package / "model.onnx", load_external_data=False).graph.node}
    assert "RotaryEmbedding" in operators and not {"Cos", "Sin", "Neg"} & operators


def test_export_reports_omitted_modules(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(tiny("qwen2_vl")), str(tmp_path / "out"), "--max-length", "64", "--attention", "gqa"]
    assert run([*arguments, "--no-verify"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "omitted" in line]
    assert "visual (" in line and "language_model" not in line and "lm_head" not in line
    source = read_manifest(tmp_path / "out").source
    assert [entry.partition(" ")[0] for entry in source.unused] == ["visual"]
    sizes = {name: info.size_bytes for name, info in open_checkpoint(str(tiny("qwen2_vl"))).tensors.items()}
    assert source.parameters * 4 == sum(size for name, size in sizes.items() if not name.startswith("visual."))


def test_model_requiring_images_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot run on text alone: it also requires pixel_values"):
        export(ExportOptions(str(tiny("blip-2")), tmp_path / "out", max_length=64), replay=replay)
    assert not (tmp_path / "out").exists()


def test_unsupported_inputs_are_reported(tiny: Tiny, exported: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    """`package_facts` is read by reports and by `serve`."""
    package = exported(tiny("qwen2_vl"), attention="gqa")
    said = package_facts(package, read_manifest(package)).omitted
    assert said.startswith("visual (") and said.endswith("; image input is not supported")
    assert partita.inspect(package).model.omitted == said
    assert run(["inspect", str(package)]) == 0
    assert "image input is not supported" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("unused", "said"),
    [
        ((), ""),
        (
            ("audio_tower (2 tensors)", "vision_tower"),
            "audio_tower (2 tensors), vision_tower; image and audio input is",
        ),
        (tuple("abcdefg"), "a, b, c, d, e and 2 more"),
    ],
)
def test_omitted_modules_are_described_with_unsupported_inputs(unused: tuple[str, ...], said: str) -> None:
    assert not_exported(unused).removesuffix(" not supported") == said


@pytest.mark.heavy
def test_omni_model_exports_the_thinker(tiny: Tiny, exported: Exported, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    thinker, whole = tiny("qwen2_5_omni_thinker"), tmp_path / "whole"
    whole.mkdir()
    config = json.loads((thinker / "config.json").read_text())
    settings = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": config}
    (whole / "config.json").write_text(json.dumps(settings))
    tensors = {f"thinker.{name}": value for name, value in load_file(thinker / "model.safetensors").items()}
    tensors["talker.codec_head.weight"] = next(iter(tensors.values())).clone()
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    package = exported(whole, attention="gqa")
    source = read_manifest(package).source
    assert source.architecture == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert any(entry.startswith("talker (1 tensor") for entry in source.unused)
    alone = exported(thinker, attention="gqa")
    assert our_tokens(package, [PROMPT], NEW_TOKENS) == our_tokens(alone, [PROMPT], NEW_TOKENS)
