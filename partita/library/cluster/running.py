"""The rows of a file through a cluster: blocks out, answers into the journal as they come.

Ray Data gives a block to a worker that has room, and again to another when a worker is lost. An answer counts once it
is in the journal, and the first for a row is the one that counts, so neither the loss of a worker nor that of the
command loses or doubles a row.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic import TypeAdapter

from partita.errors import PartitaError
from partita.library.batches.journal import Journal
from partita.library.batches.rows import READ, InputRow, RowAnswer
from partita.library.cluster.ledger import Ledger
from partita.library.cluster.options import ClusterOptions, block_rows, shares, worker_count
from partita.library.cluster.records import ClusterReport, WorkerFact
from partita.library.cluster.setting_up import check_kinds, connected, deal_of, means_of, run_error
from partita.library.cluster.worker import ANSWER, AT_ONCE, ROW, ROWS, SETUPS, Setup, Worker
from partita.library.crossing import rebuilt

ANSWERS = TypeAdapter(RowAnswer)
IN_FLIGHT = 4
"""Blocks that wait at a worker or are with it."""
LOST_STARTS = 3
"""Workers that may die one after the other while they start."""


@dataclass(slots=True)
class ClusterRun:
    """A run over rows on a cluster, and how far it is."""

    options: ClusterOptions
    setup: Setup
    slots: int
    """Rows of the package's batch."""
    journal: Journal
    rows: int | None = None
    """Of the file, where it is known."""
    heard: Callable[[ClusterRun], object] = lambda _: None
    """Called after every block of answers."""
    worker: type[Any] = Worker
    """What Ray Data starts; made and called as `Worker` is."""
    tokens: int = 0
    """New ones, of rows that are done."""
    prompt_tokens: int = 0
    """Of rows that are done."""
    again: int = 0
    unread: set[str] = field(default_factory=set)
    """Fields of rows that mean nothing here."""

    def go(self, rows: Iterable[InputRow]) -> ClusterReport:
        """Answer every row that has no answer yet.

        A row's own error is its answer. Raises InstallationError and UsageError where there is no such cluster, what a
        worker's package or provider raises, and ResourceError of the journal.
        """
        with connected(self.options.address) as ray:
            return self._go(ray, (row for row in rows if row.index not in self.journal))

    def _go(self, ray: Any, rows: Iterator[InputRow]) -> ClusterReport:
        means = means_of(ray)
        count = worker_count(self.options, means)
        given = shares(self.options, means, self.setup.where.threads)
        deal = deal_of(given)
        check_kinds(ray, deal, given)
        began, before = time.perf_counter(), len(self.journal)
        ledger = _beside(ray, deal)
        size = block_rows(self.slots, count, None if self.rows is None else self.rows - before)
        tables = self._put(ray, rows, size)
        if tables:
            self._answer(ray, tables, count, deal, ledger)
        seconds = time.perf_counter() - began
        workers, _ = ray.get(ledger.read.remote())
        return ClusterReport(
            address=self.options.address,
            ray=str(ray.__version__),
            nodes=means.nodes,
            rows=len(self.journal) - before,
            again=self.again,
            tokens=self.tokens,
            seconds=seconds,
            tokens_per_second=self.tokens / seconds if self.tokens else None,
            wanted=count,
            workers=tuple(WorkerFact(**_with_speed(fact)) for fact in workers),
        )

    def _put(self, ray: Any, rows: Iterator[InputRow], size: int) -> list[Any]:
        """The rows as blocks in the store of the cluster, which writes to disk what does not fit in memory."""
        import pyarrow

        found = []
        while block := list(islice(rows, size)):
            self.unread.update(*(row.unread for row in block))
            texts = [ROWS.dump_json(portable(row)).decode() for row in block]
            found.append(ray.put(pyarrow.table({ROW: pyarrow.array(texts, pyarrow.string())})))
        return found

    def _answer(self, ray: Any, tables: list[Any], count: int, deal: Any, ledger: Any) -> None:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_consecutive_actor_init_deaths = LOST_STARTS
        pool = ray.data.ActorPoolStrategy(
            size=min(count, len(tables)),
            max_tasks_in_flight_per_actor=IN_FLIGHT,
            max_concurrent_calls_per_actor=AT_ONCE,
            enable_true_multi_threading=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what deals is to go in Ray 2.64; the extra asks for one before it
            answers = ray.data.from_arrow_refs(tables).map_batches(
                self.worker,
                batch_size=None,
                batch_format="pyarrow",
                compute=pool,
                fn_constructor_args=(SETUPS.dump_json(self.setup).decode(), ledger),
                ray_remote_args_fn=deal,
            )
        try:
            for block in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                for text in block[ANSWER].to_pylist():
                    self._keep(ANSWERS.validate_json(text))
                self.heard(self)
        except PartitaError:
            raise
        except Exception as error:
            _, told = ray.get(ledger.read.remote())
            raise (run_error(str(error)) if told is None else rebuilt(told)) from error

    def _keep(self, answer: RowAnswer) -> None:
        """Write an answer down; the first one of a row counts."""
        if answer.index in self.journal:
            self.again += 1
            return
        self.journal.append(answer)
        self.tokens += len(answer.tokens)
        self.prompt_tokens += answer.prompt_tokens or 0


def portable(row: InputRow) -> InputRow:
    """A row as it goes to a worker: without the fields that mean nothing here, whatever they hold; an error where one
    that is read has no form in JSON, as bytes and infinity have none.
    """
    data, error = {}, row.error
    for name in sorted(READ & row.data.keys()):
        try:
            json.dumps(row.data[name], allow_nan=False)
            data[name] = row.data[name]
        except (TypeError, ValueError):
            error = error or f"{name} is {str(row.data[name])[:40]!r}, which is no value of JSON"
    return InputRow(row.index, data, error)


def _beside(ray: Any, deal: Any) -> Any:
    """A ledger on the machine of the command, which no worker takes along."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    environment = {"py_executable": deal.python, "env_vars": deal.variables}
    return ray.remote(num_cpus=0, scheduling_strategy=here, runtime_env=environment)(Ledger).remote()


def _with_speed(fact: dict[str, Any]) -> dict[str, Any]:
    busy = fact["busy_seconds"]
    return {**fact, "tokens_per_second": fact["tokens"] / busy if busy else None}
