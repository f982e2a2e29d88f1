"""Configures a session's CPU provider: threads, spinning, attention path, exact products, huge pages.

A decode step reads all weights once; with 4 KiB pages, address translation takes much of that time. ONNX Runtime
allocates ordinary memory, and Linux uses huge pages (2 MiB) only on request (`madvise` in
/sys/kernel/mm/transparent_hugepage/enabled). MADV_COLLAPSE (madvise(2), Linux 6.1) copies existing memory into huge
pages. It runs before the first decode step, on memory that was allocated while the session opened and is fully in use,
so that memory use does not grow.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from partita import process
from partita.errors import UsageError
from partita.observations.names import CPU
from partita.observations.records import AttentionChoice, CpuSession
from partita.providers.resolve import Resolution
from partita.runtime.cpu import VARIABLE, Attention, choose, cpu_flags, integer_unit, usable_cores
from partita.runtime.ort.session import Session
from partita.runtime.ort.session_options import Opening
from partita.runtime.place.model_file import all_graphs, all_nodes, read_light

SPINNING = "session.intra_op.allow_spinning"
STOPPING = "session.force_spinning_stop"
"""Threads stop spinning when a run ends. Without it they spin for another 30 to 40 ms."""
PACKING = "session.prepack.enable_parallel"
"""All threads pack weights; ONNX Runtime's default (1.31) is one thread."""
EXACT = "session.x64quantprecision"
"""Exact products of 8-bit integers on x86 processors without an instruction for them; otherwise pairs of products
saturate at 16 bits (onnxruntime_session_options_config_keys.h). Slower, so set only there."""


def set_up(
    path: Path, active: Sequence[Resolution], opening: Opening, attention: Attention | None
) -> tuple[Opening, CpuSession | None]:
    """The opening with the CPU provider's settings, and these as a report record; None if CPU is not in the chain.

    `attention`: attention of the graph, if it has both paths.
    """
    cores = usable_cores()
    threads, reason = cores.threads(opening.threads)
    # ONNX Runtime's default pins threads to cores, which is correct if the process may use all cores.
    opening = replace(opening, threads=None if reason == "cores" else threads)
    cpu = next((entry for entry in active if entry.provider.ort_name == CPU), None)
    if cpu is None:
        return opening, None
    spinning = not cores.is_oversubscribed(threads)
    spinning_reason: Literal["option", "default", "crowded"] = "default" if spinning else "crowded"
    if "spinning" in cpu.options:
        spinning, spinning_reason = cpu.options["spinning"] == "1", "option"
    # Other providers may not support packing with several threads.
    packing = len(active) == 1 and cpu.options.get("parallel_packing") != "0"
    stopping = spinning and cpu.options.get("spinning_after") == "0"
    config = {SPINNING: str(int(spinning)), PACKING: str(int(packing)), STOPPING: str(int(stopping))}
    opening = replace(opening, config={**opening.config, **config})
    if integer_unit() == "" and supports_exact(path):
        opening = replace(opening, config={**opening.config, EXACT: "1"})
    choice = _attention_choice(attention, active, cpu, threads)
    if choice is not None:
        variable = {VARIABLE: "1" if choice.path == "naive" else "0"}
        opening = replace(opening, environment={**opening.environment, **variable})
    settings = CpuSession(
        file=path.name,
        threads=threads,
        threads_reason=reason,
        cores=cores.allowed,
        quota=cores.quota,
        spinning=spinning,
        spinning_reason=spinning_reason,
        integer_unit=integer_unit(),
        attention=choice,
    )
    return opening, settings


def supports_exact(path: Path) -> bool:
    """Whether the model in `path` runs with `EXACT`.

    With it, ONNX Runtime (1.31.1) converts constant int8 weights to uint8, and gives a DequantizeLinear without zero
    point one of the wrong shape, so the run fails. The weights may also be computed by constant folding.
    """
    import onnx

    try:
        model = read_light(path)
    except (OSError, ValueError):  # ONNX Runtime reports the error in the file
        return False
    graphs = list(all_graphs(model.graph))
    safe = {port.name for graph in graphs for port in graph.input}
    safe |= {name for node in all_nodes(model.graph) if node.op_type == "QuantizeLinear" for name in node.output}
    weights = [tensor for graph in graphs for tensor in graph.initializer]
    safe |= {tensor.name for tensor in weights if tensor.data_type != onnx.TensorProto.INT8}
    safe -= {tensor.name for tensor in weights if tensor.data_type == onnx.TensorProto.INT8}
    nodes = [node for node in all_nodes(model.graph) if node.input and node.input[0] not in safe]
    nodes += [node for function in model.functions for node in all_nodes(function)]
    return not any(node.op_type == "DequantizeLinear" and not any(node.input[2:]) for node in nodes)


def memory_before(active: Sequence[Resolution]) -> tuple[Range, ...] | None:
    """Memory of the process before a session whose memory `make_huge` will move; None if it will not be moved."""
    first = active[0]
    if first.provider.ort_name != CPU or first.options.get("huge_pages") == "0" or not huge_pages_available():
        return None
    return anonymous_memory()


def will_repeat(session: Session) -> float:
    """Prepare a session for many runs that read all weights; return the seconds that it took.

    Not worthwhile for a few runs, or for compute-bound runs such as prefill.
    """
    later, session.later = session.later, None
    if later is None or session.cpu is None:
        return 0.0
    began = time.perf_counter()
    huge = later()
    seconds = time.perf_counter() - began
    session.cpu = session.cpu.model_copy(update={"huge_page_bytes": huge, "huge_page_seconds": round(seconds, 4)})
    return seconds


def _attention_choice(
    attention: Attention | None, active: Sequence[Resolution], cpu: Resolution, threads: int
) -> AttentionChoice | None:
    """The attention path: the user's by option or environment variable, else by rule; None for ONNX Runtime's default.

    ONNX Runtime reads the path from an environment variable, which Partita does not change in another program's
    process. Raises UsageError there for an option that needs another value.
    """
    option, variable = cpu.options.get("attention", "auto"), os.environ.get(VARIABLE, "")
    naive = variable not in ("", "0")
    if option in ("flash", "naive"):
        if not process.own_process and (option == "naive") != naive:
            needed = "1" if option == "naive" else "0"
            raise UsageError(
                f"`provider_options`: cpu.attention={option} needs a separate process, or the environment "
                f"variable {VARIABLE}={needed}; load the package with process='child'"
            )
        path: Literal["flash", "naive"] = "naive" if option == "naive" else "flash"
        return AttentionChoice(path=path, reason="option", detail=f"cpu.attention={path}")
    if attention is not None and variable:
        detail = f"the environment has {VARIABLE}={variable}"
        return AttentionChoice(path="naive" if naive else "flash", reason="environment", detail=detail)
    if attention is None or active[0] is not cpu:
        return None
    choice = choose(attention, threads, avx512="avx512f" in cpu_flags())
    if choice is not None and choice.path == "naive" and not process.own_process:
        detail = f"ONNX Runtime's default: Partita sets {VARIABLE} in its own processes only"
        return AttentionChoice(path="flash", reason="environment", detail=detail)
    return choice


# --- huge pages -------------------------------------------------------------------------------------------------------

HUGE = 2 << 20
"""Bytes of a huge page on x86-64, and on ARM with 4 KiB base pages; other systems are not supported."""
PAGE = 4096
COLLAPSE = 25
"""MADV_COLLAPSE of linux/mman.h."""
LEAST_BYTES = 16 << 20
"""Minimum bytes for a measurable gain: a TLB has about 2,000 entries of any page size."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS, PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
PRESENT = np.uint64(1 << 63)

Range = tuple[int, int]
"""First address and end address (exclusive)."""


def huge_pages_available() -> bool:
    """Whether the system provides huge pages on request; False if unknown."""
    if sys.platform != "linux" or _page_size() != PAGE:
        return False
    try:
        setting = SETTING.read_text(encoding="ascii")
    except OSError:
        return False
    return "[never]" not in setting


def _page_size() -> int:
    import resource

    return resource.getpagesize()


def anonymous_memory() -> tuple[Range, ...]:
    """Writable anonymous memory of this process, by address; empty if unknown."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if inode == "0" and rights == "rw-p" and (not name or name[0].startswith(("[heap]", "[anon"))):
            first, _, last = addresses.partition("-")
            found.append((int(first, 16), int(last, 16)))
    return tuple(found)


def make_huge(before: Sequence[Range]) -> int:
    """Collapse the blocks of `new_blocks` into huge pages; return the bytes that are then in huge pages."""
    blocks = new_blocks(before)
    if len(blocks) * HUGE < LEAST_BYTES:
        return 0
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    breaks = [at for at in range(1, len(blocks)) if blocks[at] != blocks[at - 1] + HUGE]
    runs = [(blocks[first], (end - first) * HUGE) for first, end in pairwise((0, *breaks, len(blocks)))]
    return sum(size for address, size in runs if madvise(address, size, COLLAPSE) == 0)


def new_blocks(before: Sequence[Range]) -> list[int]:
    """Addresses of the huge-page-sized blocks that are fully in use, and of which no part was in use `before`."""
    added = sorted({*anonymous_memory()} - {*before})
    blocks = (block for memory in added for block in full_blocks(memory))
    return [block for block in blocks if not any(first < block + HUGE and block < last for first, last in before)]


def full_blocks(memory: Range) -> list[int]:
    """Addresses of the huge-page-sized blocks of `memory` that are fully in use."""
    first = -(-memory[0] // HUGE) * HUGE
    count = (memory[1] - first) // HUGE
    if count <= 0:
        return []
    try:
        with PAGEMAP.open("rb") as stream:
            stream.seek(first // PAGE * 8)
            entries = np.frombuffer(stream.read(count * HUGE // PAGE * 8), np.uint64)
    except (OSError, MemoryError):  # huge pages are optional
        return []
    if len(entries) != count * HUGE // PAGE:
        return []
    full = (entries & PRESENT != 0).reshape(count, -1).all(axis=1)
    return [first + int(place) * HUGE for place in np.flatnonzero(full)]
