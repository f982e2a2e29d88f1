"""`--cache growing`: optimum's layout, with past states of variable length and an attention mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch

import partita
from partita import cli
from partita.errors import UnsupportedModelError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.pipeline import ExportOptions, check_options
from partita.export.verify.known_answer import load
from partita.package.folder import export_again_remedy, read_manifest
from tests.conftest import Exported, TinyCheckpoint

HEAVY = pytest.mark.heavy
VARIED = ("llama", "bloom", pytest.param("gemma2", marks=HEAVY), pytest.param("gpt_oss", marks=HEAVY))
"""Grouped heads; position biases of the model's own; windows and softcap; sinks and experts."""
Array = npt.NDArray[Any]


@pytest.mark.parametrize("kind", VARIED)
def test_growing_cache_package_is_verified(tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str) -> None:
    manifest = read_manifest(exported(tiny_checkpoint(kind), cache="growing"))
    assert manifest.verification.status == "verified" and manifest.graph.attention == "growing"
    assert max(step.max_rel_error for step in manifest.verification.steps) < 1e-5
    assert {state.growing_axis for state in manifest.graph.states} == {2}


def test_inputs_and_outputs_match_optimum(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    folder = exported(tiny_checkpoint("llama"), cache="growing")
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    found = {port.name: (port.type, port.shape) for port in session.get_inputs()}
    assert list(found)[:3] == ["input_ids", "position_ids", "attention_mask"]
    assert found["input_ids"] == found["position_ids"] == ("tensor(int64)", [1, "sequence_length"])
    assert found["attention_mask"] == ("tensor(int64)", [1, "total_sequence_length"])
    kind, shape = found["past_key_values.0.key"]
    assert (kind, shape[2]) == ("tensor(float)", "past_sequence_length")
    outputs = {port.name: port.shape for port in session.get_outputs()}
    assert outputs["logits"][:2] == [1, "sequence_length"]
    assert outputs["present.1.value"] == [*shape[:2], "total_sequence_length", shape[3]]
    (graph,) = read_manifest(folder).graph.files
    assert {port.role for port in graph.inputs} == {"tokens", "positions", "mask"}


class Session:
    """A package that is run as optimum runs it: positions count what the mask lets through."""

    def __init__(self, folder: Path) -> None:
        self.session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        self.ports = self.session.get_inputs()
        self.past: dict[str, Array] = {}

    def run(self, ids: Array, mask: Array) -> Array:
        """The logits of one step after those before."""
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        feeds: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        for port in self.ports:
            if port.name.startswith("past"):
                feeds[port.name] = np.zeros((len(ids), port.shape[1], 0, port.shape[3]), np.float32)
        given = {port.name: (feeds | self.past)[port.name] for port in self.ports}
        logits, *present = self.session.run(None, given)
        names = [port.name.replace("present", "past_key_values") for port in self.session.get_outputs()[1:]]
        self.past = dict(zip(names, present, strict=True))
        return np.asarray(logits)


@pytest.mark.parametrize("kind", ["bloom", pytest.param("gemma2", marks=HEAVY)])
def test_left_padding_does_not_change_logits(tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str) -> None:
    """transformers' generate pads prompts of unequal length this way. bloom has ALiBi positions."""
    folder = exported(tiny_checkpoint(kind), cache="growing", batch_size=2)
    ids = np.array([[5, 9, 12, 40, 7, 3], [0, 0, 12, 40, 7, 3]])
    mask = np.array([[1] * 6, [0, 0, 1, 1, 1, 1]])
    padded, plain = Session(folder), Session(folder)
    for tokens, seen in ((ids, mask), (np.array([[8], [8]]), np.concatenate([mask, [[1], [1]]], axis=1))):
        ours = padded.run(tokens, seen)[1, -1]
        expected = plain.run(np.stack([tokens[1, -4:]] * 2), seen[:, 2:] | 1)[1, -1]
        assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()


def test_sliding_window_applies_beyond_max_length(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """Callers may feed a growing cache beyond the exported `max_length`."""
    checkpoint = tiny_checkpoint("mistral", num_hidden_layers=1, sliding_window=32)
    folder = exported(checkpoint, cache="growing", max_length=32)
    session, ids = Session(folder), np.array([[3 + (37 * place) % 280 for place in range(48)]])
    steps = [session.run(ids[:, :40], np.ones((1, 40), int)), session.run(ids[:, 40:], np.ones((1, 48), int))]
    ours = np.concatenate(steps, axis=1)[0]
    with torch.no_grad():
        model = load(open_checkpoint(str(checkpoint)))
        expected = model(input_ids=torch.from_numpy(ids), use_cache=False).logits[0].numpy()
    assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "round"}, "`cache=round`: choose one of fixed, window, growing"),
        ({"cache": "growing", "attention": "gqa"}, "does not support `attention=gqa`; omit one of them"),
        ({"cache": "growing", "cache_precision": "int8"}, "does not support `cache_precision=int8`"),
        ({"attention": "growing"}, "use `cache=growing`"),
    ],
)
def test_conflicting_growing_cache_options_are_usage_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(ExportOptions("checkpoint", Path("out"), **options))


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}


@pytest.mark.parametrize(
    ("model_type", "settings", "said"),
    [
        ("mamba", {}, "the model keeps conv states, which do not grow"),
        ("llama", DYNAMIC, "its rotary frequencies depend on the length"),
    ],
)
def test_fixed_states_and_length_dependent_frequencies_are_rejected(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, settings: dict[str, Any], said: str
) -> None:
    checkpoint = tiny_checkpoint(model_type, num_hidden_layers=1, **settings)
    with pytest.raises(UnsupportedModelError, match=f"`cache=growing`: {said}"):
        exported(checkpoint, cache="growing", max_length=32)


def test_cli_option_reexport_command_and_tokens_of_growing_cache(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out, tokens = tiny_checkpoint("llama"), tmp_path / "out", []
    words = ["export", str(checkpoint), str(out), "--max-length", "64", "--cache", "growing"]
    assert cli.run(words) == 0, capsys.readouterr().err
    manifest = read_manifest(out)
    assert manifest.graph.attention == "growing"
    remedy = export_again_remedy(out, manifest).command
    assert remedy[remedy.index("--cache") + 1] == "growing" and "--attention" not in remedy
    for package in (out, exported(checkpoint)):
        with partita.load(package, "cpu") as model:
            tokens.append(list(model.generate([[5, 9, 12, 40]], max_new_tokens=24).results[0].tokens))
    assert tokens[0] == tokens[1]
