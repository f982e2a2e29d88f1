"""Partita: static ONNX export of Hugging Face decoders, and reports of the providers that ran them.

    with partita.load("package", providers="webgpu,cpu") as model:
        for step in model.generate("Return the", max_new_tokens=64):
            print(step.text, end="")
        model.report().check("provider=webgpu,share>=0.95")

docs/python.md documents the interface. Importing this package imports no torch, onnxruntime or transformers; each name
is loaded on first access.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False  # typing takes most of the time of this import, in which Ctrl-C cannot be caught
if TYPE_CHECKING:
    from typing import Any

    from partita import errors as errors
    from partita.errors import (
        CheckpointError,
        GenerationError,
        InstallationError,
        PackageError,
        ParityError,
        PartitaError,
        ProviderError,
        ReportCheckError,
        ReportError,
        ResourceError,
        UnsupportedModelError,
        UsageError,
    )
    from partita.library.api import ArgumentError
    from partita.library.batches.batch_run import BatchRunResult, generate_file
    from partita.library.bench import BenchResult, bench
    from partita.library.drifting import drift
    from partita.library.engine.requests import CompletionResult, RequestOutput, Ticket, Work
    from partita.library.exporting import ExportResult, export
    from partita.library.generation import Generation, GenerationStep
    from partita.library.inspecting import inspect
    from partita.library.loading import load
    from partita.library.model import Model, VerificationError, request
    from partita.library.place.placement import PlacementError, place
    from partita.library.place.support import providers, support
    from partita.library.planning import plan
    from partita.library.report import CheckFailedError, Report
    from partita.library.sampling import Sampling

__version__ = "0.1.0"

_HOMES = {
    "errors": (
        "CheckpointError GenerationError InstallationError PackageError ParityError PartitaError ProviderError "
        "ReportCheckError ReportError ResourceError UnsupportedModelError UsageError"
    ),
    "library.batches.batch_run": "BatchRunResult generate_file",
    "library.bench": "BenchResult bench",
    "library.api": "ArgumentError",
    "library.drifting": "drift",
    "library.exporting": "ExportResult export",
    "library.generation": "Generation GenerationStep",
    "library.inspecting": "inspect",
    "library.loading": "load",
    "library.model": "Model VerificationError request",
    "library.planning": "plan",
    "library.place.placement": "PlacementError place",
    "library.report": "CheckFailedError Report",
    "library.engine.requests": "CompletionResult RequestOutput Ticket Work",
    "library.sampling": "Sampling",
    "library.place.support": "providers support",
}
_OFFERED = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "ArgumentError",
    "BatchRunResult",
    "BenchResult",
    "CheckFailedError",
    "CheckpointError",
    "CompletionResult",
    "ExportResult",
    "Generation",
    "GenerationError",
    "GenerationStep",
    "InstallationError",
    "Model",
    "PackageError",
    "ParityError",
    "PartitaError",
    "PlacementError",
    "ProviderError",
    "Report",
    "ReportCheckError",
    "ReportError",
    "RequestOutput",
    "ResourceError",
    "Sampling",
    "Ticket",
    "UnsupportedModelError",
    "UsageError",
    "VerificationError",
    "Work",
    "__version__",
    "bench",
    "drift",
    "errors",
    "export",
    "generate_file",
    "inspect",
    "load",
    "place",
    "plan",
    "providers",
    "request",
    "support",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(f"{__name__}.errors")
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
    if name in _FOLDERS:
        _join(found, sys.modules[f"{__name__}.{name}"])
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


def _join(function: Any, folder: ModuleType) -> None:
    """Give a function the present and future attributes of the subpackage of its name: `partita.export.pipeline`."""
    vars(folder).update(vars(function))
    function.__dict__ = vars(folder)


_FOLDERS = ("bench", "drift", "export", "providers", "support")
"""Subpackages that share their name with a function."""

# Python sets a submodule as an attribute of its package at the first import only. Import it here and remove the
# attribute, so that a later `import partita.export.pipeline` does not hide the function.
for _folder in _FOLDERS:
    import_module(f"{__name__}.{_folder}")
    globals().pop(_folder, None)
