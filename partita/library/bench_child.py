"""One contender of a bench: `python -m partita.library.bench_child`, a question per line in, an answer per line out.

It opens the package once and generates when it is its turn; or it opens it under observation, generates once and writes
a report. It may crash or hang: the parent reads that as a finding. It ends without unloading native libraries, when its
stdin does.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.library.crossing import told

if TYPE_CHECKING:
    from partita.foreign.folder import Choice
    from partita.library.chain import ChainOptions, Target
    from partita.package import Manifest
    from partita.runtime.engine.recorder import Step
    from partita.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class Task:
    """What the contenders of a bench have in common."""

    package: str
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, a row each."""
    max_new_tokens: int
    prefill_chunk: int | None
    choice: dict[str, Any]
    """What was said of a folder that Partita did not write, as `Choice.to_json` has it."""


def main() -> None:
    """Answer questions until there are no more."""
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code and ONNX Runtime's Python print to stdout
    worker = Worker()
    for line in sys.stdin:
        out.write(json.dumps(_answer(worker, json.loads(line))) + "\n")
        out.flush()
    os._exit(0)


def _answer(worker: Worker, question: dict[str, Any]) -> dict[str, Any]:
    """The answer, or an error as data."""
    asked: dict[str, Callable[..., dict[str, Any]]] = {
        "load": worker.load,
        "turn": worker.turn,
        "observe": worker.observe,
    }
    name, given = next(iter(question.items()))
    try:
        return asked[name](**given)
    except Exception as error:  # noqa: BLE001 - the parent must hear of it; nobody else reads a traceback here
        return {"error": told(error)}


class Worker:
    """The package, open on one chain."""

    where: ChainOptions
    target: Target
    task: Task
    choice: Choice
    manifest: Manifest
    runner: Runner

    def prepare(self, where: dict[str, Any], task: dict[str, Any]) -> None:
        """Read what was asked."""
        from partita.foreign.folder import choice_of, open_folder
        from partita.library.chain import ChainOptions, read_chain_options

        self.where = ChainOptions(**{name: _frozen(value) for name, value in where.items()})
        self.task = Task(**{name: _frozen(value) for name, value in task.items()})
        self.target = read_chain_options(self.where)
        self.choice = choice_of(self.task.choice)
        self.manifest = open_folder(Path(self.task.package), self.choice)

    def load(self, *, where: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
        """Open the package."""
        from partita.library.notes import not_used
        from partita.runtime.chain import idle_providers
        from partita.runtime.environment import environment
        from partita.runtime.generate import check_prompts

        self.prepare(where, task)
        self.runner = self.open(observe=False)
        check_prompts(self.runner, self.task.prompts)
        idle = sorted({name for entry in self.runner.graphs for name in idle_providers(entry.session, entry.model)})
        missing = [
            not_used(entry.provider.name, entry, with_remedy=False)
            for entry in self.runner.resolutions
            if entry.status != "active"
        ]
        skipped = [not_used(entry.provider, entry) for entry in self.target.skipped]
        return {
            "load_seconds": sum(graph.session.load_seconds for graph in self.runner.graphs),
            "active": _active(self.runner),
            "unused": [*skipped, *missing, *(f"{name} was assigned no nodes" for name in idle)],
            "environment": environment().model_dump(mode="json"),
        }

    def open(self, *, observe: bool) -> Runner:
        """A runner on the chain."""
        from partita.runtime.runner import load_runner

        return load_runner(
            Path(self.task.package),
            self.target.chain,
            threads=self.where.threads,
            observe=observe,
            manifest=self.manifest,
            options=self.target.options,
        )

    def generate(self, runner: Runner) -> None:
        """Generate greedily, to the last token: where a model would stop, every contender goes on."""
        from partita.runtime.generate import PREFILL_CHUNK_TOKENS, generate
        from partita.runtime.sampling import greedy

        loop = generate(
            runner,
            self.task.prompts,
            max_new_tokens=self.task.max_new_tokens,
            sampler=greedy,
            prefill_chunk=self.task.prefill_chunk or PREFILL_CHUNK_TOKENS,
        )
        for _ in loop:
            pass

    def turn(self, *, number: int) -> dict[str, Any]:
        """Generate once and measure it, as a `Turn`."""
        from partita.bench.records import Turn
        from partita.process import peak_rss_bytes
        from partita.runtime.run_facts import first_token_seconds

        self.generate(self.runner)
        steps = self.runner.steps
        prefill, decode = ([step for step in steps if step.phase == phase] for phase in ("prefill", "decode"))
        first = first_token_seconds(steps)
        rows = zip(*(step.tokens for step in steps), strict=True)
        return Turn(
            round=number,
            prefill_ms=_milliseconds(prefill),
            prefill_tokens=sum(step.row_tokens for step in prefill),
            decode_ms=_milliseconds(decode),
            decode_tokens=sum(step.row_tokens for step in decode),
            decode_outside_ms=1000 * sum(step.overhead_seconds for step in decode),
            first_token_ms=None if first is None else 1000 * first,
            tokens=tuple(tuple(itertools.chain.from_iterable(row)) for row in rows),
            peak_rss_bytes=peak_rss_bytes(),
        ).model_dump(mode="json")

    def observe(self, *, where: dict[str, Any], task: dict[str, Any], file: str) -> dict[str, Any]:
        """Open the package, generate once with the profile on, and write the report to `file`."""
        from partita.library.run_report import Asked, make_report, said_of
        from partita.partition_reports import storage
        from partita.runtime.generate import PREFILL_CHUNK_TOKENS
        from partita.runtime.optimised import with_optimised
        from partita.runtime.run_facts import run_facts

        self.prepare(where, task)
        with self.open(observe=True) as runner:
            self.generate(runner)
            facts = with_optimised(run_facts(runner), [entry.session for entry in runner.graphs])
            resolutions, used = runner.resolutions, _active(runner)
            longest = max(len(prompt) for prompt in self.task.prompts)
            graphs = runner.executor.graphs
        asked = Asked(
            verb="bench",
            path=Path(self.task.package),
            chain=tuple(resolution.provider.ort_name for resolution in resolutions),
            chain_source=self.target.source,
            options=said_of(self.target, self.choice),
            skipped=self.target.skipped,
            threads=self.where.threads,
            prompt_tokens=longest,
            max_new_tokens=self.task.max_new_tokens,
            prefill_chunk_tokens=graphs.chunk_of(self.task.prefill_chunk or PREFILL_CHUNK_TOKENS, longest),
        )
        report = make_report(Path(self.task.package), self.manifest, facts, resolutions, asked)
        storage.write(report, Path(file))
        return {"active": used}


def _active(runner: Runner) -> list[str]:
    """Names of the providers of the chain that are used."""
    return [entry.provider.name for entry in runner.resolutions if entry.status == "active"]


def _frozen(value: Any) -> Any:
    """Tuples in place of JSON's lists."""
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value


def _milliseconds(steps: Sequence[Step]) -> tuple[float, ...]:
    """Time of each step, host work included."""
    return tuple(1000 * (step.run_seconds + step.overhead_seconds) for step in steps)


if __name__ == "__main__":
    main()
