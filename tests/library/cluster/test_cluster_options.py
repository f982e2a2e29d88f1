"""What is asked of a cluster, and how each worker is started. No Ray."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from partita.commands.cluster import _absolute
from partita.errors import UsageError
from partita.library.chain import ChainOptions
from partita.library.cluster.options import (
    CHAIN_VARIABLE,
    THREADS_VARIABLE,
    Deal,
    Means,
    WorkerKind,
    block_rows,
    lacking,
    read_cluster,
    shares,
    worker_count,
)

KINDS = ("webgpu=/opt/webgpu/bin/python", "cuda,cpu=/opt/gpu/bin/python", "cpu")
LAPTOP = Means({"CPU": 8.0}, (8.0,))
CLUSTER = Means({"CPU": 48.0, "GPU": 4.0, "partita-webgpu": 2.0}, (16.0,) * 3)


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


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ("many", "a number, or MIN-MAX such as 2-16"),
        ("-3", "a number, or MIN-MAX"),
        ("2-", "a number, or MIN-MAX"),
        ("0-4", "must be between 1"),
        ("1-20000", "must be between 1"),
        ("8-2", "MIN is more than MAX"),
        ("2-8", "with --worker-cpus"),
    ],
)
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers, said):
    with pytest.raises(UsageError, match=said):
        read_cluster("auto", workers, "cpu")


def test_processors_of_a_worker_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="--worker-cpus 0: must be between 1"):
        read_cluster("auto", 2, "cpu", cpus=0)


def test_workers_of_a_cluster_that_grows_ask_for_what_they_need_and_not_for_a_part_of_what_there_is():
    options = read_cluster("auto", "2-40", "cpu", cpus=4)
    assert (options.least, options.workers, worker_count(options, LAPTOP)) == (2, 40, 40)
    (share,) = shares(options, LAPTOP, None)
    assert (share.cpus, share.threads, share.gpus) == (4, 4, 0)
    (share,) = shares(read_cluster("auto", "1-40", "cpu", threads=3), LAPTOP, 3)
    assert (share.cpus, share.threads) == (3, 3)
    (share,) = shares(read_cluster("auto", "1-40", "cuda,cpu"), LAPTOP, None)
    assert (share.cpus, share.gpus) == (1, 1), "the machines with GPUs may be those that are not there yet"


def test_a_fixed_number_of_workers_may_ask_for_more_than_there_is_too():
    options = read_cluster("auto", 16, "cpu", cpus=4)
    (share,) = shares(options, LAPTOP, None)
    assert (options.least, share.cpus, share.threads) == (None, 4, 4)
    (share,) = shares(options, LAPTOP, 2)
    assert (share.cpus, share.threads) == (4, 2)


@pytest.mark.parametrize(
    ("workers", "kinds", "cpus", "means", "said"),
    [
        (16, (), 4, LAPTOP, "16 workers: 64 processors where the cluster has 8;"),
        ("2-16", (), 4, LAPTOP, None),
        ("2-16", (), 5, LAPTOP, "2 workers: 10 processors where the cluster has 8;"),
        ("1-16", ("cuda,cpu",), None, LAPTOP, "1 worker: 1 GPU where the cluster has 0;"),
        (2, (), 20, Means({"CPU": 48.0}, (16.0,) * 3), "20 processors each where the largest machine has 16;"),
        (4, (), 5, Means({"CPU": 24.0}, (8.0,) * 3), "5 processors each where the machines have room for 3;"),
        (3, (), 5, Means({"CPU": 24.0}, (8.0,) * 3), None),
        (2, (), 5, Means({"CPU": 16.0}, (16.0, 0.0)), None),
        (9, ("webgpu",), None, CLUSTER, "9 partita-webgpu where the cluster has 2;"),
        (16, (), None, LAPTOP, None),
        (7, (), None, LAPTOP, None),
    ],
)
def test_what_workers_wait_for_is_said(workers, kinds, cpus, means, said):
    options = read_cluster("auto", workers, None if kinds else "cpu", kinds, cpus=cpus)
    told = lacking(options, means, shares(options, means, None))
    assert told is None if said is None else said in str(told)


@pytest.mark.parametrize(
    ("workers", "cpus", "each", "threads"),
    [
        (2, (8, 2), 4, 4),
        (2, (4, 4, 4), 4, 4),
        (3, (0, 8, 8), 4, 4),
        (3, (8, 1), 2, 2),
        (2, (64, 2), 32, 32),
        (4, (1, 1, 1), 0.5, 1),
        (3, (1, 1), 0.5, 1),
        (12, (8,), 0.6666, 1),
        (6, (1,), 0.1666, 1),
        (5, (16, 16, 16), 8, 8),
        (10_000, (1,) * 5_000, 0.5, 1),
        (2, (0, 0), 1, 1),
    ],
)
def test_an_equal_part_is_one_for_which_the_machines_have_room(workers, cpus, each, threads):
    """A part of all processors may be more than any machine has, and is then waited for without an end; more than one
    are a whole number, and parts of one are no more together than there are.
    """
    means = Means({"CPU": float(sum(cpus))}, tuple(map(float, cpus)))
    options = read_cluster("auto", workers, "cpu")
    (share,) = shares(options, means, None)
    assert (share.cpus, share.threads) == (each, threads)
    assert (lacking(options, means, (share,)) is None) == bool(sum(cpus))


def test_a_head_without_a_processor_has_no_worker():
    means = Means({"CPU": 16.0}, (0.0, 8.0, 8.0))
    options = read_cluster("auto", None, "cpu")
    (share,) = shares(options, means, None)
    assert (means.nodes, worker_count(options, means), share.cpus) == (3, 2, 8)
    assert worker_count(options, Means({}, (0.0,))) == 1


def test_workers_that_need_different_parts_have_room_beside_each_other():
    given = read_cluster("local", 4, None, ("cuda,cpu", "cpu"))
    means = Means({"CPU": 10.0, "GPU": 2.0}, (10.0,))
    dealt = shares(given, means, None)
    assert [share.cpus for share in dealt] == [1, 2] and lacking(given, means, dealt) is None
    means = Means({"CPU": 10.0, "GPU": 2.0}, (1.0,) * 10)
    assert "up to 2 processors each where the largest machine has 1" in str(lacking(given, means, dealt))


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
    assert block_rows(16, 4, 1000) == 64
    assert block_rows(16, 4, 40) == 5
    assert block_rows(1, 2, 3) == 1


@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("workers", [1, 100, 5_000])
def test_a_longer_file_has_larger_blocks_and_not_more_and_more_of_them(slots, workers):
    for rows in (10**6, 10**8):
        size = block_rows(slots, workers, rows)
        assert size >= 4 * slots and 2 * workers <= math.ceil(rows / size) <= max(8_192, 8 * workers)


def test_a_kind_without_an_interpreter_runs_in_that_of_the_command():
    assert read_cluster("local", None, "cpu").kinds == (WorkerKind("cpu", None),)


def test_a_library_is_found_whatever_folder_a_worker_runs_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ChainOptions("mine,other,home,cpu", provider_libraries=("mine=lib/it.so", "other=/it.so", "home=~/it.so"))
    whole = (f"mine={Path.cwd() / 'lib' / 'it.so'}", "other=/it.so", f"home={Path.home() / 'it.so'}")
    assert _absolute(given) == replace(given, provider_libraries=whole)
