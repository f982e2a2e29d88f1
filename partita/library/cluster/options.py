"""What is asked of a cluster, and which worker is started how. Pure: nothing here imports Ray.

A worker holds the package on one chain of providers, and runs in the Python whose ONNX Runtime has them. Where nodes of
the cluster have a resource of a provider's name (`ray start --resources='{"partita-webgpu": 1}'`), workers of that
provider go there, one for each.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.errors import UsageError
from partita.observations.text_format import listing, plural
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
MAX_CPUS = 1_024
BLOCK_TURNS = 4
"""Rows of a block for each row of the batch: the rows that a worker which is killed has to be given again."""
LEAST_BLOCK = 8
MOST_BLOCKS, BLOCKS_EACH = 8_192, 8
"""Blocks of a run, and of a worker where that is more: each costs the driver about a millisecond and 5 KB before the
first row is answered, so those of a very long file are larger.
"""
WORDS = {"CPU": "processor", "GPU": "GPU"}
ROUNDING = 0.01
"""Of parts of a processor that are added up."""
PARTS = 10_000
"""Of a processor: the smallest amount that Ray knows is one of them."""


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
    """The most that there may be. None: one per device, or one of each kind."""
    kinds: tuple[WorkerKind, ...] = (WorkerKind(None),)
    least: int | None = None
    """The fewest, where the number follows from how much there is to do and what the cluster grows to; else None."""
    cpus: int | None = None
    """Processors that each asks for, whatever the cluster has now; None: an equal part of those."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a cluster has."""

    resources: Mapping[str, float]
    """Amounts by name, over all nodes."""
    cpus: tuple[float, ...]
    """Processors of each node; a head that answers nothing may have none."""

    @property
    def nodes(self) -> int:
        """Machines, those without a processor too."""
        return len(self.cpus)

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


def read_cluster(
    address: str,
    workers: str | int | None,
    provider: str | None,
    given: Sequence[str] = (),
    *,
    cpus: int | None = None,
    threads: int | None = None,
) -> ClusterOptions:
    """Check what was asked. `workers`: a number, or `MIN-MAX`; `given`: `CHAIN=PYTHON` for each kind of worker; `cpus`
    and `threads` of each. Raises UsageError.
    """
    if address not in (AUTO, LOCAL) and not re.fullmatch(r"[^\s:/]+:\d{1,5}", address):
        raise UsageError(f"{spelled('address', address)}: give auto, local or HOST:PORT, as `ray start` prints it")
    least, most = (None, None) if workers is None else _numbers(str(workers))
    if cpus is not None and not 1 <= cpus <= MAX_CPUS:
        raise UsageError(f"{spelled('worker_cpus', cpus)}: must be between 1 and {MAX_CPUS:,}")
    kinds = tuple(_kind(text) for text in given) or (WorkerKind(provider),)
    if given and provider is not None:
        raise UsageError(f"{spelled('worker')} names the chain of each worker; leave {spelled('providers')} out")
    if least is not None and least < len(kinds):
        raise UsageError(f"{spelled('workers', workers)}: fewer than the {len(kinds)} kinds of {spelled('worker')}")
    if least == most:
        return ClusterOptions(address, most, kinds, cpus=cpus)
    if cpus is None and threads is None and not all(map(_on_gpu, kinds)):
        raise UsageError(
            f"{spelled('workers', workers)}: the cluster may grow, so an equal part of what it has now tells nothing; "
            f"give the processors of each worker with {spelled('worker_cpus')}"
        )
    return ClusterOptions(address, most, kinds, least, cpus or threads)


def _numbers(text: str) -> tuple[int, int]:
    """The fewest and the most workers."""
    found = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", text)
    if found is None:
        raise UsageError(f"{spelled('workers', text)}: give a number, or MIN-MAX such as 2-16")
    least, most = int(found[1]), int(found[2] or found[1])
    if not (1 <= least <= MAX_WORKERS and 1 <= most <= MAX_WORKERS):
        raise UsageError(f"{spelled('workers', text)}: must be between 1 and {MAX_WORKERS:,}")
    if least > most:
        raise UsageError(f"{spelled('workers', text)}: MIN is more than MAX")
    return least, most


def _kind(text: str) -> WorkerKind:
    """One `CHAIN=PYTHON`; without a PYTHON, that of the command."""
    chain, equals, python = (part.strip() for part in text.partition("="))
    if not chain or (equals and not python):
        raise UsageError(f"{spelled('worker', text)}: write CHAIN=PYTHON, e.g. webgpu,cpu=/opt/webgpu/bin/python")
    parse_chain(chain, argument="worker")
    return WorkerKind(chain, python or None)


def shares(options: ClusterOptions, means: Means, threads: int | None) -> tuple[Share, ...]:
    """What a worker of each kind needs of this cluster. `threads`: of each; None: as many as its processors, which are
    those that were asked for, or an equal part of what there is.
    """
    if options.cpus is not None or options.least is not None:
        return tuple(_fixed_share(kind, means, options, threads) for kind in options.kinds)
    even = _even(means.cpus, worker_count(options, means))
    return tuple(_share(kind, means, threads or max(1, int(even)), even) for kind in options.kinds)


def _even(cpus: Sequence[float], workers: int) -> float:
    """The largest equal part of all processors of which the machines have room for so many workers: each is on one
    machine, and what that has left beside its workers is nobody's. More than one are whole ones, as Ray wants them.
    """
    most = int(sum(cpus) * PARTS / workers)
    fits = bisect_left(range(1, most + 1), True, key=lambda parts: _placed(cpus, [parts / PARTS] * workers) < workers)
    if not fits:
        return 1.0  # there is no room at all, which `lacking` says
    return float(fits // PARTS) if fits > PARTS else fits / PARTS


def _placed(cpus: Sequence[float], wanted: Iterable[float]) -> int:
    """How many of the workers that want so many processors there is room for, those that want most first."""
    left, placed = [round(each * PARTS) for each in cpus], 0
    for want, count in sorted(Counter(round(each * PARTS) for each in wanted).items(), reverse=True):
        for node, free in enumerate(left):
            taken = min(count, free // want)
            left[node] -= taken * want
            count, placed = count - taken, placed + taken
    return placed


def _share(kind: WorkerKind, means: Means, threads: int, even: float) -> Share:
    gpus = int(_on_gpu(kind) and means.amount("GPU") > 0)
    # A device computes by itself: its worker needs a processor to feed it, and no more.
    cpus = min(1 if gpus else threads, even)
    return Share(kind, cpus, gpus, _resource(kind, means), threads)


def _fixed_share(kind: WorkerKind, means: Means, options: ClusterOptions, threads: int | None) -> Share:
    """The share of a worker for which a machine may have to be added: what the cluster has now does not matter to it,
    so it asks for a GPU where its chain leads with one and the cluster may grow.
    """
    grows = options.least is not None
    gpus = int(_on_gpu(kind) and (grows or means.amount("GPU") > 0))
    cpus = options.cpus or 1
    return Share(kind, cpus, gpus, _resource(kind, means), threads or cpus)


def _on_gpu(kind: WorkerKind) -> bool:
    """Whether a worker's chain leads with a provider that runs on one of Ray's GPUs."""
    return kind.chain is not None and _by_gpu(parse_chain(kind.chain)[0])


def _resource(kind: WorkerKind, means: Means) -> str | None:
    """The resource that nodes have for workers of this kind, where some have one."""
    named = None if kind.chain is None else f"{RESOURCE}{parse_chain(kind.chain)[0].name}"
    return named if named in means.resources else None


def lacking(options: ClusterOptions, means: Means, given: Sequence[Share]) -> str | None:
    """What the fewest workers that were asked for need and the cluster does not have now, in words: they wait for it,
    which nobody would see. None where there is enough.
    """
    dealt = [given[number % len(given)] for number in range(options.least or worker_count(options, means))]
    wanted: dict[str, float] = {"CPU": sum(share.cpus for share in dealt), "GPU": sum(share.gpus for share in dealt)}
    for share in dealt:
        if share.resource is not None:
            wanted[share.resource] = wanted.get(share.resource, 0) + 1
    told = [
        f"{_pieces(amount, name)} where the cluster has {means.resources.get(name, 0):g}"
        for name, amount in wanted.items()
        if amount > means.resources.get(name, 0) + ROUNDING
    ]
    cpus = [share.cpus for share in dealt]
    if not told and (placed := _placed(means.cpus, cpus)) < len(dealt):
        largest, one, alike = max(means.cpus), max(cpus), max(cpus) == min(cpus)
        room = f"the largest machine has {largest:g}" if one > largest else f"the machines have room for {placed}"
        told = [f"{'' if alike else 'up to '}{_pieces(one, 'CPU')} each where {room}"]
    if not told:
        return None
    workers = plural(len(dealt), "worker")
    return f"asked for {workers}: {listing(told)}; those without room wait for machines that are added"


def _pieces(amount: float, name: str) -> str:
    """So much of a resource, in words."""
    word = WORDS.get(name)
    return f"{amount:g} {name}" if word is None else f"{amount:g} {word}{'' if amount == 1 else 's'}"


def _by_gpu(provider: Provider) -> bool:
    """Whether Ray's GPUs are what the provider runs on: Ray hides the others from a worker by this variable."""
    return "CUDA_VISIBLE_DEVICES" in provider.variables


def worker_count(options: ClusterOptions, means: Means) -> int:
    """How many workers at most: as asked, else one per GPU where the chain leads with it, else one per kind, or per
    node that has processors.
    """
    if options.workers is not None:
        return options.workers
    if len(options.kinds) > 1:
        return len(options.kinds)
    if _on_gpu(options.kinds[0]) and means.amount("GPU"):
        return means.amount("GPU")
    return max(1, sum(each > 0 for each in means.cpus))


def block_rows(slots: int, workers: int, rows: int) -> int:
    """Rows of a block: some turns of a batch of `slots`; more in a long file, and less where that would leave workers
    without any.
    """
    turns = max(LEAST_BLOCK, BLOCK_TURNS * slots)
    long = math.ceil(rows / max(MOST_BLOCKS, BLOCKS_EACH * workers))
    return max(1, min(max(turns, long), rows // (2 * workers)))


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
