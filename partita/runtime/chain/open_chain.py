"""Opens a session on exactly the providers of a chain, or raises an error that names the cause.

Detects providers that ONNX Runtime skips, that fail while the session is created or that it drops for a model (see
`provider_state`), and nodes on the CPU provider when the chain does not include it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from partita.diagnosis.explanation import refused_nodes
from partita.errors import PartitaError, ProviderError, RefusedNode, UsageError
from partita.observations.facts import SessionFacts
from partita.observations.names import CPU
from partita.observations.records import ChainEntry, remedy_records
from partita.observations.text_format import plural
from partita.providers.cuda_dry_run.stub_build import BUILD_VARIABLE, ensure_real
from partita.providers.resolve import Failure, Resolution, explain, known_providers, resolve_one
from partita.remedies import Remedy
from partita.runtime.chain.advice import ALLOW_CPU, export_again_for, rows_of
from partita.runtime.chain.compiled_graphs import open_compiled
from partita.runtime.chain.cpu_settings import make_huge, memory_before, set_up
from partita.runtime.chain.pins import Pin, check_pins, pinned_opening
from partita.runtime.chain.provider_state import (
    active_of,
    by_experiment,
    messages_of,
    no_provider_text,
    opens_on,
    ort_names,
    register_plugins,
    remedy_for,
    settle,
    to_blame,
    unavailable,
)
from partita.runtime.cpu import Attention
from partita.runtime.generate.record import session_facts
from partita.runtime.ort.errors import STRICT, lacks_kernel, open_error
from partita.runtime.ort.native_log import WARNING
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.ort.session_options import Opening
from partita.runtime.place.model_file import ModelFile, nodes_of

MOST_NAMED = 5
WITHOUT_PINS = Remedy("remove the pins, or use a provider that runs single nodes, e.g. cuda")


class ChainError(ProviderError):
    """The chain cannot run the model. Carries the facts that a report of the cause needs."""

    path: Path

    def __init__(
        self, message: str, chain: tuple[Resolution, ...], facts: SessionFacts | None = None, **details: Any
    ) -> None:
        """`facts`: of a session with the CPU provider added; None when a provider failed and no session opened."""
        super().__init__(message, **details)
        self.chain, self.facts = chain, facts


def open_session(
    path: Path,
    resolutions: tuple[Resolution, ...],
    *,
    threads: int | None,
    observe: bool,
    pins: Sequence[Pin] = (),
    model: bytes | None = None,
    weights: Path | None = None,
    attention: Attention | None = None,
) -> Session:
    """Open `path` on the active providers of the chain, and on no others.

    `threads`: intra-op threads; None: one per usable core. `observe`: enable profiling and the log at INFO. `model`:
    ONNX bytes to open instead of the file. `weights`: folder of their external data; None: the file's. `attention`:
    attention of the graph. A provider that cannot start is left out if others follow; see the session's `resolutions`.

    Raises ProviderError when no provider of the chain starts, a node runs on none of them, or a pin is not honoured;
    UsageError when ONNX Runtime cannot follow the chain, or a pin matches no node; PackageError for a damaged file;
    ResourceError when memory runs out.
    """
    chain = register_plugins(resolutions)
    _check_order(chain)
    unpinned = Opening(threads=threads, observe=observe, model=model, weights=weights)
    opening, marks = pinned_opening(path, unpinned, pins)
    failed: tuple[Sequence[Resolution], NativeFailureError] | None = None
    while active := active_of(chain):
        try:
            session = _open(path, active, opening, attention)
        except NativeFailureError as failure:
            if STRICT in str(failure):
                raise _refusal(path, chain, opening, failure) from failure.error
            if failed is None or not lacks_kernel(failed[1].error):
                failed = active, failure  # without its provider, a node that only the provider has lacks a kernel, too
            blamed = to_blame(path, active, failure, opening)
            if blamed is None:
                break
            reason = by_experiment(blamed, explain(blamed.provider, messages_of(failure)))
            if pins and reason.reason == "initialisation_failed" and opens_on(path, active, unpinned):
                raise _pins_rejected(path, blamed, pins, reason) from failure.error
            chain = tuple(unavailable(entry, reason) if entry is blamed else entry for entry in chain)
            continue
        with ExitStack() as opened:
            opened.callback(session.close)
            _settle(session, path, chain)
            _check_providers_of(pins, session.resolutions)
            session.pins = check_pins(session, marks)
            opened.pop_all()
        return session
    unknown = all(entry.reason in (None, "initialisation_failed") for entry in chain)
    cpu = resolve_one(known_providers()["cpu"], (CPU,))
    if failed is not None and (active or (unknown and not opens_on(path, [cpu], replace(opening, config={})))):
        providers, first = failed
        raise open_error(path, ort_names(providers), first.error, first.log) from first.error
    raise _no_provider(path, chain) from (None if failed is None else failed[1].error)


def _open(path: Path, active: Sequence[Resolution], opening: Opening, attention: Attention | None) -> Session:
    """A session on these providers, with the settings of the CPU provider."""
    began = time.perf_counter()
    prepared, cpu = set_up(path, active, opening, attention)
    before = memory_before(active)
    strict = replace(prepared, strict=CPU not in ort_names(active))
    compiled, notes = open_compiled(path, active, strict)
    session = compiled or _open_quiet(path, active, strict)
    session.cpu, session.notes = cpu, notes
    session.later = None if before is None else partial(make_huge, before)
    session.load_seconds = time.perf_counter() - began
    return session


def _no_provider(path: Path, chain: tuple[Resolution, ...]) -> ProviderError:
    """The error for a chain without an active provider; experiments may explain a provider that fails on this model."""
    if any(entry.reason == "initialisation_failed" for entry in chain):
        return ChainError(no_provider_text(chain), path=path, chain=chain, remedy=remedy_for(chain))
    return ProviderError(no_provider_text(chain), remedy=remedy_for(chain))


def _settle(session: Session, path: Path, chain: Sequence[Resolution]) -> None:
    """Set the state of each provider. Raises ProviderError when none is active, or a node is on none of them."""
    session.resolutions = settle(chain, session)
    if not active_of(session.resolutions):
        raise _no_provider(path, session.resolutions)
    # ONNX Runtime 1.27 does not check nodes in If, Loop and Scan subgraphs itself; 1.31 does.
    fallbacks = [node for node in session.assigned() if node.provider == CPU]
    if fallbacks and CPU not in ort_names(active_of(session.resolutions)):
        raise not_all_on(path, session.resolutions, opened_facts(path, session, session.resolutions))
    if not os.environ.get(BUILD_VARIABLE):
        ensure_real()  # LD_LIBRARY_PATH may still point to the stub libraries of a dry run


def _check_providers_of(pins: Sequence[Pin], chain: Sequence[Resolution]) -> None:
    """Raise ProviderError for a pin to a provider that is not active."""
    for pin, entry in product(pins, chain):
        if entry.provider.name == pin.provider.name and entry.status != "active":
            raise ProviderError(f"`pins={pin.text}`: {no_provider_text([entry])}", remedy=remedy_for([entry]))


def _check_order(chain: Sequence[Resolution]) -> None:
    """Raise UsageError for a chain that ONNX Runtime cannot follow.

    With a plugin in the chain, ONNX Runtime registers the CPU provider last, whatever its position. A plugin library
    under two names is one provider.
    """
    active = active_of(chain)
    names = ort_names(active)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"`providers`: {twice} is in the chain twice, under two names; list it once")
    plugin = next((entry.provider.name for entry in active if entry.library is not None), None)
    if plugin is not None and CPU in names[:-1]:
        raise UsageError(
            f"`providers`: cpu is listed before another provider, but with the plugin {plugin} ONNX Runtime "
            "always tries it last; put cpu at the end"
        )


def _open_quiet(path: Path, active: Sequence[Resolution], opening: Opening) -> Session:
    """Open the session. If a provider would fill the log in every run, the log is that of a first session."""
    if not opening.observe or not any(resolution.provider.logs_runs for resolution in active):
        return open_native(path, active, opening)
    listing = open_native(path, active, opening)
    log = listing.log
    listing.close()
    session = open_native(path, active, replace(opening, severity=WARNING))
    session.log = log
    return session


def _pins_rejected(path: Path, blamed: Resolution, pins: Sequence[Pin], reason: Failure) -> ProviderError:
    """The error for a provider that does not open the model with pins.

    ONNX Runtime removes pinned nodes from the graph before it looks for subgraphs of compiling providers and plugins.
    Some fail on the gaps: QNN and OpenVINO as plugins (1.27, CreateSupportedPartitionNodeGroups in
    onnxruntime/core/providers/partitioning_utils.cc).
    """
    listed = " and ".join(f"`pins={pin.text}`" for pin in pins)
    return ProviderError(
        f"{path}: {blamed.provider.name} does not open this model with {listed}: {reason.evidence}", remedy=WITHOUT_PINS
    )


def idle_providers(session: Session, model: ModelFile) -> tuple[str, ...]:
    """Names of active providers without nodes; ONNX Runtime does not report them.

    A node of the file that is in the plan but in no list of `Session.assigned` counts as assigned to them, because
    these lists may lack nodes of any provider but CPU.
    """
    listed = {node.name: node.provider for node in session.assigned()}
    planned = {name for stream in session.plan or () for name in stream}
    unlisted = any(node.name in planned and node.name not in listed for node in model.nodes)
    if unlisted or not listed:
        return ()
    used = set(listed.values())
    return tuple(
        entry.provider.name for entry in active_of(session.resolutions) if entry.provider.ort_name not in used | {CPU}
    )


def chain_entry(resolution: Resolution) -> ChainEntry:
    """The outcome of one provider of the chain, as a report record."""
    return ChainEntry.copy_of(
        resolution,
        provider=resolution.provider.ort_name,
        remedy=None if resolution.remedy is None else str(resolution.remedy),
        remedies=remedy_records(resolution.remedy),
    )


def _refusal(path: Path, chain: Sequence[Resolution], opening: Opening, failure: NativeFailureError) -> PartitaError:
    """The error for a model that needs the CPU provider: a provider that did not start, or the nodes without a
    provider.

    ONNX Runtime names neither, so the session is opened again with the CPU provider allowed.
    """
    active = active_of(chain)
    try:
        session = open_native(path, active, replace(opening, observe=True, strict=False))
    except NativeFailureError:
        return open_error(path, ort_names(active), failure.error, failure.log)
    try:
        settled = settle(chain, session)
        # Some providers name the nodes only when the CPU provider is not allowed, so that log is used, too.
        session.log = tuple(dict.fromkeys((*session.log, *failure.log)))
        facts = opened_facts(path, session, settled)
    finally:
        session.close()
    if not active_of(settled):
        # A provider that started and was dropped for this model gets a table of nodes; one that did not start gets
        # none.
        dropped = any(name in session.registered for name in ort_names(settled))
        nodes = refusal(path, settled, facts).nodes if dropped else ()
        return ProviderError(no_provider_text(settled), path=path, remedy=remedy_for(settled), nodes=nodes)
    return not_all_on(path, settled, facts)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The nodes that run on no provider of a chain."""

    nodes: tuple[RefusedNode, ...]
    count: str
    """`3 nodes`."""
    operators: str
    """The most frequent operators with their numbers."""
    export: Remedy | None
    """The export command that puts them on a provider; None without one."""


def refusal(path: Path, chain: Sequence[Resolution], facts: SessionFacts) -> Refusal:
    """The nodes of a session that run on no provider of `chain`."""
    rows = refused_nodes(facts, tuple(map(chain_entry, chain)))
    nodes = rows_of(rows, ort_names(active_of(chain)))
    counted = Counter(row.op_type or "?" for row in rows).most_common()
    operators = ", ".join(f"{op} ({count})" for op, count in counted[:MOST_NAMED])
    more = ", …" if len(counted) > MOST_NAMED else ""
    return Refusal(nodes, plural(len(rows), "node"), f"{operators}{more}", export_again_for(path, nodes))


def not_all_on(path: Path, chain: tuple[Resolution, ...], facts: SessionFacts) -> ChainError:
    """The error for nodes that run on no provider of the chain, with these nodes."""
    found = refusal(path, chain, facts)
    names = ", ".join(resolution.provider.name for resolution in active_of(chain))
    written = ",".join(resolution.provider.name for resolution in chain)
    return ChainError(
        f"{names} cannot run {found.count}: {found.operators}",
        remedy=replace(ALLOW_CPU.filled(chain=written), alternative=found.export),
        path=path,
        chain=chain,
        facts=facts,
        nodes=found.nodes,
    )


def opened_facts(path: Path, session: Session, chain: Sequence[Resolution]) -> SessionFacts:
    """Facts of a session that was opened and not run.

    They are of the model bytes rather than the file if both exist, because the bytes have a unique name for every node.
    """
    nodes, inner = nodes_of(session.opening.model or path.read_bytes())
    return session_facts(session, chain, graph=nodes, subgraph_nodes=inner, file=path.name, phases=("decode",))
