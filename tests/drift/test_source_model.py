"""The source model as reference of `partita drift` and of export errors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import partita
from partita.cli import run
from partita.drift.sides import Step, fitted
from partita.errors import ParityError
from partita.export.pipeline import ExportOptions, export
from partita.export.trace import state
from partita.export.trace.hooks import MaskRule
from partita.library import drifting
from partita.library.exporting import replay
from tests.conftest import Exported, TinyCheckpoint
from tests.drift.faults import Fault
from tests.drift.planted import compare, judge

FAULTS = (
    Fault("tiny", "norm", "model.layers.0.input_layernorm/SimplifiedLayerNormalization", attribute=("epsilon", 0.1)),
    Fault("tiny", "rotary", "model.layers.1.self_attn/GroupQueryAttention", attribute=("rotary_interleaved", 1)),
    Fault("tiny", "projection", "model.layers.1.mlp.down_proj/MatMul", part=1.5),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_fault_is_located_against_the_source_model(
    fault: Fault, tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama")
    layer, node, found = judge(exported(checkpoint), fault, tmp_path / "faulty", "cpu", checkpoint)
    assert layer and node, (found.first_layer, found.first_node, found.basis)
    assert "the source model (transformers " in found.against


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("gemma3_text", "qwen3_moe", "phi3", "gpt2"))],
)
@pytest.mark.parametrize("attention", ["auto", pytest.param("primitives", marks=pytest.mark.heavy)])
def test_correct_graph_has_no_finding(
    model_type: str, attention: str, tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    checkpoint = tiny_checkpoint(model_type)
    folder = exported(checkpoint, **({} if attention == "auto" else {"attention": attention}))
    found = compare(folder, folder, source=checkpoint)
    assert found.is_within and not found.nodes, (found.first_layer, found.first_node)
    assert found.outputs.tensor == "logits" and found.steps == ("prefill 1", "decode 2")
    layers = [layer for layer in found.layers if layer.name.rpartition(".")[2].isdigit()]
    omitted = [note for note in found.notes if "the graph computes other values there" in note]
    assert len(layers) >= 2 - len(omitted) and bool(omitted) is (model_type == "gemma3_text"), found.notes


def test_rounding_of_weights_and_states_is_within_tolerance_of_every_node(
    tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    checkpoint = tiny_checkpoint("llama")
    package = exported(checkpoint, precision="int4", attention="primitives")
    found = partita.drift(package, "cpu", against=str(checkpoint), by="node")
    assert found.is_within and len(found.nodes) > 20
    over = [node.name for node in found.nodes if node.exceeds_tolerance]
    assert not over


def test_source_model_is_named_by_folder_or_by_manifest(
    tiny_checkpoint: TinyCheckpoint,
    exported: Exported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = tiny_checkpoint("llama")
    package = exported(checkpoint)
    found = partita.drift(package, "cpu", against=str(checkpoint))
    assert found.is_within and found.versions[1] == "" and (found.outputs.error or 0) < 1e-4
    words = ["drift", str(package), "--provider", "cpu", "--against", "original"]
    assert run(words) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"--against ./{checkpoint.name}" in err
    monkeypatch.chdir(checkpoint.parent)
    result = str(tmp_path / "drift.json")
    assert run([*words, "--view", "json", "--out", result]) == 0
    assert run(["report", "check", result, "--max-drift", "0.01"]) == 0
    assert run(["report", "check", result, "--max-drift", "1e-12"]) == 5
    assert "FAILED --max-drift 1e-12: error " in capsys.readouterr().out
    for more in ([], ["--max-drift", "1", "--max-copies", "1"]):
        assert run(["report", "check", result, *more]) == 2 and "give --max-drift" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("precision", "window", "seconds", "words"),
    [
        ("fp32", 41, 60, r"first node over tolerance .*self_attn/\w+ to model\.layers\.0\.self_attn/\w*Attention"),
        ("fp32", 41, -1, "its first difference was not found within -1 s"),
        ("int8", 2, 60, r"first node over tolerance .*model\.layers\.0\.self_attn/\w+ to .*self_attn/\w*Attention"),
        ("int4", 41, 60, r"its first difference was not found: no layer alone is over tolerance 1e\+00, "),
    ],
)
def test_wrong_export_error_names_first_difference(
    precision: Literal["fp32", "int8", "int4"],
    window: int,
    seconds: int,
    words: str,
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another sliding window than 40 is exported."""
    monkeypatch.setattr(state, "classify_mask", lambda *_: MaskRule(window))
    monkeypatch.setattr(drifting, "LOCATE_SECONDS", seconds)
    checkpoint = tiny_checkpoint("mistral", sliding_window=40, num_hidden_layers=1)
    options = ExportOptions(str(checkpoint), tmp_path / "out", max_length=64, precision=precision)
    with pytest.raises(ParityError, match=words):
        export(options, replay=replay, locate=drifting.locate)


def test_fitted_reshapes_module_values_to_tensors() -> None:
    value = np.arange(12, dtype=np.float32).reshape(6, 2)
    step = Step("s", "f", {}, positions=(2, 3), logits=(3,))
    padded = fitted(value, np.full((2, 4, 2), -1, np.float32), step)
    assert padded is not None and padded.shape == (2, 4, 2)
    assert padded[1, :2].tolist() == [[4, 5], [6, 7]] and (padded[:, 2:] == -1).all()
    last = fitted(value, np.zeros((2, 1, 2), np.float16), step)
    assert last is not None and last.dtype == np.float16 and last[0].tolist() == [[6, 7]]
    flat = fitted(value, np.zeros((2, 2), np.float32), step)
    assert flat is not None and flat.tolist() == [[4, 5], [6, 7]]
    assert fitted(value, np.zeros((2, 3), np.float32), step) is None
    large = fitted(np.full((6, 2), 1e6, np.float32), np.zeros((1, 2, 2), np.float16), step)
    assert large is not None and large.max() == 65504, "an overflow on the tested side must not equal the reference"
