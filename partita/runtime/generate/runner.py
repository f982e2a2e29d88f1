"""Opens a package, or the graphs of a contract, on an execution provider chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from partita.errors import PackageError, ProviderError
from partita.observations.records import Memory
from partita.observations.text_format import plural
from partita.package.contract import Contract, GraphFile, PhaseName
from partita.package.folder import Manifest, check_files, path_inside, read_manifest
from partita.process import anonymous_bytes, rss_bytes
from partita.providers.base import Provider
from partita.providers.resolve import resolve
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.chain.open_chain import open_session
from partita.runtime.chain.pins import Pin
from partita.runtime.chain.provider_state import without_crashed
from partita.runtime.chain.rehearsal import rehearse
from partita.runtime.cpu import attention_path
from partita.runtime.generate.bound_graph import LoadedGraph
from partita.runtime.generate.cache import moves
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.graph_capture import recording_session
from partita.runtime.generate.record import Window
from partita.runtime.ort.native_log import captured_output
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.place.model_file import ModelFile, read_model_file

__all__ = ["Runner", "load_runner"]


def load_runner(
    folder: Path,
    chain: tuple[Provider, ...],
    *,
    threads: int | None = None,
    observe: bool = False,
    manifest: Manifest | None = None,
    options: Mapping[str, Mapping[str, str]] | None = None,
    pins: Sequence[Pin] = (),
    crashed: Mapping[str, str] | None = None,
    wants_tokens: bool = True,
) -> Runner:
    """Open the package in `folder` on the providers of `chain`.

    `threads`: intra-op threads; None: one per core of the process. `observe`: profile the first runs and record ONNX
    Runtime's placement messages. `manifest`: of a package without a manifest file yet. `options`: provider options, by
    provider name. `crashed`: providers to leave out, see `without_crashed`. `wants_tokens`: test a foreign package
    first. Raises PackageError, ProviderError, ResourceError; UsageError when no node matches a pin.
    """
    rss_before = rss_bytes()
    manifest = manifest or read_manifest(folder)
    check_files(folder, manifest, hashes=False)
    contract = manifest.graph
    models = [_listed_model(folder, manifest, graph) for graph in contract.files]
    _check_rolling(folder, contract, chain)
    for graph, model in zip(contract.files, models, strict=True):
        _check_ports(folder / graph.file, contract, graph, model)
    with captured_output():  # some plugin packages print when they are imported
        resolutions = without_crashed(resolve(chain, available_ort_names(), options), crashed or {})
    graphs: list[LoadedGraph] = []
    anonymous_before = anonymous_bytes()
    with ExitStack() as opened:
        for graph, model in zip(contract.files, models, strict=True):
            opening = partial(
                open_session,
                folder / graph.file,
                threads=threads,
                observe=observe,
                pins=pins,
                attention=attention_path(model.attention, graph.sequence_length),
            )
            session = recording_session(folder / graph.file, contract, graph, resolutions, opening)
            opened.callback(session.close)
            resolutions = session.resolutions  # a provider that failed for one graph is not used for the next
            phases: tuple[PhaseName, ...] = ("prefill", "decode") if graph.phase == "any" else (graph.phase,)
            graphs.append(LoadedGraph(graph, model, session, Window(session, phases), phases))
        _check_defaults(folder, graphs)
        anonymous = anonymous_bytes()
        known = anonymous is not None and anonymous_before is not None
        memory = Memory(
            weight_bytes=contract.weight_bytes,
            cache_bytes=0,
            rss_before_load_bytes=rss_before,
            rss_after_load_bytes=rss_bytes(),
            peak_rss_bytes=None,
            anonymous_growth_bytes=max(0, (anonymous or 0) - (anonymous_before or 0)) if known else None,
        )
        runner = Runner(folder, manifest, tuple(graphs), memory)
        opened.pop_all()
        opened.callback(runner.close)
        if manifest.foreign is not None and wants_tokens:
            _rehearse(runner, rounds=contract.precision != "fp32")
        opened.pop_all()
    return runner


def _rehearse(runner: Runner, *, rounds: bool) -> None:
    """Test the inferred contract of foreign graphs. Raises PackageError."""
    for entry in runner.graphs:
        entry.window.rehearses = True
    appends = rehearse(str(runner.folder), runner, rounds=rounds)
    for entry in runner.graphs:
        entry.window.rehearses = False
    if appends != runner.contract.appends_chunks:
        runner.contract = runner.contract.model_copy(update={"appends_chunks": appends})
        runner.capacity = replace(runner.capacity, appends_chunks=appends)


def _check_rolling(folder: Path, contract: Contract, chain: Sequence[Provider]) -> None:
    """Raise ProviderError for a provider that may treat a sliding-window cache as a full cache."""
    unknown = [provider.name for provider in chain if not provider.rolling_caches]
    if unknown and any(state.rolling for state in contract.states):
        raise ProviderError(
            f"{folder}: some layers have a sliding-window cache, which {unknown[0]} is not known to "
            "support; use another provider, or export with `cache=fixed`"
        )


def _check_defaults(folder: Path, graphs: Sequence[LoadedGraph]) -> None:
    """Raise ProviderError for a provider that would ignore adapter values."""
    defaults = [
        port.name for entry in graphs for port in entry.graph.adapter_inputs if port.name not in entry.model.inputs
    ]
    if not defaults:
        return
    for resolution in graphs[-1].session.resolutions:
        if resolution.status == "active" and resolution.provider.constant_defaults:
            name = resolution.provider.name
            raise ProviderError(
                f"{folder}: {name} treats inputs with a default as constants, so it would ignore adapter values for "
                f"{plural(len(set(defaults)), 'input')} and compute wrong tokens; export with "
                f"`static_shapes=True`, which removes the defaults, or remove {name}"
            )


def _listed_model(folder: Path, manifest: Manifest, graph: GraphFile) -> ModelFile:
    """Read the structure of an ONNX file, and check that the manifest lists all its files."""
    path = path_inside(folder, graph.file)
    if not path.is_file():
        raise PackageError(f"{path}: missing from the package", remedy=FROM_CHECKPOINT)
    model = read_model_file(path, path.parent)
    home = PurePosixPath(graph.file).parent
    unlisted = sorted({str(home / name) for name in model.data_files} - {entry.name for entry in manifest.files})
    if unlisted or manifest.file(graph.file) is None:
        name = unlisted[0] if unlisted else graph.file
        raise PackageError(
            f"{folder}: the manifest does not list {name}, so its hash is unknown", remedy=FROM_CHECKPOINT
        )
    return model


def _check_ports(path: Path, contract: Contract, graph: GraphFile, model: ModelFile) -> None:
    """Raise PackageError when a graph's ports differ from the contract; more outputs, or fewer states, are allowed."""
    pasts = {state.past for state in contract.states}
    required = {port.name for port in graph.adapter_inputs if port.name in model.inputs}  # the others have a default
    listed = {*(port.name for port in graph.inputs), *pasts, *required}
    given = {*(port.name for port in graph.outputs), *(state.present for state in contract.states)}
    differing = (listed ^ set(model.inputs)) | (given - set(model.outputs))
    if graph.phase == "prefill" and not pasts & set(model.inputs):
        differing -= {state.past for state in contract.states if moves(state)}
    if differing:
        odd = sorted(differing | (set(model.outputs) - given))
        raise PackageError(f"{path}: inputs and outputs differ from the manifest: {', '.join(odd)}")
