"""The files of a contender: made once by its own exporter, whose time and memory are measured."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers.plan import Entry, Places, export_command
from benchmarks.peers.records import Written

SAID = 400
"""Characters of an exporter's last line that a failure is told with."""


def busy_seconds() -> float:
    """Seconds of all cores that were not idle, those included in which the host ran something else."""
    times = psutil.cpu_times()._asdict()
    guest = times.get("guest", 0.0) + times.get("guest_nice", 0.0)  # counted in user and nice, too
    return float(sum(times.values()) - times["idle"] - times.get("iowait", 0.0) - guest)


def others_cores(busy: float, own: float, seconds: float) -> float:
    """Cores that were busy with something else, of busy and own core seconds in `seconds`."""
    return max(0.0, busy - own) / seconds


class ExportFailedError(Exception):
    """An exporter refused; the message is what it said last."""


def environ(threads: int, more: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of every process that is started: the same threads for all, and no network."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **(more or {})}


def prepare(entry: Entry, shape: str, places: Places, length: int, threads: int) -> Written | None:
    """Make the files of `entry`, unless they are there for this length; None for one that needs none.

    Raises ExportFailedError.
    """
    command = export_command(entry, shape, places, length, threads)
    if command is None:
        return None
    out = places.model(shape, entry)
    # Only our packages have a cache of a fixed length.
    note = out.with_name(f"{out.name}.{length if entry.peer == 'partita' else 'any'}.json")
    if note.is_file() and out.exists():
        return Written.model_validate_json(note.read_text("utf-8"))
    for old in (out, *out.parent.glob(f"{out.name}.*.json")):
        remove(old)
    written = _written(command, out, threads)
    note.write_text(written.model_dump_json(indent=1), "utf-8")
    return written


def _written(command: list[str], out: Path, threads: int) -> Written:
    """Run an exporter. Raises ExportFailedError."""
    log = out.with_name(f"{out.name}.log")
    busy, began = busy_seconds(), time.perf_counter()
    ended = _run(command, log, threads)
    seconds = time.perf_counter() - began
    if ended.code:
        remove(out)
        raise ExportFailedError(_last_line(log) or f"exit code {ended.code}")
    return Written(
        command=" ".join(Path(word).name if os.sep in word else word for word in command),
        seconds=seconds,
        peak_rss_bytes=ended.peak_rss_bytes,
        stages=_stages(ended.message),
        others_cores=others_cores(busy_seconds() - busy, ended.cpu_seconds, seconds),
    )


@dataclass(frozen=True, slots=True)
class Ended:
    """An exporter's end."""

    code: int
    peak_rss_bytes: int
    """Of the largest of its processes."""
    cpu_seconds: float
    message: str


LAUNCHER = """
import json, os, sys
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
scale = 1 if sys.platform == "darwin" else 1024
with open(sys.argv[1], "w") as note:
    json.dump([os.waitstatus_to_exitcode(status), usage.ru_maxrss * scale, usage.ru_utime + usage.ru_stime], note)
"""
"""Starts an exporter. Peak memory of a process begins with that of the one that started it, so this one is small."""


def _run(command: list[str], log: Path, threads: int) -> Ended:
    """Run it, with what it says on stderr in `log`."""
    answer, note = log.with_suffix(".out"), log.with_suffix(".usage")
    launch = [sys.executable, "-S", "-c", LAUNCHER, str(note), *command]
    with log.open("wb") as errors, answer.open("wb") as output:
        subprocess.run(launch, stdout=output, stderr=errors, env=environ(threads), check=True)
    code, peak, cpu = json.loads(note.read_text("utf-8"))
    return Ended(code, peak, cpu, answer.read_text("utf-8", errors="replace"))


def _stages(said: str) -> dict[str, float]:
    """`seconds` of an export of ours."""
    try:
        seconds = json.loads(said).get("seconds")
    except (ValueError, AttributeError):
        return {}
    return {str(name): float(value) for name, value in seconds.items()} if isinstance(seconds, dict) else {}


def _last_line(log: Path) -> str:
    """What an exporter said last: an exception's line, mostly."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:SAID] if lines else ""


def remove(path: Path) -> None:
    """Take away a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_bytes(path: Path) -> int:
    """Bytes of graph and weights: tokenizers, figures and answers that are stored beside them do not count."""
    if path.is_file():
        return path.stat().st_size
    weights = (".onnx", ".onnx.data", ".onnx_data", "model.safetensors", ".bin", ".weights", ".data")
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file() and each.name.endswith(weights))


def parameters(checkpoint: Path) -> int:
    """Elements of all tensors that a checkpoint stores; a tied head is not."""
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
