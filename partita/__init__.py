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
    from partita.errors import CheckpointError as CheckpointError
    from partita.errors import GenerationError as GenerationError
    from partita.errors import InstallationError as InstallationError
    from partita.errors import PackageError as PackageError
    from partita.errors import ParityError as ParityError
    from partita.errors import PartitaError as PartitaError
    from partita.errors import ProviderError as ProviderError
    from partita.errors import ReportCheckError as ReportCheckError
    from partita.errors import ReportError as ReportError
    from partita.errors import ResourceError as ResourceError
    from partita.errors import UnsupportedModelError as UnsupportedModelError
    from partita.errors import UsageError as UsageError
    from partita.library.api import ArgumentError as ArgumentError
    from partita.library.batches.batch_run import BatchRunResult as BatchRunResult
    from partita.library.batches.batch_run import generate_file as generate_file
    from partita.library.bench import BenchResult as BenchResult
    from partita.library.bench import bench as bench
    from partita.library.drifting import drift as drift
    from partita.library.engine.requests import CompletionResult as CompletionResult
    from partita.library.engine.requests import RequestOutput as RequestOutput
    from partita.library.engine.requests import Ticket as Ticket
    from partita.library.engine.requests import Work as Work
    from partita.library.exporting import ExportResult as ExportResult
    from partita.library.exporting import export as export
    from partita.library.generation import Generation as Generation
    from partita.library.generation import GenerationStep as GenerationStep
    from partita.library.inspecting import inspect as inspect
    from partita.library.loading import load as load
    from partita.library.model import Model as Model
    from partita.library.model import VerificationError as VerificationError
    from partita.library.model import request as request
    from partita.library.place.placement import PlacementError as PlacementError
    from partita.library.place.placement import place as place
    from partita.library.place.support import providers as providers
    from partita.library.place.support import support as support
    from partita.library.planning import plan as plan
    from partita.library.report import CheckFailedError as CheckFailedError
    from partita.library.report import Report as Report
    from partita.library.sampling import Sampling as Sampling

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

__all__ = sorted([*_OFFERED, "__version__", "errors"])


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
