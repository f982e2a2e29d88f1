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
import re
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from partita import __version__
from partita.errors import PackageError, PartitaError, ProviderError, UsageError
from partita.extras import explain
from partita.foreign.folder import Choice, open_folder
from partita.library.batches.batch_run import run_rows
from partita.library.batches.journal import contents_hash
from partita.library.batches.rows import AnswerRow, InputRow, RowDefaults, check_defaults
from partita.library.chain import read_chain
from partita.options.fields import group
from partita.options.generation import BatchOptions, GenerateCommand
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
"""Columns: pickled InputRow; pickled answers of a block."""


def contents_of(package: Path, manifest: Manifest) -> str:
    """Version of Partita, and hash of the package."""
    return f"{__version__} {contents_hash(package, manifest)}"


class Worker:
    """Answers blocks of rows. Ray Data makes one per worker process and calls it with one block at a time."""

    def __init__(self, options: GenerateCommand, contents: str, folder: Path, defaults: RowDefaults) -> None:
        """Load the package. An error is stored for the first call, because Ray would restart an actor that fails.

        `contents`: result of `contents_of` on the driver. `folder`: where relative paths begin; they are equal on every
        machine.
        """
        self._failed: PartitaError | None = None
        with suppress(OSError):  # not on this machine: the paths are absolute then, or the package is not found
            os.chdir(folder)
        try:
            self._open(options, contents, defaults)
        except PartitaError as error:
            error.prefix(f"worker on {socket.gethostname()}")
            self._failed = error

    def _open(self, options: GenerateCommand, contents: str, defaults: RowDefaults) -> None:
        from partita.library.loading import open_engine
        from partita.library.model import Model

        folder, choice = Path(options.package), Choice.of(options)
        manifest = open_folder(folder, choice)
        if contents_of(folder, manifest) != contents:
            message = "the worker has another package or another version of Partita than the command"
            raise PackageError(f"{message}; install the same version, and share the package folder", path=folder)
        target = read_chain(options, graph_capture=options.graph_capture)
        model = Model(open_engine(folder.absolute(), manifest, target, choice, observe=False, process="this"))
        engine = model.scheduler(**asdict(group(options, BatchOptions)))
        text = None if options.token_ids else model.tokenizer
        check_defaults(defaults, text)
        self._answers = partial(run_rows, defaults=defaults, engine=engine, text=text, vocab_size=model.vocab_size)

    def __call__(self, table: Any) -> Any:
        """Table with the pickled answers to the rows of `table`, or the error of the run."""
        import pyarrow

        result: list[AnswerRow] | PartitaError
        try:
            rows = [pickle.loads(row) for row in table[ROW].to_pylist()]
            result = self._failed or list(self._answers(rows))
        except Exception as error:  # noqa: BLE001 - the driver raises it; Ray would retry the block
            result = error if isinstance(error, PartitaError) else ProviderError(f"{type(error).__name__}: {error}")
        return pyarrow.table({RESULT: [pickle.dumps(result)]})


def answer_on_cluster(
    rows: Iterator[InputRow], defaults: RowDefaults, *, options: GenerateCommand, manifest: Manifest, count: int
) -> Iterator[AnswerRow]:
    """Answers of workers on the cluster of `--address`, as blocks finish; for `run_file`.

    `count`: rows of the prompt file. Raises UsageError without a cluster, errors of a worker's package or provider, and
    ProviderError if Ray fails.
    """
    with connect_ray(options.address or "auto") as ray:
        try:
            for block in _results(ray, rows, defaults, options, manifest, count):
                found = pickle.loads(block)
                if isinstance(found, PartitaError):
                    raise found
                yield from found
        except PartitaError:
            raise
        except Exception as error:
            raise ProviderError(f"the cluster failed: {' '.join(str(error).split())[:400]}") from error


def _results(
    ray: Any, rows: Iterator[InputRow], defaults: RowDefaults, options: GenerateCommand, manifest: Manifest, count: int
) -> Iterator[bytes]:
    """The pickled result of each block of rows."""
    import pyarrow

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = -1  # for blocks whose workers died; other errors come as results
    actors, threads, gpus = _shares(ray, options)
    size = max(LEAST_BLOCK, BLOCK_TURNS * manifest.graph.batch_size, math.ceil(count / MOST_BLOCKS))
    size = max(1, min(size, count // (2 * actors)))  # so that every worker gets blocks of a short file
    blocks = []
    while block := [pickle.dumps(row) for row in islice(rows, size)]:
        blocks.append(ray.put(pyarrow.table({ROW: block})))
    if not blocks:
        return
    contents = contents_of(Path(options.package), manifest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray 2.64 renames max_task_retries; the extra allows earlier versions
        results = ray.data.from_arrow_refs(blocks).map_batches(
            Worker,
            fn_constructor_args=(replace(options, threads=threads), contents, Path.cwd(), defaults),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=min(actors, len(blocks))),
            num_cpus=1 if gpus else threads,
            num_gpus=gpus,
            max_task_retries=LOST_WITH_BLOCK,
        )
    for table in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield from table[RESULT].to_pylist()


def check_address(address: str) -> None:
    """Raise UsageError for an invalid address, InstallationError without Ray."""
    if not re.fullmatch(r"auto|local|\S+:\d+", address):
        raise UsageError(f"`address={address}`: use auto, local or HOST:PORT, as printed by `ray start`")
    import_ray()


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


def _shares(ray: Any, options: GenerateCommand) -> tuple[int, int, int]:
    """Number of workers, and the threads and GPUs of each. Default: a worker per GPU if the chain begins with a GPU
    provider, else one per machine."""
    named = options.providers
    leads = isinstance(named, str) and "CUDA_VISIBLE_DEVICES" in parse_chain(named)[0].variables
    on_gpu = leads and ray.cluster_resources().get("GPU", 0) >= 1
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    nodes = [cpus for cpus in nodes if cpus] or [1]
    count = options.workers or (int(ray.cluster_resources()["GPU"]) if on_gpu else len(nodes))
    threads = options.threads or max(1, min(nodes) // math.ceil(count / len(nodes)))
    return count, threads, int(on_gpu)
