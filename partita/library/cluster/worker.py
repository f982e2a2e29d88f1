"""A worker: an actor of Ray Data that holds a loaded package and answers blocks of rows.

Several blocks may be with it at a time, so that rows of the next one take the places of those that have ended. It is
given the number of a block, and asks the desk beside the driver for the rows. These and what it gives back are JSON
texts, whatever the files of the run are.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from partita.errors import GenerationError, PackageError, PartitaError, ResourceError, UsageError
from partita.library.batches.rows import InputRow, RowDefaults, answered, check_defaults, failed, work_of
from partita.library.chain import ChainOptions
from partita.library.cluster.options import CHAIN_VARIABLE, THREADS_VARIABLE
from partita.library.crossing import told
from partita.library.requests import Piece, Ticket
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.runtime.logprobs import TokenLogprobs
from partita.spelling import read_as_fields

BLOCK, ANSWER, ROWS_OF_BLOCK = "block", "answer", "rows"
"""Columns: the number of a block, which is what a worker is given, and is beside each answer that it gives back, as is
how many rows the block has: Ray may hand on what a worker gave back in parts.
"""
PLACEMENT_TOKENS = 6
"""New tokens of the run that tells where nodes run: as many steps as are observed."""
AT_ONCE = 2
"""Blocks that a worker answers at the same time."""
LOST_TOGETHER, LOST_ALONE = 2, 2
"""How often workers may end with a block, and then with a row of it alone, before it is not tried so again."""
STUCK_SECONDS = 1.0
"""How long a worker waits for a row before it looks whether it was closed."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every worker of a run is given."""

    package: str
    contents: str
    """Hash of the package that the run is of, by `contents_hash`."""
    partita: str
    """The version of the command."""
    where: ChainOptions
    """Without a chain, which each worker has of its own."""
    choice: Mapping[str, Any]
    defaults: RowDefaults
    token_ids: bool
    prefill_chunk: int | None = None
    adapter: str | None = None
    speculation: Speculation = NO_SPECULATION
    """A draft is at the same path everywhere."""
    form: str = "jsonl"
    """Format of the file of prompts."""


SETUPS = TypeAdapter(Setup)
ROWS = TypeAdapter(InputRow)


@dataclass(slots=True)
class _Block:
    """Rows that are being answered."""

    left: int
    answers: list[str] = field(default_factory=list)
    tokens: int = 0
    error: PartitaError | None = None
    """What ended the run of the model, and not a row alone."""


class Worker:
    """Answers blocks of rows. Called by Ray Data, from several threads."""

    def __init__(self, setup: str, ledger: Any) -> None:
        """Load the package. `setup`: a `Setup` as JSON. What goes wrong is said when it is first called: an actor that
        fails here would be started again and again.
        """
        self._ledger = ledger
        self._failure: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._encoding = threading.Lock()
        self._room, self._alone = threading.Semaphore(AT_ONCE), threading.Lock()
        self._first: float | None = None
        self._broken: Exception | None = None
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        try:
            self._load(SETUPS.validate_json(setup))
        except Exception as error:  # noqa: BLE001 - the driver must hear of it, and raises it
            self._failure = told(error)
            self._say("failed", self._failure)

    def __call__(self, block: Any) -> Any:
        """The answers to the rows of a block, in no order: a table. Raises RuntimeError for what ends the run."""
        if self._failure is not None:
            raise RuntimeError(self._failure["said"])
        (number,) = block[BLOCK].to_pylist()
        rows = [ROWS.validate_json(text) for text in self._ask("take", number)]
        return told_of(number, self._answers(number, rows) if rows else [])

    def _answers(self, number: int, rows: Sequence[InputRow]) -> list[str]:
        self._first = self._first or time.perf_counter()
        name, waiting = f"block {number}", _Block(len(rows))
        if self._ask("began", name) < LOST_TOGETHER:
            with self._room:
                self._answer(rows, waiting)
        else:
            self._one_by_one(rows, waiting)
        self._say("ended", name)
        self._say("did", self._name, len(rows), waiting.tokens, time.perf_counter() - self._first)
        return waiting.answers

    def _answer(self, rows: Sequence[InputRow], block: _Block) -> None:
        """Answer rows side by side. Raises RuntimeError for what ends the run."""
        left = block.left - len(rows)
        for row in rows:
            self._submit(row, block)
        with self._changed:
            self._changed.wait_for(lambda: block.left <= left or block.error is not None or self._broken is not None)
        error = block.error or self._broken
        if error is not None:
            self._failure = told(error)
            self._say("failed", self._failure)
            raise RuntimeError(str(error)) from error

    def _one_by_one(self, rows: Sequence[InputRow], block: _Block) -> None:
        """Answer the rows of a block with which processes have ended, each with nothing beside it, so that the one that
        ends them is known: it gets an error, for it would end every worker, and the others their answers.
        """
        given_up = []
        with self._alone:
            for _ in range(AT_ONCE):
                self._room.acquire()
            try:
                for row in rows:
                    name = f"row {row.index}"
                    if self._ask("began", name) >= LOST_ALONE:
                        said = "the worker's process ended each time that this row was answered"
                        self._done(block, failed(row, GenerationError(said)), 0)
                        given_up.append(name)
                    else:
                        self._answer([row], block)
                        self._say("ended", name)
                for name in given_up:  # not before: when another row ends the process, this one would be tried anew
                    self._say("ended", name)
            finally:
                for _ in range(AT_ONCE):
                    self._room.release()

    def _submit(self, row: InputRow, block: _Block) -> None:
        logprobs: list[TokenLogprobs] = []

        def hear(ticket: Ticket, piece: Piece) -> None:
            logprobs.extend(piece.logprobs)
            if piece.finish_reason is None:
                return
            lost = self._scheduler.lost_by is not None  # by what is no row's own: the others would fare no better
            if lost or _ends_the_run(ticket.error) or piece.finish_reason == "interrupted":
                self._end(block, ticket.error or GenerationError("the worker was closed"))
            elif ticket.error is not None:
                self._done(block, failed(row, ticket.error), 0)
            else:
                asked = logprobs if ticket.work.logprobs is not None else None
                said = answered(row, ticket.answer, asked, with_text=self._text is not None)
                self._done(block, said, len(said.tokens))

        try:
            with self._encoding:  # a tokenizer is for one thread at a time
                work = work_of(row, self._defaults, self._text, self._scheduler.begun.vocab_size)
            with read_as_fields(row.fields):
                self._scheduler.submit(work, hear)
        except (GenerationError, UsageError) as error:
            self._done(block, failed(row, error), 0)
        except PartitaError as error:
            self._end(block, error)

    def _done(self, block: _Block, answer: Any, tokens: int) -> None:
        with self._changed:
            block.answers.append(json.dumps(answer.to_json(), ensure_ascii=False))
            block.tokens += tokens
            block.left -= 1
            self._changed.notify_all()

    def _end(self, block: _Block, error: PartitaError) -> None:
        with self._changed:
            block.error = error
            self._changed.notify_all()

    def _load(self, setup: Setup) -> None:
        from partita import __version__
        from partita.foreign.folder import choice_of, open_folder
        from partita.library.chain import read_chain_options
        from partita.library.contents import contents_hash
        from partita.library.local import LocalEngine
        from partita.library.scheduler import Scheduler
        from partita.runtime.text import load_text

        if __version__ != setup.partita:
            raise UsageError(
                f"Partita {__version__} on {socket.gethostname()} ({sys.executable}), and the command is of "
                f"{setup.partita}; install the same version there"
            )
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        folder = Path(setup.package)
        if not folder.is_dir():
            host = socket.gethostname()
            raise PackageError(f"no such folder on {host}; have it at the same path there", where=folder)
        threads = os.environ.get(THREADS_VARIABLE)
        chain = os.environ.get(CHAIN_VARIABLE) or setup.where.provider
        where = ChainOptions(**{**asdict(setup.where), "provider": chain, "threads": int(threads) if threads else None})
        choice = choice_of(dict(setup.choice))
        manifest = open_folder(folder, choice)
        if contents_hash(folder, manifest) != setup.contents:
            raise PackageError(f"another package on {socket.gethostname()} than on the command's machine", where=folder)
        self._text = None if setup.token_ids else load_text(folder, manifest.tokenizer, manifest.graph.max_length)
        self._defaults = setup.defaults
        check_defaults(self._defaults, self._text, setup.form)
        target = read_chain_options(where)
        engine = LocalEngine(folder, manifest, target, threads=where.threads, choice=choice)
        placement = placement_of(engine)
        self._scheduler = Scheduler(
            engine,
            self._text,
            prefill_chunk=setup.prefill_chunk,
            adapter=setup.adapter,
            speculation=setup.speculation,
        )
        used = tuple(entry.provider for entry in engine.opened.chain if entry.status == "active")
        fact = {
            **_place(self._name),
            "chain": used,
            "slots": self._scheduler.slots,
            "load_seconds": engine.opened.load_seconds,
            "placement": placement,
        }
        self._say("joined", self._name, fact)
        threading.Thread(target=self._step, name="partita-steps", daemon=True).start()

    def _step(self) -> None:
        """Step the batch for as long as the process lives."""
        try:
            while True:
                if self._scheduler.wait(STUCK_SECONDS):
                    self._scheduler.step()
        except Exception as error:  # noqa: BLE001 - those who wait for their rows must hear of it
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _say(self, what: str, *said: Any) -> None:
        """Tell the ledger, and wait until it knows: what a worker did is known when its block is."""
        self._ask(what, *said)

    def _ask(self, what: str, *said: Any) -> Any:
        """The same, with what the ledger says to it."""
        import ray

        return ray.get(getattr(self._ledger, what).remote(*said))


def told_of(number: int, answers: Sequence[str]) -> Any:
    """A table of what came of a block: the answers, with its number beside each."""
    import pyarrow

    columns = {
        BLOCK: ([number] * len(answers), pyarrow.int64()),
        ROWS_OF_BLOCK: ([len(answers)] * len(answers), pyarrow.int64()),
        ANSWER: (answers, pyarrow.string()),
    }
    return pyarrow.table({name: pyarrow.array(values, kind) for name, (values, kind) in columns.items()})


def _ends_the_run(error: PartitaError | None) -> bool:
    """Whether an error is of the run of the model, and not of a row: another row would fare no better."""
    return error is not None and not isinstance(error, (GenerationError, UsageError, ResourceError))


def placement_of(engine: Any) -> tuple[dict[str, Any], ...]:
    """Where the nodes of a package run, seen in a short run on a token that means nothing."""
    from partita.library.engine import GenerateRequest, ReportRequest, RowRequest
    from partita.library.sampling import Sampling
    from partita.partition_reports.copies import is_memcpy
    from partita.partition_reports.groups import provider_of

    greedy = Sampling(temperature=0.0, max_new_tokens=PLACEMENT_TOKENS)
    rows = (RowRequest((0,), greedy),) * engine.manifest.graph.batch_size
    begun = engine.begin(GenerateRequest(rows))
    while engine.step(begun.number) is not None:
        pass
    report = engine.report(ReportRequest(complete=False))
    placed = []
    for phase in report.phases:
        counts: dict[str, int] = {}
        for node in phase.nodes:
            counts[provider_of(node)] = counts.get(provider_of(node), 0) + 1
        copies = sum(map(is_memcpy, phase.nodes))
        placed.append({"phase": phase.name, "file": phase.file, "nodes": counts, "copies": copies})
    return tuple(placed)


def _place(name: str) -> dict[str, Any]:
    """Where this worker is."""
    import ray

    from partita.runtime.ort.registry import ort_build

    build, context = ort_build(), ray.get_runtime_context()
    return {
        "worker": context.get_actor_id() or name,
        "host": socket.gethostname(),
        "node": context.get_node_id(),
        "pid": os.getpid(),
        "python": f"{sys.executable} ({sys.version.split()[0]})",
        "onnxruntime": f"{build.version} ({build.package or 'unknown wheel'})",
    }
