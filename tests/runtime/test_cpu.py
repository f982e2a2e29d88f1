"""Threads, attention path, exact products and huge pages of the CPU provider."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import types
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from partita import process
from partita.errors import UsageError
from partita.machine import Gpu
from partita.providers.resolve import parse_chain, resolve
from partita.runtime.chain import cpu_settings
from partita.runtime.chain.cpu_settings import (
    HUGE,
    anonymous_memory,
    make_huge,
    memory_before,
    new_blocks,
    will_repeat,
)
from partita.runtime.chain.open_chain import open_session
from partita.runtime.cpu import (
    VARIABLE,
    Attention,
    Cores,
    attention_path,
    choose,
    cpu_name,
    find_attention,
    integer_unit,
    usable_cores,
)
from partita.runtime.machine import nvidia_gpus
from partita.runtime.ort.buffers import host_buffer
from partita.runtime.ort.session import open_native
from partita.runtime.ort.session_options import Opening
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


PAIRS = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
V2 = "0::/batch/job\n"


def test_hyperthreads_of_a_core_count_as_single_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    root = machine(tmp_path, PAIRS)
    assert usable_cores(root, {0, 1, 2, 3}).threads() == (2, "cores")
    assert usable_cores(root, {0, 2}).threads() == (1, "affinity")
    assert usable_cores(root, {0, 3}).threads() == (2, "cores")


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/batch/job/cpu.max": "150000 100000\n"}, 1.5, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/batch/job/cpu.max": "max 100000\n"}, None, 4),
        # The group around it, which is also where a container finds its own.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "nonsense\n"}, None, 4),
    ],
)
def test_cpu_quota_is_rounded_down_to_whole_threads(tmp_path, monkeypatch, files, quota, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
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


def test_nvidia_gpus_are_listed_or_none_on_driver_failure(monkeypatch):
    """Through a module that answers as pynvml does."""
    module: Any = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: b"580.95.05"
    module.nvmlSystemGetCudaDriverVersion = lambda: 13010
    module.nvmlDeviceGetCount = lambda: 1
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda handle: b"NVIDIA L4"
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=2 << 30)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert nvidia_gpus() == (Gpu(name="NVIDIA L4", memory_bytes=2 << 30, driver="580.95.05", cuda_driver="13.1"),)

    def fail():
        raise module.NVMLError("Driver Not Loaded")

    module.nvmlInit = fail
    assert nvidia_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_gpus() is None, "the package is not installed"


# The attention path


ATTENTION = Attention(frozenset({8}), head_size=64, has_window=False, batch=1, tokens=512, length=512)
CPU = resolve(parse_chain("cpu"), ["CPUExecutionProvider"])
HEAD = '<ir_version: 10, opset_import: ["" : 21]> '


@pytest.mark.parametrize(
    ("change", "threads", "avx512", "path", "why"),
    [
        ({}, 1, True, "naive", "faster"),
        ({}, 8, True, "naive", "faster"),  # a head for each thread
        ({}, 7, True, "flash", "8 heads do not divide evenly among 7 threads"),
        ({}, 64, True, "flash", "among 64 threads"),
        ({}, 1, False, "flash", "AVX-512"),
        ({"head_size": 256}, 1, True, "flash", "head size 256 is above 64"),
        ({"has_window": True}, 1, True, "flash", "sliding window"),
    ],
)
def test_naive_attention_is_chosen_only_where_it_is_faster(change, threads, avx512, path, why):
    choice = choose(replace(ATTENTION, **change), threads, avx512=avx512)
    assert choice is not None
    assert choice.path == path and why in f"{choice.reason}: {choice.detail}"


def graph(**more):
    """A graph with one node."""
    names = ["query", "key", "value", "past_key", "past_value", "last", "total"]
    past = (1, 2, 1024, 64)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, past if "past" in name else None) for name in names
    ]
    given = {"domain": "com.microsoft", "num_heads": 8, **more}
    node = helper.make_node("GroupQueryAttention", names, ["o", "pk", "pv"], **given)
    return helper.make_model(helper.make_graph([node], "g", inputs, []))


def test_attention_with_two_paths_is_found_with_parameters():
    found = find_attention(graph())
    assert found == replace(ATTENTION, length=1024)
    windowed = find_attention(graph(local_window_size=128, scale=0.5))
    assert windowed is not None and windowed.has_window
    alone = attention_path(found, 1)
    assert alone is not None and alone == replace(found, tokens=1)
    assert choose(alone, 1, avx512=True) is None, "a token takes about as long on both paths"


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    """A processor with AVX-512, and nothing in the environment."""
    monkeypatch.setattr(cpu_settings, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    monkeypatch.delenv(VARIABLE, raising=False)


def chosen(attention, active=CPU, opening=None):
    opened, cpu = cpu_settings.set_up(Path("model.onnx"), active, opening or Opening(), attention)
    assert cpu is not None
    return dict(opened.environment), cpu.attention


def test_chosen_path_is_set_in_environment(monkeypatch):
    for flags, path, value in (({"avx512f"}, "naive", "1"), ({"avx2"}, "flash", "0"), (set(), "flash", "0")):
        monkeypatch.setattr(cpu_settings, "cpu_flags", lambda flags=flags: flags)
        environment, choice = chosen(ATTENTION, opening=Opening(threads=1))
        assert environment == {VARIABLE: value} and choice.path == path
    cuda = resolve(parse_chain("cuda,cpu"), ["CUDAExecutionProvider", "CPUExecutionProvider"])
    for attention, active in ((None, CPU), (replace(ATTENTION, tokens=16, length=16), CPU), (ATTENTION, cuda)):
        assert chosen(attention, active) == ({}, None)


def test_option_overrides_environment_and_choice(monkeypatch):
    naive, flash = (
        resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"attention": path}})
        for path in ("naive", "flash")
    )
    assert chosen(ATTENTION, naive)[0] == {VARIABLE: "1"}
    assert chosen(None, naive)[0] == {VARIABLE: "1"}
    monkeypatch.setenv(VARIABLE, "1")
    assert chosen(ATTENTION, flash)[0] == {VARIABLE: "0"}, "the option goes before the environment"
    assert chosen(ATTENTION)[1].reason == "environment"


def test_naive_attention_in_foreign_process_requires_variable(monkeypatch):
    monkeypatch.setattr(process, "own_process", False)
    assert chosen(ATTENTION)[1].path == "flash"
    naive = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"attention": "naive"}})
    with pytest.raises(UsageError, match=f"{VARIABLE}=1"):
        chosen(ATTENTION, naive)
    monkeypatch.setenv(VARIABLE, "1")
    assert chosen(ATTENTION, naive)[1].reason == "option" and chosen(ATTENTION)[1].path == "naive"


@pytest.mark.parametrize(
    ("chain", "threads", "options", "key", "value"),
    [
        ("cpu", None, {}, cpu_settings.SPINNING, "1"),
        ("cpu", 512, {}, cpu_settings.SPINNING, "0"),
        ("cpu", 512, {"spinning": "1"}, cpu_settings.SPINNING, "1"),
        ("cpu", 1, {"spinning": "0"}, cpu_settings.SPINNING, "0"),
        ("cpu", None, {}, cpu_settings.STOPPING, "0"),
        ("cpu", None, {"spinning_after": "0"}, cpu_settings.STOPPING, "1"),
        ("cpu", None, {}, cpu_settings.PACKING, "1"),
        ("cpu", None, {"parallel_packing": "0"}, cpu_settings.PACKING, "0"),
        ("cpu,cuda", None, {}, cpu_settings.PACKING, "0"),
    ],
)
def test_cpu_options_and_threads_set_session_config(chain, threads, options, key, value):
    active = resolve(parse_chain(chain), ["CUDAExecutionProvider", "CPUExecutionProvider"], {"cpu": options})
    opened, cpu = cpu_settings.set_up(Path("model.onnx"), active, Opening(threads=threads), None)
    assert opened.config[key] == value and cpu is not None
    if key == cpu_settings.SPINNING:
        assert cpu.spinning_reason == ("option" if options else "crowded" if threads == 512 else "default")
    assert active[0].provider_options == {}, "ONNX Runtime has no such options"


WEIGHT = np.array([[100, -100], [1, 2], [-128, 127], [90, 3]])
"""Beyond seven bits: ONNX Runtime leaves others as they are."""


def rounded_product(path: Path, kind: str, form: str, *, zero_point: bool) -> np.ndarray:
    """Writes the product of `x` [1, 4] and a weight of 8-bit integers [4, 2] to a file; the weight as numbers."""
    weight = WEIGHT.astype(kind)
    stored = weight.T if form == "Transpose" else weight
    typed = f"{kind}[{','.join(map(str, stored.shape))}]"
    values = f"{{{','.join(map(str, stored.ravel()))}}}"
    name, before = {
        "initializer": ("weight", ""),
        "Constant": ("", f"weight = Constant<value = {typed} {values}>()"),
        "Transpose": ("stored", "weight = Transpose<perm = [1, 0]>(stored)"),
    }[form]
    given = ["float[2] scale = {1, 1}", *([f"{kind}[2] zero = {{0, 0}}"] if zero_point else [])]
    given += [f"{typed} {name} = {values}"] if name else []
    read = "weight, scale, zero" if zero_point else "weight, scale"
    text = (
        f"g (float[1,4] x) => (float[1,2] y) <{', '.join(given)}> {{ {before} w = DequantizeLinear<axis = 1>({read}) "
    )
    onnx.save(parser.parse_model(f"{HEAD}{text} y = MatMul(x, w) }}"), path)
    return weight.astype(np.float32)


@pytest.mark.parametrize("form", ["initializer", "Constant", "Transpose"])
@pytest.mark.parametrize(("kind", "zero_point"), [("int8", True), ("int8", False), ("uint8", True)])
@pytest.mark.parametrize("unit", ["", "avx512_vnni", None])
def test_integer_matmul_is_exact_for_every_weight_form(monkeypatch, tmp_path, unit, kind, zero_point, form):
    monkeypatch.setattr(cpu_settings, "integer_unit", lambda: unit)
    path = tmp_path / "model.onnx"
    weight = rounded_product(path, kind, form, zero_point=zero_point)
    opened, _ = cpu_settings.set_up(path, CPU, Opening(), None)
    assert opened.config.get(cpu_settings.EXACT) == ("1" if unit == "" and zero_point else None)
    session = open_native(path, CPU, opened)
    outputs, failure = session.run_once({"x": np.ones((1, 4), np.float32)})
    session.close()
    assert outputs is not None and not failure, failure
    assert outputs[0].tolist() == [weight.sum(0).tolist()]


# Huge pages

linux = pytest.mark.skipif(not cpu_settings.huge_pages_available(), reason="no huge pages on this system")


@linux
def test_make_huge_preserves_content_and_untouched_memory():
    count = (24 << 20) // 4
    before = anonymous_memory()
    with mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        values = np.frombuffer(memory, np.uint32)
        values[:count] = 7  # what is beyond stays untouched; an array to copy from would be new memory beside it
        resident = len(new_blocks(before))
        assert resident >= 11  # a neighbour that the system joins with it is counted, too
        made = make_huge(before)
        assert made in range((resident + 3) * HUGE + 1)  # a kernel before 6.1 refuses
        assert bool((values[:count] == 7).all())
        left = len(new_blocks(before))
        assert left <= resident + 3, (
            "of the 8 blocks that nobody has touched hardly any: others of this process grow, too"
        )
        del values


def test_huge_pages_follow_system_setting_and_page_size(tmp_path, monkeypatch):
    path = tmp_path / "enabled"
    monkeypatch.setattr(cpu_settings, "SETTING", path)
    assert not cpu_settings.huge_pages_available()
    linux = sys.platform == "linux"
    for setting, size, allowed in (
        ("always [madvise] never", 4096, linux),
        ("always madvise [never]", 4096, False),
        ("always [madvise] never", 65536, False),
    ):
        path.write_text(setting)
        monkeypatch.setattr(cpu_settings, "_page_size", lambda size=size: size)
        assert cpu_settings.huge_pages_available() is allowed


@linux
def test_huge_pages_are_off_for_other_providers_and_by_option():
    cuda = resolve(parse_chain("cuda,cpu"), ["CUDAExecutionProvider", "CPUExecutionProvider"])
    off = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"huge_pages": "0"}})
    assert memory_before(cuda) is None and memory_before(off) is None
    assert memory_before(resolve(parse_chain("cpu"), ["CPUExecutionProvider"]))


@linux
def test_session_output_is_identical_with_huge_pages(tmp_path):
    path, shape = tmp_path / "model.onnx", (2048, 3072)
    made = parser.parse_model(HEAD + "g (float[1,2048] x) => (float[1,3072] y) { y = MatMul(x, w) }")
    weights = np.random.default_rng(0).standard_normal(shape, np.float32)
    made.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(made, path)
    results = {}
    for wanted in ("0", "1"):
        chain = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"huge_pages": wanted}})
        with closing(open_session(path, chain, threads=1, observe=False)) as session:
            binding, out = session.binding(), host_buffer((1, 3072), "float32")
            given = host_buffer((1, 2048), "float32")
            given.host[:] = 1
            binding.bind_input("x", given)
            binding.bind_output("y", out)
            assert session.cpu is not None and session.cpu.huge_page_bytes is None  # a prompt does not wait for it
            will_repeat(session)
            binding.run()
            results[wanted] = (out.host.copy(), session.cpu.huge_page_bytes)
            binding.release()
            assert will_repeat(session) == 0  # once
    np.testing.assert_array_equal(results["0"][0], results["1"][0])
    assert results["0"][1] is None
    assert results["1"][1] in (0, *range(16 << 20, 1 << 30, HUGE))  # 0 from a kernel that refuses
