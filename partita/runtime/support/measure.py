"""A support table's measurement, from the side that survives it: the child process is started again when it crashes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.files import temporary_directory
from partita.observations.native_text import cut
from partita.providers.resolve import Resolution
from partita.runtime.probes.child import STARTUP
from partita.runtime.process.children import ChildOutcome, run_children
from partita.runtime.support.child import read_lines
from partita.support.answers import Answer, Measured, Need

CHILD = "partita.runtime.support.child"
START_SECONDS = 60.0
"""For the provider to start; a GPU may compile for a long time."""
SESSION_SECONDS = 60.0
"""For one session, over many variants or over one."""
GRACE_SECONDS = 5.0
"""For the child to notice that its time is up."""
MOST_FRUITLESS = 3
"""A child that ends so many times in a row without an answer is given up."""
LONGEST = 300


def measure(
    resolution: Resolution, what: Mapping[str, Any], seconds: float, environment: Mapping[str, str] | None = None
) -> Measured:
    """Ask a provider about everything in `what` within so many seconds; see `wanted.all_wanted`.

    `environment`: of the child, None for our own. Ctrl-C ends the measurement, and what is known by then stands.
    """
    began, interrupted = time.monotonic(), False
    with temporary_directory() as name:
        folder = Path(name)
        path = folder / "answers.jsonl"
        request = _request_of(resolution, what, folder, path)
        unusable = ""
        try:
            unusable = _ask_until_done(request, path, began + seconds, environment)
        except KeyboardInterrupt:
            interrupted = True
        return read_measured(read_lines(path), time.monotonic() - began, unusable, interrupted=interrupted)


def _request_of(resolution: Resolution, what: Mapping[str, Any], folder: Path, path: Path) -> dict[str, Any]:
    """What the child is told, but for the time."""
    provider = resolution.provider
    return {
        "provider": {
            "name": provider.name,
            "ort_name": provider.ort_name,
            "options": resolution.provider_options,
            "library": str(resolution.library) if resolution.library else None,
            "own": str(provider.library) if provider.library else None,
        },
        "what": dict(what),
        "folder": str(folder),
        "answers": str(path),
        "start_seconds": START_SECONDS,
        "session_seconds": SESSION_SECONDS,
    }


def _ask_until_done(
    request: Mapping[str, Any], path: Path, deadline: float, environment: Mapping[str, str] | None
) -> str:
    """Run children until everything is asked or the time is up; why the provider cannot be asked, else empty."""
    fruitless = 0
    while (left := deadline - time.monotonic()) > 0 and fruitless < MOST_FRUITLESS:
        known = answered(read_lines(path))
        (outcome,) = run_children(
            CHILD,
            [{**request, "seconds": left}],
            timeout_seconds=left + GRACE_SECONDS + START_SECONDS,
            environment=environment,
        )
        lines = read_lines(path)
        unusable = next((str(line["unusable"]) for line in lines if "unusable" in line), "")
        if unusable or any("done" in line for line in lines):
            return unusable
        begun = next((line for line in reversed(lines) if "begun" in line), {"begun": [STARTUP]})
        if begun["begun"] == [STARTUP] and not any("opset" in line for line in lines):
            return f"its process {_ended(outcome)} while it started"
        blame(begun, answered(lines), outcome, path)
        fruitless = 0 if answered(read_lines(path)) > known else fruitless + 1
    return ""


def answered(lines: Sequence[Mapping[str, Any]]) -> set[str]:
    """Variants for which the provider gave an answer in time."""
    return {line["id"] for line in lines if "outcome" in line}


def blame(begun: Mapping[str, Any], known: set[str], outcome: ChildOutcome, path: Path) -> None:
    """Write down the crash of a variant that was alone in the first session of its process; else it is tried so."""
    if len(begun["begun"]) != 1 or not begun.get("fresh") or begun["begun"][0] in known:
        return
    said = f"its process {_ended(outcome)}"
    line = {"id": begun["begun"][0], "outcome": "crashed", "said": said}
    if begun.get("judge"):  # not the provider's doing: nothing is known of the model then
        line = {"id": begun["begun"][0], "outcome": "invalid", "said": f"on the CPU provider alone, {said}"}
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(line)}\n")  # the line before may have been cut off


def _ended(outcome: ChildOutcome) -> str:
    """How a child ended, in words."""
    if outcome.signal is not None and outcome.signal == getattr(signal, "SIGALRM", None):
        return f"gave no answer within {SESSION_SECONDS:g} s"
    last = f"; its last output: {cut(outcome.log[-1], LONGEST)}" if outcome.log else ""
    return f"{outcome.ended or 'gave no output'}{last}"


def read_measured(lines: Sequence[Mapping[str, Any]], seconds: float, unusable: str, *, interrupted: bool) -> Measured:
    """The facts in the child's file."""
    outcomes = {line["id"]: line for line in lines if "outcome" in line}
    planned = {line["id"]: line["plan"] for line in lines if "plan" in line}
    answers = tuple(_read_answer(plan, outcomes.get(key, {})) for key, plan in planned.items())
    last: dict[str, Any] = {}
    for line in lines:
        if not {"plan", "outcome", "begun"} & set(line):
            last |= line
    done = any("done" in line for line in lines)
    return Measured(
        answers=answers,
        needs=tuple(map(_read_need, last.get("needs", ()))),
        without_example=tuple(last.get("without_example", ())),
        beyond=tuple({tuple(line["operator"]): line["left_out"] for line in lines if "left_out" in line}.items()),
        newest_opset=last.get("opset"),
        sessions=sum(line.get("sessions", 0) for line in lines),
        crashes=sum(line["outcome"] == "crashed" for line in outcomes.values()),
        seconds=seconds,
        complete=done and not any("late" in line for line in lines),
        interrupted=interrupted,
        unusable=unusable,
    )


def _read_answer(plan: Mapping[str, Any], line: Mapping[str, Any]) -> Answer:
    """One variant; untried where there is no answer."""
    return Answer(
        domain=plan["domain"],
        operator=plan["operator"],
        since=plan["since"],
        until=plan["until"],
        kind=plan["kind"],
        types=tuple((name, kind) for name, kind in plan["types"]),
        what=plan["what"],
        factors=frozenset(plan["factors"]),
        outcome=line.get("outcome", "untried"),
        said=line.get("said", ""),
        replaced=line.get("replaced", False),
    )


def _read_need(raw: Mapping[str, Any]) -> Need:
    """What a model needs."""
    return Need(
        raw["domain"], raw["operator"], raw["since"], tuple((name, kind) for name, kind in raw["types"]), raw["nodes"]
    )
