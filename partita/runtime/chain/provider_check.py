"""Whether a provider runs on this machine: a worker process runs a model of one node and compares its output.

Only the worker imports ONNX Runtime. A crash, a timeout or a wrong output is a result.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.machine import Device
from partita.observations.text_format import listing
from partita.providers.base import Provider
from partita.providers.resolve import (
    Failure,
    Resolution,
    explain,
    failure,
    installed_version,
    known_providers,
    no_device,
    resolve_one,
)
from partita.runtime.ort.errors import STRICT, one_line
from partita.runtime.ort.native_log import HEAD
from partita.runtime.worker.child import Channel, serve
from partita.runtime.worker.parent import Worker, WorkerLostError

PROBE_MODEL = base64.b64decode(
    "CAc6aAoYCgF4CgF3EgF5GgVwcm9iZSIGTWF0TXVsEgVwcm9iZSobCAIIAhABQgF3ShAAAIA/AAAAQAAAQEAAAIBAWhMKAXgSDgoMCAESCAoCCAIK"
    "AggCYhMKAXkSDgoMCAESCAoCCAIKAggCQgQKABAN"
)
"""One MatMul, opset 13: y[2,2] = x[2,2] · w, w = [[1, 2], [3, 4]], all float32. A test in tests/runtime rebuilds it."""
FEED = ((1.0, 2.0), (-3.0, 0.5))
ANSWER = ((7.0, 10.0), (-1.5, -4.0))
"""Every number and partial sum is exact in float16, for providers that compute in float16."""
TOLERANCE = 1e-2
TIMEOUT_SECONDS = 60.0
"""The first use of a GPU may compile for many seconds, but a working provider needs less than a minute."""
LAST_LINES = 3
STAGES: Mapping[str, str] = {
    "start": "starting Python",
    "import": "loading ONNX Runtime",
    "load": "loading the provider's library",
    "run": "opening a session and running one MatMul",
}
"""The activity that follows each stage that the worker reports."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of the check of one provider."""

    resolution: Resolution
    """Unavailable, with a reason, if the provider is not usable."""
    library_loads: bool | None
    device_found: bool | None
    devices: tuple[Device, ...] = ()
    software: bool = False
    """It ran, but ONNX Runtime found no GPU, so it computed on the CPU."""
    seconds: float | None = None
    """None if the provider was not tested."""
    log: tuple[str, ...] = ()
    """Output of the worker's native code."""

    @property
    def usable(self) -> bool:
        """Whether it ran the model without fallback and the output is correct."""
        return self.resolution.status == "active"


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of a worker, or how it ended."""

    result: Mapping[str, Any] | None
    """The result of `run_examination`; None if the worker ended without one."""
    stage: str
    """The last stage that the worker reached."""
    log: tuple[str, ...]
    """Lines of its stderr."""
    how: str
    """How the worker ended, if it returned no result."""
    seconds: float


@dataclass(frozen=True, slots=True)
class DefaultChain:
    """The provider chain of a run without `--providers`."""

    chain: tuple[Provider, ...]
    reason: str
    """The reason for this chain, as a sentence without a full stop."""
    skipped: tuple[Resolution, ...] = ()
    """Installed providers with a higher rank that could not start."""


def check(resolutions: Sequence[Resolution], *, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[Check, ...]:
    """Check every active resolution, in parallel on the available cores; other resolutions are returned unchanged."""
    active = [resolution for resolution in resolutions if resolution.status == "active"]
    outcomes = examine(active, timeout_seconds=timeout_seconds)
    judged = {id(entry): judge(entry, outcome) for entry, outcome in zip(active, outcomes, strict=True)}
    return tuple(judged.get(id(entry)) or Check(entry, None, None) for entry in resolutions)


def examine(
    resolutions: Sequence[Resolution | None],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[WorkerResult]:
    """Run each provider in a worker process, one per core at a time; results in that order.

    None instead of a provider: only list the build and its providers. A worker without a result after
    `timeout_seconds` is killed.
    """
    slots = os.cpu_count() or 1
    outcomes: list[WorkerResult] = []
    for start in range(0, len(resolutions), slots):
        with ExitStack() as stack:
            begun = [_begin(stack, entry, environment) for entry in resolutions[start : start + slots]]
            outcomes += [outcome(timeout_seconds) for outcome in begun]
    return outcomes


def _begin(
    stack: ExitStack, resolution: Resolution | None, environment: Mapping[str, str] | None
) -> Callable[[float], WorkerResult]:
    """Start a worker that runs one provider; return a function that waits for its result."""
    began, stages, ended = time.monotonic(), ["start"], list[float]()
    worker = Worker(__name__, environment=environment, on_event=stages.append)
    stack.callback(worker.kill)
    future = worker.submit("examine", resolution)
    future.add_done_callback(lambda _: ended.append(time.monotonic()))

    def outcome(timeout_seconds: float) -> WorkerResult:
        found, how = None, ""
        try:
            found = worker.wait(future, max(began + timeout_seconds - time.monotonic(), 0.0))
        except WorkerLostError as lost:
            how = f"gave no answer within {timeout_seconds:g} s" if lost.late else lost.how
        return WorkerResult(found, stages[-1], worker.log(), how, (ended or [time.monotonic()])[0] - began)

    return outcome


def judge(resolution: Resolution, outcome: WorkerResult) -> Check:
    """The check that follows from a worker's result."""
    result = outcome.result or {}
    reason = _unusable_reason(resolution, outcome, result)
    ort_name = str(result.get("ort_name") or resolution.provider.ort_name)
    devices = tuple(device for device in result.get("devices", ()) if device.ort_name == ort_name)
    if reason is None:
        hardware = set(result.get("hardware") or ())
        software = resolution.provider.software_devices and bool(hardware) and not hardware & {"GPU", "NPU"}
        return Check(resolution, True, True, devices, software, outcome.seconds, outcome.log)
    loads = False if reason.reason in ("library_missing", "version_mismatch") else result.get("loaded")
    found = False if reason.reason == "device_missing" else True if devices else None
    settled = replace(
        resolution, status="unavailable", reason=reason.reason, evidence=reason.evidence, remedy=reason.remedy
    )
    return Check(settled, loads, found, devices, False, outcome.seconds, outcome.log)


def _unusable_reason(resolution: Resolution, outcome: WorkerResult, result: Mapping[str, Any]) -> Failure | None:
    """The reason why the provider is not usable; None if it is usable."""
    provider, doing = resolution.provider, STAGES.get(outcome.stage, outcome.stage)
    if outcome.result is None:
        last = " | ".join(outcome.log[-LAST_LINES:])
        last_output = f"; its last output: {last}" if last else ", without any output"
        return failure(provider, "initialisation_failed", f"its process {outcome.how} while {doing}{last_output}")
    if result.get("error") is not None:
        return explain(provider, _texts_of(result["error"], outcome.log))
    if result.get("offered") == []:
        return no_device(provider, resolution.library or Path(provider.name))
    if not result.get("correct"):
        return failure(provider, "initialisation_failed", f"it computed {result.get('output')}, which is incorrect")
    return None


def _texts_of(error: Mapping[str, Any], log: tuple[str, ...]) -> list[str]:
    """Log lines and exception texts, most specific first: logged errors, the exception, lines of other libraries."""
    logged = [match for line in log if (match := HEAD.match(line)) and STRICT not in line]
    errors = [one_line(match["text"]) for match in logged if match["severity"] in "EF"]
    warnings = [one_line(match["text"]) for match in logged if match["severity"] == "W"]
    raised = one_line(str(error.get("text", "")))
    strict = STRICT in raised
    if strict:
        raised = "it started, but did not run a float32 MatMul"
    elif error.get("type") not in (None, "Fail", "RuntimeError"):
        raised = f"{error['type']}: {raised}"
    others = [line for line in log if not HEAD.match(line)]
    # A fallback is inferred from the log; another kind of exception is more specific than a log warning.
    return [*errors, *([*warnings, raised] if strict else [raised]), *others]


def candidates(available_ort_names: Collection[str]) -> tuple[Resolution, ...]:
    """Available providers that may lead a default chain, best first, without the CPU provider."""
    ranked = sorted((entry for entry in known_providers().values() if entry.rank > 1), key=lambda entry: -entry.rank)
    return tuple(
        resolve_one(provider, available_ort_names)
        for provider in ranked
        if provider.ort_name in available_ort_names or (provider.plugin and installed_version(provider.plugin.wheel))
    )


def best_chain(available_ort_names: Collection[str], checks: Sequence[Check] = ()) -> DefaultChain:
    """The best usable provider followed by the CPU provider, and the reason.

    `checks`: existing results. Other providers are checked one after the other, best first, until one is usable. No
    process is started if only the CPU provider is available.
    """
    known = {entry.resolution.provider.name: entry for entry in checks}
    cpu = known_providers()["cpu"]
    failed: dict[str, str] = {}
    skipped: list[Resolution] = []
    for resolution in candidates(available_ort_names):
        name = resolution.provider.name
        checked = known.get(name) or check([resolution])[0]
        if checked.usable and not checked.software:
            parts = [
                *(f"{other} {reason}" for other, reason in failed.items()),
                f"{name} is usable; so {name}, then cpu",
            ]
            return DefaultChain((resolution.provider, cpu), "; ".join(parts), tuple(skipped))
        skipped += [] if checked.usable else [checked.resolution]
        reason = f"could not start ({checked.resolution.reason})"
        failed[name] = "is usable, but only on the CPU: there is no GPU" if checked.usable else reason
    absent = [entry.name for entry in known_providers().values() if entry.rank > 1 and entry.name not in failed]
    parts = [f"{name} {reason}" for name, reason in failed.items()]
    parts += [f"{listing(absent)}: not in this build"] if absent else []
    return DefaultChain((cpu,), "; ".join([*parts, "so cpu"]), tuple(skipped))


# --- in the worker process -------------------------------------------------------------------------------------------


def run(channel: Channel) -> None:
    """Serve `examine` requests. Each stage is reported when it begins, to give the parent the stage of a crash."""
    serve(channel, {"examine": partial(run_examination, channel.push)})


def run_examination(reached: Callable[[str], object], resolution: Resolution | None) -> dict[str, Any]:
    """The findings up to an exception, and the exception under `error`. None: list the build and its providers."""
    found: dict[str, Any] = {"error": None}
    try:
        reached("import")
        from partita.runtime.ort import registry

        try:
            if resolution is None:
                found["build"] = registry.ort_build()
                found["available"] = registry.available_ort_names()
            else:
                _probe(resolution, found, reached)
        finally:  # a provider that does not start is listed, too
            found["devices"] = registry.ep_devices(check=True)
            found["hardware"] = [kind for kind, _, _ in registry.hardware()]
    except BaseException as error:  # noqa: BLE001 - the parent reads every exception as a result
        found["error"] = {"type": type(error).__name__, "text": str(error)}
    return found


def _probe(resolution: Resolution, found: dict[str, Any], reached: Callable[[str], object]) -> None:
    """Register the provider's plugin library, if any, and run the model on the provider alone."""
    import numpy as np

    from partita.runtime.ort import registry

    provider, library = resolution.provider, resolution.library
    reached("load")
    if provider.preload:
        registry.preload_libraries()
    if library:
        offered = registry.register_library(provider.ort_name, library)
        found["offered"], found["loaded"] = list(offered), True
        if not offered:
            return
        if provider.ort_name not in offered:
            provider = replace(provider, ort_name=offered[0])
    found["ort_name"] = provider.ort_name
    reached("run")
    feed = {"x": np.array(FEED, np.float32)}
    outputs, found["options"] = registry.run_alone(PROBE_MODEL, replace(resolution, provider=provider), feed)
    found["output"] = np.asarray(outputs[0], np.float32).tolist()
    found["correct"] = bool(np.allclose(outputs[0], np.array(ANSWER, np.float32), rtol=0, atol=TOLERANCE))
