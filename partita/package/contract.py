"""What the runtime needs of any model: ports by role, states, and how the graphs may be fed.

A package's manifest has it on disk; a folder that Partita did not write can provide it too.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from partita import dtypes

PhaseName = Literal["prefill", "decode"]

Dimension = int | str
"""A fixed size, or the name of a symbolic one."""

CONTEXT_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "max_sequence_length", "seq_length"),
    *("n_ctx", "context_length", "model_max_length", "max_position", "max_target_positions"),
)
"""What configurations call the longest text of a model; the first that a config has counts."""
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
    "logits_rows",  # [K] which of the S positions the logits are wanted for
    "rope_length",  # [] the length of the text that this step's rotary frequencies are for; see Contract.rereads_at
    "mask",  # [B, T] 1 for each valid row of cache and step, else 0; T = max start[b] + S unless it is fixed
    "cache_branch",  # [1] whether past is to be read: false in the first step of a row
    "logits_kept",  # [] of how many positions, the last ones, logits are wanted
    "logits",  # output [B, K, vocab]
]
"""What a graph input or output means. The runtime feeds by role; it knows no names."""


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
    """A tensor that lives from step to step; `past` is read and `present` is written, as a rule in the same buffer.

    Keys and values are written at the cursor, and what lies beyond it is never read, unless they roll. A `conv` or
    `recurrent` state sums up every token that its row was fed, padding included: it is zero before a row's first token,
    and a row must be fed none but its own tokens from then on.
    """

    past: str
    present: str
    layer: int = Field(ge=0, le=1 << 20)
    kind: Literal["key", "value", "conv", "recurrent"]
    shape: tuple[Size, ...]
    """[B, KV heads, N, head size] for keys and values; [B, ...] for the others."""
    dtype: Dtype
    """Its own: a recurrent state may be float32 in an fp16 package."""
    window: int | None = None
    """Sliding window in tokens, when the layer has one."""
    rolls: bool = False
    """Keys and values of the last tokens alone: `shape` has room for a window instead of N, the graph drops the oldest
    and moves the others, and a step reads what was left by all before it. Rows that the buffer has held from their
    beginning are where fixed ones would be.
    """
    grows: int | None = None
    """The axis along which past has an entry per token so far, and present as many as after the step: optimum's layout.
    `shape` has N there, the most. None: past and present have the fixed `shape`.
    """
    in_place: bool = True
    """Past and present may be one buffer. False: the graph may write present before it has read all of past; of what
    grows always.
    """


class AdapterInput(Record):
    """An input for what an adapter has: without one a run gives it nothing where it has a default, by which nothing is
    added, else zeros.
    """

    name: str
    shape: tuple[Dimension, ...]
    """[K, r] or [r, N]; r, the rank of the adapter, is symbolic, unless all sizes are fixed."""
    dtype: str
    by_row: bool = False
    """There is an axis before these two, for rows: where it is symbolic, a run is given one for all rows or one for
    each; where it is B, one for each.
    """


class GraphFile(Record):
    """One ONNX file. A package holds one for both phases, or a fully static pair."""

    file: str
    phase: Literal["any", "prefill", "decode"]
    sequence_length: int | None
    """S, when it is fixed in the file."""
    nodes: Size
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    adapter_inputs: tuple[AdapterInput, ...] = ()


class Contract(Record):
    """Everything that running needs, apart from weights and tokens."""

    files: tuple[GraphFile, ...]
    states: tuple[State, ...]
    appends_chunks: bool
    """True when a step may take several new tokens per row after past ones; False: only one, but at the beginning."""
    batch_size: int = Field(ge=1, le=1 << 24)
    max_length: int = Field(ge=1, le=1 << 24)
    """N: the most tokens, prompt and new ones together, that a row can hold."""
    vocab_size: Size
    weight_bytes: Size
    longest: int | None = Field(default=None, ge=1)
    """What N may be set to where the folder is opened, as with those of other exporters; None: the export decided."""
    model_positions: int | None = Field(default=None, ge=1)
    """Most positions that the model of a package supports, and so the largest N of another export; None: unknown."""
    rereads_at: int | None = None
    """Keys cached by steps with a rope_length up to this do not go with those of steps beyond it: before the first step
    beyond it, prompt and new tokens are read again from the beginning. None when cached keys stay valid.
    """
    takes_fewer_rows: bool = False
    """A step may be of some neighbouring rows alone, 1 to B of them, over their part of every state: the first axis of
    what the graphs read and write by row is symbolic. False: every step is of all rows.
    """
    rereads: bool = False
    """The graph has no cache: every step reads the whole text from its beginning."""

    @property
    def adapters_by_row(self) -> bool:
        """Whether rows of a batch may have adapters of their own: every input of one has an axis for them."""
        inputs = [port for file in self.files for port in file.adapter_inputs]
        return bool(inputs) and all(port.by_row for port in inputs)

    @property
    def adapters_of_every_row(self) -> bool:
        """Whether a run is given one for each row, also where all rows have the same: the axis of rows is fixed."""
        return self.adapters_by_row and any(
            isinstance(port.shape[0], int) for file in self.files for port in file.adapter_inputs
        )

    @model_validator(mode="after")
    def _runs_every_phase(self) -> Contract:
        for phase in ("prefill", "decode"):
            if sum(file.phase in (phase, "any") for file in self.files) != 1:
                raise ValueError(f"not one of its files is for {phase}, or more than one is")
        for file in self.files:
            roles = {port.role for port in (*file.inputs, *file.outputs)}
            if lacking := {"tokens", "logits"} - roles:
                raise ValueError(f"{file.file} has no port for {' and '.join(sorted(lacking))}")
        return self
