"""What is asked of a cluster, and how each worker is started. No Ray."""

from __future__ import annotations

import pytest

from partita.errors import UsageError
from partita.library.cluster.options import (
    CHAIN_VARIABLE,
    THREADS_VARIABLE,
    Deal,
    Means,
    WorkerKind,
    block_rows,
    read_cluster,
    shares,
    worker_count,
)

KINDS = ("webgpu=/opt/webgpu/bin/python", "cuda,cpu=/opt/gpu/bin/python", "cpu")
LAPTOP = Means(1, {"CPU": 8.0})
CLUSTER = Means(3, {"CPU": 48.0, "GPU": 4.0, "partita-webgpu": 2.0})


@pytest.mark.parametrize("address", ["", "here", "ray://head:10001", "head", "head:", "head:6379/x"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(UsageError, match="give auto, local or HOST:PORT"):
        read_cluster(address, None, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("=python",), "CHAIN=PYTHON"),
        (("cpu=",), "CHAIN=PYTHON"),
        (("webgpux=/opt/python",), "did you mean 'webgpu'"),
        (("cpu,cpu",), "twice"),
    ],
)
def test_a_kind_of_worker_that_makes_no_sense_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        read_cluster("auto", None, None, given)


def test_fewer_workers_than_kinds_are_refused_and_so_is_a_chain_beside_kinds():
    with pytest.raises(UsageError, match="fewer than the 3 kinds"):
        read_cluster("auto", 2, None, KINDS)
    with pytest.raises(UsageError, match="leave --provider out"):
        read_cluster("auto", None, "cpu", KINDS)


def test_one_worker_per_gpu_per_node_or_per_kind_unless_a_number_is_given():
    assert worker_count(read_cluster("auto", None, "cuda,cpu"), CLUSTER) == 4
    assert worker_count(read_cluster("auto", None, "cuda,cpu"), LAPTOP) == 1
    assert worker_count(read_cluster("auto", None, "cpu"), CLUSTER) == 3
    assert worker_count(read_cluster("auto", None, None, KINDS), CLUSTER) == 3
    assert worker_count(read_cluster("auto", 7, None, KINDS), CLUSTER) == 7


def test_a_worker_gets_a_gpu_a_part_of_the_processors_or_the_resource_of_its_provider():
    webgpu, cuda, cpu = shares(read_cluster("auto", 6, None, KINDS), CLUSTER, None)
    assert (webgpu.resource, webgpu.gpus, webgpu.threads) == ("partita-webgpu", 0, 8)
    assert (cuda.resource, cuda.gpus, cuda.cpus) == (None, 1, 1)
    assert (cpu.resource, cpu.gpus, cpu.cpus, cpu.threads) == (None, 0, 8, 8)
    (alone,) = shares(read_cluster("auto", 2, "cuda"), LAPTOP, 3)
    assert (alone.gpus, alone.cpus, alone.threads) == (0, 3, 3)  # nothing says that there is a GPU
    (crowded,) = shares(read_cluster("auto", 16, "cpu"), LAPTOP, None)
    assert (crowded.cpus, crowded.threads) == (0.5, 1)


def test_workers_are_dealt_out_in_turn_each_with_its_interpreter_and_chain():
    deal = Deal(shares(read_cluster("auto", 3, None, KINDS), CLUSTER, 2), {"PYTHONPATH": "here"}, "/own/python")
    dealt = [deal() for _ in range(4)]
    pythons = [entry["runtime_env"]["py_executable"] for entry in dealt]
    assert pythons == ["/opt/webgpu/bin/python", "/opt/gpu/bin/python", "/own/python", "/opt/webgpu/bin/python"]
    told = [entry["runtime_env"]["env_vars"] for entry in dealt[:3]]
    assert [entry[CHAIN_VARIABLE] for entry in told] == ["webgpu", "cuda,cpu", "cpu"]
    assert all(entry[THREADS_VARIABLE] == "2" and entry["PYTHONPATH"] == "here" for entry in told)
    assert [entry["num_gpus"] for entry in dealt[:3]] == [0, 1, 0]
    assert [entry["resources"] for entry in dealt[:3]] == [{"partita-webgpu": 1}, {}, {}]


def test_blocks_leave_no_worker_without_any():
    assert block_rows(16, 4, None) == 64
    assert block_rows(16, 4, 1000) == 64
    assert block_rows(16, 4, 40) == 5
    assert block_rows(1, 2, 3) == 1


def test_a_kind_without_an_interpreter_runs_in_that_of_the_command():
    assert read_cluster("local", None, "cpu").kinds == (WorkerKind("cpu", None),)
