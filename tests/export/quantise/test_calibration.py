"""Calibration on a text: inputs of each module, order of quantisation, errors, and memory use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from partita.demo import heldout_path
from partita.errors import CheckpointError, ResourceError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.naming import match_names
from partita.export.progress import Silent
from partita.export.quantise import calibration
from partita.export.quantise.lockstep import run_lockstep
from partita.export.quantise.quantisers import Grid, Packing
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.weight_source import CalibratedWeights, QuantisedSource
from partita.export.verify import known_answer
from partita.export.verify.known_answer import load
from partita.export.verify.texts import Text
from partita.export.weights.sources import FloatSource, checkpoint_weight
from partita.package.folder import read_manifest
from tests.checkpoints import edit_tensors
from tests.conftest import Exported, TinyCheckpoint
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
        source = checkpoint_weight(open_checkpoint(str(folder)), f"{name}.weight", ir.DataType.FLOAT).source
        assert isinstance(source, FloatSource)
        plain = replace(source, origin=source.origin.permuted((1, 0))) if name.startswith("transformer.h") else source
        found.append(PlacedWeight(QuantisedSource.of(plain, packing, rounded=rounded), (name,), ()))
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


def test_lockstep_propagates_changed_weights_and_model_errors(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load(open_checkpoint(str(tiny_checkpoint("llama"))))
    batches = [torch.from_numpy(some_text().windows[:2])]
    walk = run_lockstep(model, batches, {name: model.get_submodule(name) for name in (GATE, DOWN)})
    next(walk)
    model.get_submodule(GATE).weight.detach().zero_()  # then what is multiplied by `up` is 0
    _, given = next(walk)
    assert float(given[0].abs().max()) == 0
    walk.close()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("by the model")

    model.get_submodule(DOWN).register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError, match="by the model"):
        list(run_lockstep(model, batches, {GATE: model.get_submodule(GATE)}))


def test_calibration_lowers_output_error_on_the_text(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """Of the weights in the package, on the inputs that the module receives."""
    folder = tiny_checkpoint("llama")
    model, (_, packed) = calibrated(folder, (GATE, DOWN), tmp_path / "found")
    given: list[torch.Tensor] = []
    hook = model.get_submodule(DOWN).register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(some_text().windows), use_cache=False)
    hook.remove()
    weight = load(open_checkpoint(str(folder))).get_submodule(DOWN).weight.detach()
    from_file = torch.cat([rows for _, rows in packed.rows_restored()])
    assert packed.quantiser == "gptq"
    assert torch.allclose(from_file, model.get_submodule(DOWN).weight.detach(), atol=1e-7)
    free = torch.cat([rows for _, rows in replace(packed, rounded=CalibratedWeights()).rows_restored()])

    def error(values: torch.Tensor) -> float:
        return float((given[0] @ (values - weight).T).norm())

    assert error(from_file) < 0.95 * error(free), "weights of this model are random"


def test_calibration_is_deterministic(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """gpt2 stores [K, N]; the package stores [N, K] with blocks along K."""
    for model_type, names in (("llama", (GATE, DOWN, "lm_head")), ("gpt2", ("transformer.h.0.mlp.c_fc",))):
        found = []
        for name in ("one", "other"):
            model, weights = calibrated(tiny_checkpoint(model_type), names, tmp_path / f"{model_type}-{name}")
            found.append([torch.cat([rows for _, rows in each.rows_restored()]) for each in weights])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        weight = model.get_submodule(names[-1]).weight.detach()
        assert torch.allclose(found[0][-1], weight.T if model_type == "gpt2" else weight, atol=1e-7)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gpt2", marks=pytest.mark.heavy)])
def test_calibrated_package_uses_gptq_and_lowers_divergence(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str
) -> None:
    """llama has fused QKV weights; gpt2 has transposed weights."""
    checkpoint = tiny_checkpoint(model_type, tied=True) if model_type == "llama" else tiny_checkpoint(model_type)
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
    with pytest.raises(UsageError, match=r"`calibrate=.*the checkpoint's tokenizer cannot be loaded"):
        export_to(
            tmp_path / "out", tiny_checkpoint("llama", tokenizer=False), precision="int4", calibrate=heldout_path()
        )


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (f"{GATE}.weight", float("nan")),
        (f"{GATE}.weight", 3e38),
    ],
)
def test_non_finite_values_raise_checkpoint_error(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    own_copy: Callable[[Path], Path],
    tensor: str,
    value: float,
) -> None:
    folder = own_copy(tiny_checkpoint("llama"))
    edit_tensors(folder, lambda tensors: tensors[tensor].fill_(value))
    with pytest.raises(CheckpointError, match=rf"the input of {DOWN}\.weight is not finite on `calibrate=text\.txt`"):
        calibrated(folder, (DOWN,), tmp_path / "found")


def test_insufficient_memory_is_detected_before_loading_the_model(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(known_answer, "free_bytes", lambda: 4e6)
    monkeypatch.setattr(known_answer, "load", no_load)
    with pytest.raises(
        ResourceError, match=r"needs about .* to calibrate on 8,192 tokens of heldout\.txt, but .* free"
    ):
        export_to(tmp_path / "out" / "package", tiny_checkpoint("llama"), precision="int4", calibrate=heldout_path())
    assert not (tmp_path / "out").exists()
