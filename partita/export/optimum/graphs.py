"""What optimum wrote, as a graph and the contract by which it is run: names and sizes are those of optimum.

Inputs are `input_ids`, `attention_mask`, `position_ids` where the model has any, and `past_key_values.N.key`; outputs
`logits` and `present.N.key`. Past grows by the tokens of a step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx_ir as ir

from partita.errors import UnsupportedModelError
from partita.export.graph.element_types import of_ir
from partita.package.contract import Contract, Dimension, GraphFile, Port, Role, State

FILE = "model.onnx"
ROLES: dict[str, Role] = {
    "input_ids": "tokens",
    "attention_mask": "mask",
    "position_ids": "positions",
    "logits": "logits",
}
PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
GROWING_AXIS = 2
"""Of [B, KV heads, tokens, head size]."""


def load(folder: Path) -> ir.Model:
    """The graph that optimum wrote; its weights stay in their file. Raises UnsupportedModelError for another layout."""
    path = folder / FILE
    if not path.is_file():
        found = sorted(each.name for each in folder.glob("*.onnx"))
        raise UnsupportedModelError(f"optimum wrote {', '.join(found) or 'no graph'} where {FILE} was expected")
    return ir.load(path)


def contract_of(model: ir.Model, batch: int, max_length: int, vocab_size: int) -> Contract:
    """How the graph is run. Raises UnsupportedModelError for inputs that this layout does not have."""
    return Contract(
        files=(
            GraphFile(
                file=FILE,
                phase="any",
                sequence_length=None,
                nodes=len(list(model.graph)),
                inputs=tuple(_ports(model.graph.inputs, batch)),
                outputs=tuple(_ports((value for value in model.graph.outputs if value.name in ROLES), batch)),
            ),
        ),
        states=tuple(_states(model, batch, max_length)),
        appends_chunks=True,
        batch_size=batch,
        max_length=max_length,
        vocab_size=vocab_size,
        weight_bytes=0,
    )


def vocabulary(model: ir.Model) -> int | None:
    """How many tokens there are logits for; None where the graph does not say."""
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    size = logits.shape[-1] if logits is not None and logits.shape is not None else None
    return size if isinstance(size, int) else None


def weights_of(model: ir.Model) -> tuple[int, int]:
    """How many weights the graph has, and the bytes of everything that it has stored."""
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    count = sum(tensor.size for tensor in tensors if tensor.dtype.is_floating_point())
    return count, sum(tensor.nbytes for tensor in tensors)


def _ports(values: Iterable[ir.Value], batch: int) -> Iterator[Port]:
    for value in values:
        name = value.name or ""
        if PAST.fullmatch(name):
            continue
        if name not in ROLES:
            raise UnsupportedModelError(
                f"optimum's graph has the input {name!r}, which a decoder of text does not need"
            )
        yield Port(name=name, role=ROLES[name], shape=_shape(value, batch), dtype=_dtype(value))


def _states(model: ir.Model, batch: int, max_length: int) -> Iterator[State]:
    outputs = {value.name for value in model.graph.outputs}
    for value in model.graph.inputs:
        found = PAST.fullmatch(value.name or "")
        if found is None:
            continue
        layer, kind = int(found[1]), found[2]
        present = f"present.{layer}.{kind}"
        sizes = [batch, *_shape(value, batch)[1:]]
        if len(sizes) != 4 or present not in outputs or not all(isinstance(sizes[axis], int) for axis in (1, 3)):
            raise UnsupportedModelError(
                f"optimum's graph keeps {value.name} as {list(sizes)}: keys and values of a known number of heads and "
                "size were expected"
            )
        sizes[GROWING_AXIS] = max_length
        yield State(
            past=value.name or "",
            present=present,
            layer=layer,
            kind="key" if kind == "key" else "value",
            shape=tuple(int(size) for size in sizes),
            dtype=_dtype(value),
            grows=GROWING_AXIS,
            in_place=False,
        )


def _shape(value: ir.Value, batch: int) -> tuple[Dimension, ...]:
    """The sizes of a port, the batch as it is asked for."""
    if value.shape is None:
        raise UnsupportedModelError(f"optimum's graph does not say of which rank {value.name} is")
    rest = (size if isinstance(size, int) else str(size.value or "unknown") for size in list(value.shape)[1:])
    return (batch, *rest)


def _dtype(value: ir.Value) -> str:
    if value.dtype is None:
        raise UnsupportedModelError(f"optimum's graph does not say of which type {value.name} is")
    return of_ir(value.dtype)
