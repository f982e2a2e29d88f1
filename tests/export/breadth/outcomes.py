"""One model type: a tiny checkpoint, then for each lowering export, run and compare with transformers."""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError, ParityError, PartitaError
from partita.options.export import Attention
from partita.package.folder import TOLERANCES, read_manifest
from tests.export.breadth import recipes
from tests.export.breadth.records import Outcome, Status
from tests.export.breadth.reference import NEW_TOKENS, Reference, first_line, load, reference, relative_error, scale

MAX_LENGTH = 64
PROMPT = [1, *(3 + (37 * i) % 280 for i in range(19))]
SHORT_PROMPT = PROMPT[3:9]
PREFILL_CHUNK = 7
TOLERANCE = TOLERANCES["fp32"]


class DifferenceError(Exception):
    """A package that was verified at export computes something else in our loop."""


def outcomes(model_type: str, lowerings: Sequence[str]) -> Iterator[Outcome]:
    """One outcome per lowering."""
    if reason := recipes.IMPOSSIBLE.get(model_type, ""):
        yield from (Outcome(model_type, lowering, "no checkpoint", reason=reason) for lowering in lowerings)
        return
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name) / model_type
        try:
            recipes.save(checkpoint, model_type)
            model = load(checkpoint)
        except Exception as error:  # noqa: BLE001 - a recipe that does not work is a result like any other
            reason = f"the source model: {_described(error)}"
            yield from (Outcome(model_type, lowering, "crashed", reason=reason) for lowering in lowerings)
            return
        original, wanted = "", list[Reference]()
        try:
            wanted = [reference(model, prompt) for prompt in (PROMPT, SHORT_PROMPT)]
            original = next((entry.disagreements for entry in wanted if entry.disagreements), "")
        except Exception as error:  # noqa: BLE001 - a model that does not answer to text alone has to be refused
            original = _described(error)
        del model
        for lowering in lowerings:
            began = time.perf_counter()
            result = outcome(checkpoint, model_type, lowering, wanted)
            yield replace(result, original=original, seconds=round(time.perf_counter() - began, 1))


def outcome(checkpoint: Path, model_type: str, lowering: str, wanted: Sequence[Reference]) -> Outcome:
    """Export for one row and compare, then for two rows of unequal length.

    One row: the prompt at once, the prompt in chunks, and decode steps past every window. Without a reference the
    original does not run on text, so anything but a refusal is wrong.
    """
    result = _tried(checkpoint, Outcome(model_type, lowering, "verified"), wanted[:1])
    if not wanted and result.status == "verified":
        return replace(result, status="wrong", reason="exported, although the original does not run on text")
    return _tried(checkpoint, result, wanted) if result.status == "verified" else result


def _tried(checkpoint: Path, done: Outcome, wanted: Sequence[Reference]) -> Outcome:
    """The outcome of an export for a row per reference. A refusal of several rows leaves the type verified."""
    several = len(wanted) > 1
    exporting, running = ("batch of 2: ", "rows of unequal length: ") if several else ("", "running the package: ")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "package"
        try:
            errors = [done.max_rel_error or 0.0, _export(checkpoint, package, done.attention, len(wanted) or 1)]
        except ParityError as problem:
            status: Status = "parity" if wanted else "refused"
            return replace(done, status=status, reason=f"{exporting}{_said(problem, checkpoint)}")
        except PartitaError as problem:
            said = _said(problem, checkpoint)
            return replace(done, rows=said) if several else replace(done, status="refused", reason=said)
        except Exception as problem:  # noqa: BLE001 - a crash is a result
            return replace(done, status="crashed", reason=f"{exporting}{_described(problem)}")
        try:
            for chunk in (len(PROMPT),) if several else (len(PROMPT), PREFILL_CHUNK):
                errors += [difference(package, wanted, chunk)] if wanted else []
        except DifferenceError as problem:
            return replace(done, status="wrong", reason=f"{running if several else ''}{problem}")
        except Exception as problem:  # noqa: BLE001
            if several and isinstance(problem, GenerationError):
                return replace(done, rows=first_line(problem))
            return replace(done, status="crashed", reason=f"{running}{_described(problem)}")
    return replace(done, max_rel_error=max(errors))


def _export(checkpoint: Path, package: Path, lowering: str, batch_size: int) -> float:
    """Export as the command line does, and return the largest relative error of the exporter's own replay."""
    from partita.export.pipeline import ExportOptions, export
    from partita.library.exporting import replay
    from partita.library.place.target import supported_by_cpu

    options = ExportOptions(
        str(checkpoint), package, max_length=MAX_LENGTH, batch_size=batch_size, attention=cast(Attention, lowering)
    )
    export(options, replay=replay, supports=supported_by_cpu)
    verification = read_manifest(package).verification
    if verification.status != "verified":
        raise DifferenceError(f"published as {verification.status}: {verification.detail}")
    return max(step.max_rel_error for step in verification.steps)


def difference(package: Path, wanted: Sequence[Reference], prefill_chunk: int) -> float:
    """Run our loop with the reference's tokens, one row per reference, and return the largest relative error.

    Raises DifferenceError at the first step that is not as transformers has it.
    """
    from benchmarks.engine_steps import generate
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.runner import load_runner

    largest, compared = 0.0, 0

    def forced(logits: npt.NDArray[np.float32], history: npt.NDArray[np.int64]) -> int:
        nonlocal largest, compared
        known = history.tolist()
        row = next(index for index, entry in enumerate(wanted) if [*entry.prompt, *entry.tokens][: len(known)] == known)
        step = len(known) - len(wanted[row].prompt)
        largest = max(largest, _checked(logits, wanted[row].logits[step], f"row {row + 1}, new token {step + 1}"))
        compared += 1
        return wanted[row].tokens[step]

    with load_runner(package, parse_chain("cpu"), threads=1) as runner:
        prompts = [entry.prompt for entry in wanted]
        for _ in generate(runner, prompts, max_new_tokens=NEW_TOKENS, sampler=forced, prefill_chunk=prefill_chunk):
            pass
    if compared != NEW_TOKENS * len(wanted):
        raise DifferenceError(f"the loop ended after {compared} of {NEW_TOKENS * len(wanted)} tokens")
    return largest


def _checked(ours: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32], where: str) -> float:
    """The relative error. Raises DifferenceError when it is too large, or when another token is clearly the best."""
    error = relative_error(ours, wanted)
    if not error <= TOLERANCE:
        raise DifferenceError(f"{where}: relative error {error:.1e}")
    second, first = np.partition(wanted, -2)[-2:]
    tie = first - second <= 2 * TOLERANCE * scale(wanted)
    if not tie and int(ours.argmax()) != int(wanted.argmax()):
        raise DifferenceError(f"{where}: another token, although the relative error is {error:.1e}")
    return error


def _said(problem: PartitaError, checkpoint: Path) -> str:
    """The exporter's line without paths of temporary folders, which are others in every run."""
    line = first_line(problem).replace(f"{checkpoint}: ", "").replace(str(checkpoint), checkpoint.name)
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^\s:]*/", "", line)


def _described(problem: BaseException) -> str:
    """Type, message and the last place in our own code."""
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [frame for frame in frames if "/partita/" in frame.filename] or list(frames)
    where = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(problem).__name__}: {first_line(problem)}{where}"
