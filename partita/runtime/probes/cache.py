"""Answers of earlier experiments, per ONNX Runtime build, provider, options and device.

A file of JSON per such combination in the user's cache folder. A file that cannot be read or written costs time, never
a report.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, get_args

from partita.files import replace
from partita.observations.facts import Outcome
from partita.paths import cache_folder
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.ort.registry import ep_devices, hardware, ort_build

FORMAT = 9
"""To be raised when experiments are made otherwise, so that old answers count for nothing."""
KIND = "probes"
"""Of what Partita keeps."""
MOST_ANSWERS = 20_000


class Known(NamedTuple):
    """An answer that was given before."""

    outcome: Outcome
    said: str
    unfolded: bool = False
    """Taken as the nodes of the operator's function, and not as itself."""


class Cache:
    """Answers of one combination; `save` writes them."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.answers = _read(path) if path is not None else {}
        self.new: dict[str, Known] = {}

    def get(self, key: str) -> Known | None:
        """The answer stored under `key`, of this run or an earlier one; None when there is none."""
        return self.new.get(key) or self.answers.get(key)

    def put(self, key: str, outcome: Outcome, said: str, *, unfolded: bool = False) -> None:
        """Keep an answer in memory; `save` writes it to disk."""
        self.new[key] = Known(outcome, said, unfolded)

    def save(self) -> None:
        """Write new answers beside those that others have written meanwhile."""
        if self.path is None or not self.new:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            merged = {**_read(self.path), **self.new}
            kept = dict(list(merged.items())[-MOST_ANSWERS:])
            replace(self.path, json.dumps({"format": FORMAT, "answers": kept}))


def _read(path: Path) -> dict[str, Known]:
    """The answers in a file; none when it cannot be read, or is not ours."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            return {}
        answers = {str(key): Known(value[0], str(value[1]), bool(value[2])) for key, value in raw["answers"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return {}
    return {key: answer for key, answer in answers.items() if answer.outcome in get_args(Outcome)}


def cache_for(resolution: Resolution, environment: Mapping[str, str] | None = None) -> Cache:
    """The cache of one provider on this machine, or on the device that a dry run simulates.

    `environment`: that of the processes which are asked; None for our own.
    """
    folder = cache_folder(KIND)
    if folder is None:
        return Cache(None)
    text = json.dumps(_identity(resolution, os.environ if environment is None else environment), sort_keys=True)
    return Cache(folder / f"{resolution.provider.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")


def _identity(resolution: Resolution, environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Everything that an answer may depend on, besides the model."""
    build = asdict(ort_build())
    build.pop("folder")
    provider = resolution.provider
    chosen = {name for entry in known_providers().values() for name in entry.variables}
    return {
        "format": FORMAT,
        "build": build,
        "provider": provider.ort_name,
        "options": resolution.provider_options,
        "library": _stamp(resolution.library),
        "devices": [asdict(entry) for entry in ep_devices()],
        "hardware": [list(entry) for entry in hardware()],
        "variables": {name: value for name, value in environment.items() if name in chosen or name.startswith(PREFIX)},
    }


def _stamp(library: Path | None) -> list[Any]:
    """Path, size and time of a plugin library."""
    if library is None:
        return []
    try:
        status = library.stat()
    except OSError:
        return [str(library)]
    return [str(library), status.st_size, status.st_mtime_ns]
