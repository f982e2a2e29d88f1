"""Calibration on a text: inputs of each module, order of quantisation, errors, and memory use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.demo import heldout_path
from partita.errors import CheckpointError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.naming import match_names
from partita.export.progress import Silent
from partita.export.quantise import Grid, Packing, calibration
from partita.export.quantise.calibration import run_lockstep
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.weight_source import CalibratedWeights, QuantisedSource
from partita.export.verify.known_answer import load
from partita.export.verify.texts import Text
from partita.package.folder import read_manifest
from tests.checkpoints import edit_tensors
from tests.conftest import Exported, TinyCheckpoint
from tests.export.nets import float_source
from tests.export.quantise.test_precision import checked, export_to

GATE, DOWN = "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"


def some_text(windows: int = 12, length: int = 48) -> Text:
    """Tokens of the tiny checkpoints' vocabulary."""
    ids = np.random.Generator(np.random.PCG64(0)).integers(0, 60, (windows, length))
    return Text("text.txt", "0" * 64, ids)


def placed(folder: Path, names: tuple[str, ...], rounded: CalibratedWeights) -> list[PlacedWeight]:
    """Modules whose weights are to be packed."""
    found, packing = [], Packing(Grid(4, symmetric=False), 32, "gptq")
    for name in names:
        source = float_source(open_checkpoint(str(folder)), f"{name}.weight")
        found.append(PlacedWeight(QuantisedSource.of(source, packing, rounded=rounded), (name,), ()))
    return found


def calibrated(
    folder: Path, names: tuple[str, ...], into: Path, text: Text | None = None
) -> tuple[Any, list[QuantisedSource]]:
    """The model with rounded weights, and the calibrated weights."""
    checkpoint = open_checkpoint(str(folder))
    model, rounded = load(checkpoint), CalibratedWeights()
    into.mkdir(exist_ok=True)
    rounded.begin(into)
    sources, weights = match_names(model, checkpoint.tensors), placed(folder, names, rounded)
    assert calibration.calibrate(model, checkpoint, text or some_text(), weights, sources, Silent()) == []
    return model, [each.packed for each in weights]


def test_calibration_is_deterministic(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        _, weights = calibrated(tiny_checkpoint("llama"), (GATE, DOWN, "lm_head"), tmp_path / name)
        found.append([torch.cat([rows for _, rows in each.rows_restored()]) for each in weights])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_errors_of_the_model_end_a_calibration(tiny_checkpoint: TinyCheckpoint) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by the model")

    model = load(open_checkpoint(str(tiny_checkpoint("llama"))))
    model.get_submodule(DOWN).register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError, match="by the model"):
        list(run_lockstep(model, [torch.from_numpy(some_text().windows)], {GATE: model.get_submodule(GATE)}))


def test_calibrated_package_uses_gptq_and_lowers_divergence(
    tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    """Queries, keys and values are one weight."""
    checkpoint = tiny_checkpoint("llama", tied=True)
    manifest = checked(exported(checkpoint, precision="int4", calibrate=heldout_path(), block_size=32))
    free = read_manifest(exported(checkpoint, precision="int4", block_size=32))
    assert manifest.packed is not None and manifest.packed.calibration is not None and free.packed is not None
    found = manifest.packed.calibration
    assert (found.quantiser, found.text, found.not_calibrated) == ("gptq", "heldout.txt", ())
    assert found.tokens == 128 * 64 and found.window_tokens == 64 and free.packed.calibration is None
    assert {kind.quantiser for kind in manifest.packed.kinds} == {"gptq"}
    assert manifest.graph.weight_bytes == free.graph.weight_bytes
    assert manifest.quality is not None and free.quality is not None
    assert manifest.quality.kl_mean < 0.95 * free.quality.kl_mean


def test_calibration_requires_a_tokenizer(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tokenizer=False)
    with pytest.raises(UsageError, match=r"`calibrate=.*the checkpoint's tokenizer cannot be loaded"):
        export_to(tmp_path / "out", checkpoint, precision="int4", calibrate=heldout_path())


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_non_finite_values_raise_checkpoint_error(llama: Path, tmp_path: Path, value: float) -> None:
    edit_tensors(llama, lambda tensors: tensors[f"{GATE}.weight"].fill_(value))
    with pytest.raises(CheckpointError, match=rf"the input of {DOWN}\.weight is not finite on `calibrate=text\.txt`"):
        calibrated(llama, (DOWN,), tmp_path / "found")
