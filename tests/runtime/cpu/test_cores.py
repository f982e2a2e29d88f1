"""Thread counts follow the CPUs available to the process (affinity, quota), not the machine's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from partita.machine import Gpu
from partita.runtime.cpu.cores import Cores, cpu_name, integer_unit, usable_cores
from partita.runtime.machine import nvidia_gpus
from tests.conftest import REPOSITORY


def machine(root: Path, siblings: dict[int, str], files: dict[str, str] | None = None) -> Path:
    """A folder with what Linux says of its CPUs and of a process's control group."""
    for cpu, listed in siblings.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{listed}\n")
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


PAIRS = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
V2 = "0::/batch/job\n"


@pytest.mark.usefixtures("four_cpus")
def test_hyperthreads_of_a_core_count_as_single_thread(tmp_path):
    root = machine(tmp_path, PAIRS)
    assert usable_cores(root, {0, 1, 2, 3}).threads() == (2, "cores")
    assert usable_cores(root, {0, 2}).threads() == (1, "affinity")
    assert usable_cores(root, {0, 3}).threads() == (2, "cores")


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/batch/job/cpu.max": "150000 100000\n"}, 1.5, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/batch/job/cpu.max": "50000 100000\n"}, 0.5, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/batch/job/cpu.max": "max 100000\n"}, None, 4),
        # The group around it, which is also where a container finds its own.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0, 3),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            2.0,
            2,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
            4,
        ),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "nonsense\n"}, None, 4),
    ],
)
def test_cpu_quota_is_rounded_down_to_whole_threads(tmp_path, files, quota, threads):
    cores = usable_cores(machine(tmp_path, {cpu: str(cpu) for cpu in range(4)}, files), {0, 1, 2, 3})
    assert cores.quota == quota
    assert cores.threads() == (threads, "cores" if threads == 4 else "quota")


def test_thread_option_overrides_and_oversubscription_is_detected():
    cores = Cores(machine=8, allowed=4, quota=3.5)
    assert cores.threads(6) == (6, "option")
    assert [cores.is_oversubscribed(threads) for threads in (3, 4, 5)] == [False, True, True]
    assert not Cores(8, 8, None).is_oversubscribed(8)


TASKS = """
import os, sys
from pathlib import Path
from partita.providers.resolve import parse_chain, resolve
from partita.runtime.chain.open_chain import open_session
from partita.runtime.ort.registry import available_ort_names
before = len(os.listdir("/proc/self/task"))
chain = resolve(parse_chain("cpu"), available_ort_names())
session = open_session(Path(sys.argv[1]), chain, threads=None, observe=False)
tasks = os.listdir("/proc/self/task")
print(len(tasks) - before, sorted({cpu for task in tasks for cpu in os.sched_getaffinity(int(task))}))
print(session.cpu.threads, session.cpu.threads_reason)
"""


@pytest.mark.skipif(not shutil.which("taskset") or (os.cpu_count() or 1) < 2, reason="needs taskset and two CPUs")
def test_process_with_affinity_to_single_cpu_stays_there(tiny_package):
    """ONNX Runtime's default starts a thread per machine core and pins a thread to a disallowed CPU."""
    path = tiny_package() / "model.onnx"
    done = subprocess.run(
        ["taskset", "-c", "0", sys.executable, "-c", TASKS, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    assert done.stdout.splitlines() == ["0 [0]", "1 affinity"]


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ("flags : fpu avx512_vnni avx512_bf16 amx_tile amx_int8", "amx_int8"),
        ("Features : fp asimd asimddp", "asimddp"),
        ("flags : fpu avx2 amx_bf16", ""),
        (None, None),
    ],
)
def test_cpu_name_and_integer_unit_are_parsed(tmp_path: Path, flags: str | None, unit: str | None) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor : 0\nmodel name : A processor\n{flags}\n")
        assert cpu_name(info) == "A processor"
    assert integer_unit(info) == unit


# What the NVIDIA driver says, read through a module that answers as pynvml does: no GPU is at hand


@pytest.fixture
def nvml(monkeypatch):
    """A driver with two GPUs."""
    module: Any = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: b"580.95.05"
    module.nvmlSystemGetCudaDriverVersion = lambda: 13010
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda handle: ("NVIDIA H100", b"NVIDIA L4")[handle]
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=(handle + 1) << 30)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_nvidia_gpus_are_listed_or_none_on_driver_failure(nvml, monkeypatch):
    assert nvidia_gpus() == (
        Gpu(name="NVIDIA H100", memory_bytes=1 << 30, driver="580.95.05", cuda_driver="13.1"),
        Gpu(name="NVIDIA L4", memory_bytes=2 << 30, driver="580.95.05", cuda_driver="13.1"),
    )

    def fail():
        raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlDeviceGetCount = fail
    assert nvidia_gpus() is None
    nvml.nvmlInit = fail
    assert nvidia_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_gpus() is None, "the package is not installed"
