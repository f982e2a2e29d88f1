"""A loaded package: its sessions, the engine's executor over them, and a record of the last generation.

Knows how a package becomes sessions and which session runs which phase. Does not know how a prompt is cut into steps
(`engine`) nor how facts are put together (`run_facts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from partita.contract import Contract, GraphFile, PhaseName
from partita.errors import PackageError, ProviderError
from partita.observations.text_format import plural
from partita.package import Manifest, check_files, inside, read_manifest
from partita.process import anonymous_bytes, rss_bytes
from partita.providers.base import Provider
from partita.providers.resolve import Resolution, resolve
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.adapters import Adapters
from partita.runtime.capturing import recording_session
from partita.runtime.chain import open_session
from partita.runtime.cpu.attention import within
from partita.runtime.engine.bound_graph import LoadedGraph
from partita.runtime.engine.cache.cache import Cache
from partita.runtime.engine.cache.growing import moves
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.recorder import Recorder, Step
from partita.runtime.model_file import ModelFile, read_model_file
from partita.runtime.observe import Window
from partita.runtime.ort.native_log import captured_output
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.pins import Pin
from partita.runtime.rehearsal import rehearse
from partita.runtime.settling import without_crashed
from partita.spelling import spelled


class Runner:
    """Opened graphs and what they are to be fed. One generation at a time; close it, or use it as a context manager.

    It observes the engine: the steps of the last generation are kept, and which profiled runs are of it.
    """

    def __init__(
        self,
        folder: Path,
        contract: Contract,
        graphs: tuple[LoadedGraph, ...],
        rss: tuple[int, int],
        anonymous: int | None = None,
    ) -> None:
        self.folder, self.contract, self.graphs = folder, contract, graphs
        self.rss_before_load_bytes, self.rss_after_load_bytes = rss
        self.anonymous_growth_bytes = anonymous
        self.executor = Executor(contract, graphs)
        self.recorder = Recorder()
        self.adapters: Adapters | None = None
        """Those beside the weights of a package; `load_runner` completes it."""

    def rehearse(self, *, rounds: bool) -> None:
        """Try whether the graphs are what was inferred of them, and read prompts whole where they cannot be cut.

        Raises PackageError for a graph that is something else.
        """
        for entry in self.graphs:
            entry.window.rehearses = True
        appends_chunks = rehearse(str(self.folder), self.executor, rounds=rounds)
        for entry in self.graphs:
            entry.window.rehearses = False
        if appends_chunks != self.contract.appends_chunks:
            self.executor.release()
            self.contract = self.contract.model_copy(update={"appends_chunks": appends_chunks})
            self.executor = Executor(self.contract, self.graphs)

    def use_adapter(self, name: str | None) -> None:
        """Generate with an adapter of the package, or with none, from the next generation on.

        Raises UsageError for a name that is not there, PackageError for a damaged file.
        """
        if self.adapters is not None:
            self.executor.switch([self.adapters.named(name)])

    def check_adapter(self, name: str | None) -> None:
        """Raise what `use_adapter` would."""
        if self.adapters is not None:
            self.adapters.named(name)

    def use_adapters(self, names: Sequence[str | None]) -> None:
        """Have each row of the batch [B] read with an adapter of its own from the next step on, or with none.

        What a row has in the cache was computed with the one that it had. Raises as `use_adapter`.
        """
        if self.adapters is not None:
            self.executor.switch([self.adapters.named(name) for name in names])

    def on_prompts(self, lengths: tuple[int, ...]) -> None:
        """A generation begins: what is kept is of it alone."""
        self.recorder.on_prompts(lengths)
        for entry in self.graphs:
            entry.window.begin()

    def begin(self, *, takes_turns: bool) -> None:
        """Begin a record of requests; see `Recorder.begin`."""
        self.recorder.begin(takes_turns=takes_turns)
        for entry in self.graphs:
            entry.window.begin()

    def on_step(self, step: Step) -> None:
        """Record one step; called by the engine after each session run."""
        self.recorder.on_step(step)

    @property
    def cache(self) -> Cache:
        """The states of the package."""
        return self.executor.cache

    @property
    def steps(self) -> list[Step]:
        """The steps of the last generation."""
        return self.recorder.steps

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """What became of each provider of the chain, after the sessions were opened."""
        return self.graphs[-1].session.resolutions

    def loaded(self, phase: PhaseName) -> LoadedGraph:
        """The graph that runs `phase`."""
        return self.executor.graph(phase)

    def close(self) -> None:
        """End profiling, delete what the sessions left on disk, and free the buffers before the sessions they are of.

        Facts can be asked for after it.
        """
        for entry in self.graphs:
            entry.window.close()
        self.executor.release()
        for entry in self.graphs:
            entry.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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

    `threads`: intra-op threads, None for one per core that the process may use. `observe`: profile the first runs and
    keep what ONNX Runtime says about placement. `manifest`: that of a package whose manifest is not written yet.
    `options`: those of each provider, by its name. `crashed`: providers that are left out, see
    `registering.without_crashed`. `wants_tokens`: what comes out is looked at, so what another exporter wrote is
    tried first.
    Raises PackageError, ProviderError, ResourceError; UsageError when no node fits a pin.
    """
    rss_before = rss_bytes()
    manifest = manifest or read_manifest(folder)
    check_files(folder, manifest, hashes=False)
    models = [_listed_model(folder, manifest, graph) for graph in manifest.graph.files]
    runner = open_runner(
        folder,
        manifest.graph,
        chain,
        models,
        threads=threads,
        observe=observe,
        options=options,
        pins=pins,
        crashed=crashed,
        rss_before=rss_before,
    )
    runner.adapters = Adapters(folder, manifest)
    if manifest.foreign is not None and wants_tokens:
        try:
            runner.rehearse(rounds=manifest.graph.precision != "fp32")
        except BaseException:
            runner.close()
            raise
    return runner


def _check_rolling(folder: Path, contract: Contract, chain: Sequence[Provider]) -> None:
    """Raise ProviderError for a provider that may compute with a cache of a window as if it were a whole one."""
    unknown = [provider.name for provider in chain if not provider.rolling_caches]
    if unknown and any(state.rolls for state in contract.states):
        raise ProviderError(
            f"{folder}: the cache of some layers holds their window alone, and {unknown[0]} is not known to keep such "
            f"a cache; name another provider, or export with {spelled('cache', 'fixed')}"
        )


def open_runner(
    folder: Path,
    contract: Contract,
    chain: tuple[Provider, ...],
    models: Sequence[ModelFile] = (),
    *,
    threads: int | None = None,
    observe: bool = False,
    options: Mapping[str, Mapping[str, str]] | None = None,
    pins: Sequence[Pin] = (),
    crashed: Mapping[str, str] | None = None,
    rss_before: int | None = None,
) -> Runner:
    """Open the graphs of `contract`, which lie in `folder`, whoever wrote them: no manifest is needed.

    `models`: the structure of each, where it has been read. The rest is as for `load_runner`.
    Raises PackageError, also for a graph that is not what the contract says of it; ProviderError, ResourceError,
    UsageError.
    """
    rss_before = rss_bytes() if rss_before is None else rss_before
    _check_rolling(folder, contract, chain)
    models = models or [_read_model(folder, graph) for graph in contract.files]
    for graph, model in zip(contract.files, models, strict=True):
        _check_ports(folder / graph.file, contract, graph, model)
    with captured_output():  # some plugin packages write to it when they are imported
        resolutions = without_crashed(resolve(chain, available_ort_names(), options), crashed or {})
    graphs: list[LoadedGraph] = []
    anonymous_before = anonymous_bytes()
    try:
        for graph, model in zip(contract.files, models, strict=True):
            opened = partial(
                open_session,
                folder / graph.file,
                threads=threads,
                observe=observe,
                pins=pins,
                attention=within(model.attention, graph.sequence_length),
            )
            session = recording_session(folder / graph.file, contract, graph, resolutions, opened)
            resolutions = session.resolutions  # a provider that one graph had to do without is not tried for the next
            phases: tuple[PhaseName, ...] = ("prefill", "decode") if graph.phase == "any" else (graph.phase,)
            graphs.append(LoadedGraph(graph, model, session, Window(session, phases), phases))
        _check_defaults(folder, graphs)
        return Runner(folder, contract, tuple(graphs), (rss_before, rss_bytes()), _grown(anonymous_before))
    except BaseException:
        for entry in graphs:
            entry.session.close()
        raise


def _check_defaults(folder: Path, graphs: Sequence[LoadedGraph]) -> None:
    """Raise ProviderError where a provider would not read what an adapter has for its inputs."""
    defaults = [
        port.name for entry in graphs for port in entry.graph.adapter_inputs if port.name not in entry.model.inputs
    ]
    if not defaults:
        return
    for resolution in graphs[-1].session.resolutions:
        if resolution.status == "active" and resolution.provider.constant_defaults:
            name = resolution.provider.name
            raise ProviderError(
                f"{folder}: {name} takes inputs that have a default for constants, and adapters are given to "
                f"{plural(len(set(defaults)), 'input')} of that kind, so no token would be right; export with "
                f"{spelled('static_shapes', True)}, where they have none, or leave {name} out"
            )


def _grown(before: int | None) -> int | None:
    """What of this process's memory is of no file, and was not there before; None where nobody can tell."""
    now = anonymous_bytes()
    return None if before is None or now is None else max(0, now - before)


def _listed_model(folder: Path, manifest: Manifest, graph: GraphFile) -> ModelFile:
    """Read the structure of one ONNX file, and check that the manifest lists all that belongs to it."""
    model = _read_model(folder, graph)
    home = PurePosixPath(graph.file).parent
    unlisted = sorted({str(home / name) for name in model.data_files} - {entry.name for entry in manifest.files})
    if unlisted or manifest.file(graph.file) is None:
        name = unlisted[0] if unlisted else graph.file
        raise PackageError(
            f"{folder}: {name} is not in the manifest's list of files, so its integrity cannot be checked"
        )
    return model


def _read_model(folder: Path, graph: GraphFile) -> ModelFile:
    """Read the structure of one ONNX file, whose weights lie beside it."""
    path = inside(folder, graph.file)
    if not path.is_file():
        raise PackageError(f"{path}: missing from the package", remedy=FROM_CHECKPOINT)
    return read_model_file(path, path.parent)


def _check_ports(path: Path, contract: Contract, graph: GraphFile, model: ModelFile) -> None:
    """Raise PackageError when a graph's inputs and outputs are not those of the contract.

    It may give more than is asked for, and a graph that begins texts need not take what was cached before.
    """
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
