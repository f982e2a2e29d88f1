"""How the CPU provider was set up for a session, and why: parts of the schema `partita.report/1`."""

from __future__ import annotations

from typing import Literal

from partita.observations.records import Record

AttentionPath = Literal["flash", "naive"]
"""GroupQueryAttention's two ways through a prompt on the CPU: in tiles, or with the whole matrix of scores."""


class AttentionChoice(Record):
    """The path that GroupQueryAttention took, and why."""

    path: AttentionPath
    reason: Literal[
        "faster",  # naive: the processor and the head sizes are those for which it was measured to be faster
        "not_faster",  # flash: ONNX Runtime's default
        "unclear",  # only in reports of earlier versions, which timed both paths
        "memory",  # flash: the matrix of scores would be too large
        "option",  # the user said so
        "environment",  # a variable of ONNX Runtime says so
        "failed",  # only in reports of earlier versions
    ]
    detail: str
    """In one sentence."""


class CpuSession(Record):
    """Threads and kernels of the CPU provider in one session."""

    file: str
    threads: int
    """Threads that compute a node, the calling one included."""
    threads_reason: Literal["option", "cores", "affinity", "quota"]
    """The user said so; physical cores of the machine; of those that the process may run on; of its share of time."""
    cores: int
    """Physical cores that the process may run on."""
    quota: float | None
    """CPUs' worth of time that the control group may use; null without a limit."""
    spinning: bool
    """Threads wait for work in a loop, which is quick and keeps their cores busy."""
    spinning_reason: Literal["option", "default", "crowded"]
    """The user said so; ONNX Runtime's default; more threads than cores would wait for each other's loops."""
    huge_page_bytes: int | None = None
    """Of what the session allocated, in pages of 2 MiB; null where the system has none, the user wants none, or there
    was no decode step.
    """
    huge_page_seconds: float | None = None
    """What that took: before the first decode step, and counted in the time of none."""
    attention: AttentionChoice | None
    """null without GroupQueryAttention of two paths, where another provider comes first, and for short prompts."""
