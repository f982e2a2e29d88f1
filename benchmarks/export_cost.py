"""`python -m benchmarks.export_cost CHECKPOINT OUT`: what each stage of an export takes: time, CPU time and memory.

Threads are those of OMP_NUM_THREADS; with 1, CPU time says most on a machine that does something else as well. Peaks of
single stages are Linux's, which can be told to count anew (clear_refs in proc(5)).
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from partita.export.progress import Unit
from partita.process import peak_rss_bytes, rss_bytes

RESET, REFS = "5", Path("/proc/self/clear_refs")


@dataclass(slots=True)
class Row:
    """A stage, or what was done between two."""

    name: str
    began: float = field(default_factory=time.perf_counter)
    cpu_began: float = field(default_factory=lambda: _cpu_seconds())
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mib: float = 0.0
    left_mib: float = 0.0

    def __post_init__(self) -> None:
        if REFS.exists():
            REFS.write_text(RESET, encoding="ascii")

    def advance(self, amount: int) -> None:
        """How far a stage is does not matter here."""

    def end(self) -> Row:
        """Note what it took."""
        self.seconds, self.cpu_seconds = time.perf_counter() - self.began, _cpu_seconds() - self.cpu_began
        self.peak_mib, self.left_mib = peak_rss_bytes() / 2**20, rss_bytes() / 2**20
        return self


class Table:
    """Hears of the stages."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.between = Row("imports")

    def start(self, title: str, total: int | None, unit: Unit) -> Row:
        """A stage begins."""
        self.rows.append(self.between.end())
        return Row(title)

    def finish(self, stage: object, seconds: float) -> None:
        """A stage ended."""
        assert isinstance(stage, Row)
        self.rows.append(stage.end())
        self.between = Row("between")


def _cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Export, and print a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--precision", default="int4")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--target", default="cpu")
    given = parser.parse_args()
    from partita.library.exporting import run_export
    from partita.options.export import ExportOptions

    table = Table()
    words = {name: getattr(given, name) for name in ("precision", "block_size", "max_length")}
    options = ExportOptions(checkpoint=given.checkpoint, out=given.out, force=True, target=given.target, **words)
    run_export(options, table)
    rows = [*table.rows, table.between.end()]
    print(f"{'stage':28} {'seconds':>8} {'CPU s':>8} {'peak MiB':>9} {'left MiB':>9}")
    for row in rows:
        if row.name != "between" or row.cpu_seconds > 0.1:
            print(f"{row.name:28} {row.seconds:8.2f} {row.cpu_seconds:8.2f} {row.peak_mib:9.0f} {row.left_mib:9.0f}")
    seconds, cpu = sum(row.seconds for row in rows), sum(row.cpu_seconds for row in rows)
    print(f"{'all':28} {seconds:8.2f} {cpu:8.2f} {max(row.peak_mib for row in rows):9.0f}")


if __name__ == "__main__":
    main()
