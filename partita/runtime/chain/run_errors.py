"""Errors and notes for failed or interrupted runs of a user's ONNX model."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

from partita.errors import INTERRUPTED, GenerationError, PartitaError, ProviderError, ResourceError
from partita.observations.names import CPU, RENAMED
from partita.observations.text_format import listing, plural
from partita.remedies import Remedy
from partita.runtime.ort.errors import LACKS, one_line
from partita.runtime.ort.session import Session
from partita.runtime.place.onnx_model import OnnxModel

NODE_FAILED = re.compile(r"while running (\S+) node\. Name:'(.*?)' Status Message: (.*)", re.DOTALL)
SIZES = re.compile(r"\b(shapes?|dimensions?|dims?|rank|broadcast\w*|sizes?|axis|out of bounds)\b", re.IGNORECASE)
"""Matches a message about sizes: other sizes may help."""
OF_DEVICE = re.compile(r"device does not support", re.IGNORECASE)
"""Matches a message about a feature that the device lacks for every node of the type."""
LEAVE = Remedy("run the node on the CPU", options=("--provider-option", "{now}"))
WITHOUT_PROVIDER = Remedy("run it without that provider", options=("--provider", "{chain}"))
RUN_ERRORS = (GenerationError, ProviderError, ResourceError)


class RunInterruptedError(GenerationError):
    """Ctrl-C interrupted the run after the session was opened."""

    exit_code = INTERRUPTED

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: interrupted before its runs finished")


class RunLateError(GenerationError):
    """No run finished within the time limit. `given`: inputs with values from the user."""

    def __init__(self, model: OnnxModel, seconds: float, given: Collection[str]) -> None:
        super().__init__(
            f"{model.path}: a run on {_values_origin(model, given)} did not end within {seconds:g} s; the "
            "node placement is valid, but measurements are missing; set other values with "
            "`inputs=NAME=FILE.npy`, or a longer limit with `run_seconds`"
        )


def release_frames(error: BaseException | None) -> None:
    """Release the objects in the frames of an exception and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def failed_run_error(
    model: OnnxModel,
    session: Session,
    error: PartitaError,
    given: Collection[str] = (),
    runs_on_cpu: Callable[[], bool | None] = lambda: None,
) -> PartitaError:
    """The error of a run, in terms of the user's model and inputs.

    A failure is that of a provider other than CPU if the CPU provider runs the same inputs. If that is unknown, it is
    if the message is about a node of that provider and not about sizes.

    Args:
        given: Inputs with values from the user.
        runs_on_cpu: Whether the CPU provider runs the model on the same inputs; None if unknown.
    """
    error_text = one_line(str(error.__cause__ or error))
    found = NODE_FAILED.search(error_text)
    message = found[3] if found else error_text
    about_sizes = SIZES.search(message) is not None and not LACKS.search(message)
    active = [entry.provider for entry in session.resolutions if entry.status == "active"]
    known = None
    if found and any(found[2] in stream for stream in session.plan or ()):
        # Lists may lack nodes of other providers than CPU.
        known = next((node.provider for node in session.assigned() if node.name == found[2]), active[0].ort_name)
    others = [each.ort_name for each in active if each.ort_name != CPU]
    provider = known or (others[0] if len(others) == 1 else None)
    runs = runs_on_cpu() if provider not in (None, CPU) else False
    if runs is None:
        runs = known is not None and not about_sizes
    converted: PartitaError
    if runs:
        node = found[2] if found else ""
        if node not in (names := {entry.name for entry in model.nodes}) and RENAMED.sub("", node) in names:
            node = RENAMED.sub("", node)
        leaving = None if OF_DEVICE.search(message) or not node else _leaving(session, str(provider), node)
        what = "cannot run the model"
        if found:
            verb = "was assigned" if known else "runs the model and fails on"
            what = f"{verb} node {node!r} ({found[1]}){' and cannot run it' if known else ''}"
        rest = ",".join(each.name for each in active if each.ort_name != provider) or "cpu"
        remedy = leaving or WITHOUT_PROVIDER.filled(chain=rest)
        converted = ProviderError(f"{provider} {what}: {message}", path=model.path, remedy=remedy)
    elif isinstance(error, ProviderError):
        converted = ProviderError(f"{model.path}: a run failed: {error_text}; use another provider")
    else:
        other = "other sizes: `shapes=NAME=SIZES`"
        if not about_sizes:
            other = "other values: `inputs=NAME=FILE.npy`"
        converted = GenerationError(
            f"{model.path}: a run on {_values_origin(model, given)} failed: {error_text}; {other}"
        )
    converted.__cause__ = error.__cause__
    return converted


def _values_origin(model: OnnxModel, given: Collection[str]) -> str:
    """The origin of the input values, for a message."""
    generated = [port.name for port in model.inputs if port.name not in given]
    if not given:
        return "generated inputs"
    values = f"the given values of {listing(given)}"
    return f"{values} and generated values of {listing(generated)}" if generated else values


def _leaving(session: Session, provider: str, node: str) -> Remedy | None:
    """The option that runs a node on the CPU; None if the provider has none, or the chain has no CPU provider."""
    active = [entry for entry in session.resolutions if entry.status == "active"]
    entry = next((entry for entry in active if entry.provider.ort_name == provider), None)
    if entry is None or not entry.provider.fallback_option or CPU not in (each.provider.ort_name for each in active):
        return None
    option = entry.provider.fallback_option
    names = "\n".join(filter(None, (entry.options.get(option, ""), node)))
    return LEAVE.filled(now=f"{entry.provider.name}.{option}={names}")


def crashed_in_run(model: OnnxModel, how: str, given: Collection[str]) -> GenerationError:
    """The error for a run that crashed. `given`: inputs with values from the user."""
    return GenerationError(
        f"{model.path}: {how}, on {_values_origin(model, given)}; the model opens without a run, so the "
        "node placement is valid; set other values with `inputs=NAME=FILE.npy`"
    )


def run_notes(
    done: int, runs: int, error: PartitaError | None, late: float | None = None, *, still_running: bool = False
) -> tuple[str, ...]:
    """The note for a run that failed, or that exceeded the time limit of `late` seconds after complete runs."""
    if error is not None:
        interrupted = "was interrupted" if isinstance(error, RunInterruptedError) else "failed"
        how = "did not end" if isinstance(error, RunLateError) else interrupted
        return (f"run {done + 1} of {runs} {how}, so measurements of complete runs are missing: {error}",)
    if late is None or not done:
        return ()
    lost = "; times of nodes and copies are missing because ONNX Runtime writes its profile after the last run"
    return (
        f"run {done + 1} of {runs} exceeded the time limit of {late:g} s (`run_seconds`), "
        f"so the measurements are of {plural(done, 'run')}{lost if still_running else ''}",
    )
