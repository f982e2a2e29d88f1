"""Calibration on a text: inputs of each module, order of quantisation, errors, and memory use."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from partita.demo import heldout_path
from partita.errors import CheckpointError, PartitaError, ResourceError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.naming import match_names
from partita.export.progress import SilentStage
from partita.export.quantise.calibrate import CalibratedWeights, calibration
from partita.export.quantise.calibrate.lockstep import run_lockstep
from partita.export.quantise.quantisers import Grid, Packing
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.weight_source import QuantisedSource, restored
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


def placed(folder: Path, names: tuple[str, ...], size: int = 32) -> list[PlacedWeight]:
    """Modules whose weights are to be packed."""
    found = []
    for name in names:
        source = checkpoint_weight(open_checkpoint(str(folder)), f"{name}.weight", ir.DataType.FLOAT).source
        assert isinstance(source, FloatSource)
        plain = replace(source, origin=source.origin.permuted((1, 0))) if name.startswith("transformer.h") else source
        found.append(
            PlacedWeight(QuantisedSource.of(plain, Packing(Grid(4, symmetric=False), size, "gptq")), (name,), ())
        )
    return found


def calibrated(
    folder: Path, names: tuple[str, ...], into: Path, text: Text | None = None
) -> tuple[Any, CalibratedWeights]:
    """The model with rounded weights, and what was found."""
    checkpoint = open_checkpoint(str(folder))
    model, rounded = load(checkpoint), CalibratedWeights()
    into.mkdir(exist_ok=True)
    rounded.begin(into)
    sources = match_names(model, checkpoint.tensors)
    left = calibration.calibrate(
        model, checkpoint, text or some_text(), placed(folder, names), sources, rounded, SilentStage()
    )
    assert left == []
    return model, rounded


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
    model, rounded = calibrated(folder, (GATE, DOWN), tmp_path / "found")
    original = load(open_checkpoint(str(folder)))
    given: list[torch.Tensor] = []
    hook = model.get_submodule(DOWN).register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(some_text().windows), use_cache=False)
    hook.remove()
    weight = original.get_submodule(DOWN).weight.detach()
    (entry,) = placed(folder, (DOWN,))
    origin, packing = entry.packed.origin, entry.packed.packing
    rows = rounded.rows(origin, packing.grid, packing.block_size)
    from_file = torch.cat([restored(found) for _, found in rows])
    assert torch.allclose(from_file, model.get_submodule(DOWN).weight.detach(), atol=1e-7)
    free = torch.cat([restored(rows) for _, rows in entry.packed.rows_quantised()])

    def error(values: torch.Tensor) -> float:
        return float((given[0] @ (values - weight).T).norm())

    assert error(from_file) < 0.95 * error(free), "weights of this model are random"


def test_calibration_is_deterministic(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    names = (GATE, DOWN, "lm_head")
    for name in ("one", "other"):
        calibrated(tiny_checkpoint("llama"), names, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 9
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in files)


def test_transposed_weights_are_quantised_along_their_inputs(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """gpt2 stores [K, N]; the package stores [N, K] with blocks along K."""
    folder, name = tiny_checkpoint("gpt2"), "transformer.h.0.mlp.c_fc"
    model, rounded = calibrated(folder, (name,), tmp_path / "found")
    (entry,) = placed(folder, (name,))
    origin, packing = entry.packed.origin, entry.packed.packing
    rows = list(rounded.rows(origin, packing.grid, packing.block_size))
    values = torch.cat([restored(found) for _, found in rows])
    weight = model.get_submodule(name).weight.detach()
    assert weight.shape[0] != weight.shape[1] and torch.allclose(values[:, : len(weight)], weight.T, atol=1e-7)
    assert all(int(found.integers.max()) <= packing.grid.top for _, found in rows)


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


def own_text(folder: Path, content: bytes) -> Path:
    path = folder / "text.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("options", "content", "said"),
    [
        ({}, b"a text", r"`calibrate=.*text\.txt` applies to quantised weights"),
        ({"precision": "int4"}, b"Too short a text.", r"`calibrate=.*too short: \d+ tokens; at least 2,048"),
        ({"precision": "int4"}, b"\xff\xfe", r"`calibrate=.*text\.txt`: not UTF-8"),
        ({"precision": "int4"}, None, r"`calibrate=.*text\.txt`: cannot be read"),
        ({"precision": "int4", "quantiser": "refit"}, b"a text", r"`quantiser=refit` uses no text"),
    ],
    ids=["fp32", "short", "bytes", "absent", "quantiser"],
)
def test_unusable_calibration_text_is_a_usage_error(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, options: dict[str, object], content: bytes | None, said: str
) -> None:
    text = tmp_path / "text.txt" if content is None else own_text(tmp_path, content)
    with pytest.raises(UsageError, match=said):
        export_to(tmp_path / "package", tiny_checkpoint("llama"), calibrate=text, **options)
    assert not (tmp_path / "package").exists()


def test_calibration_requires_a_tokenizer(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`calibrate=.*the checkpoint's tokenizer cannot be loaded"):
        export_to(
            tmp_path / "out", tiny_checkpoint("llama", tokenizer=False), precision="int4", calibrate=heldout_path()
        )


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        (f"{GATE}.weight", float("nan"), rf"tensor {GATE}\.weight contains NaN or infinite values"),
        ("model.norm.weight", float("inf"), r"tensor model\.norm\.weight contains NaN or infinite values"),
        (f"{GATE}.weight", 3e38, rf"the input of {DOWN}\.weight overflows float32"),
    ],
)
def test_non_finite_values_raise_checkpoint_error(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    own_copy: Callable[[Path], Path],
    tensor: str,
    value: float,
    said: str,
) -> None:
    folder = own_copy(tiny_checkpoint("llama"))
    edit_tensors(folder, lambda tensors: tensors[tensor].fill_(value))
    with pytest.raises(CheckpointError, match=said):
        calibrated(folder, (DOWN,), tmp_path / "found")


def test_insufficient_memory_is_detected_before_loading_the_model(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(calibration, "free_bytes", lambda: 1e6)
    monkeypatch.setattr(known_answer, "load", no_load)
    kinds: type[PartitaError] = ResourceError
    with pytest.raises(kinds, match=r"`calibrate=heldout\.txt`: calibrating on 8,192 tokens takes about .* free"):
        export_to(tmp_path / "out" / "package", tiny_checkpoint("llama"), precision="int4", calibrate=heldout_path())
    assert not (tmp_path / "out").exists()


def living_bytes() -> int:
    """Of all tensors that Python knows of."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_peak_memory_is_below_the_estimate(tiny_checkpoint: TinyCheckpoint) -> None:
    """Measured before the last product of a layer, with and without materialised attention weights."""
    text, hidden, width, heads = some_text(8, 64), 64, 96, 4
    attention = "model.layers.1.self_attn.o_proj"
    held = {}
    for lean in (True, False):
        model = load(open_checkpoint(str(tiny_checkpoint("llama"))))
        if not lean:
            model.set_attn_implementation("eager")
        batches = [torch.from_numpy(text.windows[start : start + 4]) for start in (0, 4)]
        before = living_bytes()
        walk = run_lockstep(model, batches, {name: model.get_submodule(name) for name in (attention, DOWN)})
        held[lean] = max(living_bytes() - before for _ in walk)
        rest = 0 if lean else heads
        assert 0 < held[lean] < 4 * text.tokens * (calibration.HELD * hidden + 2 * width + (1 + rest) * 64)
    assert held[True] < 0.7 * held[False]
