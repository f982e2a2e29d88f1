"""How a session's CPU provider is set up, all told: what the user said, what the machine has, what was measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from partita.errors import PartitaError
from partita.observations.cpu import AttentionChoice, CpuSession
from partita.observations.names import CPU
from partita.providers.resolve import Resolution
from partita.runtime.cpu import huge_pages
from partita.runtime.cpu.attention import VARIABLE, Attention, by_word, choose, too_large
from partita.runtime.cpu.cores import usable_cores
from partita.runtime.cpu.huge_pages import Range
from partita.runtime.cpu.timing import kept_timings, times_of
from partita.runtime.ort.session import NativeFailureError, Opening

SPINNING = "session.intra_op.allow_spinning"
PACKING = "session.prepack.enable_parallel"
"""Weights are packed by all threads; ONNX Runtime's default, of 1.31 too, is one."""


def set_up(
    file: str, active: Sequence[Resolution], opening: Opening, attention: Attention | None
) -> tuple[Opening, CpuSession | None]:
    """The opening with what the CPU provider needs in it, and the settings as a report has them; None without the
    provider.

    `attention`: that of the graph, where it has two paths; the faster one for prompts is measured once per machine.
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
    config = {SPINNING: str(int(spinning)), PACKING: str(int(packing))}
    opening = replace(opening, config={**opening.config, **config})
    choice = _attention_choice(attention, active, cpu, threads)
    if choice is not None:
        variable = {VARIABLE: "1" if choice.path == "naive" else "0"}
        opening = replace(opening, environment={**opening.environment, **variable})
    settings = CpuSession(
        file=file,
        threads=threads,
        threads_reason=why,
        cores=cores.allowed,
        quota=cores.quota,
        spinning=spinning,
        spinning_reason=spinning_why,
        attention=choice,
    )
    return opening, settings


def memory_before(active: Sequence[Resolution]) -> tuple[Range, ...] | None:
    """What the process has allocated, where what a session adds to it is to go into huge pages; None where not."""
    first = active[0]
    if first.provider.ort_name != CPU or first.options.get("huge_pages") == "0" or not huge_pages.allowed():
        return None
    return huge_pages.anonymous_memory()


def with_huge_pages(settings: CpuSession | None, before: Sequence[Range] | None) -> CpuSession | None:
    """Put what the session has allocated since `before` into huge pages; the settings with how much that is."""
    if settings is None or before is None:
        return settings
    return settings.model_copy(update={"huge_page_bytes": huge_pages.make_huge(before)})


def _spinning(said: str | None, crowded: bool) -> tuple[bool, Literal["option", "default", "crowded"]]:
    """Whether threads wait for work in a loop, and why."""
    if said is not None:
        return said == "1", "option"
    return (False, "crowded") if crowded else (True, "default")


def _attention_choice(
    attention: Attention | None, active: Sequence[Resolution], cpu: Resolution, threads: int
) -> AttentionChoice | None:
    """The path through attention; None where nothing is chosen: ONNX Runtime does what it does."""
    said = by_word(cpu.options.get("attention", ""), os.environ.get(VARIABLE, ""))
    if said is not None and (attention is not None or said.reason == "option"):
        return said
    if attention is None or active[0] is not cpu or not attention.matters:
        return None
    large = too_large(attention)
    if large is not None:
        return large
    kept = kept_timings()
    try:
        found = {form: times_of(form, attention.lengths, cpu, kept) for form in attention.forms}
    except (NativeFailureError, PartitaError) as error:
        detail = f"the operator could not be timed alone: {error}"
        return AttentionChoice(path="flash", reason="failed", detail=detail)
    times = {form: each for form, (each, _) in found.items()}
    return choose(attention, times, threads, kept=all(known for _, known in found.values()))
