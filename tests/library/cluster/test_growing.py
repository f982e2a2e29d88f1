"""A cluster that adds machines for a run, as far as it may; its machines are processes here: `make test-ray`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from partita.library.batches.journal import Journal
from partita.library.batches.rows import InputRow
from partita.library.cluster.options import read_cluster
from partita.library.cluster.records import ClusterReport
from partita.library.cluster.running import ClusterRun
from partita.library.cluster.worker import Worker
from tests.conftest import require
from tests.library.cluster.test_cluster_run import expected, setup_of, working_tree
from tests.runtime.handmade import handmade

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]  # Ray warns of what Ray Data itself does
START_SECONDS = 120.0
COMMANDS = (
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
"""What machines that are processes need nothing of, and a configuration has to have."""
MACHINE_SECONDS = 300.0
"""Longest wait for a machine that is added, on a machine that does much else."""
ROW_SECONDS = 0.01
ROWS = [InputRow(n, {"tokens": [n % 60 + 1, n % 7 + 1], "max_new_tokens": 4}) for n in range(1600)]
__all__ = ["working_tree"]


class Slow(Worker):
    """A worker that answers nothing before there is a second one, and then takes its time, so that both have some."""

    def _submit(self, row: InputRow, block: Any) -> None:
        deadline = time.monotonic() + MACHINE_SECONDS
        while not self._several():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no second worker within {MACHINE_SECONDS:g} s")
            time.sleep(1.0)
        time.sleep(ROW_SECONDS)
        super()._submit(row, block)

    def _several(self) -> bool:
        """Whether another worker has joined; asked for until one has."""
        self._joined = getattr(self, "_joined", False) or len(self._ask("read")[0]) > 1
        return self._joined


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """HOST:PORT of a cluster of one machine with one processor, which may add two more. Nobody else's Ray is touched:
    ray.cluster_utils.AutoscalingCluster would end it.
    """
    require("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # it keeps tokens in a home folder, and tests have one of their own
    from ray.util import get_node_ip_address

    with socket.create_server(("", 0)) as server:
        address = f"{get_node_ip_address()}:{server.getsockname()[1]}"
    kinds = {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "more": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    config = {
        "cluster_name": "growing",
        "max_workers": 2,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {"ssh_user": "nobody"},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "docker": {},
        **dict.fromkeys(COMMANDS, ()),
        "head_node_type": "ray.head.default",
        "available_node_types": kinds,
    }
    file = tmp_path / "autoscaling.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=1"]
    given = [f"--port={address.rpartition(':')[2]}", f"--autoscaling-config={file}", "--include-dashboard=false"]
    said, deadline = tmp_path / "ray.log", time.monotonic() + START_SECONDS
    with said.open("wb") as log:
        process = subprocess.Popen(
            [*command, *given],
            env={**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    while "Ray runtime started" not in said.read_text(encoding="utf-8"):
        assert process.poll() is None and time.monotonic() < deadline, said.read_text(encoding="utf-8")
        time.sleep(0.2)
    try:
        yield address
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with suppress(psutil.Error):
                child.kill()
        process.wait()


def answered(address: str, folder: Path) -> tuple[list[dict[str, Any]], ClusterReport]:
    """The answers to all rows, and the report."""
    options = read_cluster(address, "1-3", "cpu", cpus=1)
    with Journal(folder / "journal", {}, 0) as journal:
        report = ClusterRun(options, setup_of(folder / "package"), 3, journal, len(ROWS), worker=Slow).go(iter(ROWS))
        return [json.loads(line) for line in journal.answers()], report


def test_workers_become_more_where_there_is_work_and_the_cluster_grows_for_them(growing: str, tmp_path: Path) -> None:
    """In a process that has had no other cluster: else Ray Data takes back actors that have not begun."""
    handmade(tmp_path / "package", batch=3)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        answers, report = pool.submit(answered, growing, tmp_path).result()
    assert [answer["tokens"] for answer in answers] == [expected(row) for row in ROWS]
    assert (report.nodes, report.least, report.wanted) == (1, 1, 3)
    worked = [worker for worker in report.workers if worker.rows]
    assert len(worked) > 1 and len({worker.node for worker in worked}) > 1
