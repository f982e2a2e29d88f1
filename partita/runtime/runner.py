"""A loaded package: its sessions, its cache, and the steps of the last generation.

Knows how a package becomes sessions and which session runs which phase. Does not know how a prompt is cut into steps
(`generate`) nor how facts are put together (`run_facts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from partita.errors import PackageError
from partita.package import GraphFile, Manifest, Port, check_files, inside, read_manifest
from partita.process import rss_bytes
from partita.providers.base import Provider
from partita.providers.resolve import Resolution, resolve
from partita.runtime.chain import open_session
from partita.runtime.feed import Feed
from partita.runtime.kv_cache import KvCache
from partita.runtime.model_file import ModelFile, read_model_file
from partita.runtime.native_log import captured_output
from partita.runtime.observe import Window
from partita.runtime.ort_registry import available_ort_names
from partita.runtime.pins import Pin
from partita.runtime.session import Session

PhaseName = Literal["prefill", "decode"]
Finish = Literal["stop", "length", "cache_full"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the generation loop: one session run, and what came of it."""

    phase: PhaseName
    """prefill while any row still reads its prompt."""
    index: int
    """0-based, over the whole generation."""
    new_tokens: int
    """Tokens that the row with most of them took in; padding does not count."""
    row_tokens: int
    """Tokens taken in over all rows: prompt tokens while a prompt is read, then one per row that still goes on."""
    tokens: tuple[int | None, ...]
    """The new token of each row; None for a row that has finished, or whose prompt has not been read to its end."""
    run_seconds: float
    """Wall time of the session run."""
    overhead_seconds: float
    """Wall time since the step before, less `run_seconds`: feeding, sampling, and what the caller did in between."""
    finish: tuple[Finish | None, ...]
    """Why a row has finished, in this step or an earlier one; None while it goes on."""
    observed: bool
    """Profiling was on."""
    file: str
    """ONNX file that ran it. A static pair reads part of a prompt with decode.onnx."""
    again: bool = False
    """It read tokens that had been read before, because what was cached of them was no longer valid."""


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """One ONNX file of the package, opened."""

    graph: GraphFile
    model: ModelFile
    session: Session
    window: Window
    phases: tuple[PhaseName, ...]


class Runner:
    """A loaded package. One generation at a time; close it, or use it as a context manager."""

    def __init__(self, folder: Path, manifest: Manifest, graphs: tuple[LoadedGraph, ...], rss: tuple[int, int]) -> None:
        self.folder, self.manifest, self.graphs = folder, manifest, graphs
        self.rss_before_load_bytes, self.rss_after_load_bytes = rss
        self.batch, self.max_length = manifest.graph.batch_size, manifest.graph.max_length
        self.vocab_size = manifest.graph.vocab_size
        self.cache = KvCache(manifest.graph.states, self.loaded("decode").session)
        self.steps: list[Step] = []
        self.prompt_tokens = 0
        """Tokens of the longest prompt of the last generation."""
        self.must_clear = False
        """Keys and values have to be zeroed before the next generation: what is left in them may not be finite."""
        self._decode: Feed | None = None
        self._prefill: Feed | None = None

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """What became of each provider of the chain, after the sessions were opened."""
        return self.graphs[-1].session.resolutions

    @property
    def chunk_fixed(self) -> int | None:
        """S of the graph that reads prompts: C of a fully static pair, 1 when one graph of S = 1 does everything; None
        when it takes any number of tokens.
        """
        return self.loaded("prefill").graph.sequence_length

    @property
    def can_append_chunks(self) -> bool:
        """False when only a step at position 0 may take more than one token per row."""
        return self.manifest.graph.appends_chunks

    @property
    def prefill_rows(self) -> int | None:
        """K of the prefill graph when it is fixed in the file."""
        port = port_by_role(self.loaded("prefill").graph, "logits_rows")
        return port.shape[0] if port is not None and isinstance(port.shape[0], int) else None

    def loaded(self, phase: PhaseName) -> LoadedGraph:
        """The graph that runs `phase`."""
        return next(entry for entry in self.graphs if phase in entry.phases)

    def decode_feed(self) -> Feed:
        """Buffers of a decode step, S = K = 1; made once."""
        if self._decode is None:
            self._decode = self._feed("decode", 1, 1)
        return self._decode

    def prefill_feed(self, new_tokens: int, rows: int) -> Feed:
        """Buffers of a prefill step with S = `new_tokens` and K = `rows`; the last ones are kept."""
        port = port_by_role(self.loaded("prefill").graph, "logits_rows")
        rows = (self.prefill_rows or rows) if port is not None else new_tokens  # without it, all logits come
        feed = self._prefill
        if feed is None or (feed.new_tokens, feed.rows) != (new_tokens, rows):
            self._prefill = None  # let go of the old buffers before the new ones are made
            feed = self._prefill = self._feed("prefill", new_tokens, rows)
        return feed

    def last_feed(self, phase: PhaseName) -> Feed:
        """The buffers `phase` last ran with, or would run with."""
        if phase == "decode":
            return self.decode_feed()
        return self._prefill or self.prefill_feed(self.chunk_fixed or 1, self.prefill_rows or 1)

    def _feed(self, phase: PhaseName, new_tokens: int, rows: int) -> Feed:
        entry = self.loaded(phase)
        return Feed(
            entry.session, entry.graph, self.cache, entry.window,
            phase=phase, batch=self.batch, new_tokens=new_tokens, rows=rows, vocab_size=self.vocab_size,
        )  # fmt: skip

    def close(self) -> None:
        """End profiling, delete what the sessions left on disk, and free the buffers before the sessions they are of.

        Facts can be asked for after it.
        """
        for entry in self.graphs:
            entry.window.close()
        for feed in (self._decode, self._prefill):
            if feed is not None:
                feed.binding.release()
        self.cache.release()
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
) -> Runner:
    """Open the package in `folder` on the providers of `chain`.

    `threads`: intra-op threads, None for ONNX Runtime's choice. `observe`: profile the first runs and keep what ONNX
    Runtime says about placement. `manifest`: that of a package whose manifest is not written yet. `options`: those of
    each provider, by its name. Raises PackageError, ProviderError, ResourceError; UsageError when no node fits a pin.
    """
    rss_before = rss_bytes()
    manifest = manifest or read_manifest(folder)
    check_files(folder, manifest, hashes=False)
    models = [checked_model(folder, manifest, graph) for graph in manifest.graph.files]
    with captured_output():  # some plugin packages write to it when they are imported
        resolutions = resolve(chain, available_ort_names(), options)
    graphs: list[LoadedGraph] = []
    try:
        for graph, model in zip(manifest.graph.files, models, strict=True):
            session = open_session(folder / graph.file, resolutions, threads=threads, observe=observe, pins=pins)
            resolutions = session.resolutions  # a provider that one graph had to do without is not tried for the next
            phases: tuple[PhaseName, ...] = ("prefill", "decode") if graph.phase == "any" else (graph.phase,)
            graphs.append(LoadedGraph(graph, model, session, Window(session, phases), phases))
        return Runner(folder, manifest, tuple(graphs), (rss_before, rss_bytes()))
    except BaseException:
        for entry in graphs:
            entry.session.close()
        raise


def checked_model(folder: Path, manifest: Manifest, graph: GraphFile) -> ModelFile:
    """Read the structure of one ONNX file, and check that its inputs and outputs are those of the manifest."""
    path = inside(folder, graph.file)
    if path.parent != folder:
        raise PackageError(f"{folder}: the graph {graph.file!r} is not directly in the package folder")
    model = read_model_file(path, folder)
    unlisted = sorted(model.data_files - {entry.name for entry in manifest.files})
    if unlisted or manifest.file(graph.file) is None:
        name = unlisted[0] if unlisted else graph.file
        raise PackageError(f"{folder}: {name} is not in the manifest's list of files, so nothing vouches for it")
    states = manifest.graph.states
    listed = {*(port.name for port in graph.inputs), *(state.past for state in states)}
    given = {*(port.name for port in graph.outputs), *(state.present for state in states)}
    odd = sorted((listed ^ set(model.inputs)) | (given ^ set(model.outputs)))
    if odd:
        raise PackageError(f"{folder / graph.file}: inputs and outputs differ from the manifest: {', '.join(odd)}")
    return model


def port_by_role(graph: GraphFile, role: str) -> Port | None:
    """The input with `role`, if the graph has one."""
    return next((port for port in graph.inputs if port.role == role), None)
