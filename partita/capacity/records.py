"""Records of `partita plan --json`, and of the measured rates of a machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record
from partita.partition_reports.records import Bound

SCHEMA = "partita.plan/1"


class FormRates(Record):
    """Rates of products with weights of one form."""

    gemv_bytes_per_second: dict[int, float]
    """Bytes of all weights of a model -> bytes per second that one row of activations reads of them."""
    product_bytes: tuple[int, int]
    """Bytes of the weights of one product: in `gemv_bytes_per_second`, and in `large_gemv_bytes_per_second`."""
    large_gemv_bytes_per_second: float
    """The same with larger matrices than any cache holds together."""
    gemm_flops: float
    """Arithmetic per second for 256 rows."""
    product_seconds: float
    """A product with a matrix of 256 x 256: mostly start and synchronisation of the threads."""


class MachineRates(Record):
    """Rates of this machine with ONNX Runtime's CPU provider, each the fastest of several runs."""

    threads: int
    onnxruntime: str
    read_bytes_per_second: float
    elementwise_bytes_per_second: float
    """Read and written."""
    forms: dict[str, FormRates]
    """By form of the weights: float32, int8, int4."""
    attention_decode_flops: float
    """Arithmetic per second of attention, one new token after 1,023."""
    attention_prefill_flops: float
    node_seconds: float
    """One small node."""
    process_bytes: int
    """Resident memory of a process with ONNX Runtime and no model."""


class DeviceFacts(Record):
    """The device of a plan."""

    name: str
    """`here`, or the name of a known device."""
    title: str
    memory_bytes: int
    available_bytes: int
    """For `here`, the free memory now."""
    source: str
    """Basis of its memory and rates."""


class MemoryPart(Record):
    """Memory of one kind at full context and batch."""

    name: Literal["process", "weights", "cache", "logits", "workspace"]
    size_bytes: int
    basis: str


class Estimate(Record):
    """A computed figure with an interval."""

    value: float
    low: float
    high: float


class PhasePlan(Record):
    """One phase: prefill is the prompt, decode is one step of all rows."""

    phase: Literal["prefill", "decode"]
    read_bytes: int
    """Weights, and the cached keys and values."""
    flops: int
    seconds: Estimate
    bound_by: Bound
    """The part with most of the time."""


class Plan(Record):
    """The result of `partita plan`."""

    schema_id: Literal["partita.plan/1"] = Field(default="partita.plan/1", alias="schema")
    partita_version: str
    model: str
    kind: Literal["checkpoint", "config", "package", "folder"]
    model_type: str
    parameters: int
    """Parameters of the source model; 0 if unknown."""
    precision: str
    attention: str
    device: DeviceFacts
    context: int
    batch: int
    prompt_tokens: int
    fits: bool
    required_bytes: int
    """Peak: of loading or of running."""
    load_bytes: int
    """Peak of loading on the CPU: mapped weights and packed weights; 0 on a GPU."""
    memory: tuple[MemoryPart, ...]
    cache_bytes_per_token: int
    """Of one row, in layers that cache every token."""
    largest_context: int
    """Of this batch size; 0 if none fits. At most the model's maximum length."""
    largest_batch: int
    """Of this context; 0 if none fits."""
    context_limit: int | None
    """The model's maximum length, or the package's; null if unknown."""
    batch_limit: int | None
    """The batch size of the package; null for a checkpoint."""
    phases: tuple[PhasePlan, ...]
    first_token_seconds: Estimate
    """Of a prompt of `prompt_tokens` in every row."""
    decode_tokens_per_second: Estimate
    """Of all rows, after `prompt_tokens` tokens."""
    speed_basis: str
    notes: tuple[str, ...]
