"""Converts ONNX Runtime's exceptions to Partita's, one line each, by class name and text, without importing it.

The patterns match messages of version 1.31.1; unknown messages are passed on, shortened to one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from partita.errors import GenerationError, PackageError, PartitaError, ProviderError, ResourceError
from partita.observations.native_text import cut, without_signatures
from partita.package.folder import MANIFEST, export_again_remedy
from partita.remedies import FROM_CHECKPOINT, Remedy
from partita.runtime.ort.native_log import complaints

OUR_OWN = "Could not write a profile"
"""Message when a profiled session could not be opened."""
STRICT = "fallback to CPU EP has been explicitly disabled"
HEAD = re.compile(r"^(Error in execution: )?(\[ONNXRuntimeError\] : \d+ : \w+ : )?(Error in execution: )?")
SOURCE_PATH = re.compile(r"(/\S*)?/?onnxruntime_src/\S+ [^\[]*?(?=\[ONNXRuntimeError\])")
MEMORY = re.compile(r"bad_alloc|out of memory|failed to allocate|BFCArena.*(fail|not enough)", re.IGNORECASE)
FILE_TROUBLE = re.compile(
    r"Load model|External (initializer|data)|Deserialize tensor|Type Error|Invalid model|IR version|opset|"
    r"ShapeInferenceError|TypeInferenceError|is not a registered function/op|Failed to load model",
    re.IGNORECASE,
)
NAMED_NODE = re.compile(r"Could not find an implementation for (?P<op>\w+)\S* node with name '(?P<node>.*)'")
UNPLACED = re.compile(r"Provider type for (?P<op>\S+) node with name '(?P<node>[^']*)' is not set")
"""The exception for a node without a kernel in any provider, if a provider prefers another layout."""
LONGEST = 600

DAMAGED = frozenset({"NoSuchFile", "InvalidProtobuf", "InvalidGraph", "NoModel", "ModelRequiresCompilation"})
PROVIDER_TROUBLE = frozenset({"EPFail", "EngineError", "DeviceReset"})
NO_KERNEL = "NotImplemented"
LACKS = re.compile(
    r"device does not support|shader_helper|ShaderModule|compute pipeline|not supported by the device|not implemented",
    re.IGNORECASE,
)
OTHER_SCHEMA = re.compile(r"with schema\(|Unrecognized attribute")
"""The file uses inputs, outputs or attributes of a newer operator version."""
OTHER_NODE = Remedy(
    "no provider in the chain has a kernel for it: change the node's type or opset, or use another provider"
)
OTHER_PRECISION = Remedy(
    "use another provider, or export with another precision",
    ("partita", "export", "CHECKPOINT", "OUT", "--precision", "fp32"),
)
ON_CPU = Remedy("use the CPU provider", options=("--provider", "cpu"))
OTHER_VERSION = Remedy(
    "it uses another version of that operator: run it with the ONNX Runtime it was exported for, or export "
    "it without that attribute or input"
)
NEWER_RUNTIME = Remedy("run it with a newer ONNX Runtime, or export it for an older operator set")
OTHER_RUNTIME = Remedy(
    "run it with the ONNX Runtime it was exported for, or export it without that operator: Partita loads no libraries "
    "of custom operators"
)
LOWER_IR = Remedy("use a newer ONNX Runtime, or set ir_version in the file to {last}; nothing else needs to change")
TOO_NEW: tuple[tuple[re.Pattern[str], str, Remedy], ...] = (
    (
        re.compile(r"Opset (\d+) is under development.*support for domain (\S+) is till opset (?P<last>\d+)"),
        "it uses operator set {0} of {1}, but this ONNX Runtime supports up to {2}",
        NEWER_RUNTIME,
    ),
    (
        re.compile(r"([\w.]*):(\w+)\(-?\d+\) is not a registered function/op"),
        "this ONNX Runtime lacks the operator {0}.{1}, which the graph needs",
        OTHER_RUNTIME,
    ),
    (
        re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (?P<last>\d+)"),
        "its IR version is {0}, but this ONNX Runtime supports versions up to {1}",
        LOWER_IR,
    ),
)
"""A message about a model for another ONNX Runtime, its problem with the groups of the message, and the remedy."""
ESCAPES = re.compile(r"escapes (the )?model directory", re.IGNORECASE)
NEW_FILE = Remedy("check it with onnx.checker, or export it again")
SMALLER = Remedy(
    "free memory, or export a smaller model", ("partita", "export", "CHECKPOINT", "OUT", "--precision", "fp16")
)
SHORTER = Remedy(
    "free memory, or export with a smaller maximum length",
    ("partita", "export", "CHECKPOINT", "OUT", "--max-length", "512"),
)


class NoKernelError(ProviderError):
    """No provider of the chain has a kernel for a node.

    `node` is empty for a node of an inlined function, which has no name; `op_type` is empty if unknown.
    """

    path: Path

    def __init__(self, message: str, path: Path, node: str, op_type: str = "", *, remedy: Remedy | None = None) -> None:
        super().__init__(message, path=path, remedy=OTHER_NODE if remedy is None else remedy)
        self.node, self.op_type = node, op_type


class NotOpenedError(ProviderError):
    """The last providers of a chain fail on a model, usually while creating a kernel of an unnamed node.

    `path`: the file, for experiments.
    """

    path: Path


def lacks_kernel(error: Exception) -> bool:
    """Whether no provider of a session has a kernel for a node."""
    return type(error).__name__ == NO_KERNEL or UNPLACED.search(str(error)) is not None


def open_error(path: Path, chain: Sequence[str], error: Exception, log: tuple[str, ...]) -> PartitaError:
    """The error for a session that cannot be opened. `log`: native log lines of the attempt."""
    kind, text, names = type(error).__name__, one_line(str(error)), ", ".join(chain)
    log_lines = [one_line(line) for line in complaints(log) if OUR_OWN not in line]
    extra = "".join(
        f"; ONNX Runtime also logged: {line}" for line in log_lines[:1] if line not in text and text not in line
    )
    packaged = (path.parent / MANIFEST).is_file()
    if MEMORY.search(text):
        return ResourceError(f"out of memory while loading it: {text}{extra}", path=path, remedy=SMALLER)
    if lacks_kernel(error):
        found = NAMED_NODE.search(text) or UNPLACED.search(text)
        node, op_type = (found["node"], found["op"]) if found else ("", "")
        return NoKernelError(f"{names} cannot run it: {text}{extra}", path, node, op_type)
    for pattern, problem, remedy in TOO_NEW:
        if found := pattern.search(text):
            return PackageError(problem.format(*found.groups()), path=path, remedy=remedy.filled(**found.groupdict()))
    if kind in DAMAGED or (kind not in PROVIDER_TROUBLE and FILE_TROUBLE.search(text)):
        remedy = (
            OTHER_VERSION if OTHER_SCHEMA.search(text) else export_again_remedy(path.parent) if packaged else NEW_FILE
        )
        return PackageError(f"ONNX Runtime cannot load it: {text}{extra}", path=path, remedy=remedy)
    on_cpu = ON_CPU if list(chain) != ["CPUExecutionProvider"] else None
    return NotOpenedError(f"{names} failed to open it: {text}{extra}", path=path, remedy=on_cpu)


def run_error(file: str, error: Exception) -> PartitaError:
    """The error for failed binding or a failed run."""
    kind, text = type(error).__name__, one_line(str(error))
    if MEMORY.search(text):
        return ResourceError(f"{file}: out of memory during a run: {text}", remedy=SHORTER)
    if LACKS.search(text):
        return ProviderError(f"{file}: the device cannot run it: {text}", remedy=OTHER_PRECISION)
    if kind in PROVIDER_TROUBLE:
        return ProviderError(f"{file}: the provider failed during a run: {text}", remedy=ON_CPU)
    return GenerationError(f"{file}: a run failed: {text}", remedy=FROM_CHECKPOINT)


def buffer_error(size_bytes: int, memory: str, error: Exception | None = None) -> PartitaError:
    """The error for a buffer that cannot be allocated."""
    reason = f" ({one_line(str(error))})" if error is not None else ""
    if error is not None and LACKS.search(str(error)):  # raised by a run
        return ProviderError(f"the device cannot run it: {one_line(str(error))}", remedy=OTHER_PRECISION)
    if error is not None and not MEMORY.search(str(error)):
        return ProviderError(
            f"cannot allocate a buffer of {size_bytes:,} bytes in {memory} memory{reason}", remedy=OTHER_PRECISION
        )
    return ResourceError(f"no space for a buffer of {size_bytes:,} bytes in {memory} memory{reason}", remedy=SHORTER)


def one_line(text: str, longest: int = LONGEST) -> str:
    """A message of ONNX Runtime on one line of at most `longest` characters, without status and source paths."""
    flat = HEAD.sub("", without_signatures(" ".join(SOURCE_PATH.sub("", text).split()))).rstrip(". ")
    return cut(flat, longest)
