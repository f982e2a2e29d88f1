"""The path of GroupQueryAttention on the CPU: flash tiles the prompt, naive computes all scores at once.

ONNX Runtime's default is flash. Sources: group_query_attention.cc and gqa_attention_base.h in
onnxruntime/contrib_ops/cpu/bert. Measurements: docs/cpu.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from partita.observations.records import AttentionChoice
from partita.observations.text_format import human_bytes

if TYPE_CHECKING:
    import onnx

VARIABLE = "ORT_GQA_DISABLE_FLASH_ATTENTION"
"""Environment variable; 1 selects naive. Read when a session builds its kernels."""
OPERATOR = "GroupQueryAttention"
PREFILL_TOKENS = 512
"""Default maximum number of prompt tokens per run."""
LEAST_TOKENS = 128
"""Shortest prompt in tokens for which naive was measured."""
MOST_HEAD_SIZE = 64
"""Largest head size for which naive was faster in every measurement."""
MOST_UNEVEN = 1.4
"""Naive gives each thread whole heads. One thread needs at most 0.62 of flash's time (512 tokens); this keeps it below
0.9."""
MOST_SCRATCH = 256 * 2**20
"""Maximum bytes of the matrix of scores."""
PAST_KEY, SINK = 3, 11
FLOAT32 = 1
"""ONNX element type number."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a graph that has both paths on the CPU."""

    heads: frozenset[int]
    """Query heads of its layers."""
    head_size: int
    """The largest head size."""
    has_window: bool
    """Whether a layer has a sliding window."""
    batch: int
    tokens: int
    """Maximum prompt tokens per run."""
    length: int
    """Cache length in tokens."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the matrix of scores: batch x heads x tokens per run x cache length, in float32."""
        return 4 * self.batch * max(self.heads, default=0) * self.tokens * self.length


def find_attention(model: onnx.ModelProto) -> Attention | None:
    """The attention of a graph for which ONNX Runtime's CPU provider has both paths; None without.

    Flash supports float32 without soft cap, smooth softmax, sink and output of scores; other nodes always use naive.
    """
    shapes = {port.name: port.type.tensor_type for port in model.graph.input}
    found = []
    for node in model.graph.node:
        past = shapes.get(node.input[PAST_KEY]) if len(node.input) > PAST_KEY else None
        if node.op_type != OPERATOR or past is None or past.elem_type != FLOAT32:
            continue
        given = {entry.name: entry.f if entry.type == entry.FLOAT else entry.i for entry in node.attribute}
        has_sink = len(node.input) > SINK and bool(node.input[SINK])
        if has_sink or any(given.get(name, 0) > 0 for name in ("softcap", "smooth_softmax", "qk_output")):
            continue
        dims = [size.dim_value for size in past.shape.dim]
        if len(dims) == 4 and all(dims) and given.get("num_heads"):  # others grow, or have an unknown size
            found.append((int(given["num_heads"]), given.get("local_window_size", -1) > 0, dims))
    if not found:
        return None
    batch, _, length, head_size = (max(column) for column in zip(*(dims for _, _, dims in found), strict=True))
    heads, windows = frozenset(heads for heads, _, _ in found), any(window for _, window, _ in found)
    return Attention(heads, head_size, windows, batch, min(PREFILL_TOKENS, length), length)


def attention_path(attention: Attention | None, tokens: int | None) -> Attention | None:
    """The attention of a graph with at most `tokens` prompt tokens per run. None: unlimited."""
    if attention is None or tokens is None:
        return attention
    return replace(attention, tokens=min(attention.tokens, tokens))


def by_word(option: str, variable: str) -> AttentionChoice | None:
    """The path set by the user with the provider's option or the environment variable; None for neither."""
    if option in ("flash", "naive"):
        path: Literal["flash", "naive"] = "flash" if option == "flash" else "naive"
        return AttentionChoice(path=path, reason="option", detail=f"cpu.attention={path}")
    if not variable:
        return None
    off = variable != "0"
    return AttentionChoice(
        path="naive" if off else "flash", reason="environment", detail=f"the environment has {VARIABLE}={variable}"
    )


def choose(attention: Attention, threads: int, *, avx512: bool) -> AttentionChoice | None:
    """The path for all nodes of a graph; None if prompts are run in chunks below 128 tokens.

    Naive with AVX-512 and head sizes up to 64; otherwise flash, ONNX Runtime's default.
    """
    if attention.tokens < LEAST_TOKENS:
        return None
    if attention.scratch_bytes > MOST_SCRATCH:
        need = f"the naive path would need {human_bytes(attention.scratch_bytes)} for {attention.tokens} tokens"
        return AttentionChoice(
            path="flash", reason="memory", detail=f"{need}, above the limit of {human_bytes(MOST_SCRATCH)}"
        )
    against = "" if avx512 else "the processor does not report AVX-512"
    if attention.head_size > MOST_HEAD_SIZE:
        against = f"head size {attention.head_size} is above {MOST_HEAD_SIZE}"
    elif attention.has_window:
        against = "a layer has a sliding window"
    for heads in sorted(attention.batch * heads for heads in attention.heads):
        if not against and math.ceil(heads / threads) * threads > MOST_UNEVEN * heads:
            against = f"{heads} heads do not divide evenly among {threads} threads"
    if against:
        return AttentionChoice(path="flash", reason="not_faster", detail=f"ONNX Runtime's default: {against}")
    detail = f"faster for prompts with AVX-512 and head sizes up to {MOST_HEAD_SIZE}"
    return AttentionChoice(path="naive", reason="faster", detail=detail)
