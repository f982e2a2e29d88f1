"""CPU resources of this process, and the rule for the path of GroupQueryAttention. Does not import ONNX Runtime.

ONNX Runtime creates a thread for each physical core of the machine, including cores outside the process's affinity
(1.31.1). So the number is set explicitly whenever the process has fewer cores than the machine.

GroupQueryAttention has two paths: flash tiles the prompt, naive computes all scores at once. ONNX Runtime's default is
flash. Sources: group_query_attention.cc and gqa_attention_base.h in onnxruntime/contrib_ops/cpu/bert. Measurements:
docs/cpu.md.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from partita.observations.records import AttentionChoice
from partita.observations.text_format import human_bytes

if TYPE_CHECKING:
    import onnx

ROOT = Path("/")
CPU_INFO = Path("/proc/cpuinfo")
INTEGER_UNITS = ("amx_int8", "avx512_vnni", "avx_vnni", "asimddp")
"""Processor flags for 8-bit integer dot products, fastest first."""
Reason = Literal["option", "cores", "affinity", "quota"]


@dataclass(frozen=True, slots=True)
class Cores:
    """The CPU resources of this process."""

    machine: int
    """Physical cores of the machine."""
    allowed: int
    """Physical cores in the process's affinity."""
    quota: float | None
    """CPU quota of the control group, in CPUs; None without a limit."""

    def threads(self, requested: int | None = None) -> tuple[int, Reason]:
        """Number of threads, at least one, and the reason for it. `requested`: set by the user."""
        if requested is not None:
            return requested, "option"
        if self.quota is not None and math.floor(self.quota) < self.allowed:
            return max(1, math.floor(self.quota)), "quota"
        return self.allowed, "cores" if self.allowed >= self.machine else "affinity"

    def is_oversubscribed(self, threads: int) -> bool:
        """Whether there are more threads than cores or quota."""
        return threads > self.allowed or (self.quota is not None and threads > max(1, math.floor(self.quota)))


def usable_cores(root: Path = ROOT, affinity: Collection[int] | None = None) -> Cores:
    """The cores of this machine and process. `root`, `affinity`: replacements for tests."""
    every = range(os.cpu_count() or 1)
    may = os.sched_getaffinity(0) if affinity is None and hasattr(os, "sched_getaffinity") else affinity
    if may is None:  # no CPU affinity on this system
        physical = psutil.cpu_count(logical=False) or len(every)
        return Cores(physical, physical, None)
    siblings = {cpu: _core_of(root, cpu) for cpu in {*every, *may}}
    machine, allowed = (len({siblings[cpu] for cpu in some}) for some in (siblings, may))
    return Cores(machine, max(allowed, 1), _quota(root))


def _core_of(root: Path, cpu: int) -> str:
    """A key equal for CPUs of the same physical core."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> float | None:
    """The lowest CPU quota of the control groups (version 2) of this process, in CPUs; None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        number, _, path = line.split(":", 2)
        # Inside a container its own group is mounted as the root, but the path may be that outside.
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for depth in range(len(parts) + 1) if number == "0" else ():
            with suppress(OSError, ValueError):  # no such group, or `max`
                folder = (root / "sys/fs/cgroup").joinpath(*parts[:depth])
                quota, period = map(float, (folder / "cpu.max").read_text(encoding="utf-8").split())
                limits.append(quota / period)
    return min(limits, default=None)


def cpu_name(info: Path = CPU_INFO) -> str:
    """Model name of the processor."""
    pairs = (line.partition(":") for line in _cpu_info(info).splitlines())
    named = next((value.strip() for key, _, value in pairs if key.strip() == "model name"), "")
    return named or platform.processor() or platform.machine()


def cpu_flags(info: Path = CPU_INFO) -> frozenset[str]:
    """Words of /proc/cpuinfo, including the instruction sets; empty on other systems."""
    return frozenset(_cpu_info(info).split())


def integer_unit(info: Path = CPU_INFO) -> str | None:
    """The fastest of `INTEGER_UNITS` of the processor; empty if it has none, None if unknown."""
    known = cpu_flags(info)
    return next((flag for flag in INTEGER_UNITS if flag in known), "") if known else None


def _cpu_info(info: Path) -> str:
    """Contents of /proc/cpuinfo; empty on other systems."""
    return info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""


# --- the attention rule -----------------------------------------------------------------------------------------------

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
