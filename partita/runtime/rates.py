"""The measured rates of this machine, kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import ValidationError

from partita.capacity.records import MachineRates
from partita.files import replace
from partita.paths import cache_folder
from partita.runtime.chain.wheels import runtime_wheels
from partita.runtime.cpu.cores import cpu_flags, cpu_name, usable_cores

KIND = "rates"
FORMAT = 1
"""Increment when the measurement changes."""


def uses_naive_attention() -> bool:
    """Whether the rates are those of the naive attention path; see `runtime.cpu.attention.choose`."""
    return "avx512f" in cpu_flags()


def stored_rates() -> MachineRates | None:
    """The rates of this machine, ONNX Runtime and number of threads; None if they were not measured."""
    path = _path()
    if path is None or not path.is_file():
        return None
    try:
        return MachineRates.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):  # measured again
        return None


def keep_rates(rates: MachineRates) -> None:
    """Write the rates to the cache folder, if there is one that can be written."""
    path = _path()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, rates.model_dump_json().encode())
    except OSError:  # measured again next time
        return


def _path() -> Path | None:
    folder = cache_folder(KIND)
    threads, _ = usable_cores().threads()
    machine = [FORMAT, cpu_name(), threads, [f"{wheel.name} {wheel.version}" for wheel in runtime_wheels()]]
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return None if folder is None else folder / f"{name}.json"
