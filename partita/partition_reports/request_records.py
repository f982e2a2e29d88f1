"""Request, model, dry run and speculative decoding: part of the schema `partita.report/1`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record


class ModelInput(Record):
    """An input of a model that is not a package, with the shape used."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    """The shape used; null if its sizes are dynamic and no value could be generated, so that the model was not run."""

    @property
    def declared(self) -> str:
        """Type and shape as text: `float32[1,3]`."""
        return self.dtype if self.shape is None else f"{self.dtype}[{','.join(map(str, self.shape))}]"


class ModelFacts(Record):
    """The ONNX file that was run, if it is not a package."""

    file: str
    sha256: str
    """Hash of the ONNX file without `data_files`."""
    data_files: tuple[str, ...]
    """Files with external weights."""
    ir_version: int
    opsets: dict[str, int]
    """Operator set version by domain; "" is ai.onnx."""
    nodes: int
    """Nodes of the main graph."""
    inputs: tuple[ModelInput, ...]


class DryRunFacts(Record):
    """The simulated device of a dry run, and the parts of the report that are not real."""

    device: str
    """Name of the device profile."""
    device_name: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int
    provider_library: str
    """File of the real execution provider."""
    onnxruntime_version: str
    cuda_version: str
    """The version that the stub libraries report."""
    stub_build: str
    """Build of the stub libraries that the process loaded."""
    not_real: tuple[str, ...]


class Request(Record):
    """The user's request."""

    verb: str
    path: str | None = None
    """Path of the package or model in the process that ran it."""
    chain: tuple[str, ...]
    """Provider names in the order given."""
    chain_source: str
    """`command line` or `default`, with the reason."""
    options: dict[str, str]
    threads: int | None
    prompt_tokens: int | None
    """null, as the next two fields, without a generation."""
    max_new_tokens: int | None
    prefill_chunk_tokens: int | None
    runs: int | None = None
    """Requested session runs of `place` per phase."""
    limits: dict[str, int] = Field(default_factory=dict)
    """Option name -> limit of the placement."""


class Speculation(Record):
    """Speculative decoding. Profiled steps have no draft tokens and are excluded."""

    kind: Literal["ngram", "draft"]
    draft: str | None
    """Name of the draft package; null for n-gram lookup."""
    steps: int
    """Decode steps without profiling."""
    drafting_steps: int
    """Steps that verified draft tokens."""
    drafted: int
    """Verified draft tokens."""
    accepted: int
    acceptance_rate: float | None
    """`accepted` divided by `drafted`; null without draft tokens."""
    tokens: int
    """New tokens of all rows."""
    tokens_per_step: float | None
    seconds: float
    """Wall time of the steps."""
    draft_seconds: float
    """Time for drafting, part of `seconds`, including runs of the draft model."""
    plain_token_ms: float | None
    """Median time per token of steps without draft tokens, without drafting time; null if there are none."""
    speedup: float | None
    """Estimated time without draft tokens, divided by the measured time. The estimate uses the median of steps without
    draft tokens and with the same number of rows; null without draft tokens, or without these steps.
    """
