"""The chain is the policy: a session on exactly the providers that were named, or a precise refusal.

Knows every way in which ONNX Runtime leaves the chain without saying so, and closes it: a provider that it skips, one
that fails while the session is made, one that it drops for a model, and nodes that end up on the CPU provider although
the chain does not name it. Knows nothing of packages or tokens.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.diagnosis.records import Fallback
from partita.diagnosis.refusal import refused_nodes
from partita.errors import PartitaError, ProviderError, RefusedNode, UsageError
from partita.observations.facts import SessionFacts
from partita.observations.names import CPU
from partita.observations.records import ChainEntry, remedy_records
from partita.observations.text_format import plural
from partita.providers.cuda_dry_run.standins import BUILD_VARIABLE, ensure_real
from partita.providers.patterns import DROPPED
from partita.providers.resolve import Resolution, known_providers
from partita.providers.start import Failure, explain, failure
from partita.remedies import Remedy
from partita.runtime.advice import ALLOW_CPU, export_anew
from partita.runtime.model_file import ModelFile, read_model_file
from partita.runtime.native_log import captured_output, complaints, headless
from partita.runtime.ort_buffers import NATIVE_ERRORS
from partita.runtime.ort_errors import STRICT, blames_provider, one_line, open_error
from partita.runtime.ort_registry import register_library
from partita.runtime.pins import Pin, check_pins, pinned_opening
from partita.runtime.session import NativeFailureError, Opening, Session, open_native
from partita.runtime.session_facts import session_facts
from partita.runtime.wheels import duplicate_remedy, duplicate_runtime, runtime_wheels

MOST_NAMED = 5
WHOLE = 20_000
"""Characters of a message that patterns look through: OpenVINO names the cause at the end of a C++ signature."""


OTHER_OPSET = Remedy("give the model another opset, or use another version of ONNX Runtime")


class ChainError(ProviderError):
    """A chain that a model cannot be opened on, with what is known of it, for those who look for the cause."""

    def __init__(
        self,
        message: str,
        *,
        path: Path,
        chain: tuple[Resolution, ...],
        facts: SessionFacts | None = None,
        remedy: Remedy | None = None,
        nodes: tuple[RefusedNode, ...] = (),
    ) -> None:
        super().__init__(message, remedy=remedy, nodes=nodes)
        self.path, self.chain = path, chain
        self.facts = facts
        """Of a session with the CPU provider behind the chain; None when a provider failed and none was opened."""


def open_session(
    path: Path,
    resolutions: tuple[Resolution, ...],
    *,
    threads: int | None,
    observe: bool,
    pins: Sequence[Pin] = (),
    model: bytes | None = None,
) -> Session:
    """Open `path` on the active providers of the chain, and on no other.

    `threads`: intra-op threads, None for ONNX Runtime's choice. `observe` turns on profiling and the log at INFO.
    `model` is opened in place of the file, with the weights beside it.
    A provider that cannot start is left out when the chain goes on after it; the session's `resolutions` say so.
    Raises ProviderError when no provider of the chain starts, some node fits none of them, or a pin does not hold;
    UsageError when the chain cannot be kept to, or a pin fits no node;
    PackageError when the file is damaged; ResourceError when memory runs out.
    """
    chain = registered(resolutions)
    check_order(chain)
    opening, marks = pinned_opening(path, Opening(threads=threads, observe=observe, model=model), pins)
    while True:
        active = active_of(chain)
        if not active:
            raise ProviderError(nothing_left(chain))
        try:
            session = open_quiet(path, active, replace(opening, strict=CPU not in ort_names(active)))
        except NativeFailureError as failure:
            if STRICT in str(failure):
                raise refusal(path, chain, opening, failure) from failure.error
            blamed = to_blame(active, failure) or only_suspect(path, active, opening)
            if blamed is None:
                raise open_error(path, ort_names(active), failure.error, failure.log) from failure.error
            chain = left_out(chain, blamed, explain(blamed.provider, said(failure)))
            if not active_of(chain):
                raise ChainError(f"{path}: {nothing_left(chain)}", path=path, chain=chain) from failure.error
            continue
        try:
            session.resolutions = settle(chain, session)
            refuse_strays(path, session)
            check_pinned_providers(session.resolutions, pins)
            session.pins = check_pins(session, marks)
            if not os.environ.get(BUILD_VARIABLE):
                ensure_real()  # whatever LD_LIBRARY_PATH holds, a real run never takes a dry run's libraries for real
        except BaseException:
            session.close()
            raise
        return session


def check_order(chain: Sequence[Resolution]) -> None:
    """Raise UsageError for a chain that ONNX Runtime cannot keep to.

    With a plugin in the chain it registers the CPU provider last, wherever it stands; and a library that is named twice
    is one provider.
    """
    active = active_of(chain)
    names = ort_names(active)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--provider: {twice} is in the chain twice, under two names; name it once")
    plugin = next((entry.provider.name for entry in active if entry.library is not None), None)
    if plugin is not None and CPU in names[:-1]:
        raise UsageError(
            f"--provider: cpu stands before another provider, and beside the plugin {plugin} ONNX Runtime always tries "
            "it last; put cpu at the end"
        )


def refuse_strays(path: Path, session: Session) -> None:
    """Raise ProviderError when a node is on the CPU provider although the chain does not name it.

    ONNX Runtime's own ban does not see nodes in the bodies of If, Loop and Scan (1.27; 1.31 does).
    """
    active = active_of(session.resolutions)
    if CPU in ort_names(active):
        return
    strays = [node for node in session.assigned() or () if node.provider == CPU]
    if strays:
        raise not_all_on(path, session.resolutions, opened_facts(path, session, session.resolutions))


def check_pinned_providers(chain: Sequence[Resolution], pins: Sequence[Pin]) -> None:
    """Raise ProviderError when a pin asks for a provider of the chain that is not there."""
    for pin in pins:
        for entry in chain:
            if entry.provider.name == pin.provider.name and entry.status != "active":
                raise ProviderError(f"--pin {pin.text}: {nothing_left([entry])}")


def entries(chain: Sequence[Resolution]) -> tuple[ChainEntry, ...]:
    """The chain as a report has it."""
    return tuple(chain_entry(resolution) for resolution in chain)


def open_quiet(path: Path, active: Sequence[Resolution], opening: Opening) -> Session:
    """Open the session; when a provider would fill the log in every run, the log is that of one opened before."""
    if not opening.observe or not any(resolution.provider.logs_runs for resolution in active):
        return open_native(path, active, opening)
    listing = open_native(path, active, opening)
    log = listing.log
    listing.close()
    session = open_native(path, active, replace(opening, quiet=True))
    session.log = log
    return session


def active_of(chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The providers that are still to be used."""
    return tuple(resolution for resolution in chain if resolution.status == "active")


def ort_names(chain: Sequence[Resolution]) -> tuple[str, ...]:
    """ONNX Runtime's names of the providers."""
    return tuple(resolution.provider.ort_name for resolution in chain)


def registered(chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The chain once plugin libraries are registered: one that does not load, or has no device, is unavailable."""
    return tuple(
        register(resolution) if resolution.library is not None else overwritten(resolution) for resolution in chain
    )


def overwritten(resolution: Resolution) -> Resolution:
    """A provider that the build lacks although a wheel that contains it is installed: another wheel overwrote it."""
    if resolution.status == "active" or resolution.reason != "not_in_build":
        return resolution
    owners = runtime_wheels()
    if len(owners) < 2 or not {owner.name for owner in owners} & set(resolution.provider.wheels):
        return resolution
    finding = duplicate_runtime(owners)
    return unavailable(resolution, Failure("duplicate_runtime", finding.evidence, duplicate_remedy(owners)))


def register(resolution: Resolution) -> Resolution:
    """Register the library of one provider. A library may call its provider otherwise than the user does."""
    assert resolution.library is not None
    provider = resolution.provider
    with captured_output() as captured:
        try:
            offered = register_library(provider.ort_name, resolution.library)
        except NATIVE_ERRORS as error:
            raised = str(error)
            offered = None
    if offered is None:
        return unavailable(
            resolution, explain(provider, [raised, *complaints(captured.lines), *headless(captured.lines)])
        )
    if not offered:
        evidence = (
            f"{resolution.library.name} was registered and offers no device on this machine{provider.plugin_takes}"
        )
        return unavailable(resolution, failure(provider, "device_missing", evidence))
    if provider.ort_name in offered:
        return resolution
    return replace(resolution, provider=replace(provider, ort_name=offered[0]))


def unavailable(resolution: Resolution, failure: Failure) -> Resolution:
    """The provider is not used, and this is why."""
    return replace(
        resolution, status="unavailable", reason=failure.reason, evidence=failure.evidence, remedy=failure.remedy
    )


def left_out(chain: Sequence[Resolution], blamed: Resolution, failure: Failure) -> tuple[Resolution, ...]:
    """The chain without one provider."""
    return tuple(unavailable(entry, failure) if entry is blamed else entry for entry in chain)


def said(failure: NativeFailureError) -> list[str]:
    """What ONNX Runtime said when it failed, most telling text first."""
    texts = (str(failure), *complaints(failure.log), *headless(failure.log))
    return [one_line(text, WHOLE) for text in texts]


def to_blame(active: Sequence[Resolution], failure: NativeFailureError) -> Resolution | None:
    """The provider whose fault it is that the session could not be opened; None when it is the model's.

    A provider whose own words are in the message is to blame; for a failure that only a provider can cause, it is the
    first one that is not the CPU's.
    """
    others = [resolution for resolution in active if resolution.provider.ort_name != CPU]
    if not others or not blames_provider(failure.error):
        return None
    lines = said(failure)
    for resolution in others:
        known = explain(resolution.provider, lines).reason != "initialisation_failed"
        if known or any(resolution.provider.ort_name in line for line in lines):
            return resolution
    return others[0]


def only_suspect(path: Path, active: Sequence[Resolution], opening: Opening) -> Resolution | None:
    """The one provider besides the CPU's, when ONNX Runtime opens the same model without it; None otherwise.

    A kernel's constructor that raises reads like a model that is not sound.
    """
    others = [resolution for resolution in active if resolution.provider.ort_name != CPU]
    if len(others) != 1:
        return None
    alone = Resolution(known_providers()["cpu"], "active")
    try:
        open_native(path, [alone], replace(opening, observe=False, strict=False, config={})).close()
    except NativeFailureError:
        return None
    return others[0]


def settle(chain: Sequence[Resolution], session: Session) -> tuple[Resolution, ...]:
    """The chain after the session was opened: a provider that ONNX Runtime left out is unavailable, with its reason.

    Raises ProviderError when none is left, or ONNX Runtime registered one that is not in the chain. The CPU provider is
    always registered; outside the chain it holds no node, or opening would have failed.
    """
    settled = tuple(settle_one(resolution, session.registered, session.log) for resolution in chain)
    settled = tuple(without_backend(resolution, session) for resolution in settled)
    active = ort_names(active_of(settled))
    if not active:
        raise ProviderError(nothing_left(settled))
    strangers = [name for name in session.registered if name not in (*ort_names(chain), CPU)]
    if strangers:
        raise ProviderError(f"ONNX Runtime registered {', '.join(strangers)}, which the provider chain does not name")
    return settled


def settle_one(resolution: Resolution, names: Sequence[str], log: tuple[str, ...]) -> Resolution:
    """What became of one provider: it was not registered, or it was dropped for this model, or it is active."""
    provider = resolution.provider
    if resolution.status != "active":
        return resolution
    if provider.ort_name not in names:
        lines = [line for line in complaints(log) if STRICT not in line]
        return unavailable(resolution, explain(provider, lines))
    for line in log:
        dropped = re.search(DROPPED.pattern, line)
        if dropped and dropped["provider"] == provider.ort_name:
            why = Failure(DROPPED.reason, one_line(line[dropped.start() :]), OTHER_OPSET)
            return unavailable(resolution, why)
    return resolution


def without_backend(resolution: Resolution, session: Session) -> Resolution:
    """A provider that compiles may be registered without its own backend, take no node, and only log why (QNN)."""
    provider = resolution.provider
    if resolution.status != "active" or not provider.compiles:
        return resolution
    listed = session.assigned()
    if listed is None or any(node.provider == provider.ort_name for node in listed):
        return resolution
    why = explain(provider, [*complaints(session.log), *headless(session.log)])
    return resolution if why.reason == "initialisation_failed" else unavailable(resolution, why)


def idle_providers(session: Session, model: ModelFile) -> tuple[str, ...]:
    """Names of active providers that took no node, which ONNX Runtime does not mention.

    A node of the file that is in the plan and in no list counts for them: the list can miss nodes (see
    `Session.assigned`), though not those of the CPU provider.
    """
    listed = {node.name: node.provider for node in session.assigned() or ()}
    planned = {name for stream in session.plan or () for name in stream}
    unlisted = any(node.name in planned and node.name not in listed for node in model.nodes)
    if unlisted or not listed:
        return ()
    taken = set(listed.values())
    return tuple(
        entry.provider.name for entry in active_of(session.resolutions) if entry.provider.ort_name not in taken | {CPU}
    )


def nothing_left(chain: Sequence[Resolution]) -> str:
    """One line on why no provider of the chain can run."""
    return "; ".join(f"{r.provider.name}: {r.reason}: {r.evidence}; {r.remedy}" for r in chain)


def chain_entry(resolution: Resolution) -> ChainEntry:
    """What became of one provider of the chain, as a report has it."""
    return ChainEntry(
        provider=resolution.provider.ort_name,
        status=resolution.status,
        reason=resolution.reason,
        evidence=resolution.evidence,
        remedy=None if resolution.remedy is None else str(resolution.remedy),
        remedies=remedy_records(resolution.remedy),
    )


def refusal(path: Path, chain: Sequence[Resolution], opening: Opening, failure: NativeFailureError) -> PartitaError:
    """Why the CPU provider would have been needed: a provider that did not start, or nodes that none took.

    ONNX Runtime names neither. The same session opened without the ban tells.
    """
    active = active_of(chain)
    try:
        session = open_native(path, active, replace(opening, observe=True, strict=False))
    except NativeFailureError:
        return open_error(path, ort_names(active), failure.error, failure.log)
    try:
        settled = tuple(settle_one(resolution, session.registered, session.log) for resolution in chain)
        settled = tuple(without_backend(resolution, session) for resolution in settled)
        # Some providers name the nodes only when the CPU provider is banned, so that log counts too.
        session.log = tuple(dict.fromkeys((*session.log, *failure.log)))
        facts = opened_facts(path, session, settled)
    finally:
        session.close()
    if not active_of(settled):
        # A provider that started and was dropped for this model is worth a table; one that did not start takes no node.
        rows = refused_nodes(facts, entries(settled))
        dropped = any(name in session.registered for name in ort_names(settled))
        return ProviderError(f"{path}: {nothing_left(settled)}", nodes=rows_of(rows) if dropped else ())
    return not_all_on(path, settled, facts)


def not_all_on(path: Path, chain: tuple[Resolution, ...], facts: SessionFacts) -> ChainError:
    """The refusal, with its nodes."""
    rows = refused_nodes(facts, entries(chain))
    names = ", ".join(resolution.provider.name for resolution in active_of(chain))
    counted = Counter(row.op_type or "?" for row in rows).most_common()
    shown = ", ".join(f"{op} ({count})" for op, count in counted[:MOST_NAMED])
    more = ", …" if len(counted) > MOST_NAMED else ""
    reasons = [code for code, _ in Counter(row.reason for row in rows).most_common()]
    anew = export_anew(path, reasons, chain[0].provider.ort_name)
    written = ",".join(resolution.provider.name for resolution in chain)
    return ChainError(
        f"{path}: {names} cannot run {plural(len(rows), 'node')}: {shown}{more}",
        remedy=replace(ALLOW_CPU.filled(chain=written), otherwise=anew),
        path=path,
        chain=chain,
        facts=facts,
        nodes=rows_of(rows),
    )


def rows_of(fallbacks: Sequence[Fallback]) -> tuple[RefusedNode, ...]:
    """Nodes off the chain, as an error carries them."""
    return tuple(
        RefusedNode(
            node=entry.node,
            op_type=entry.op_type,
            module=entry.module,
            wanted=entry.wanted,
            provider=entry.provider,
            reason=entry.reason,
            evidence_kind=entry.evidence_kind,
            evidence=entry.evidence,
            remedy=entry.remedy,
        )
        for entry in fallbacks
    )


def opened_facts(path: Path, session: Session, chain: Sequence[Resolution]) -> SessionFacts:
    """Facts of a session that was opened and not run."""
    model = read_model_file(path, path.parent)
    return session_facts(session, chain, graph=model.nodes, inner=model.inner, file=path.name, phases=("decode",))
