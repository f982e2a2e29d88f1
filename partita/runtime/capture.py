"""Whether ONNX Runtime opens a session for graph capture, which it decides when it has placed the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from partita.providers.resolve import Resolution
from partita.runtime.onnx_model import OnnxModel
from partita.runtime.ort.errors import one_line
from partita.runtime.ort.session import NativeFailureError, Opening, open_native


@dataclass(frozen=True, slots=True)
class Attempt:
    """Whether ONNX Runtime opened a session for graph capture."""

    file: str
    opened: bool
    warned: bool
    """It was opened with a warning: some nodes outside the device are taken for shape computations."""
    said: str


def try_capture(model: OnnxModel, resolutions: Sequence[Resolution], option: str, threads: int | None) -> Attempt:
    """Open a session whose first provider has the option that asks for graph capture, e.g. enable_cuda_graph."""
    first, *others = [entry for entry in resolutions if entry.status == "active"]
    asking = replace(first, options={**first.options, option: "1"})
    try:
        session = open_native(model.path, (asking, *others), Opening(threads=threads, model=model.to_bytes()))
    except NativeFailureError as failure:
        return Attempt(model.path.name, False, False, one_line(str(failure)))
    with closing(session):
        warned = [line for line in session.log if "graph capture" in line.lower()]
        said = one_line(warned[0].rpartition("] ")[2]) if warned else f"ONNX Runtime opens the session with {option}=1"
        return Attempt(model.path.name, True, bool(warned), f"{said}; a run may still fail to be captured")
