"""The rows of a file through a cluster: blocks out, answers into the journal as they come.

Ray Data gives a block to a worker that has room, and again to another when a worker is lost; its rows lie at a desk
beside the driver (`desk.py`), which is as far ahead with reading as workers are about to need. An answer counts once it
is in the journal, and the first for a row is the one that counts, so neither the loss of a worker nor that of the
command loses or doubles a row.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.batches.journal import GOES_ON, Journal
from partita.library.batches.rows import READ, InputRow, RowAnswer, note_unread
from partita.library.cluster.desk import Desk
from partita.library.cluster.ledger import Ledger
from partita.library.cluster.options import LOCAL, ClusterOptions, Share, block_rows, lacking, shares, worker_count
from partita.library.cluster.records import ClusterReport, WorkerFact
from partita.library.cluster.setting_up import check_kinds, connected, deal_of, means_of, run_error
from partita.library.cluster.worker import ANSWER, AT_ONCE, BLOCK, ROWS, ROWS_OF_BLOCK, SETUPS, Setup, Worker
from partita.library.crossing import rebuilt
from partita.observations.text_format import plural

ANSWERS = TypeAdapter(RowAnswer)
COLUMNS = BLOCK, ROWS_OF_BLOCK, ANSWER
IN_FLIGHT = 4
"""Blocks that wait at a worker or are with it."""
LOST_STARTS = 3
"""Workers that may die one after the other while they start."""
NO_PROGRESS = "execution_no_progress_timeout_s"
"""A setting of Ray Data, not of all versions: the run is given up after so long without a block that is done."""
CALLS = 100
"""Of the driver, and of workers that do not wait, at what is beside the driver."""
AHEAD = 2
"""Blocks for each worker that are read before it asks for them."""


class Beside(Ledger, Desk):
    """What is beside the driver, in one process."""

    def __init__(self, ahead: int) -> None:
        """`ahead` is that of the desk."""
        Ledger.__init__(self)
        Desk.__init__(self, ahead)


class Reader(threading.Thread):
    """Reads the rows of a run, and lays blocks of them down at the desk as fast as they are asked for."""

    def __init__(self, ray: Any, desk: Any, rows: Iterator[InputRow], size: int, blocks: int) -> None:
        """`blocks` of `size` rows each: as many as are counted on."""
        super().__init__(name="partita-rows", daemon=True)
        self.unread: set[str] = set()
        """Fields of rows that mean nothing here."""
        self.read = 0
        """Rows that were laid down."""
        self.error: Exception | None = None
        """What keeps it from the rows behind those that it has laid down."""
        self._ray, self._desk, self._rows, self._size, self._blocks = ray, desk, rows, size, blocks
        self._stopped = False

    def run(self) -> None:
        """Read to the end, or until it is stopped."""
        try:
            for block in self._in_blocks():
                if self._stopped:
                    return
                self._lay_down(block)
        except Exception as error:  # noqa: BLE001 - the driver raises it, when what was read before is answered
            self.error = error
        finally:
            self._close()

    def _in_blocks(self) -> Iterator[list[InputRow]]:
        block: list[InputRow] = []
        try:
            for row in self._rows:
                block.append(row)
                if len(block) == self._size:
                    yield block
                    block = []
        except Exception as error:  # noqa: BLE001 - as above
            self.error = error
        if block:
            yield block

    def _lay_down(self, block: list[InputRow]) -> None:
        if not self._blocks:
            raise GenerationError(
                "the file of prompts has more rows than when the run began; the answers to those that it had are kept, "
                "and another run has to be begun for all of them"
            )
        self._blocks -= 1
        for row in block:
            note_unread(self.unread, row)
        texts = [ROWS.dump_json(portable(row)).decode() for row in block]
        self.read += len(block)
        try:
            self._ray.get(self._desk.put.remote(texts))
        except Exception as error:
            raise run_error(str(error)) from error

    def stop(self) -> None:
        """Nobody wants more rows; back when it reads no more."""
        self._stopped = True
        self._close()
        self.join()

    def _close(self) -> None:
        with suppress(Exception):  # the run ends, by an error of its own where the desk is gone
            self._ray.get(self._desk.close.remote())


@dataclass(slots=True)
class ClusterRun:
    """A run over rows on a cluster, and how far it is."""

    options: ClusterOptions
    setup: Setup
    slots: int
    """Rows of the package's batch."""
    journal: Journal
    rows: int
    """Of the file, at most."""
    heard: Callable[[ClusterRun], object] = lambda _: None
    """Called after every block of answers."""
    noted: Callable[[str], object] = lambda _: None
    """Told what is worth knowing before there is one."""
    worker: type[Any] = Worker
    """What Ray Data starts; made and called as `Worker` is."""
    tokens: int = 0
    """New ones, of rows that are done."""
    prompt_tokens: int = 0
    """Of rows that are done."""
    again: int = 0
    unread: set[str] = field(default_factory=set)
    """Fields of rows that mean nothing here."""
    _parts: dict[int, set[int]] = field(default_factory=dict)
    """Rows with an answer, of blocks that came in part."""

    def go(self, rows: Iterable[InputRow]) -> ClusterReport:
        """Answer every row that has no answer yet.

        A row's own error is its answer. Raises InstallationError and UsageError where there is no such cluster, what a
        worker's package or provider raises, ResourceError of the journal, and what reading the rows raises when those
        that were read are answered.
        """
        with connected(self.options.address) as ray:
            return self._go(ray, (row for row in rows if row.index not in self.journal))

    def _go(self, ray: Any, rows: Iterator[InputRow]) -> ClusterReport:
        means = means_of(ray)
        count = worker_count(self.options, means)
        given = shares(self.options, means, self.setup.where.threads)
        deal = deal_of(given)
        check_kinds(ray, deal, given)
        if waits := lacking(self.options, means, given):
            if self.options.address == LOCAL:
                raise UsageError(waits)  # nobody adds a machine to one that was made for this run
            self.noted(waits)
        began, before = time.perf_counter(), len(self.journal)
        left = self.rows - before
        size = block_rows(self.slots, count, left)
        blocks = math.ceil(left / size)
        beside = _beside(ray, deal, count)
        if blocks:
            reader = Reader(ray, beside, rows, size, blocks)
            reader.start()
            try:
                self._answer(ray, blocks, count, given, deal, beside)
            finally:
                reader.stop()
                self.unread |= reader.unread
            if reader.error is not None:
                raise reader.error
            if lost := reader.read - (len(self.journal) - before):
                raise GenerationError(f"the cluster gave back no answer to {plural(lost, 'row')}; {GOES_ON}")
        seconds = time.perf_counter() - began
        try:
            workers, _ = ray.get(beside.read.remote())
        except Exception as error:
            raise run_error(str(error)) from error
        return ClusterReport(
            address=self.options.address,
            ray=str(ray.__version__),
            nodes=means.nodes,
            rows=len(self.journal) - before,
            again=self.again,
            tokens=self.tokens,
            seconds=seconds,
            tokens_per_second=self.tokens / seconds if self.tokens else None,
            least=self.options.least or count,
            wanted=count,
            workers=tuple(WorkerFact(**_with_speed(fact)) for fact in workers),
        )

    def _answer(self, ray: Any, blocks: int, count: int, given: Sequence[Share], deal: Any, beside: Any) -> None:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_consecutive_actor_init_deaths = LOST_STARTS
        if hasattr(context, NO_PROGRESS):  # a block, or a machine that is added, may take longer than Ray Data waits
            setattr(context, NO_PROGRESS, -1)
        least, most = min(self.options.least or count, blocks), min(count, blocks)
        pool = ray.data.ActorPoolStrategy(
            min_size=least,
            max_size=most,
            # All that have work: what those ask for who find no room is what machines are added for.
            initial_size=min(most, max(least, math.ceil(blocks / IN_FLIGHT))),
            max_tasks_in_flight_per_actor=IN_FLIGHT,
            max_concurrent_calls_per_actor=AT_ONCE,
            enable_true_multi_threading=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what deals is to go in Ray 2.64; the extra asks for one before it
            numbers = ray.data.from_items([{BLOCK: number} for number in range(blocks)], override_num_blocks=blocks)
            answers = numbers.map_batches(
                self.worker,
                batch_size=None,
                batch_format="pyarrow",
                compute=pool,
                fn_constructor_args=(SETUPS.dump_json(self.setup).decode(), beside),
                # What Ray Data plans with, while `deal` says what each has. GPUs it takes with a batch size alone.
                num_cpus=max(share.cpus for share in given),
                ray_remote_args_fn=deal,
            )
        try:
            for block in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                if whole := self._take(block):
                    beside.kept.remote(whole)
                self.heard(self)
        except PartitaError:
            raise
        except Exception as error:
            told = None
            with suppress(Exception):  # that is gone, too, where the cluster is
                _, told = ray.get(beside.read.remote())
            raise (run_error(str(error)) if told is None else rebuilt(told)) from error

    def _take(self, answers: Any) -> list[int]:
        """Keep the answers of a table; the blocks of which none is missing any more: what is not here is asked for
        again where it is lost on the way, and then the desk has to have its rows.
        """
        whole = []
        for number, rows, text in zip(*(answers[name].to_pylist() for name in COLUMNS), strict=True):
            answer = ANSWERS.validate_json(text)
            self._keep(answer)
            part = self._parts.setdefault(number, set())
            part.add(answer.index)
            if len(part) == rows:
                del self._parts[number]
                whole.append(number)
        return whole

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


def _beside(ray: Any, deal: Any, workers: int) -> Any:
    """A ledger and a desk on the machine of the command, which no worker takes along."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    given = {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        "runtime_env": {"py_executable": deal.python, "env_vars": deal.variables},
        "max_concurrency": CALLS + 2 * AT_ONCE * workers,  # each may wait for rows, and none is to keep them away
    }
    return ray.remote(**given)(Beside).remote(AHEAD * workers)


def _with_speed(fact: dict[str, Any]) -> dict[str, Any]:
    busy = fact["busy_seconds"]
    return {**fact, "tokens_per_second": fact["tokens"] / busy if busy else None}
