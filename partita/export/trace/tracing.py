"""Trace a Hugging Face decoder on fake tensors to an ONNX graph with a static cache.

transformers' modelling code runs with our attention function and cache (`hooks.py`, `emitter.py`). Parameters become
initializers without data, named as in the model; buffers (rotary frequencies, scales) are real.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch._dynamo.exc import UserError, UserErrorType
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita.errors import UnsupportedModelError
from partita.export.passes.base import TracedGraph
from partita.export.passes.cleaning import ROOT, clean, name_axes, name_nodes
from partita.export.progress import Silent, Stage
from partita.export.trace import DOMAIN, DOMAINS
from partita.export.trace.attention import Lowering
from partita.export.trace.decompositions import TABLE, graphs_without_code, quick_export, skip_decompositions
from partita.export.trace.emitter import CACHE_LENGTH, ROLLED, Emitter, Key
from partita.export.trace.experts import experts_form
from partita.export.trace.fake_model import FakeModel, quiet, translate_errors
from partita.export.trace.hooks import connect_plug
from partita.export.trace.placeholders import placeholders
from partita.export.trace.ports import (
    TORCH_POSITIONS,
    TraceSpec,
    check_grows,
    check_rolls,
    cursor_shape,
    past_shape,
    ports_of,
    state_table,
)
from partita.export.trace.recurrence import read_states, replace_recurrences
from partita.export.trace.repeats import copied_repeats
from partita.export.trace.replacements import ComplexAsPairs, rope_by_length, rows_by_position
from partita.export.trace.state import PlugCache, call, layer_count
from partita.export.weights import to_torch
from partita.package.contract import State

EXAMPLE_TOKENS, EXAMPLE_ROWS, EXAMPLE_PAST = 3, 2, 5
SMALL_SIZES = 130
"""All sizes below are tested against a trace's guards: more than any usual chunk."""
TORCH_KEEPS = "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT"
"""Nodes of the last trace, which torch 2.13 keeps alive in a module, with the whole graph."""


class FixedLengthError(UnsupportedModelError):
    """A model whose code can be traced only for a fixed number of tokens."""


class RecordedGuards:
    """The guards of a trace on symbolic sizes; a class, because torch reverts changes of module attributes."""

    def __init__(self) -> None:
        self.shapes: list[ShapeEnv] = []


class _Wrapper(torch.nn.Module):
    """The model with flat inputs (tokens, positions, rows, cursors, past) and outputs (logits, present)."""

    def __init__(self, fake: FakeModel, lowering: Lowering, table: Mapping[Key, State], spec: TraceSpec) -> None:
        super().__init__()
        setattr(self, ROOT, fake.module)
        self.fake, self.lowering, self.keys, self.spec = fake, lowering, tuple(table), spec
        self.rolling = frozenset(state.layer for state in table.values() if state.rolling)
        self.recorded_guards = RecordedGuards()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        rows: tuple[torch.Tensor, ...],
        cursors: tuple[torch.Tensor, ...],
        past: tuple[torch.Tensor, ...],
        lengths: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        model = getattr(self, ROOT)
        size: Any = input_ids.shape[1]
        if isinstance(size, torch.SymInt):
            self.recorded_guards.shapes.append(size.node.shape_env)
        keys: Any = self.spec.max_length
        places = position_ids
        if self.lowering.grows:
            keys = cursors[0].shape[1]  # the tokens of a step are the last
            places = torch.arange(keys - size, keys, dtype=TORCH_POSITIONS)[None]
            if self.spec.batch > 1:
                places = places + torch.zeros(self.spec.batch, 1, dtype=TORCH_POSITIONS)
        probed, states = self.fake.probed, dict(zip(self.keys, past, strict=True))
        plug = Emitter(probed, self.lowering, keys, layer_count(model), places, cursors, states, self.rolling)
        length = lengths[0] if lengths else None
        with (
            connect_plug(plug),
            ComplexAsPairs(),
            rope_by_length(model, length),
            replace_recurrences(model, self.spec.form),
            rows_by_position(model, places, keys),
        ):
            cache = PlugCache(plug, hides_recurrent=read_states(model))
            wanted = rows[0] if rows else None
            logits = call(model, input_ids, position_ids, cache, wanted, keys if probed.needs_ones_mask else None)
        plug.check()
        return (logits, *(plug.present(key) for key in self.keys))


def trace(fake: FakeModel, lowering: Lowering, spec: TraceSpec, progress: Stage | None = None) -> TracedGraph:
    """Trace `fake` with `lowering` into an ONNX graph of the sizes in `spec`. Raises UnsupportedModelError."""
    if lowering.grows:
        check_grows(fake, spec)
    if spec.rolls:
        check_rolls(fake, spec)
    table = state_table(fake, lowering, spec)
    states = tuple(table.values())
    arguments = _examples(fake, lowering, spec, states)
    with (
        quiet(),
        torch.no_grad(),
        translate_errors("tracing the model"),
        experts_form(spec.form, spec.tokens) as forms,
        placeholders(fake.module, spec.placeholders) if lowering.fused != "none" else nullcontext(),
        quick_export(),
    ):
        wrapper = _Wrapper(fake, lowering, table, spec)
        onnx_program = torch.onnx.export(
            _trace_with_torch(wrapper, arguments, spec, progress or Silent()),
            tuple(arguments.values()),
            dynamo=True,
            opset_version=spec.opset,
            input_names=[
                "input_ids",
                "position_ids",
                *("logits_indices" for _ in arguments["rows"]),
                *(c.name for c in lowering.cursors),
                *(s.past for s in states),
                *("rope_length" for _ in arguments["lengths"]),
            ],
            output_names=["logits", *(s.present for s in states)],
            custom_translation_table=dict(TABLE),
            optimize=False,
            verbose=False,
        )
    assert onnx_program is not None
    model = _detached_copy(onnx_program.model)
    del onnx_program
    with quiet(), translate_errors("cleaning the graph"):
        _strip_weights(model, fake.module)
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            node.domain = "" if node.domain == "onnx" else node.domain  # of torch's symbolic operators
        model.opset_imports.clear()
        model.opset_imports.update({"": spec.opset, **dict(lowering.domains), **dict(DOMAINS[spec.form])})
        clean(model)
        _check_placeholders(model)
        name_axes(model)
        name_nodes(model)
    inputs, outputs = ports_of(model, lowering, spec, fake)
    return TracedGraph(
        model,
        inputs,
        outputs,
        states,
        spec,
        fused=lowering.fused,
        has_router=bool(forms.chosen),
        notes=tuple(forms.notes),
    )


def _examples(fake: FakeModel, lowering: Lowering, spec: TraceSpec, states: tuple[State, ...]) -> dict[str, Any]:
    """Argument name -> fake example input of the wrapper."""
    length = spec.sequence_length or min(EXAMPLE_TOKENS, spec.max_length)
    rows = 1 if spec.sequence_length else min(EXAMPLE_ROWS, length)
    positions = torch.long if lowering.grows else TORCH_POSITIONS
    with fake.mode:
        return {
            "input_ids": torch.zeros(spec.batch, length, dtype=torch.long),
            "position_ids": torch.zeros(spec.batch, length, dtype=positions),
            "rows": () if lowering.grows else (torch.zeros(rows, dtype=torch.long),),
            "cursors": tuple(
                torch.zeros(cursor_shape(c, spec, EXAMPLE_PAST + length), dtype=getattr(torch, c.dtype))
                for c in lowering.cursors
            ),
            "past": tuple(torch.zeros(past_shape(s, EXAMPLE_PAST), dtype=to_torch(s.dtype)) for s in states),
            "lengths": (torch.zeros((), dtype=TORCH_POSITIONS),) if fake.rope_by_length else (),
        }


def _trace_with_torch(
    wrapper: _Wrapper, arguments: dict[str, Any], spec: TraceSpec, progress: Stage
) -> torch.export.ExportedProgram:
    """The wrapper as torch traces it. Raises FixedLengthError when a symbolic size turns out to be no such thing."""
    shapes: dict[str, Any] | None = None
    if spec.sequence_length is None:
        tokens = torch.export.Dim("sequence_length", min=1, max=spec.max_length)
        wanted = torch.export.Dim("logits_rows", min=1, max=spec.max_length)
        shapes = {"input_ids": {1: tokens}, "position_ids": {1: tokens}}
        shapes["rows"] = tuple({0: wanted} for _ in arguments["rows"])
        shapes |= {name: tuple({} for _ in arguments[name]) for name in ("cursors", "past", "lengths")}
        if wrapper.lowering.grows:
            # torch has no relation T = P + S between sizes, and needs none here.
            longest = max(spec.max_length, 2 * (EXAMPLE_PAST + EXAMPLE_TOKENS))
            total = torch.export.Dim("total_sequence_length", min=1, max=longest)
            past = torch.export.Dim("past_sequence_length", min=1, max=longest)
            shapes["cursors"] = tuple({1: total} for _ in arguments["cursors"])
            shapes["past"] = tuple({2: past} for _ in arguments["past"])
    try:
        # torch itself rejects some guards that hold for every size, hence `broken_guard`.
        with copied_repeats(wrapper.fake.module, progress), graphs_without_code():
            program = torch.export.export(
                wrapper,
                tuple(arguments.values()),
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except UserError as error:
        if shapes is None or error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
            raise
        raise FixedLengthError("the model's code specialises on one number of tokens") from error
    if guard := broken_guard(wrapper.recorded_guards, spec.max_length):
        raise FixedLengthError(f"the model's code specialises on one number of tokens ({guard})")
    skip_decompositions(program)
    return program


def broken_guard(taken: RecordedGuards, max_length: int) -> str | None:
    """A guard that does not hold for every small size and those around powers of two; None when all hold."""
    sizes = {*range(2, SMALL_SIZES), *(n + d for n in (2 ** np.arange(1, 25)).tolist() for d in (-1, 0, 1))}
    tried = sorted(size for size in {*sizes, max_length - 1, max_length} if 2 <= size <= max_length)
    granted = {guard.expr for env in taken.shapes for guard in env.guards}
    granted |= {late.expr for env in taken.shapes for found in env.deferred_runtime_asserts.values() for late in found}
    for expression in sorted(granted, key=str):
        for size in tried:
            if expression.subs(dict.fromkeys(expression.free_symbols, size)) == False:  # noqa: E712 - sympy's own
                return f"{expression} does not hold for {size}"
    return None


def _check_placeholders(model: ir.Model) -> None:
    """Raise UnsupportedModelError where a node reads a placeholder, for which the graph has no value."""
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type == CACHE_LENGTH:
            raise UnsupportedModelError(
                "the model derives positions from the length of the cache, one for the whole batch; "
                "export it with `batch_size=1`",
                option="batch_size",
            )
        if node.domain == DOMAIN and node.op_type == ROLLED:
            reader = next((use.node.op_type for use in node.outputs[0].uses()), "the graph's output")
            raise UnsupportedModelError(
                f"`cache=window`: {reader} reads the cache of a layer, not only its attention; omit it",
                option="cache",
            )


def _strip_weights(model: ir.Model, module: torch.nn.Module) -> None:
    """Rename initializers to the model's names, and drop the data of tensors that a checkpoint may store."""
    stored = {f"{ROOT}.{name}" for name in module.state_dict()}
    stored |= {f"{ROOT}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in list(model.graph.initializers.items()):
        if not name.startswith(f"{ROOT}."):
            continue
        if name in stored:
            value.const_value = None
        value.name = name.removeprefix(f"{ROOT}.")


def _detached_copy(made: ir.Model) -> ir.Model:
    """A copy of torch's graph without references to the trace, which holds megabytes per layer."""
    model = made.clone()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.meta.clear()
        for value in node.outputs:
            value.meta.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.meta.clear()
    getattr(torch.fx.experimental.proxy_tensor, TORCH_KEEPS, {}).clear()
    return model


def without_unread(item: TracedGraph) -> TracedGraph:
    """The graph without inputs that no node reads, e.g. positions. Raises UnsupportedModelError where it is tokens."""
    gone = {v.name for v in item.graph.inputs if not v.uses()} - {state.past for state in item.states}
    if "input_ids" in gone:
        raise UnsupportedModelError("the traced graph does not read its tokens, so the model cannot be exported")
    for value in [v for v in item.graph.inputs if v.name in gone]:
        item.graph.inputs.remove(value)
    return replace(item, inputs=tuple(port for port in item.inputs if port.name not in gone))
