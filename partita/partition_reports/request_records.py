"""What was asked for, of which model, and how a dry run was made: parts of the schema `partita.report/1`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record


class ModelInput(Record):
    """An input of a model that is no package, and what it was given."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    """The shape used; null of an input for which no value can be made and whose sizes are open: the model was not run.
    """

    @property
    def declared(self) -> str:
        """Type and shape for people: `float32[1,3]`."""
        return self.dtype if self.shape is None else f"{self.dtype}[{','.join(map(str, self.shape))}]"


class ModelFacts(Record):
    """The ONNX file that was run, when it is no package."""

    file: str
    sha256: str
    """Of the ONNX file alone; `data_files` are not in it."""
    data_files: tuple[str, ...]
    """Files beside it that hold weights."""
    ir_version: int
    opsets: dict[str, int]
    """Operator set per domain; "" is ONNX itself."""
    nodes: int
    """Of the main graph."""
    inputs: tuple[ModelInput, ...]


BlockingCause = Literal["control_flow", "copy", "elsewhere", "size"]
"""The host decides which body runs; a copy waits for it; the node is not on the device; the host reads a size back."""


class BlockingNode(Record):
    """A node that cannot be part of a captured graph."""

    node: str
    op_type: str | None
    provider: str
    cause: BlockingCause | None = None
    """Null in a report that was written without."""
    why: str
    """The cause in words."""


class GraphCapture(Record):
    """Whether a session would let its runs be captured into one CUDA graph."""

    file: str
    accepted: bool
    evidence: str
    """What ONNX Runtime said, or that it opened the session."""
    blocking: tuple[BlockingNode, ...]
    """Nodes that block the capture; those of an accepted session slow it down or make captures wrong."""


class DryRunFacts(Record):
    """A run without the device: which one was simulated, and what is therefore not real."""

    device: str
    """Name of the device profile."""
    device_name: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int
    provider_library: str
    """File of the execution provider, which is the real one."""
    onnxruntime_version: str
    cuda_version: str
    """The version that the stub libraries report."""
    stand_ins: str
    """Name of the build of the stub libraries, as the process that ran proved to have loaded them."""
    not_real: tuple[str, ...]
    graph_capture: tuple[GraphCapture, ...] | None
    """One per ONNX file; null when it was not asked for."""


class Request(Record):
    """What the user asked for."""

    verb: str
    path: str | None = None
    """Of the package or model, as the process that ran it was given it; null in a report that was written without."""
    chain: tuple[str, ...]
    """Provider names in the order given."""
    chain_source: str
    """`command line` or `default`, with the reason."""
    options: dict[str, str]
    threads: int | None
    prompt_tokens: int | None
    """null, like the next two, where nothing is generated."""
    max_new_tokens: int | None
    prefill_chunk_tokens: int | None
    runs: int | None = None
    """Session runs per phase that `place` was asked for."""
    limits: dict[str, int] = Field(default_factory=dict)
    """Limits that the run had to meet, by option name."""
