"""The contract of a model for the runtime: ports by role, states, and feeding rules.

It is part of a package's manifest, and is inferred for foreign folders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from partita import dtypes

PhaseName = Literal["prefill", "decode"]
Phase = Literal["any", PhaseName]

Dimension = int | str
"""A fixed size, or the name of a symbolic one."""

CONTEXT_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "max_sequence_length", "seq_length"),
    *("n_ctx", "context_length", "model_max_length", "max_position", "max_target_positions"),
)
"""Config keys of the maximum length; the first that a config has counts."""
Size = Annotated[int, Field(ge=0)]


def _storable(name: str) -> str:
    dtypes.storage(name)  # raises ValueError
    return name


Dtype = Annotated[str, AfterValidator(_storable)]
"""A numpy name of an element type that numpy can store."""

Role = Literal[
    "tokens",  # [B, S] token ids
    "positions",  # [B, S] start[b] + 0 .. S-1
    "last_index",  # [B] start[b] + S - 1: index of the last cache row that is valid after this step
    "total_length",  # [] max over rows of start[b] + S
    "write_start",  # [B] start[b]: first cache row this step writes
    "valid_length",  # [B] start[b] + S: cache rows that are valid after this step
    "logits_rows",  # [K] indices into S of the positions with logits
    "rope_length",  # [] the sequence length for this step's rotary frequencies; see Contract.recompute_above
    "mask",  # [B, T] 1 for each valid row of cache and step, else 0; T = max start[b] + S unless it is fixed
    "cache_branch",  # [1] whether to read past: false in the first step of a sequence
    "logits_count",  # [] number of last positions with logits
    "logits",  # output [B, K, vocab]
]
"""The role of a graph input or output. The runtime feeds by role, not by name."""


class Record(BaseModel):
    """Base of every record on disk: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Port(Record):
    """A graph input or output that is not a state."""

    name: str
    role: Role
    shape: tuple[Dimension, ...]
    dtype: Dtype


class State(Record):
    """A tensor that is passed from step to step: `past` is read and `present` is written, usually in the same buffer.

    Keys and values are written at the cursor, and rows beyond it are never read, unless they roll. A `conv` or
    `recurrent` state depends on every input token of its sequence, padding included: it is zero before the first token,
    and only the sequence's own tokens may be fed.
    """

    past: str
    present: str
    layer: int = Field(ge=0, le=1 << 20)
    kind: Literal["key", "value", "conv", "recurrent"]
    shape: tuple[Size, ...]
    """[B, KV heads, N, head size] for keys and values; [B, ...] for the others."""
    dtype: Dtype
    """Its own dtype: a recurrent state may be float32 in an fp16 package."""
    window: int | None = None
    """Sliding window in tokens, when the layer has one."""
    rolling: bool = False
    """Window cache: `shape` has room for a window instead of N, the graph drops the oldest rows and moves the others.
    Rows that are still in the buffer from its start are where a static cache has them."""
    growing_axis: int | None = None
    """The axis along which past has one entry per earlier token and present one per token: optimum's layout. `shape`
    has N there. None: past and present have the fixed `shape`."""
    in_place: bool = True
    """Past and present may share a buffer. False: the graph may write present before it has read all of past; always
    for growing states."""


def state_bytes(states: Iterable[State], dtype: str | None = None) -> int:
    """Size of states at their maximum in bytes, in their own dtypes or in `dtype`."""
    return sum(dtypes.size_bytes(dtype or state.dtype, state.shape) for state in states)


class AdapterInput(Record):
    """An input for a value of an adapter. Without an adapter a run omits it, or feeds zeros where it has no default."""

    name: str
    shape: tuple[Dimension, ...]
    """[K, r] or [r, N]; the rank r is symbolic, unless all sizes are fixed."""
    dtype: str
    by_row: bool = False
    """It has a leading batch axis: if symbolic, a run feeds one value for all sequences or one per sequence; if B, one
    per sequence."""


class GraphFile(Record):
    """One ONNX file. A package has one for both phases, or a static pair."""

    file: str
    phase: Phase
    sequence_length: int | None
    """S, when it is fixed in the file."""
    nodes: Size
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    adapter_inputs: tuple[AdapterInput, ...] = ()


class Contract(Record):
    """The data needed to run a model, apart from weights and tokens."""

    files: tuple[GraphFile, ...]
    states: tuple[State, ...]
    appends_chunks: bool
    """A step may have several new tokens per sequence after past ones; False: only at the start of a sequence."""
    batch_size: int = Field(ge=1, le=1 << 24)
    max_length: int = Field(ge=1, le=1 << 24)
    """N: maximum tokens of a sequence, prompt and completion."""
    vocab_size: Size
    weight_bytes: Size
    max_length_limit: int | None = Field(default=None, ge=1)
    """Maximum value of N when the folder is opened, for foreign folders; None: fixed by the export."""
    model_positions: int | None = Field(default=None, ge=1)
    """Maximum positions of the model, i.e. the largest N of another export; None: unknown."""
    recompute_above: int | None = None
    """Keys cached by steps with a rope_length up to this are invalid for longer ones: before the first longer step, all
    tokens run again. None when cached keys stay valid."""
    symbolic_batch: bool = False
    """A step may run 1 to B neighbouring sequences on their part of every state: the batch axis is symbolic. False:
    every step runs the whole batch."""
    cacheless: bool = False
    """The graph has no cache: every step runs the whole sequence."""

    @property
    def adapters_by_row(self) -> bool:
        """Whether sequences of a batch may have different adapters: every adapter input has a batch axis."""
        inputs = [port for file in self.files for port in file.adapter_inputs]
        return bool(inputs) and all(port.by_row for port in inputs)

    @property
    def adapters_of_every_row(self) -> bool:
        """Whether a run feeds one adapter per sequence even if they are equal: the batch axis is fixed."""
        return self.adapters_by_row and any(
            isinstance(port.shape[0], int) for file in self.files for port in file.adapter_inputs
        )

    @model_validator(mode="after")
    def _runs_every_phase(self) -> Contract:
        for phase in ("prefill", "decode"):
            count = sum(file.phase in (phase, "any") for file in self.files)
            if count != 1:
                raise ValueError(
                    f"{count} files for {phase}; name one file for any phase, or one for prefill and one for decode"
                )
        for file in self.files:
            roles = {port.role for port in (*file.inputs, *file.outputs)}
            if lacking := {"tokens", "logits"} - roles:
                raise ValueError(f"{file.file} lacks ports for {' and '.join(sorted(lacking))}")
        return self
