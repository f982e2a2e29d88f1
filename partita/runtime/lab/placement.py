"""The worker process of the laboratory: opens one model on one provider and returns the placement of its node.

The chain is the provider and ONNX Runtime's CPU provider. A changed node that the provider supports is also run. In a
dry run, it runs on the CPU provider instead and is compared with the unchanged node.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from partita import dtypes
from partita.observations.facts import FAILED, Outcome
from partita.observations.names import CPU, INLINED
from partita.observations.native_text import FULL
from partita.observations.patterns import LogPattern
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.cuda_dry_run.stub_build import BUILD_VARIABLE, ensure_child
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.chain.provider_state import register_plugins
from partita.runtime.ort.errors import lacks_kernel, one_line
from partita.runtime.ort.native_log import HEAD, INFO, VERBOSE
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.ort.session_options import Opening

NODE = "probe"
"""Name of the node under test."""
AUXILIARY = "auxiliary"
"""Name of the auxiliary Neg, and name prefix of other auxiliary nodes."""
ZEROS = "zeros.bin"
"""Sparse file of zeros, the external data of large constants."""
RUN = "partita.run"
"""Metadata key of a changed node: sizes of its inputs by name, in JSON; null if they are unknown or large."""
TIMED = "partita.timed"
"""Metadata key of a model whose run is also timed."""
REFUSED = frozenset({"InvalidGraph", "InvalidArgument", "InvalidProtobuf", "NoSuchFile"})
ILLEGAL = re.compile(
    r"invalid model|Type Error|TypeInferenceError|ShapeInferenceError|Unrecognized attribute|ValidateOpset|"
    r"under development|only guaranteed support|not a registered function/op|IR version|is not currently registered",
    re.IGNORECASE,
)
LOADING = re.compile(r"Load model from \S+ failed:\s*")
CPU_KERNEL = re.compile(r"providers[/\\]cpu[/\\]\S+\.cc:")
"""A source file of the CPU provider's kernels. Other providers use its headers, too."""
NEIGHBOUR = re.compile(rf"{AUXILIARY}\d+")
"""Name prefix of neighbouring nodes."""
ABOUT_NODE, ABOUT_AUXILIARY = re.compile(f"`{NODE}`"), re.compile(rf"`{AUXILIARY}\w*`")
"""A message of QNN about a node."""
CAST = "InsertedPrecisionFreeCast"
"""Part of the name of casts that ONNX Runtime inserts around kernels of another type."""
CASTS = (
    "the CPU provider runs it between casts inserted by ONNX Runtime, because the CPU provider has no "
    "kernel for the type either"
)
AS_FUNCTION = "only as the nodes of its function"
NO_NODE_LEFT = "folded before the run: no node of it remains"
NOT_CLAIMED = "it is not among the nodes that the provider supports"
FLOATS = frozenset({"tensor(float)", "tensor(float16)", "tensor(double)"})
"""Types of inputs that may be ones; integers may be positions or sizes."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The outcome of one model."""

    outcome: Outcome
    message: str = ""
    """A line of the log or an error; for a supported node, its replacement by ONNX Runtime."""
    replaced_by: Literal["", "function", "nothing", "casts"] = ""
    """Nodes in place of a supported node: those of its function, none, or (CPU) a node of another type between
    casts."""
    seconds: float | None = None
    """The fastest of several runs on ones; None if it was not timed."""
    cached: bool = False
    was_killed: bool = False
    """The process was ended by SIGKILL, e.g. for lack of memory."""

    @property
    def function_inlined(self) -> bool:
        """Whether it is supported as the expanded function of the operator, not as the operator."""
        return self.replaced_by == "function"

    @property
    def is_supported(self) -> bool:
        """Whether the unchanged node is supported."""
        return self.outcome == "supported" and not self.function_inlined

    @property
    def is_repeatable(self) -> bool:
        """Whether the answer does not depend on the load of the machine."""
        if self.outcome == "timed_out" or self.was_killed or self.seconds is not None:
            return False
        return self.outcome not in FAILED or not FULL.search(self.message)


class State:
    """The started provider of this process."""

    resolution: Resolution | None = None


def start(resolution: Resolution) -> str:
    """Start the provider; return why it cannot be tested, or an empty string."""
    try:
        if os.environ.get(BUILD_VARIABLE):
            ensure_child()
        (State.resolution,) = register_plugins([resolution])
    except Exception as error:  # noqa: BLE001 - every exception is a result
        return f"{type(error).__name__}: {error}"
    settled = State.resolution
    return "" if settled.status == "active" else f"RuntimeError: {settled.reason}: {settled.evidence}"


def measure(model: bytes, zeros: int, one_node: bool) -> Placement:
    """Open a model. `one_node`: place its node, unoptimised; else only open it. `zeros`: size of its weights file."""
    assert State.resolution is not None
    try:
        if zeros:
            with (_place().parent / ZEROS).open("ab") as file:
                file.truncate(max(zeros, file.tell()))
        return _measure(model, State.resolution, one_node)
    except Exception as error:  # noqa: BLE001 - not the provider's fault, so not reported as its crash
        return Placement("invalid", f"the experiment itself failed: {type(error).__name__}: {error}")


HANDLERS = {"start": start, "measure": measure}


def _place() -> Path:
    """The model's virtual path, in the folder of the file of zeros."""
    return Path(tempfile.gettempdir()) / "model.onnx"


def _measure(model: bytes, resolution: Resolution, one_node: bool) -> Placement:
    """Open the model, find the node, and run it if requested."""
    severity = VERBOSE if one_node and resolution.provider.why_patterns else INFO
    threads = 1 if one_node else None
    try:
        opening = Opening(
            threads=threads, severity=severity, optimise=not one_node, model=model, scratch=_place().parent
        )
        session = open_native(_place(), [resolution], opening)
    except NativeFailureError as failure:
        return failed_placement(failure, resolution, one_node, legal=lambda: _legal_on_cpu(model))
    with closing(session):
        found = opened_placement(session, resolution) if one_node else _in_session(session, resolution)
        return _run(session, found, model) if found.outcome == "supported" else found


def _legal_on_cpu(model: bytes) -> bool:
    """Whether ONNX Runtime accepts the model without the provider, even without a kernel for it."""
    try:
        _open_on_cpu(model).close()
    except NativeFailureError as failure:
        cpu = Resolution(known_providers()["cpu"], "active")
        return failed_placement(failure, cpu, one_node=True, legal=lambda: False).outcome != "invalid"
    return True


def failed_placement(
    failure: NativeFailureError, resolution: Resolution, one_node: bool, *, legal: Callable[[], bool]
) -> Placement:
    """The outcome of a session that did not open: no kernel, an illegal model, or a failure of the provider.

    `legal`: whether ONNX Runtime accepts the model without the provider.
    """
    kind, text = type(failure.error).__name__, plain_text(str(failure))
    reason = _reason_in(failure.log, resolution.provider.node_patterns)
    if lacks_kernel(failure.error):
        return Placement("rejected", reason or text)
    if one_node and CAST in text:  # around a kernel of another type, in an opset whose Cast does not support the type
        return Placement("rejected", reason or CASTS)
    illegal = kind in REFUSED or (kind not in ("EPFail", "RuntimeException", "RuntimeError") and ILLEGAL.search(text))
    if illegal and not legal():
        return Placement("invalid", text)
    if one_node and (reason or CPU_KERNEL.search(str(failure))):
        # The provider rejected the node before: the CPU provider's kernel failed.
        return Placement("rejected", reason or text)
    if one_node and not illegal and not legal():
        return Placement("invalid", text)
    fatal = [
        one_line(match["text"]) for line in failure.log if (match := HEAD.match(line)) and match["severity"] in "EF"
    ]
    more = next((line for line in fatal if line not in text and text not in line), "")
    both = f"{text} {more}"
    if one_node and ABOUT_AUXILIARY.search(both) and not ABOUT_NODE.search(both):
        return Placement("invalid", f"the provider fails on a neighbouring node: {text}")
    return Placement("failed", f"{text}; {more}" if more else text)


def plain_text(text: str) -> str:
    """A message on one line, without the names of file and node."""
    text = LOADING.sub("", one_line(text))
    for spelled in (f" node name: {NODE}", f" in node ({NODE})", f" with name '{NODE}'"):
        text = text.replace(spelled, "")
    return text.replace(f"Node ({NODE}) ", "Node ")


def _in_session(session: Session, resolution: Resolution) -> Placement:
    """The outcome if ONNX Runtime left the provider out of the session."""
    name = resolution.provider.ort_name
    if name in session.registered:
        return Placement("supported")
    return Placement("failed", f"ONNX Runtime left {name} out of the session")


def opened_placement(session: Session, resolution: Resolution) -> Placement:
    """The placement of the node in an open session.

    The node lists may lack nodes of a provider that prefers another layout and nodes between inserted casts; the plan
    has these. An operator without a kernel appears as the nodes of its function in both.
    """
    kept = _in_session(session, resolution)
    if kept.outcome != "supported":
        return kept
    provider = resolution.provider
    everything = session.assigned() or ()
    nodes = [node for node in everything if not node.name.startswith(AUXILIARY)]
    own = next((node.provider for node in nodes if node.name == NODE), None)
    devices = session.plan_devices or ()
    planned = {
        node: devices[number] if number < len(devices) else ""
        for number, stream in enumerate(session.plan or ())
        for node in stream
    }
    casts = any(CAST in node for node in planned)
    on_itself = provider.ort_name == CPU
    if own == provider.ort_name:
        return Placement("supported", CASTS, "casts") if on_itself and casts else Placement("supported")
    reason = _reason_in(session.log, provider.node_patterns)

    def rejected(otherwise: str = "") -> Placement:
        return Placement("rejected", reason or reason_in_log(session.log, provider.why_patterns) or otherwise)

    if any(NEIGHBOUR.fullmatch(name) for name in (*planned, *(node.name for node in everything))):
        # Casts and function nodes may belong to the neighbours.
        return rejected() if own == CPU else Placement("supported")
    if own == CPU or casts:
        return rejected(CASTS if casts else "")
    placed = [node for node in planned if node == NODE or node.startswith(f"{NODE}_")]
    if placed:
        if provider.compiles:
            return rejected(NOT_CLAIMED)
        on_host = planned[placed[0]] == "0" and any(device != "0" for device in devices)
        return rejected() if on_host or reason else Placement("supported")
    # It was replaced by the nodes of its function, by none, or by a compiled part.
    on_cpu = sorted({node.op_type for node in nodes if node.provider == CPU})
    if on_cpu and not on_itself:
        return rejected(f"of its function, {', '.join(on_cpu)} fell back to the CPU provider")
    if not nodes and all(node.startswith(AUXILIARY) for node in planned):
        return Placement("supported", NO_NODE_LEFT, "nothing")
    if provider.compiles and not any(not node.name or node.name.startswith(INLINED) for node in nodes):
        return Placement("supported")  # in another layout, and so under another name
    return Placement("supported", AS_FUNCTION, "function")


def reason_in_log(log: Sequence[str], expressions: Sequence[str]) -> str:
    """The provider's reason for the node in a VERBOSE log, most specific expression first."""
    text = "\n".join(log)
    for expression in expressions:
        for match in re.finditer(expression, text):
            if match["node"] == NODE:
                return match["why"].replace(f" for node `{NODE}` of type", " for").strip(" .")
    return ""


def _reason_in(log: Sequence[str], patterns: Sequence[LogPattern]) -> str:
    """The log line with a reason for the node; else for another node, e.g. in its subgraph."""
    found = [(line, match) for pattern in patterns for line in log if (match := re.search(pattern.pattern, line))]
    own = (line for line, match in found if match.groupdict().get("node") == NODE)
    line = next(own, found[0][0] if found else "")
    head = HEAD.match(line)
    return plain_text(head["text"] if head else line)


# --- runs of a changed node ----------------------------------------------------------------------------------------


def _run(session: Session, found: Placement, model: bytes) -> Placement:
    """The outcome of a supported node after a run with floats of known sizes; in a dry run, on the CPU provider."""
    sizes = json.loads(session.metadata(RUN) or "null")
    floats = all(port.type in FLOATS for port in session.inputs)
    if session.metadata(RUN) and not found.message and any(name.startswith(PREFIX) for name in os.environ):
        ran, failure = _run_on_cpu(model, sizes) if sizes is not None else (False, "")
        if failure and floats:
            return Placement("invalid", f"the CPU provider cannot run the changed node: {one_line(failure)}")
        return found if ran else Placement("placed")
    feeds = _ones(session, sizes) if sizes is not None and floats else None
    if feeds is None:
        return found
    if run_failure := session.run_once(feeds)[1]:
        return Placement("failed", f"it is assigned the node, but the run fails: {one_line(run_failure)}")
    return replace(found, seconds=session.seconds_of_run(feeds)) if session.metadata(TIMED) else found


def _ones(session: Session, sizes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """Ones for float inputs and zeros for others, by input; None if numpy lacks a type."""
    feeds = {}
    for port in session.inputs:
        kind = dtypes.find(port.type.removeprefix("tensor(").removesuffix(")"))
        if kind is None or kind.name not in np.sctypeDict:
            return None
        feeds[port.name] = np.full(sizes.get(port.name, (1,)), "float" in kind.name, kind.name)
    return feeds


def _run_on_cpu(model: bytes, sizes: Mapping[str, Sequence[int]]) -> tuple[bool, str]:
    """Whether the CPU provider runs a model on ones or integer zeros, and the error (empty: no kernel or feed)."""
    try:
        with closing(_open_on_cpu(model)) as session:
            feeds = _ones(session, sizes)
            message = session.run_once(feeds)[1] if feeds is not None else ""
    except NativeFailureError as failure:
        return False, "" if lacks_kernel(failure.error) else str(failure)
    return feeds is not None and not message, message


def _open_on_cpu(model: bytes) -> Session:
    """A session of a model on the CPU provider. Raises NativeFailureError."""
    opening = Opening(threads=1, optimise=False, model=model, scratch=_place().parent)
    return open_native(_place(), [Resolution(known_providers()["cpu"], "active")], opening)
