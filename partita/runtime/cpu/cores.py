"""How many threads the CPU provider should have: cores, affinity and the control group's CPU quota.

ONNX Runtime creates a thread for each physical core of the machine, including cores outside the process's affinity
(1.31.1). So the number is set explicitly whenever the process has fewer cores than the machine.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

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
    """The lowest CPU quota of the control groups that contain this process, in CPUs; None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Inside a container its own group is mounted as the root, but the path may be that outside.
        if not controllers:
            for folder in _up(root / "sys/fs/cgroup", path):
                limits.append(_pair(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in (*_up(root / "sys/fs/cgroup/cpu", path), *_up(root / "sys/fs/cgroup/cpu,cpuacct", path)):
                limits.append(_pair(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"))
    found = [limit for limit in limits if limit is not None]
    return min(found) if found else None


def _up(mount: Path, path: str) -> list[Path]:
    """The folder of a control group and of its ancestors."""
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _pair(*files: Path) -> float | None:
    """Quota divided by period, from one file with both or from two; None without a limit."""
    try:
        quota, period = (float(word) for file in files for word in file.read_text(encoding="utf-8").split())
    except (OSError, ValueError):  # no such group, or `max`
        return None
    return quota / period if quota > 0 and period > 0 else None


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
