"""What is asked of a cluster, and which worker is started how. Pure: nothing here imports Ray.

A worker holds the package on one chain of providers, and runs in the Python whose ONNX Runtime has them. Where nodes of
the cluster have a resource of a provider's name (`ray start --resources='{"partita-webgpu": 1}'`), workers of that
provider go there, one for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.errors import UsageError
from partita.providers.base import Provider
from partita.providers.resolve import parse_chain
from partita.spelling import spelled

LOCAL = "local"
"""The address of a cluster that is started for one run, on this machine."""
AUTO = "auto"
RESOURCE = "partita-"
CHAIN_VARIABLE = "PARTITA_WORKER_CHAIN"
"""How a worker is told its chain: workers of one pool are made with the same arguments."""
THREADS_VARIABLE = "PARTITA_WORKER_THREADS"
MAX_WORKERS = 10_000
BLOCK_TURNS = 4
"""Rows of a block for each row of the batch: the rows that a worker which is killed has to be given again."""
LEAST_BLOCK = 8


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Workers on one chain, in one environment."""

    chain: str | None
    """As written; None for the best usable providers where it runs."""
    python: str | None = None
    """Its interpreter, on the machines of the cluster; None: that of the command."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Where the rows are to be answered."""

    address: str
    """`auto`, `local`, or HOST:PORT."""
    workers: int | None = None
    """None: one per device, or one of each kind."""
    kinds: tuple[WorkerKind, ...] = (WorkerKind(None),)


@dataclass(frozen=True, slots=True)
class Means:
    """What a cluster has."""

    nodes: int
    resources: Mapping[str, float]
    """Amounts by name, over all nodes."""

    def amount(self, name: str) -> int:
        """Whole pieces of a resource."""
        return int(self.resources.get(name, 0))


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker of a kind needs, and the threads that it runs with."""

    kind: WorkerKind
    cpus: float
    """A part of one, where there are more workers than processors."""
    gpus: int
    resource: str | None
    threads: int | None


def read_cluster(address: str, workers: int | None, provider: str | None, given: Sequence[str] = ()) -> ClusterOptions:
    """Check what was asked. `given`: `CHAIN=PYTHON` for each kind of worker. Raises UsageError."""
    if address not in (AUTO, LOCAL) and not re.fullmatch(r"[^\s:/]+:\d{1,5}", address):
        raise UsageError(f"{spelled('address', address)}: give auto, local or HOST:PORT, as `ray start` prints it")
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"{spelled('workers', workers)}: must be between 1 and {MAX_WORKERS:,}")
    kinds = tuple(_kind(text) for text in given) or (WorkerKind(provider),)
    if given and provider is not None:
        raise UsageError(f"{spelled('worker')} names the chain of each worker; leave {spelled('providers')} out")
    if workers is not None and workers < len(kinds):
        raise UsageError(f"{spelled('workers', workers)}: fewer than the {len(kinds)} kinds of {spelled('worker')}")
    return ClusterOptions(address, workers, kinds)


def _kind(text: str) -> WorkerKind:
    """One `CHAIN=PYTHON`; without a PYTHON, that of the command."""
    chain, equals, python = (part.strip() for part in text.partition("="))
    if not chain or (equals and not python):
        raise UsageError(f"{spelled('worker', text)}: write CHAIN=PYTHON, e.g. webgpu,cpu=/opt/webgpu/bin/python")
    parse_chain(chain, argument="worker")
    return WorkerKind(chain, python or None)


def shares(options: ClusterOptions, means: Means, threads: int | None) -> tuple[Share, ...]:
    """What a worker of each kind needs of this cluster. `threads`: of each; None: an equal part of the processors."""
    even = max(1, means.amount("CPU")) / worker_count(options, means)
    return tuple(_share(kind, means, threads or max(1, int(even)), even) for kind in options.kinds)


def _share(kind: WorkerKind, means: Means, threads: int, even: float) -> Share:
    leads = None if kind.chain is None else parse_chain(kind.chain)[0]
    gpus = int(leads is not None and _by_gpu(leads) and means.amount("GPU") > 0)
    named = None if leads is None else f"{RESOURCE}{leads.name}"
    # A device computes by itself: its worker needs a processor to feed it, and no more.
    cpus = min(1 if gpus else threads, even)
    return Share(kind, cpus, gpus, named if named in means.resources else None, threads)


def _by_gpu(provider: Provider) -> bool:
    """Whether Ray's GPUs are what the provider runs on: Ray hides the others from a worker by this variable."""
    return "CUDA_VISIBLE_DEVICES" in provider.variables


def worker_count(options: ClusterOptions, means: Means) -> int:
    """How many workers: as asked, else one per GPU where the chain leads with one, else one per node or kind."""
    if options.workers is not None:
        return options.workers
    if len(options.kinds) > 1:
        return len(options.kinds)
    chain = options.kinds[0].chain
    if chain is not None and _by_gpu(parse_chain(chain)[0]) and means.amount("GPU"):
        return means.amount("GPU")
    return max(1, means.nodes)


def block_rows(slots: int, workers: int, rows: int | None) -> int:
    """Rows of a block: some turns of a batch of `slots`, and less where that would leave workers without any."""
    whole = max(LEAST_BLOCK, BLOCK_TURNS * slots)
    return whole if rows is None else max(1, min(whole, rows // (2 * workers)))


class Deal:
    """The arguments that Ray starts each worker with, in turn. Called by Ray Data, once for every worker."""

    def __init__(self, given: Sequence[Share], variables: Mapping[str, str], python: str) -> None:
        """`variables` of the environment that every worker gets; `python`: the interpreter of the command."""
        self.variables, self.python = dict(variables), python
        self._shares, self._next = tuple(given), 0

    def __call__(self) -> dict[str, Any]:
        """Those of the next worker."""
        share = self._shares[self._next % len(self._shares)]
        self._next += 1
        return {
            "num_cpus": share.cpus,
            "num_gpus": share.gpus,
            "resources": {share.resource: 1} if share.resource else {},
            "runtime_env": self.environment(share),
        }

    def environment(self, share: Share) -> dict[str, Any]:
        """The runtime environment of a worker."""
        own = {CHAIN_VARIABLE: share.kind.chain or "", THREADS_VARIABLE: str(share.threads or "")}
        variables = {**self.variables, **own}
        return {"py_executable": share.kind.python or self.python, "env_vars": variables}
