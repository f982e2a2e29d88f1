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
from partita.package.folder import not_exported, read_manifest
from tests.conftest import Exported, require
from tests.export.breadth import recipes
from tests.export.test_parity import NEW_TOKENS, PROMPT, our_tokens

LOWERINGS = {"llava": "gqa", "qwen2_vl": "onnx24", "gemma3": "primitives", "qwen2_audio": "gqa"}
"""An image projected into the tokens; positions in three rows; two rotations and windows; sound."""
SAMPLE = ("qwen2_vl",)
"""The others are heavy."""
LEFT_OUT = {
    "llava": ("vision_tower", "multi_modal_projector"),
    "qwen2_vl": ("visual",),
    "gemma3": ("vision_tower", "multi_modal_projector"),
    "qwen2_audio": ("audio_tower", "multi_modal_projector"),
}

Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Checkpoints with towers, one per type."""
    require("torch")
    made: dict[str, Path] = {}

    def factory(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(f"whole-{model_type}-")
            recipes.save(made[model_type], model_type)
        return made[model_type]

    return factory


def generated(checkpoint: Path) -> list[int]:
    """Greedy tokens of `generate` of the class that the checkpoint was saved from, given tokens alone."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model: Any = getattr(transformers, config.architectures[0]).from_pretrained(checkpoint, dtype=torch.float32)
    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.heavy) for name in LOWERINGS]
)
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


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.heavy) for name in LOWERINGS]
)
def test_package_has_all_weights_except_towers(tiny: Tiny, exported: Exported, model_type: str) -> None:
    from partita.export.checkpoint.description import open_checkpoint

    checkpoint = tiny(model_type)
    package = exported(checkpoint, attention=LOWERINGS[model_type])
    sizes = {name: info.size_bytes for name, info in open_checkpoint(str(checkpoint)).tensors.items()}
    towers = sum(size for name, size in sizes.items() if _outside(name, model_type))
    assert towers > 0
    assert read_manifest(package).source.parameters * 4 == sum(sizes.values()) - towers


def _outside(name: str, model_type: str) -> bool:
    return name.startswith(tuple(f"{prefix}." for prefix in LEFT_OUT[model_type]))


def test_export_reports_omitted_modules(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(tiny("qwen2_vl")), str(tmp_path / "out"), "--max-length", "64", "--attention", "gqa"]
    assert run([*arguments, "--no-verify"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "omitted" in line]
    for name in LEFT_OUT["qwen2_vl"]:
        assert f"{name} (" in line, line
    assert "language_model" not in line and "lm_head" not in line
    unused = read_manifest(tmp_path / "out").source.unused
    assert {entry.partition(" ")[0] for entry in unused} == set(LEFT_OUT["qwen2_vl"])


def test_model_requiring_images_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    from partita.export.pipeline import ExportOptions, export
    from partita.library.exporting import replay

    with pytest.raises(UnsupportedModelError, match="cannot run on text alone: it also requires pixel_values"):
        export(ExportOptions(str(tiny("blip-2")), tmp_path / "out", max_length=64), replay=replay)
    assert not (tmp_path / "out").exists()


def test_unsupported_inputs_are_reported_by_inspect_and_place(
    tiny: Tiny, exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from partita.runtime.chain.advice import package_facts

    package = exported(tiny("qwen2_vl"), attention="gqa")
    manifest = read_manifest(package)
    said = package_facts(package, manifest).omitted
    assert said.startswith("visual (") and said.endswith("; image input is not supported")
    assert partita.inspect(package).model.omitted == said
    assert run(["inspect", str(package)]) == 0 and "image input is not supported" in " ".join(
        capsys.readouterr().out.split()
    )
    assert run(["place", str(package), "-e", "cpu", "--report", str(tmp_path / "r.json"), "--json"]) == 0
    assert "image input is not supported" in " ".join(partita.Report.read(tmp_path / "r.json").to_text().split())


@pytest.mark.parametrize(
    ("unused", "said"),
    [
        ((), ""),
        (("mtp (1 tensor, 16 B)",), "mtp (1 tensor, 16 B)"),
        (
            ("audio_tower (2 tensors)", "vision_tower"),
            "audio_tower (2 tensors), vision_tower; image and audio input is not supported",
        ),
        (tuple("abcdefg"), "a, b, c, d, e and 2 more"),
    ],
)
def test_omitted_modules_are_described_with_unsupported_inputs(unused: tuple[str, ...], said: str) -> None:
    assert not_exported(unused) == said


@pytest.mark.heavy
def test_omni_model_exports_the_thinker(tiny: Tiny, exported: Exported, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    thinker, whole = tiny("qwen2_5_omni_thinker"), tmp_path / "whole"
    whole.mkdir()
    config = json.loads((thinker / "config.json").read_text())
    (whole / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2_5_omni",
                "architectures": ["Qwen2_5OmniModel"],
                "thinker_config": config,
            }
        )
    )
    tensors = {f"thinker.{name}": value for name, value in load_file(thinker / "model.safetensors").items()}
    tensors["talker.codec_head.weight"] = next(iter(tensors.values())).clone()
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    package = exported(whole, attention="gqa")
    source = read_manifest(package).source
    assert source.architecture == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert any(entry.startswith("talker (1 tensor") for entry in source.unused)
    assert our_tokens(package, [PROMPT], NEW_TOKENS) == our_tokens(
        exported(thinker, attention="gqa"), [PROMPT], NEW_TOKENS
    )
