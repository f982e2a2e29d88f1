"""Settings of the CPU provider in a session, with reasons: part of the schema `partita.report/1`."""

from __future__ import annotations

from typing import Literal

from partita.observations.records import Record

AttentionPath = Literal["flash", "naive"]
"""Algorithms of GroupQueryAttention on the CPU: flash (tiled) or naive (full score matrix)."""


class AttentionChoice(Record):
    """The algorithm that GroupQueryAttention used, with the reason."""

    path: AttentionPath
    reason: Literal[
        "faster",  # naive: measured to be faster for this processor and head size
        "not_faster",  # flash: ONNX Runtime's default
        "memory",  # flash: the matrix of scores would be too large
        "option",  # set by the user
        "environment",  # set by an environment variable of ONNX Runtime
    ]
    detail: str
    """Explanation in one sentence."""


class CpuSession(Record):
    """Threads and kernels of the CPU provider in one session."""

    file: str
    threads: int
    """Intra-op threads, including the calling thread."""
    threads_reason: Literal["option", "cores", "affinity", "quota"]
    """option: set by the user. Otherwise the physical cores of the machine (cores), of the process's CPU affinity, or
    of its cgroup quota.
    """
    cores: int
    """Physical cores that the process may run on."""
    quota: float | None
    """CPU limit of the cgroup, in CPUs; null without a limit."""
    spinning: bool
    """Threads spin while they wait for work."""
    spinning_reason: Literal["option", "default", "crowded"]
    """option: set by the user. default: ONNX Runtime's default. crowded: off, because threads exceed cores."""
    huge_page_bytes: int | None = None
    """Session memory in pages of 2 MiB; null if the system has none, they are off, or there was no decode step."""
    huge_page_seconds: float | None = None
    """Time to move memory to huge pages, before the first decode step; not part of any step's time."""
    integer_unit: str | None = None
    """Instruction set of the processor for products of 8-bit integers, e.g. avx512_vnni; empty if it has none, null if
    unknown."""
    attention: AttentionChoice | None
    """null without a choice: no GroupQueryAttention, another preferred provider, or a short prompt."""
