"""The measured rates of this machine, kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from partita.capacity.records import MachineRates
from partita.files import cache_folder, replace
from partita.library.api import QUIET, Audience
from partita.library.engine.jobs import run_job
from partita.providers.resolve import parse_chain
from partita.runtime.cpu import VARIABLE, cpu_flags, cpu_name, usable_cores
from partita.runtime.machine import runtime_wheels

FORMAT = 2
"""Increment when the measurement changes."""
MEASURE, MOST_SECONDS = "partita.runtime.ort.rates:measure", 300.0


def _path() -> Path | None:
    """The file for this processor, number of threads and ONNX Runtime; None without a cache folder."""
    folder = cache_folder("rates")
    machine = [
        FORMAT,
        cpu_name(),
        usable_cores().threads(),
        [f"{each.name} {each.version}" for each in runtime_wheels()],
    ]
    name = hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]
    return None if folder is None else folder / f"{name}.json"


def uses_naive_attention() -> bool:
    """Whether the rates are those of the naive attention path; see `runtime.cpu.choose`."""
    return "avx512f" in cpu_flags()


def stored_rates() -> MachineRates | None:
    """The rates of this machine; None if they were not measured."""
    path = _path()
    with suppress(OSError, ValidationError, UnicodeDecodeError):  # measured again
        return None if path is None else MachineRates.model_validate_json(path.read_text(encoding="utf-8"))
    return None


def here_rates(audience: Audience = QUIET, *, again: bool = False) -> MachineRates:
    """The rates of this machine, measured and kept if they are not known. Raises as `run_job`."""
    found = None if again else stored_rates()
    if found is not None:
        return found
    environment = {**os.environ, VARIABLE: str(int(uses_naive_attention()))}
    with audience.busy("measuring the rates of this machine"):
        threads, _ = usable_cores().threads()
        rates: MachineRates = run_job(
            MEASURE, threads, chain=parse_chain("cpu"), environment=environment, timeout=MOST_SECONDS
        )
    path = _path()
    with suppress(OSError):  # a cache that cannot be written
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, rates.model_dump_json())
    return rates
