"""A Hugging Face decoder on fake tensors -> an ONNX graph with a static cache, its nodes named by module path.

transformers' own modelling code is traced with our attention function and cache plugged in (`hooks.py`); no weight is
read. Parameters come out as initializers without data, named as in the model; buffers (rotary frequencies, scales) are
real.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir
import torch
import transformers.utils.logging
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig

from partita.errors import PartitaError, UnsupportedModelError
from partita.export.attention import Lowering
from partita.export.attention.base import AttentionCall
from partita.export.cleaning import clean
from partita.export.hooks import IMPLEMENTATION, AttentionRequest, MaskRule, Plug, PlugCache, plugged, register
from partita.export.opset17 import WRITTEN, to_opset17
from partita.export.state import LayerState, probe_layers
from partita.package import Port, State

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MODULE, CLASS, SOURCE = "partita.module", "partita.class", "partita.source"
"""Node metadata keys: module path, module class, file:line of the modelling code."""
ROOT = "hf"
"""Attribute that holds the original model inside the traced wrapper; stripped from every name."""
EXAMPLE_TOKENS, EXAMPLE_ROWS = 3, 2
POSITIONS, TORCH_POSITIONS = "int32", torch.int32
"""GPU providers have kernels for int32 where they have none for int64 (Unsqueeze and Cast on WebGPU), and a position
fits."""


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """The fixed sizes of one graph."""

    batch: int
    max_length: int
    sequence_length: int | None
    """S, or None to leave it symbolic; a fixed S also fixes K to 1."""
    opset: int


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model without weights: parameters are fake tensors, buffers are real."""

    module: torch.nn.Module
    mode: FakeTensorMode
    dtype: str
    layers: tuple[LayerState, ...]
    vocab_size: int

    def stored_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that a checkpoint may hold, with the values the model gives them when it does not."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: value for name, value in self.module.state_dict().items() if name not in parameters}


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph and the contract of its inputs and outputs."""

    model: ir.Model
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    states: tuple[State, ...]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings of torch, onnxscript and transformers that a user can do nothing about off the terminal."""
    loggers = [
        logging.getLogger(n) for n in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers", "torch")
    ]
    levels = [logger.level for logger in loggers]
    bars = transformers.utils.logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def build_fake_model(config: PreTrainedConfig, dtype: str, batch: int, max_length: int) -> FakeModel:
    """Build the model of `config` without weights and probe what its layers cache.

    Raises UnsupportedModelError with the reason when the model cannot be built or probed.
    """
    register()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> Any:
        if parameter is None or isinstance(parameter, FakeTensor):
            return parameter  # a tied parameter is registered twice and must stay one object
        with mode:
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
        return torch.nn.Parameter(data, requires_grad=False)

    handle = register_module_parameter_registration_hook(fake_parameter)
    try:
        with quiet(), translated("building the model from config.json"):
            module = AutoModelForCausalLM.from_config(
                config, attn_implementation=IMPLEMENTATION, dtype=TORCH_DTYPES[dtype], trust_remote_code=False
            ).eval()
            _refuse_by_modules(module)
            _refuse_length_dependent_rope(module)
        with quiet(), translated("running the model once, on tensors without data,"):
            layers = probe_layers(module, mode, batch, max_length)
    finally:
        handle.remove()
    vocabulary = int(module.config.get_text_config().vocab_size)
    return FakeModel(module, mode, dtype, layers, vocabulary)


def _refuse_by_modules(model: torch.nn.Module) -> None:
    """Refuse by name what would fail later for reasons a user cannot read."""
    experts = next((type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Experts")), None)
    if experts is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has mixture-of-experts layers ({experts}); not exported yet"
        )
    if getattr(model.config.get_text_config(), "num_hidden_layers", 1) == 0:  # type: ignore[union-attr, operator]
        raise UnsupportedModelError(f"{type(model).__name__} has no layers: num_hidden_layers is 0 in config.json")


LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rope types of transformers that pick their frequencies by the longest position of a call (modeling_rope_utils.py)."""


def _refuse_length_dependent_rope(model: torch.nn.Module) -> None:
    """A graph has one set of frequencies; a rope type that changes them from call to call would come out wrong."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in LENGTH_DEPENDENT_ROPE:
                raise UnsupportedModelError(
                    f"{name}: rope type {kind!r} picks its frequencies by the length of each prompt; it cannot be "
                    "exported yet"
                )


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn any exception of the traced model code into UnsupportedModelError; our own pass through."""
    try:
        yield
    except PartitaError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, PartitaError):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise UnsupportedModelError(
                "the model picks its attention by class and not through transformers' AttentionInterface; it "
                "cannot be traced with a "
                "static cache"
            ) from error
        first = next((line for line in str(error).splitlines() if line.strip()), "no message")
        raise UnsupportedModelError(f"{what} failed: {type(error).__name__}: {first.strip()[:300]}") from error


class _Wrapper(torch.nn.Module):
    """The model with flat inputs and outputs: tokens, positions, rows, cursors, past states -> logits, present
    states.
    """

    def __init__(self, fake: FakeModel, lowering: Lowering, max_length: int) -> None:
        super().__init__()
        setattr(self, ROOT, fake.module)
        self.layers, self.lowering, self.max_length = fake.layers, lowering, max_length

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_indices: torch.Tensor,
        cursors: tuple[torch.Tensor, ...],
        past: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def lower(request: AttentionRequest) -> torch.Tensor:
            keys, values = past[2 * request.layer : 2 * request.layer + 2]
            call = AttentionCall(
                request.query,
                request.key,
                request.value,
                keys,
                values,
                position_ids,
                cursors,
                request.scale,
                request.softcap,
                self.layers[request.layer].window,
            )
            output, *new = self.lowering.emit(call)
            present[request.layer] = (new[0], new[1])
            return output

        # Which layer has which window was settled by the probe; here a mask function cannot be evaluated.
        plug = Plug(lower, lambda function: MaskRule(None), self.max_length)
        with plugged(plug):
            logits = getattr(self, ROOT)(
                input_ids=input_ids,
                position_ids=position_ids,
                past_key_values=PlugCache(plug, len(self.layers)),
                use_cache=True,
                attention_mask=None,
                logits_to_keep=logits_indices,
            ).logits
        return (logits, *(tensor for layer in sorted(present) for tensor in present[layer]))


def trace(fake: FakeModel, lowering: Lowering, spec: TraceSpec) -> Traced:
    """Trace `fake` with `lowering` into an ONNX graph of the sizes in `spec`.

    Raises UnsupportedModelError when a layer does not fit the lowering or the model code cannot be traced.
    """
    _check_fit(fake, lowering)
    length = spec.sequence_length or min(EXAMPLE_TOKENS, spec.max_length)
    rows = 1 if spec.sequence_length else min(EXAMPLE_ROWS, length)
    states = _states(fake, spec)
    with fake.mode:
        ids = torch.zeros(spec.batch, length, dtype=torch.long)
        cursors = tuple(
            torch.zeros(spec.batch if c.per_row else (), dtype=getattr(torch, c.dtype)) for c in lowering.cursors
        )
        past = tuple(torch.zeros(s.shape, dtype=TORCH_DTYPES[s.dtype]) for s in states)
        positions = torch.zeros(spec.batch, length, dtype=TORCH_POSITIONS)
        arguments = (ids, positions, torch.zeros(rows, dtype=torch.long), cursors, past)
    shapes: dict[str, Any] | None = None
    if spec.sequence_length is None:
        tokens = torch.export.Dim("sequence_length", min=1, max=spec.max_length)
        wanted = torch.export.Dim("logits_rows", min=1, max=spec.max_length)
        shapes = {
            "input_ids": {1: tokens},
            "position_ids": {1: tokens},
            "logits_indices": {0: wanted},
            "cursors": tuple({} for _ in cursors),
            "past": tuple({} for _ in past),
        }
    input_names = [
        "input_ids",
        "position_ids",
        "logits_indices",
        *(c.name for c in lowering.cursors),
        *(s.past for s in states),
    ]
    output_names = ["logits", *(s.present for s in states)]
    with quiet(), torch.no_grad(), translated("tracing the model"):
        wrapper = _Wrapper(fake, lowering, spec.max_length)
        program = torch.export.export(wrapper, arguments, dynamic_shapes=shapes, strict=False)
        onnx_program = torch.onnx.export(
            program,
            arguments,
            dynamo=True,
            opset_version=max(spec.opset, WRITTEN),
            input_names=input_names,
            output_names=output_names,
            optimize=False,
            verbose=False,
        )
    assert onnx_program is not None
    model = onnx_program.model
    with quiet(), translated("cleaning the graph"):
        _strip_weights(model, fake.module)
        _settle_domains(model, lowering, max(spec.opset, WRITTEN))
        clean(model)
        _drop_unused_inputs(model)
        name_nodes(model)
        if spec.opset < WRITTEN:
            to_opset17(model)
    return Traced(model, *_ports(model, lowering, spec, fake), states)


def _check_fit(fake: FakeModel, lowering: Lowering) -> None:
    for layer in fake.layers:
        if lowering.same_kv_width and layer.key_width != layer.value_width:
            raise UnsupportedModelError(
                f"layer {layer.layer} caches keys of width {layer.key_width} and values of width {layer.value_width}; "
                f"--attention {lowering.name} needs them equal"
            )


def _states(fake: FakeModel, spec: TraceSpec) -> tuple[State, ...]:
    return tuple(
        State(
            past=f"past_key_values.{layer.layer}.{kind}",
            present=f"present.{layer.layer}.{kind}",
            layer=layer.layer,
            kind=kind,
            shape=(spec.batch, layer.kv_heads, spec.max_length, width),
            dtype=fake.dtype,
            window=layer.window,
        )
        for layer in fake.layers
        for kind, width in _widths(layer)
    )


def _widths(layer: LayerState) -> tuple[tuple[Literal["key", "value"], int], ...]:
    """What a layer caches, with the size of its last axis."""
    return ("key", layer.key_width), ("value", layer.value_width)


def _strip_weights(model: ir.Model, module: torch.nn.Module) -> None:
    """Rename initializers to the model's own names, and drop the data of what a checkpoint may hold.

    That is every parameter and every persistent buffer; left in place, the value a buffer has in a fresh model would be
    folded into the graph.
    """
    stored = {f"{ROOT}.{name}" for name in module.state_dict()}
    stored |= {f"{ROOT}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in list(model.graph.initializers.items()):
        if not name.startswith(f"{ROOT}."):
            continue
        if name in stored:
            value.const_value = None
        value.name = name.removeprefix(f"{ROOT}.")


def _settle_domains(model: ir.Model, lowering: Lowering, opset: int) -> None:
    """torch writes the standard domain of a symbolic op as "onnx", where ONNX wants ""."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain == "onnx":
            node.domain = ""
    model.opset_imports.clear()
    model.opset_imports[""] = opset
    for domain, version in lowering.domains:
        model.opset_imports[domain] = version


def _drop_unused_inputs(model: ir.Model) -> None:
    """An input that no node reads (positions of a model without any, say) must not be asked of the user."""
    graph = model.graph
    for value in [v for v in graph.inputs if not v.uses()]:
        if value.name == "input_ids":
            raise UnsupportedModelError("the traced graph does not read its tokens; this model cannot be exported")
        graph.inputs.remove(value)


def name_nodes(model: ir.Model) -> None:
    """Name every node `<module path>/<Op>[_n]`, its outputs after it, and keep module, class and source line as
    metadata.
    """
    seen: dict[str, int] = {}
    keep = {v.name for v in (*model.graph.inputs, *model.graph.outputs)} | set(model.graph.initializers)
    for node in model.graph:
        module = _settle_metadata(node)
        base = f"{module or 'graph'}/{node.op_type}"
        number = seen.get(base, 0)
        seen[base] = number + 1
        node.name = f"{base}_{number}" if number else base
        for index, value in enumerate(node.outputs):
            if value.name not in keep:
                value.name = f"{node.name}_output_{index}"


def _settle_metadata(node: ir.Node) -> str:
    """Replace torch's long metadata by three short entries; returns the module path, "" at the top."""
    properties = node.metadata_props
    if MODULE in properties:
        return properties[MODULE]
    scopes = _as_list(properties.get("pkg.torch.onnx.name_scopes"))
    classes = _as_list(properties.get("pkg.torch.onnx.class_hierarchy"))
    paths = [s.removeprefix(ROOT).removeprefix(".") for s in scopes[:-1] if s == ROOT or s.startswith(f"{ROOT}.")]
    source = _source_line(properties.get("pkg.torch.onnx.stack_trace", ""))
    properties.clear()
    module = paths[-1] if paths else ""
    properties[MODULE] = module
    if len(classes) >= len(scopes) - 1 and len(scopes) > 1:
        properties[CLASS] = classes[len(scopes) - 2].rpartition(".")[2]
    if source:
        properties[SOURCE] = source
    return module


def _as_list(text: str | None) -> list[str]:
    """torch writes these lists as Python literals of plain strings."""
    return re.findall(r"'([^']*)'", text or "")


def _source_line(stack: str) -> str:
    """file:line of the innermost frame of modelling code, below site-packages."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack)
    for path, line in reversed(frames):
        if "modeling_" in path or "/transformers/" in path:
            return f"{path.rpartition('site-packages/')[2]}:{line}"
    return ""


def _ports(
    model: ir.Model, lowering: Lowering, spec: TraceSpec, fake: FakeModel
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Ports of the graph that are not states, by role."""
    tokens: tuple[int | str, ...] = (spec.batch, spec.sequence_length or "sequence_length")
    rows: int | str = 1 if spec.sequence_length else "logits_rows"
    known = {
        "input_ids": Port(name="input_ids", role="tokens", shape=tokens, dtype="int64"),
        "position_ids": Port(name="position_ids", role="positions", shape=tokens, dtype=POSITIONS),
        "logits_indices": Port(name="logits_indices", role="logits_rows", shape=(rows,), dtype="int64"),
    }
    for cursor in lowering.cursors:
        shape: tuple[int | str, ...] = (spec.batch,) if cursor.per_row else ()
        known[cursor.name] = Port(name=cursor.name, role=cursor.role, shape=shape, dtype=cursor.dtype)
    inputs = tuple(known[v.name] for v in model.graph.inputs if v.name in known)
    logits = model.graph.outputs[0]
    assert logits.dtype is not None
    dtype = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}[
        logits.dtype
    ]
    output = Port(name="logits", role="logits", shape=(spec.batch, rows, fake.vocab_size), dtype=dtype)
    return inputs, (output,)
