"""Names, shapes, dtypes and roles of the inputs, outputs and states of a traced graph.

The sizes and operator choices of one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from partita.errors import UnsupportedModelError, UsageError
from partita.export.trace import PLACEHOLDERS
from partita.export.trace.attention import Cursor, Lowering
from partita.export.trace.emitter import Key
from partita.export.trace.fake_model import FakeModel
from partita.export.trace.replacements import static_up_to
from partita.export.weights import of_ir, of_torch
from partita.observations.text_format import listing
from partita.package.contract import Port, State

if TYPE_CHECKING:
    from partita.export.trace import Form


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """The fixed sizes of one graph, and the form of its non-attention operators."""

    batch: int
    max_length: int
    sequence_length: int | None
    """S, or None for a symbolic size; a fixed S also fixes K to 1."""
    opset: int
    form: Form
    """The form of experts and recurrences."""
    rolls: bool = False
    """Layers with a window cache only the window, where the lowering supports it."""
    placeholders: frozenset[str] = PLACEHOLDERS
    """What is traced as nodes that passes replace, where the lowering has fused operators."""

    @property
    def tokens(self) -> int | None:
        """Tokens of a step over the batch, when they are fixed."""
        return None if self.sequence_length is None else self.batch * self.sequence_length


POSITIONS, TORCH_POSITIONS = "int32", torch.int32
"""Some GPU providers lack int64 kernels (Unsqueeze and Cast on WebGPU), and int32 is sufficient."""
TOTAL = "total_sequence_length"
"""The name of T, the rows of a growing cache after a step."""


def state_table(fake: FakeModel, lowering: Lowering, spec: TraceSpec) -> dict[Key, State]:
    """Every state of the model in the order of the graph's inputs."""
    table: dict[Key, State] = {}
    for layer in fake.probed.layers:
        key_width, value_width = layer.key_width, layer.value_width
        if lowering.same_kv_width and layer.fused:
            key_width = value_width = max(key_width, value_width)
        window = layer.window if spec.rolls and lowering.rolls and layer.rolls else None
        for kind, width in (("key", key_width), ("value", value_width)):
            table[kind, layer.layer, 0] = State(
                past=f"past_key_values.{layer.layer}.{kind}",
                present=f"present.{layer.layer}.{kind}",
                layer=layer.layer,
                kind=kind,  # type: ignore[arg-type]
                shape=(spec.batch, layer.kv_heads, window or spec.max_length, width),
                dtype=fake.dtype,
                window=layer.window,
                rolling=window is not None,
                growing_axis=2 if lowering.grows else None,
                in_place=not lowering.grows,
            )
    for extra in fake.probed.extras:
        name = f"{extra.layer}.{extra.kind}" + (f".{extra.index}" if extra.index else "")
        table[extra.kind, extra.layer, extra.index] = State(
            past=f"past_key_values.{name}",
            present=f"present.{name}",
            layer=extra.layer,
            kind=extra.kind,
            shape=extra.shape,
            dtype=of_torch(extra.dtype),
        )
    return table


def check_grows(fake: FakeModel, spec: TraceSpec) -> None:
    """Raise UnsupportedModelError for a model whose states or inputs do not fit the growing layout."""
    kinds = "".join(extra.kind for extra in fake.probed.extras[:1])
    for is_wrong, reason in (
        (kinds, f"the model keeps {kinds} states, which do not grow"),
        # whatever N is: sequences in this layout may be longer
        (static_up_to(fake.module), "its rotary frequencies depend on the length of the text, an input that it lacks"),
        (spec.sequence_length, "the model can only be traced for a fixed number of tokens, which this layout lacks"),
    ):
        if is_wrong:
            raise UnsupportedModelError(f"`cache=growing`: {reason}; omit it", option="cache")


def check_rolls(fake: FakeModel, spec: TraceSpec) -> None:
    """Raise UsageError without a layer for a window cache, and where padding would drop rows of the window."""
    option = "`cache=window`"
    layers = fake.probed.layers
    windows = sorted({layer.window for layer in layers if layer.window is not None})
    if not any(layer.rolls for layer in layers):
        reason = (
            f"its windows ({listing([f'{each:,} tokens' for each in windows])}) are read by several layers, or in a "
            "way that no operator supports"
            if windows
            else f"it has no layer with a window of less than `max_length={spec.max_length}`"
        )
        raise UsageError(f"{option}: {reason}; omit it")
    if spec.sequence_length is not None:
        raise UsageError(
            f"{option}: the model can only be traced for a fixed number of tokens, and padding would drop "
            "rows of the window; omit it"
        )


def cursor_shape(cursor: Cursor, spec: TraceSpec, total: Any) -> tuple[Any, ...]:
    """The shape of a cursor; `total`: T, the rows of a growing cache."""
    if cursor.per_key:
        return spec.batch, total
    return (spec.batch,) if cursor.per_row else ()


def past_shape(state: State, past: int) -> tuple[int, ...]:
    """The shape of a state before a step; `past`: P, the rows of a growing state at that time."""
    return tuple(past if axis == state.growing_axis else size for axis, size in enumerate(state.shape))


def ports_of(
    model: ir.Model, lowering: Lowering, spec: TraceSpec, fake: FakeModel
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Ports of the graph other than states, by role."""
    tokens: tuple[int | str, ...] = (spec.batch, spec.sequence_length or "sequence_length")
    rows: int | str = 1 if spec.sequence_length else "sequence_length" if lowering.grows else "logits_rows"
    positions = "int64" if lowering.grows else POSITIONS
    known = {
        "input_ids": Port(name="input_ids", role="tokens", shape=tokens, dtype="int64"),
        "position_ids": Port(name="position_ids", role="positions", shape=tokens, dtype=positions),
        "logits_indices": Port(name="logits_indices", role="logits_rows", shape=(rows,), dtype="int64"),
        "rope_length": Port(name="rope_length", role="rope_length", shape=(), dtype=POSITIONS),
    }
    for cursor in lowering.cursors:
        shape: tuple[int | str, ...] = cursor_shape(cursor, spec, TOTAL)
        known[cursor.name] = Port(name=cursor.name, role=cursor.role, shape=shape, dtype=cursor.dtype)
    inputs = tuple(known[v.name] for v in model.graph.inputs if v.name in known)
    logits = model.graph.outputs[0]
    assert logits.dtype is not None
    shape = (spec.batch, rows, fake.vocab_size)
    output = Port(name="logits", role="logits", shape=shape, dtype=of_ir(logits.dtype))
    return inputs, (output,)
