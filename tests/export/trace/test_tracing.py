"""Skipped decompositions and copied layers change no graph; guards on sizes are detected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from transformers import AutoConfig

from partita.errors import UnsupportedModelError
from partita.export.trace import decompositions, tracing
from partita.export.trace.attention import lowering
from partita.export.trace.fake_model import FakeModel, build_fake_model
from partita.export.trace.ports import TraceSpec
from partita.export.trace.repeats import layers
from partita.export.trace.replacements import ComplexAsPairs, rows_by_position
from partita.export.trace.tracing import RecordedGuards, broken_guard
from tests.conftest import TinyCheckpoint


def traced(fake: FakeModel) -> ir.Model:
    """The graph of a model for any number of tokens."""
    return tracing.trace(fake, lowering("gqa"), TraceSpec(1, 32, None, 21, "contrib")).model


@pytest.mark.parametrize(
    ("model_type", "skipped"),
    [("qwen2", True), ("mixtral", False), pytest.param("mamba", False, marks=pytest.mark.heavy)],
)
def test_quick_export_produces_same_graph(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, model_type: str, skipped: bool
) -> None:
    config = AutoConfig.from_pretrained(tiny_checkpoint(model_type, num_hidden_layers=1))
    found: list[bool] = []
    own: Any = decompositions._has_forms

    def graph(*, quick: bool) -> tuple[Counter[str], set[str]]:
        def has_forms(*arguments: Any) -> bool:
            found.append(own(*arguments))
            return found[-1] and quick

        monkeypatch.setattr(decompositions, "_has_forms", has_forms)
        monkeypatch.setattr(tracing, "quick_export", decompositions.quick_export if quick else nullcontext)
        model = traced(build_fake_model(config, "float32", 1, 32))
        weights = {name for name, value in model.graph.initializers.items() if value.const_value is None}
        nodes = Counter(
            f"{node.op_identifier()} {node.name} {[(each.dtype, str(each.shape)) for each in node.outputs]}"
            for node in model.graph
        )
        return nodes, weights

    assert graph(quick=True) == graph(quick=False)
    assert found == [skipped, skipped]


MASKS_BY_MODEL = {
    "num_hidden_layers": 6,
    "layer_types": ["full_attention"] * 4 + ["sliding_attention"] * 2,
    "sliding_window": 8,
    "use_sliding_window": False,
    "no_rope_layers": [1] * 6,
}
"""No attribute of a layer tells its mask."""
MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3, "sliding_window": 8}


@pytest.mark.parametrize(
    ("model_type", "settings", "traced_layers"),
    [
        ("llama", {"num_hidden_layers": 5}, [0, 1, 2]),  # the first one makes nodes that all use
        ("smollm3", MASKS_BY_MODEL, [0, 1, 2, 4, 5]),
        ("gemma3_text", {"num_hidden_layers": 9, **MIXED}, [0, 1, 2, 3, 5]),
        ("gpt2", {"num_hidden_layers": 5, "scale_attn_by_inverse_layer_idx": True}, [0, 1, 2, 3, 4]),
        ("gpt2", {"num_hidden_layers": 5}, [0, 1, 2]),
        ("mamba", {"num_hidden_layers": 4}, [0, 1, 2]),
        ("mixtral", {"num_hidden_layers": 4}, [0, 1, 2]),
    ],
)
def test_copied_layers_give_same_graph(
    tiny_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    settings: dict[str, Any],
    traced_layers: list[int],
) -> None:
    """Layers that repeat an earlier one are copied."""
    config = AutoConfig.from_pretrained(tiny_checkpoint(model_type, **settings))
    ran: list[int] = []

    def note(index: int) -> None:
        if get_proxy_mode() is not None:
            ran.append(index)

    def graph() -> bytes:
        fake = build_fake_model(config, "float32", 1, 32)
        for index, layer in enumerate(layers(fake.module)):
            next(layer.children()).register_forward_pre_hook(lambda *_, index=index: note(index))
        content: bytes = ir.to_proto(traced(fake)).SerializeToString()
        return content

    with_copies = graph()
    assert ran == traced_layers
    monkeypatch.setattr(tracing, "copied_repeats", lambda *_: nullcontext())
    assert graph() == with_copies


class Indexed(torch.nn.Module):
    """Rows, columns and single numbers of x, by one index or two."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
        two = x[narrow, :, torch.tensor([0, 2], dtype=torch.int32)]
        return x[:, rows, :], x[narrow], x[..., rows], two, x[:, torch.tensor([True, False, True])]


def test_indexing_is_translated_to_gather(tmp_path: Path) -> None:
    """Results equal those of torch."""
    given = torch.randn(2, 3, 4), torch.tensor([2, -1, 0]), torch.tensor([1, 0], dtype=torch.int32)
    table = dict(decompositions.TABLE)
    program: Any = torch.onnx.export(
        Indexed().eval(), given, dynamo=True, custom_translation_table=table, optimize=True, verbose=False
    )
    path = tmp_path / "model.onnx"
    program.save(path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, dict(zip(names, (each.numpy() for each in given), strict=True)))
    for one, other in zip(found, Indexed()(*given), strict=True):
        assert np.array_equal(one, other.numpy())
    assert [node.op_type for node in program.model.graph].count("Gather") >= 3


KEYS = 6


def test_last_rows_of_mask_buffer_are_selected_by_position() -> None:
    """Other slices, and slices of other tensors, are unchanged."""
    positions, other = torch.tensor([[1, 2], [4, 5]]), torch.ones(1, 1, 8, 8, dtype=torch.bool)
    model: Any = torch.nn.Module()
    model.bias = torch.nn.Buffer(other.tril())
    with rows_by_position(model, positions, KEYS):
        found = model.bias[:, :, KEYS - 2 : KEYS, :KEYS]
        first, narrow = model.bias[:, :, 0:2, :KEYS], model.bias[:, :, KEYS - 2 : KEYS, :4]
        assert other[:, :, KEYS - 2 : KEYS, :KEYS].shape == (1, 1, 2, KEYS)
    assert torch.equal(found, (torch.arange(KEYS) <= positions[..., None])[:, None])
    assert torch.equal(first[0, 0], torch.arange(KEYS) <= torch.tensor([[0], [1]]))
    assert torch.equal(narrow, torch.ones(1, 1, 2, 4, dtype=torch.bool))


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """A rotary embedding as llama4 and deepseek_v2 write it."""
    factor = torch.polar(torch.ones_like(angle), angle) * 0.5
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    both = pairs * factor[:, :, None, :], pairs * factor.unsqueeze(2).to(pairs.device), pairs * factor.unsqueeze(-2)
    return torch.cat([torch.view_as_real(each).flatten(3) for each in both])


def test_complex_rotation_as_pairs_matches_torch() -> None:
    x, angle = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 4)
    with ComplexAsPairs():
        found = rotated(x, angle)
        pairs = torch.view_as_complex(torch.randn(3, 2))
        for name, other in (("conj", lambda: pairs.conj()), ("abs", lambda: torch.abs(pairs))):
            with pytest.raises(UnsupportedModelError, match=rf"complex numbers \({name}\)"):
                other()
    assert torch.allclose(found, rotated(x, angle), atol=1e-6)


class Planted(torch.nn.Module):
    """Computes something else for some sizes."""

    def __init__(self, odd: Callable[[Any], Any]) -> None:
        super().__init__()
        self.odd, self.recorded_guards = odd, RecordedGuards()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size: Any = x.shape[1]
        self.recorded_guards.shapes.append(size.node.shape_env)
        return x * 2 if self.odd(size) else x


@pytest.mark.parametrize(
    ("odd", "depends"),
    [
        (lambda size: size % 64 == 0, True),
        (lambda size: size % 4 == 3, True),
        (lambda size: size**2 > 100, True),
        (lambda size: size * 64 < size, False),
    ],
)
def test_size_dependent_branch_is_detected(odd: Callable[[Any], Any], depends: bool) -> None:
    made = Planted(odd)
    torch.export.export(
        made,
        (torch.zeros(1, 3),),
        dynamic_shapes={"x": {1: torch.export.Dim("size", min=1, max=4096)}},
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    assert made.recorded_guards.shapes, "the trace was not symbolic"
    assert (broken_guard(made.recorded_guards, 4096) is not None) == depends
