"""Runs the rows of a prompt file on a Ray cluster: Ray Data sends blocks of rows to workers with a loaded package.

Unanswered rows are put into Ray's object store, which spills to disk. Ray schedules blocks, restarts lost workers and
repeats their blocks. The driver's journal keeps the first answer of each row, so a killed worker or driver neither
loses nor duplicates rows.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from partita import __version__
from partita.errors import PackageError, PartitaError, ProviderError, UsageError
from partita.extras import explain
from partita.foreign.folder import Choice, open_folder
from partita.library.batches.batch_run import WorkerFact, run_rows
from partita.library.batches.journal import contents_hash
from partita.library.batches.rows import AnswerRow, InputRow, RowDefaults, check_defaults
from partita.library.chain import read_chain
from partita.options.generation import BatchOptions
from partita.options.groups import ProviderChain
from partita.package.folder import Manifest
from partita.providers.resolve import parse_chain
from partita.remedies import Remedy
from partita.runtime.ort.native_log import captured_output

START = Remedy(
    "start one",
    ("ray", "start", "--head"),
    alternative=Remedy("start one for this run", options=("--address", "local")),
)
CONNECT_SECONDS = 5.0
BLOCK_TURNS, LEAST_BLOCK, MOST_BLOCKS = 8, 16, 4_096
"""A block has this many batches and at least the minimum rows, or more if a file would have too many blocks."""
LOST_WITH_BLOCK = 2
"""Ray's retries of a block whose worker process ended; after these, its rows have no answer."""
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
ROW, RESULT = "row", "result"
"""Columns: pickled InputRow; pickled worker and answers of a block."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of every worker, see `setup_of`. Paths are equal on every machine."""

    package: Path
    contents: str
    """Version of Partita, and hash of the package."""
    chain: ProviderChain
    choice: Choice
    batch: BatchOptions
    graph_capture: bool = False
    token_ids: bool = False
    format: str = "jsonl"
    """Format of the prompt file."""


def setup_of(
    package: Path,
    manifest: Manifest,
    chain: ProviderChain,
    choice: Choice,
    batch: BatchOptions,
    **options: Any,
) -> Setup:
    """The settings of workers, with absolute paths, because their working folders differ. `options`: more `Setup`
    fields."""
    libraries = {
        name: str(Path(path).expanduser().absolute()) for name, path in (chain.provider_libraries or {}).items()
    }
    contract, draft = choice.contract, batch.draft
    return Setup(
        package.absolute(),
        _contents(package, manifest),
        replace(chain, provider_libraries=libraries),
        replace(choice, contract=None if contract is None else contract.absolute()),
        replace(batch, draft=None if draft is None else Path(draft).absolute()),
        **options,
    )


def _contents(package: Path, manifest: Manifest) -> str:
    return f"{__version__} {contents_hash(package, manifest)}"


class Worker:
    """Answers blocks of rows. Ray Data makes one per worker process and calls it with one block at a time."""

    def __init__(self, setup: Setup, defaults: RowDefaults) -> None:
        """Load the package. An error is stored for the first call, because Ray would restart an actor that fails."""
        self._failed: PartitaError | None = None
        self._fact = WorkerFact(socket.gethostname(), os.getpid())
        try:
            self._open(setup, defaults)
        except PartitaError as error:
            error.prefix(f"worker on {self._fact.host}")
            self._failed = error

    def _open(self, setup: Setup, defaults: RowDefaults) -> None:
        from partita.library.loading import open_engine
        from partita.library.model import Model

        folder, choice = setup.package, setup.choice
        manifest = open_folder(folder, choice)
        if _contents(folder, manifest) != setup.contents:
            raise PackageError(
                (
                    "the worker has another package or another version of Partita than the command; "
                    "install the same version, and share the package folder"
                ),
                path=folder,
            )
        target = read_chain(setup.chain, graph_capture=setup.graph_capture)
        model = Model(open_engine(folder, manifest, target, choice, observe=False, process="this"))
        engine = model.scheduler(**asdict(setup.batch))
        text = None if setup.token_ids else model.tokenizer
        check_defaults(defaults, text, setup.format)
        self._fact.chain = model.providers
        self._answers = partial(run_rows, defaults=defaults, engine=engine, text=text, vocab_size=model.vocab_size)

    def __call__(self, table: Any) -> Any:
        """Table of one pickled pair: the worker, and the answers to the rows of `table` or the error of the run."""
        import pyarrow

        result: list[AnswerRow] | PartitaError
        try:
            rows = [pickle.loads(row) for row in table[ROW].to_pylist()]
            result = self._failed or list(self._answers(rows))
        except PartitaError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - the driver raises it; Ray would retry the block
            result = ProviderError(f"{type(error).__name__}: {error}")
        return pyarrow.table({RESULT: [pickle.dumps((self._fact, result))]})


@dataclass(slots=True)
class Cluster:
    """Answers rows on a cluster; a function for `answer_file`."""

    address: str
    """`auto`, `local`, or HOST:PORT."""
    setup: Setup
    slots: int
    """Batch size of the package."""
    rows: int
    """Number of rows of the prompt file."""
    workers: int | None = None
    """Number of workers; None: one per GPU if the chain begins with a GPU provider, else one per machine."""
    facts: dict[tuple[str, int], WorkerFact] = field(default_factory=dict)
    """Workers that have answered rows."""

    def __call__(self, rows: Iterator[InputRow], defaults: RowDefaults) -> Iterator[AnswerRow]:
        """Yield answers as blocks finish.

        Raises UsageError without a cluster, errors of a worker's package or provider, and ProviderError if Ray fails.
        """
        with connect_ray(self.address) as ray:
            try:
                for block in self._results(ray, rows, defaults):
                    fact, found = pickle.loads(block)
                    if isinstance(found, PartitaError):
                        raise found
                    known = self.facts.setdefault((fact.host, fact.pid), fact)
                    known.rows += len(found)
                    known.tokens += sum(len(each.tokens) for each in found)
                    yield from found
            except PartitaError:
                raise
            except Exception as error:
                raise ProviderError(f"the cluster failed: {' '.join(str(error).split())[:400]}") from error

    def _results(self, ray: Any, rows: Iterator[InputRow], defaults: RowDefaults) -> Iterator[bytes]:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = -1  # for blocks whose workers died; other errors come as results
        count, threads, gpus = _shares(ray, self.workers, self.setup.chain)
        size = max(LEAST_BLOCK, BLOCK_TURNS * self.slots, math.ceil(self.rows / MOST_BLOCKS))
        size = max(1, min(size, self.rows // (2 * count)))  # so that every worker gets blocks of a short file
        blocks = list(_put(ray, rows, size))
        if not blocks:
            return
        chain = replace(self.setup.chain, threads=threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray 2.64 renames max_task_retries; the extra allows earlier versions
            results = ray.data.from_arrow_refs(blocks).map_batches(
                Worker,
                fn_constructor_args=(replace(self.setup, chain=chain), defaults),
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=min(count, len(blocks))),
                num_cpus=1 if gpus else threads,
                num_gpus=gpus,
                max_task_retries=LOST_WITH_BLOCK,
            )
        for table in results.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from table[RESULT].to_pylist()


def _put(ray: Any, rows: Iterator[InputRow], size: int) -> Iterator[Any]:
    """References to blocks of `size` rows in the object store."""
    import pyarrow

    while block := [pickle.dumps(row) for row in islice(rows, size)]:
        yield ray.put(pyarrow.table({ROW: block}))


def import_ray() -> Any:
    """Ray, with Ray Data. Raises InstallationError."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray.data
    except ImportError as error:
        raise explain(error) or error from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    return ray


@contextmanager
def connect_ray(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster while the block runs. Raises UsageError."""
    ray = import_ray()
    before = signal.getsignal(signal.SIGTERM)
    given: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        host, colon, port = address.rpartition(":")
        if colon:  # Ray would retry for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        with captured_output():
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **given)
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        raise UsageError(f"`address={address}`: no cluster at this address ({message})", remedy=START) from error
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray installs its own
    with redirect_stdout(sys.stderr):  # Ray's messages about lost workers
        try:
            yield ray
        finally:
            ray.shutdown()


def _shares(ray: Any, workers: int | None, chain: ProviderChain) -> tuple[int, int, int]:
    """Number of workers, and the threads and GPUs of each."""
    named = chain.providers
    leads = isinstance(named, str) and "CUDA_VISIBLE_DEVICES" in parse_chain(named)[0].variables
    on_gpu = leads and ray.cluster_resources().get("GPU", 0) >= 1
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    nodes = [cpus for cpus in nodes if cpus] or [1]
    count = workers or (int(ray.cluster_resources()["GPU"]) if on_gpu else len(nodes))
    threads = chain.threads or max(1, min(nodes) // math.ceil(count / len(nodes)))
    return count, threads, int(on_gpu)
