"""What a cluster of many machines costs beside the work: blocks through Ray Data to workers that only wait.

    python -m benchmarks.cluster_scheduling --nodes 200 --workers 200 --rows 20000 --row-ms 20

Every node is a process of Ray on this machine (ray.cluster_utils), with a processor in name: a worker sleeps for
as long as its rows would take. What is measured is the run that `partita generate --address` makes, with its blocks,
retries and ledger: seconds to the last answer, what they would be without overhead, and the driver's processor time. A
node takes some 100 MB of memory or more, and seconds to start.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita import __version__
from partita.library.batches.journal import Journal
from partita.library.batches.rows import InputRow, RowAnswer, RowDefaults
from partita.library.chain import ChainOptions
from partita.library.cluster.options import block_rows, read_cluster
from partita.library.cluster.running import ClusterRun
from partita.library.cluster.worker import BLOCK, Setup, told_of
from partita.library.sampling import Sampling

SLOTS = 16
"""Rows of the batch that a worker would have."""


class Sleeper:
    """In place of a worker: takes its time, and answers nothing in particular."""

    def __init__(self, setup: str, ledger: Any) -> None:
        """As `Worker` is made."""
        self._ms, self._ledger = float(json.loads(setup)["adapter"]), ledger

    def __call__(self, block: Any) -> Any:
        """Answers to a block, after the time that it takes with `SLOTS` rows at once."""
        import ray

        (number,) = block[BLOCK].to_pylist()
        rows = [json.loads(text) for text in ray.get(self._ledger.take.remote(number))]
        time.sleep(self._ms / 1e3 * math.ceil(len(rows) / SLOTS))
        empty = RowAnswer(0, None, None, (), 1, "stop", None, None)
        return told_of(number, [json.dumps(replace(empty, index=row["index"]).to_json()) for row in rows])


def main() -> None:
    """Start the nodes, run, print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 200), ("workers", 200), ("rows", 20_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--row-ms", type=float, default=20.0, help="how long a turn of the batch takes, to its end")
    asked = parser.parse_args()
    print(json.dumps(measured(asked.nodes, asked.workers, asked.rows, asked.row_ms)))


def measured(nodes: int, workers: int, rows: int, row_ms: float) -> dict[str, Any]:
    """One run on a cluster of so many nodes."""
    from ray.cluster_utils import Cluster

    began = time.perf_counter()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 200 * 2**20})
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    started = time.perf_counter() - began
    try:
        return {"nodes": nodes, "start_seconds": started, **_run(str(cluster.address), workers, rows, row_ms)}
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _run(address: str, workers: int, rows: int, row_ms: float) -> dict[str, Any]:
    defaults = RowDefaults(Sampling(temperature=0.0, max_new_tokens=1))
    choice = {"variant": None, "contract": None, "max_length": None}
    setup = Setup("", "", __version__, ChainOptions(), choice, defaults, True, adapter=str(row_ms))
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal", {}, 0) as journal:
        options = read_cluster(address, workers, "cpu")
        run = ClusterRun(options, setup, SLOTS, journal, rows, worker=Sleeper)
        cpu = time.process_time()
        report = run.go(InputRow(index, {"tokens": [1]}) for index in range(rows))
        cpu = time.process_time() - cpu
    size = block_rows(SLOTS, workers, rows)
    blocks = math.ceil(rows / size)
    ideal = math.ceil(blocks / workers) * math.ceil(size / SLOTS) * row_ms / 1e3
    return {
        "workers": workers,
        "rows": rows,
        "blocks": blocks,
        "rows_per_block": size,
        "seconds": report.seconds,
        "seconds_without_overhead": ideal,
        "driver_cpu_ms_per_block": cpu / blocks * 1e3,
        "answered": len(journal),
    }


if __name__ == "__main__":
    main()
