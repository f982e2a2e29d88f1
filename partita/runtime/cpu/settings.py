"""Configures a session's CPU provider, from the user's options and the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from partita import process
from partita.errors import UsageError
from partita.observations.names import CPU
from partita.observations.records import AttentionChoice, CpuSession
from partita.providers.resolve import Resolution
from partita.runtime.cpu import huge_pages
from partita.runtime.cpu.attention import VARIABLE, Attention, by_word, choose
from partita.runtime.cpu.cores import cpu_flags, integer_unit, usable_cores
from partita.runtime.cpu.huge_pages import Range
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
    """Memory of the process before a session that will be moved into huge pages; None if it will not be moved."""
    first = active[0]
    if first.provider.ort_name != CPU or first.options.get("huge_pages") == "0" or not huge_pages.are_available():
        return None
    return huge_pages.anonymous_memory()


def into_huge_pages(before: Sequence[Range] | None) -> Callable[[], int] | None:
    """A function that moves memory allocated since `before` into huge pages and returns the bytes; None without it."""
    if before is None:
        return None
    return partial(huge_pages.make_huge, huge_pages.added_ranges(before, huge_pages.anonymous_memory()))


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
    """The attention path; None if ONNX Runtime's default applies.

    ONNX Runtime reads the path from an environment variable, which Partita does not change in another program's
    process. Raises UsageError there for an option that needs another value.
    """
    option, variable = cpu.options.get("attention", ""), os.environ.get(VARIABLE, "")
    by_option = by_word(option, variable)
    if by_option is not None and (attention is not None or by_option.reason == "option"):
        if not process.own_process and (by_option.path == "naive") != (variable not in ("", "0")):
            needed = "1" if by_option.path == "naive" else "0"
            raise UsageError(
                f"`provider_options`: cpu.attention={by_option.path} needs a separate process, or the environment "
                f"variable {VARIABLE}={needed}; load the package with process='child'"
            )
        return by_option
    if attention is None or active[0] is not cpu:
        return None
    choice = choose(attention, threads, avx512="avx512f" in cpu_flags())
    if choice is not None and choice.path == "naive" and not process.own_process:
        detail = f"ONNX Runtime's default: Partita sets {VARIABLE} in its own processes only"
        return AttentionChoice(path="flash", reason="environment", detail=detail)
    return choice
