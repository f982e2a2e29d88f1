"""How a session's CPU provider is configured: the options of the user and the properties of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from partita import streams
from partita.errors import UsageError
from partita.observations.cpu import AttentionChoice, CpuSession
from partita.observations.names import CPU
from partita.providers.resolve import Resolution
from partita.runtime.contents.light import read_light
from partita.runtime.cpu import huge_pages
from partita.runtime.cpu.attention import VARIABLE, Attention, by_word, choose
from partita.runtime.cpu.cores import cpu_flags, integer_unit, usable_cores
from partita.runtime.cpu.huge_pages import Range
from partita.runtime.ort.session import Opening, Session
from partita.runtime.place.model_file import all_graphs, all_nodes

SPINNING = "session.intra_op.allow_spinning"
STOPPING = "session.force_spinning_stop"
"""Threads leave their loop when a run ends. Without it they stay in it for 30 to 40 ms."""
PACKING = "session.prepack.enable_parallel"
"""Weights are packed by all threads; ONNX Runtime's default, of 1.31 too, is one."""
EXACT = "session.x64quantprecision"
"""Products of 8-bit integers are exact on processors of x86 without an instruction for them, where pairs of products
saturate at 16 bits otherwise (onnxruntime_session_options_config_keys.h). It is slower, so it is set only there.
"""


def set_up(
    path: Path, active: Sequence[Resolution], opening: Opening, attention: Attention | None
) -> tuple[Opening, CpuSession | None]:
    """The opening with what the CPU provider needs in it, and the settings as a report has them; None without the
    provider.

    `attention`: that of the graph, where it has two paths.
    """
    cores = usable_cores()
    threads, why = cores.threads(opening.threads)
    # ONNX Runtime's own choice ties threads to cores, and is left alone where all of them are there to be tied to.
    opening = replace(opening, threads=None if why == "cores" else threads)
    cpu = next((entry for entry in active if entry.provider.ort_name == CPU), None)
    if cpu is None:
        return opening, None
    spinning, spinning_why = _spinning(cpu.options.get("spinning"), cores.crowded(threads))
    # What other providers do when they pack need not be made for several threads.
    packing = len(active) == 1 and cpu.options.get("parallel_packing") != "0"
    stopping = spinning and cpu.options.get("spinning_after") == "0"
    config = {SPINNING: str(int(spinning)), PACKING: str(int(packing)), STOPPING: str(int(stopping))}
    opening = replace(opening, config={**opening.config, **config})
    if integer_unit() == "" and takes_exact(path):
        opening = replace(opening, config={**opening.config, EXACT: "1"})
    choice = _attention_choice(attention, active, cpu, threads)
    if choice is not None:
        variable = {VARIABLE: "1" if choice.path == "naive" else "0"}
        opening = replace(opening, environment={**opening.environment, **variable})
    settings = CpuSession(
        file=path.name,
        threads=threads,
        threads_reason=why,
        cores=cores.allowed,
        quota=cores.quota,
        spinning=spinning,
        spinning_reason=spinning_why,
        attention=choice,
    )
    return opening, settings


def takes_exact(path: Path) -> bool:
    """Whether the model in `path` runs with `EXACT`.

    With it ONNX Runtime turns constant int8 weights into uint8, and gives a DequantizeLinear without zero point one of
    the wrong shape; the run then fails (1.31.1, seen). Constants may also come from nodes that ONNX Runtime folds.
    """
    import onnx

    try:
        model = read_light(path)
    except (OSError, ValueError):  # ONNX Runtime reports what is wrong with the file
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
    """What the process has allocated, where what a session adds to it is to go into huge pages; None where not."""
    first = active[0]
    if first.provider.ort_name != CPU or first.options.get("huge_pages") == "0" or not huge_pages.allowed():
        return None
    return huge_pages.anonymous_memory()


def into_huge_pages(before: Sequence[Range] | None) -> Callable[[], int] | None:
    """Puts what has been allocated since `before` and up to now into huge pages when it is called, and says how many
    bytes that are; None where that is not to be.
    """
    if before is None:
        return None
    return partial(huge_pages.make_huge, huge_pages.added(before, huge_pages.anonymous_memory()))


def will_repeat(session: Session) -> float:
    """Do what makes a run quicker that reads all weights, once for a session; how many seconds that took.

    It takes longer than it saves in a few runs, and saves nothing where a run computes more than it reads, as that of a
    prompt does.
    """
    later, session.later = session.later, None
    if later is None or session.cpu is None:
        return 0.0
    began = time.perf_counter()
    huge = later()
    seconds = time.perf_counter() - began
    session.cpu = session.cpu.model_copy(update={"huge_page_bytes": huge, "huge_page_seconds": round(seconds, 4)})
    return seconds


def _spinning(said: str | None, crowded: bool) -> tuple[bool, Literal["option", "default", "crowded"]]:
    """Whether threads wait for work in a loop, and why."""
    if said is not None:
        return said == "1", "option"
    return (False, "crowded") if crowded else (True, "default")


def _attention_choice(
    attention: Attention | None, active: Sequence[Resolution], cpu: Resolution, threads: int
) -> AttentionChoice | None:
    """The path through attention; None where nothing is chosen, and ONNX Runtime decides.

    ONNX Runtime reads the path from an environment variable, which the process of another program keeps as it is.
    Raises UsageError there for an option that needs another value.
    """
    option, variable = cpu.options.get("attention", ""), os.environ.get(VARIABLE, "")
    said = by_word(option, variable)
    if said is not None and (attention is not None or said.reason == "option"):
        if not streams.own_process and (said.path == "naive") != (variable not in ("", "0")):
            needed = "1" if said.path == "naive" else "0"
            raise UsageError(
                f"`provider_options`: cpu.attention={said.path} needs a process of its own, or the environment "
                f"variable {VARIABLE}={needed}; load the package with process='child'"
            )
        return said
    if attention is None or active[0] is not cpu:
        return None
    choice = choose(attention, threads, avx512="avx512f" in cpu_flags())
    if choice is not None and choice.path == "naive" and not streams.own_process:
        detail = f"ONNX Runtime's default: Partita sets {VARIABLE} in its own processes only"
        return AttentionChoice(path="flash", reason="environment", detail=detail)
    return choice
