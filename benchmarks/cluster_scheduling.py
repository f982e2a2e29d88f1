"""What a cluster of many machines costs beside the work: blocks through Ray Data to workers that only wait.

    python -m benchmarks.cluster_scheduling --nodes 10 25 50 100 --blocks 8 --row-ms 1000

Every node is a process of Ray on this machine (ray.cluster_utils), with a worker per processor; the worker sleeps for
as long as its rows would take. What is measured is the run that `partita generate --address` makes, with its blocks,
retries, ledger and desk. Sizes are measured on one cluster, which is made larger: the processor's time of the driver,
of the process beside it (ledger and desk) and of Ray's head, once all workers have answered two blocks, and seconds
to there and from there. A node takes some 150 MiB and a worker as much, and what all of them do at rest takes
processors, too: wall time is that of one machine that plays all of them, the driver's time is not. Nodes are added
for as long as there is memory for them and their workers; 200 of them with 100 workers fit in 24 GiB with compressed
swap:

    modprobe zram; echo 40G > /sys/block/zram0/disksize; mkswap /dev/zram0; swapon /dev/zram0
    echo 0 > /proc/sys/vm/page-cluster; echo 180 > /proc/sys/vm/swappiness

and workers that start in turns (--at-once 4): in their first seconds all of their memory is in use, and that of 200
is twice what there is. The last one has to begin before all blocks are given out, or Ray Data takes it back: with ten
workers a minute, blocks have to last longer than the others take to begin (--blocks, --row-ms).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from partita import __version__
from partita.library.batches.journal import Journal
from partita.library.batches.rows import InputRow, RowAnswer, RowDefaults
from partita.library.chain import ChainOptions
from partita.library.cluster.options import BLOCK_TURNS, read_cluster
from partita.library.cluster.running import ClusterRun
from partita.library.cluster.worker import BLOCK, Setup, told_of
from partita.library.sampling import Sampling

SLOTS = 16
"""Rows of the batch that a worker would have."""
LEFT_MIB = 4096
"""Of memory, that is left alone: others are at work on this machine."""
NODE_MIB, WORKER_MIB = 150, 145
"""What a node takes, and each of its workers."""
SWAP_SHARE = 0.6
"""Of swap that is free, what nodes and workers may be expected to find: compressed memory takes memory, too."""
QUIET = {
    # A process that Ray starts ahead has no environment of ours, and would never be used.
    "enable_worker_prestart": "0",
    "prestart_worker_first_driver": "0",
    # Of what a node does at rest, and of how soon it is given up: one machine has the processors of two, not of 200.
    "raylet_report_resources_period_milliseconds": "2000",
    "gcs_pull_resource_loads_period_milliseconds": "5000",
    "metrics_report_interval_ms": "120000",
    "event_stats": "0",
    "raylet_liveness_self_check_interval_ms": "60000",
    "health_check_period_ms": "60000",
    "health_check_timeout_ms": "120000",
    "agent_register_timeout_ms": "300000",
    "worker_register_timeout_seconds": "3600",
    "memory_monitor_refresh_ms": "0",
}
"""Settings of Ray, for `RAY_...`."""
MIB = 2**20
TURN = 9
"""The file descriptor by which a worker has its turn to start; ended by `Sleeper`."""
LONGEST_START = 60
"""Seconds after which a turn ends all the same."""
TRIES = 4
PARTS = {"beside": "ray::Beside", "head": "gcs_server"}
"""Processes beside the driver whose time is its own, by what they call themselves."""


class Sleeper:
    """In place of a worker: takes its time, and answers nothing in particular."""

    def __init__(self, setup: str, ledger: Any) -> None:
        """As `Worker` is made."""
        with suppress(OSError):  # there are no turns
            fcntl.flock(TURN, fcntl.LOCK_UN)
        told = json.loads(setup)
        self._ms, self._ledger, self._seen = float(told["adapter"]), ledger, Path(told["package"]) / str(os.getpid())
        self._batch = threading.Lock()

    def __call__(self, block: Any) -> Any:
        """Answers to a block, after the time that it takes with `SLOTS` rows at once."""
        import ray

        (number,) = block[BLOCK].to_pylist()
        rows = [json.loads(text) for text in ray.get(self._ledger.take.remote(number))]
        ray.get(self._ledger.began.remote(f"block {number}"))
        with self._batch:  # of which there is one, whatever number of blocks is here
            time.sleep(self._ms / 1e3 * math.ceil(len(rows) / SLOTS))
        ray.get(self._ledger.ended.remote(f"block {number}"))
        self._seen.touch()
        empty = RowAnswer(0, None, None, (), 1, "stop", None, None)
        return told_of(number, [json.dumps(replace(empty, index=row["index"]).to_json()) for row in rows])


@dataclass(slots=True)
class Watch:
    """When a run had answers of all workers and when all answers, and the processor's seconds of each part then."""

    seen: Path
    """A folder in which every worker that has answered a block has a file."""
    workers: int
    enough: int
    """Rows after which workers may have answered two blocks each."""
    rows: int
    began: float = field(default_factory=time.perf_counter)
    warm: tuple[float, dict[str, float], int] | None = None
    """Seconds, processor's seconds by part, and rows."""
    done: tuple[float, dict[str, float], int] | None = None

    def hear(self, run: ClusterRun) -> None:
        """Called after every block."""
        now = len(run.journal)
        if self.warm is None and now >= self.enough and sum(1 for _ in self.seen.iterdir()) >= self.workers:
            parts = spent()
            self.warm = time.perf_counter() - self.began, {**parts, "driver": driver_seconds()}, now
        elif now == self.rows:
            driver = driver_seconds()
            self.done = time.perf_counter() - self.began, {**spent(), "driver": driver}, now


def driver_seconds() -> float:
    """Processor's seconds of this process."""
    return sum(psutil.Process().cpu_times()[:2])


def spent() -> dict[str, float]:
    """Processor's seconds so far of what is beside the driver."""
    found = dict.fromkeys(PARTS, 0.0)
    for process in psutil.Process().children(recursive=True):
        try:
            title = process.name() + " " + " ".join(process.cmdline()[:1])
            for part, name in PARTS.items():
                if name in title:
                    found[part] += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return found


def main() -> None:
    """Start the nodes, run at each size, print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 25, 50, 100, 200])
    parser.add_argument("--per-node", type=int, default=1, help="processors of a node, with a worker for each")
    parser.add_argument("--workers", type=int, help="as many as processors, where it is not given")
    parser.add_argument("--blocks", type=int, default=8, help="for each worker")
    parser.add_argument("--row-ms", type=float, default=1000.0, help="how long a turn of the batch takes, to its end")
    parser.add_argument("--at-once", type=int, default=0, help="workers that start at the same time; 0: all")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = in_turns(Path(folder), asked.at_once) if asked.at_once else None
        sizes = sorted(asked.nodes)
        for line in measured(sizes, asked.per_node, asked.workers, asked.blocks, asked.row_ms, python):
            print(json.dumps({**line, "at_once": asked.at_once}), flush=True)


def in_turns(folder: Path, at_once: int) -> Path:
    """An interpreter for workers of which so many start at once: the next one when one of them is ready, or has taken
    too long for another reason (the first process of a kind only looks what is installed).
    """
    path, turn = folder / "python", shlex.quote(str(folder / "turn-"))
    path.write_text(
        f"#!/bin/sh\nexec {TURN}>>{turn}$(( $$ % {at_once} ))\nflock {TURN}\n"
        f'(sleep {LONGEST_START}; flock -u {TURN}) >/dev/null 2>&1 &\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return path


def measured(
    sizes: list[int], per_node: int, workers: int | None, blocks: int, row_ms: float, python: Path | None = None
) -> Iterator[dict[str, Any]]:
    """A run on a cluster of each size, with this interpreter for workers."""
    os.environ.update({f"RAY_{name}": value for name, value in QUIET.items()})
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": per_node, "object_store_memory": 200 * MIB})
    nodes = 1
    try:
        for size in sizes:
            began = time.perf_counter()
            while nodes < size and _room(per_node) > 0:
                _add(cluster, per_node)
                nodes += 1
            facts = {"nodes": nodes, "start_seconds": time.perf_counter() - began}
            places = nodes * per_node
            yield {**facts, **_run(str(cluster.address), min(workers or places, places), blocks, row_ms, python)}
            if nodes < size:
                return
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _add(cluster: Any, per_node: int) -> None:
    """A node more. Ray gives one 30 s to start, which on a machine that is busy with the others may be too little."""
    for left in reversed(range(TRIES)):
        try:
            cluster.add_node(num_cpus=per_node, object_store_memory=80 * MIB)
        except Exception:
            if not left:
                raise
        else:
            return


def _room(per_node: int) -> int:
    """Nodes that may be added, each with the workers that it has later."""
    free = psutil.virtual_memory().available + SWAP_SHARE * psutil.swap_memory().free
    return int((free / MIB - LEFT_MIB) // (NODE_MIB + per_node * WORKER_MIB))


def _run(address: str, workers: int, blocks: int, row_ms: float, python: Path | None) -> dict[str, Any]:
    defaults = RowDefaults(Sampling(temperature=0.0, max_new_tokens=1))
    choice = {"variant": None, "contract": None, "max_length": None}
    size = BLOCK_TURNS * SLOTS
    rows = size * blocks * workers
    began = driver_seconds()
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal", {}, 0) as journal:
        (seen := Path(folder) / "seen").mkdir()
        setup = Setup(str(seen), "", __version__, ChainOptions(), choice, defaults, True, adapter=str(row_ms))
        watch = Watch(seen, workers, 2 * workers * size, rows)
        options = read_cluster(address, workers, None if python else "cpu", [f"cpu={python}"] if python else ())
        run = ClusterRun(options, setup, SLOTS, journal, rows, watch.hear, worker=Sleeper)
        report = run.go(InputRow(index, {"tokens": [1]}) for index in range(rows))
        answered = len(journal)
    if watch.warm is None or watch.done is None:
        raise SystemExit("a worker had no block before all were answered: more --blocks, or a longer --row-ms")
    (warm_seconds, warm, warm_rows), (seconds, done, _) = watch.warm, watch.done
    left = (rows - warm_rows) / size
    worked = {f"{part}_seconds_from_there": done[part] - warm[part] for part in warm}
    return {
        "nodes_seen": report.nodes,
        "workers": workers,
        "blocks": blocks * workers,
        "answered": answered,
        "again": report.again,
        "seconds_to_all": warm_seconds,
        "seconds_from_there": seconds - warm_seconds,
        "seconds_without_overhead": left / workers * BLOCK_TURNS * row_ms / 1e3,
        "driver_seconds_to_all": warm["driver"] - began,
        "blocks_from_there": left,
        **worked,
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
