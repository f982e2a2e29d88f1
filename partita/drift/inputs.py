"""Inputs of a comparison: the reference's own steps of a package, or values for any ONNX file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.drift.sides import Side, Step
from partita.package.folder import KNOWN_ANSWER, Manifest
from partita.runtime.generate.cache import moves
from partita.runtime.generate.feeds import port_by_role
from partita.runtime.generate.loop import serve
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import load_runner
from partita.runtime.ort.binding import Binding
from partita.runtime.place.inputs import SEED, Shape, make_values
from partita.runtime.place.onnx_model import OnnxModel
from partita.runtime.verify.replay import read_known_answer

PROMPT_TOKENS, NEW_TOKENS = 24, 3


def package_steps(reference: Side, manifest: Manifest) -> list[Step]:
    """Every step of a prompt and a few new tokens, as the reference runs them.

    The text is that of the package's known answer; without one, tokens spread over the vocabulary. Raises the errors of
    `load_runner` and of a run.
    """
    contract, folder = manifest.graph, reference.folder
    if manifest.foreign is None and (folder / KNOWN_ANSWER).is_file():
        answer = read_known_answer(folder, KNOWN_ANSWER)
        prompt, pick = answer.prompt.tolist(), answer.pick
    else:
        count = max(1, min(PROMPT_TOKENS, contract.max_length - NEW_TOKENS))
        prompt, pick = np.linspace(0, contract.vocab_size - 1, count, dtype=np.int64).tolist(), _most_likely
    steps: list[Step] = []
    states = {state.present: state.past for state in contract.states}
    shared = {state.present: state.past for state in contract.states if not moves(state)}
    chain, options = reference.chain, reference.options
    with load_runner(folder, chain, threads=reference.threads, manifest=manifest, options=options) as runner:
        for entry in runner.graphs:

            def record(binding: Binding, file: str = entry.graph.file) -> None:
                names = binding.inputs
                feeds = {name: np.array(binding.buffers[name].values()) for name in names}
                steps.append(Step("", file, feeds, states, shared))

            entry.session.watchers.append(record)
        roped = port_by_role(runner.graph("decode").graph, "rope_length") is not None
        length = min(NEW_TOKENS, contract.max_length - len(prompt))
        request = Request(prompt, pick, length, any_logits=True, rope_length=len(prompt) + length if roped else 0)
        numbers: Counter[str] = Counter()
        begin = 0
        for done in serve(runner, [request] * runner.rows, prefill_chunk=len(prompt)):
            numbers[done.phase] += 1
            positions = tuple(range(begin, begin + done.new_tokens))
            begin += done.new_tokens
            for at, step in enumerate(steps):
                if not step.name:
                    steps[at] = _in_text(step, f"{done.phase} {numbers[done.phase]}", positions, manifest)
    return steps


def _in_text(step: Step, name: str, positions: tuple[int, ...], manifest: Manifest) -> Step:
    """The step with its tokens, and the positions of the logits: the last one unless an input names them."""
    graph = next(graph for graph in manifest.graph.files if graph.file == step.file)
    tokens, rows = port_by_role(graph, "tokens"), port_by_role(graph, "logits_rows")
    row = () if tokens is None else tuple(map(int, step.feeds[tokens.name].reshape(-1)[: len(positions)]))
    logits = positions[-1:]
    if rows is not None and positions:
        logits = tuple(positions[0] + int(place) for place in step.feeds[rows.name].reshape(-1))
    return replace(step, name=name, tokens=row, positions=positions, logits=logits)


def _most_likely(logits: npt.NDArray[np.float32], history: npt.NDArray[np.int64]) -> int:
    return int(np.nan_to_num(logits).argmax())


def file_step(model: OnnxModel, shapes: Mapping[str, Shape], values: Mapping[str, npt.NDArray[Any]]) -> Step:
    """One run of an ONNX file on given values; others are generated."""
    rng = np.random.default_rng(SEED)
    feeds = {
        port.name: np.asarray(values[port.name]) if port.name in values else make_values(port, shapes[port.name], rng)
        for port in model.inputs
    }
    return Step("run", model.path.name, feeds)
