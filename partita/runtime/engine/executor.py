"""Runs plans: writes tokens and cursors into the buffers of one graph, runs it, hands out logits.

Feeds strictly by role: what a port means comes from the contract, its name is only handed on. Every buffer is allocated
and bound once, but for those whose length is another in each step; a step writes into the buffers and runs. Knows
nothing of prompts, sampling or when to stop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.contract import Contract, Dimension, GraphFile, PhaseName
from partita.errors import PackageError, PartitaError
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.adapters import NOTHING, Given, stacked
from partita.runtime.cpu.settings import will_repeat
from partita.runtime.engine.cache.base import Span
from partita.runtime.engine.cache.cache import Cache, Stores, by_contract
from partita.runtime.engine.feeds import (
    Feed,
    Mask,
    Starts,
    bound,
    cursor_writer,
    logits_given,
    port_by_role,
    port_shapes,
)
from partita.runtime.engine.planner import GraphName, Graphs, StepPlan
from partita.runtime.engine.recording import Recording
from partita.runtime.model_file import ModelFile
from partita.runtime.observe import Window
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.session import Session

FEW_TOKENS = 16
"""Steps of so many tokens that confirm guesses keep their buffers each: of S rows of logits, which is not much."""


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """One ONNX file of the package, opened."""

    graph: GraphFile
    model: ModelFile
    session: Session
    window: Window
    phases: tuple[PhaseName, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one session run went."""

    run_seconds: float
    """Wall time of the session run."""
    observed: bool
    """Profiling was on."""
    file: str
    """The ONNX file that ran."""


class BoundGraph:
    """Buffers of one graph for S new tokens per row and K rows of logits, for all rows of the batch or those of a span.

    `tokens` [B, S] is there to be written before each run; it is of all rows, of which a run reads those of its span.
    `phase` is what the run counts as.
    """

    def __init__(
        self,
        loaded: LoadedGraph,
        cache: Cache,
        contract: Contract,
        *,
        phase: PhaseName,
        new_tokens: int,
        rows: int,
        given: Mapping[str, Buffer],
        span: Span = None,
    ) -> None:
        graph, session = loaded.graph, loaded.session
        self.phase, self.file, self.new_tokens, self.span = phase, graph.file, new_tokens, span
        self._first, self._end = span or (0, contract.batch_size)
        batch = self._end - self._first
        self._some = None if span is None else batch
        self._cache, self._window = cache, loaded.window
        self.binding = session.binding()
        cache.bind(self.binding, span)
        self._recording: Recording | None = None
        if session.captures and span is None and _repeats(phase, new_tokens):
            self._recording = Recording(session, self.binding, cache)
        binds = self._recording or self.binding
        bind_given = self.binding.bind_input if self._recording is None else self._recording.bind_constant
        for port in graph.adapter_inputs:
            if port.name in given:
                bind_given(port.name, given[port.name])
        self.rows = rows
        shapes = port_shapes(batch, new_tokens, rows, contract.vocab_size, contract.max_length)
        mask = port_by_role(graph, "mask")
        self._mask = Mask.of(mask, contract, new_tokens) if mask is not None else None
        ports = [port for port in graph.inputs if self._mask is None or port is not mask]
        inputs = bound(ports, shapes, binds.bind_input)
        outputs = bound(graph.outputs, shapes, binds.bind_output)
        fed = _required(inputs, "tokens", graph.file)
        self._fed = fed.array
        self.tokens = self._fed if span is None else np.empty((contract.batch_size, new_tokens), self._fed.dtype)
        self._logits = _required(outputs, "logits", graph.file)
        self._wide = np.empty((batch, contract.vocab_size), np.float32)
        self._chosen = inputs["logits_rows"].array if "logits_rows" in inputs else None
        if "logits_kept" in inputs:
            inputs["logits_kept"].array.fill(rows)
        first = new_tokens - rows if self._chosen is None else 0
        self._columns = {first + column: column for column in range(rows)}
        fixed = self._recording.fix(inputs, contract.max_length) if self._recording is not None else frozenset()
        self._cursors = [
            (writer, feed.array)
            for role, feed in inputs.items()
            if role not in fixed and (writer := cursor_writer(role, new_tokens))
        ]
        self._whole_mask = inputs["mask"].array if "mask" in inputs else None
        self._rope = inputs["rope_length"].array if "rope_length" in inputs else None
        self._moving = moving(self.binding, session.wanted_memory, [port.name for port in ports], cache)

    def place(self, starts: Starts, rope_length: int) -> None:
        """Write every cursor input. `starts` [B]; `rope_length`: the length of text to take rotary frequencies for."""
        starts = starts[self._first : self._end]
        for write, array in self._cursors:
            write(starts, array)
        if self._rope is not None:
            self._rope.fill(rope_length)
        if self._mask is not None:
            self.binding.bind_input(self._mask.name, self._mask.written(starts))

    def masked(self, values: Sequence[int]) -> None:
        """Write these values [T] into the mask in place of those that `place` wrote, and 0 beyond them."""
        if self._mask is not None:
            self.binding.bind_input(self._mask.name, self._mask.written_as(values))
        elif self._whole_mask is not None:
            self._whole_mask.fill(0)
            self._whole_mask[:, : len(values)] = values

    def choose(self, positions: Sequence[int]) -> None:
        """Ask for the logits at these positions of 0 .. S-1, at most K of them; what is left over repeats the last."""
        if self._chosen is None:
            return
        self._columns = {position: column for column, position in enumerate(positions)}
        self._chosen[: len(positions)] = positions
        self._chosen[len(positions) :] = positions[-1]

    def run(self) -> Outcome:
        """One session run with the buffers as they are bound; how long it took."""
        window = self._window
        if self.tokens is not self._fed:
            np.copyto(self._fed, self.tokens[self._first : self._end])
        began = time.perf_counter()
        try:
            for name, buffer in self._moving:
                self.binding.bind_input(name, buffer)
            self._cache.before_run(self.binding, self.new_tokens)
            if self._recording is None:
                self.binding.run()
            else:
                self._recording.run(observed=window.open)
            seconds = time.perf_counter() - began
            if not window.open:
                return Outcome(seconds, False, self.file)
            self._cache.look(self._as_of_all(self.binding.output_addresses()))
            window.after_run(self.phase, self.new_tokens, self._some)
        except PartitaError:
            window.close()  # the profile would count a run that nobody can describe
            raise
        except BaseException:
            window.cut_short(self.phase, self.new_tokens, self._some)
            raise
        return Outcome(seconds, True, self.file)

    def _as_of_all(self, outputs: dict[str, int]) -> dict[str, int]:
        """Where a run left its outputs, the states as if all rows had taken part: of a part, where its whole begins."""
        buffers = self.binding.buffers
        parts = {name: buffers[name] for name in outputs if name in buffers and buffers[name].part is not None}
        moved = {name: outputs[name] - part.address() + part.keeps.address() for name, part in parts.items()}
        return {**outputs, **moved}

    def logits(self, row: int, position: int) -> npt.NDArray[np.float32]:
        """Logits [vocab] of one row of the batch at a position that was chosen; valid until the next run."""
        row -= self._first
        values: npt.NDArray[Any] = self._logits.array[row, self._columns[position]]
        dtype = self._logits.buffer.dtype
        if dtype == "float32":
            return values  # no copy when they are float32
        wide: npt.NDArray[np.float32] = self._wide[row]
        if dtypes.named(dtype).upper_half:
            np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(wide, values)
        return wide


class Executor:
    """The graphs of a package and its cache: a plan in, logits out."""

    def __init__(self, contract: Contract, loaded: Sequence[LoadedGraph], stores: Stores = by_contract) -> None:
        self.contract, self.loaded = contract, tuple(loaded)
        self.cache = Cache(contract.states, self.graph("decode").session, contract.batch_size, stores)
        self.cache.even = _needs_even_rows(loaded) if contract.batch_size > 1 else None
        prefill = self.graph("prefill").graph
        rows = port_by_role(prefill, "logits_rows")
        self._given = {entry.graph.file: logits_given(entry.graph) for entry in loaded}
        fixed = rows.shape[0] if rows is not None and isinstance(rows.shape[0], int) else None
        self.graphs = Graphs(
            max_length=contract.max_length,
            chunk=prefill.sequence_length,
            logits_rows=1 if self._given[prefill.file] == "last" else fixed,
            appends_chunks=contract.appends_chunks,
            padding_is_safe=self.cache.padding_is_safe,
            decode_takes_several=len(self.loaded) > 1 and self.graph("decode").graph.sequence_length is None,
            prefill_reads_past=self._reads_past(prefill),
            takes_fewer_rows=contract.takes_fewer_rows and contract.batch_size > 1 and self.cache.has_parts,
        )
        roped = any(port_by_role(entry.graph, "rope_length") is not None for entry in loaded)
        self.takes_rope_length = roped or contract.rereads_at is not None
        self._bound: dict[tuple[GraphName, int], BoundGraph] = {}
        """By the graph, and S of those that confirm guesses, which change from step to step; 1 where the graph of
        single tokens reads several all the same, else 0.
        """
        self._adapters: list[Given] = [NOTHING] * contract.batch_size
        """[B]"""
        self._stacked: dict[Span, Given] = {}
        self._nothing: dict[tuple[tuple[Dimension, ...], str], Buffer] = {}

    def switch(self, given: Sequence[Given]) -> None:
        """Have every run from now on read what an adapter has for inputs with defaults, and those where it has none:
        one for all rows, or one for each [B], which only graphs take whose inputs have an axis for rows.

        What a row has in the cache was computed with the one that it had.
        """
        adapters = [*given] if len(given) > 1 else [given[0]] * self.contract.batch_size
        changed = [new is not old for new, old in zip(adapters, self._adapters, strict=True)]
        for place, graph in [*self._bound.items()]:
            if any(changed[slice(*graph.span or (None,))]):  # what is bound once stays bound
                graph.binding.release()
                del self._bound[place]
        self._adapters = adapters
        self._stacked = {
            span: kept for span, kept in self._stacked.items() if not any(changed[slice(*span or (None,))])
        }

    def _given_to(self, span: Span) -> Given:
        """What the rows of a run are given."""
        if span not in self._stacked:
            rows = self._adapters[slice(*span or (None,))]
            self._stacked[span] = stacked(rows, every=self.contract.adapters_of_every_row)
        return self._stacked[span]

    def _zeros(self, entry: LoadedGraph) -> Given:
        """For inputs of adapters that have no default, by which nothing is added; inputs of one size share them."""
        for port in entry.graph.adapter_inputs:
            key = port.shape, port.dtype
            if port.name in entry.model.inputs and key not in self._nothing:
                self._nothing[key] = host_buffer(_fixed(port.shape), port.dtype)
        return {
            port.name: self._nothing[port.shape, port.dtype]
            for port in entry.graph.adapter_inputs
            if port.name in entry.model.inputs
        }

    def _reads_past(self, prefill: GraphFile) -> bool:
        """Whether the graph for prompts is given what is cached; optimum writes some that are not."""
        model = next(entry.model for entry in self.loaded if entry.graph is prefill)
        return all(state.past in model.inputs for state in self.contract.states)

    @functools.cached_property
    def takes_back(self) -> bool:
        """Whether a token that a row was fed in vain can be taken out of the cache again."""
        contract = self.contract
        return contract.rereads_at is None and not contract.rereads and self.cache.can_rewind(1)

    @property
    def observed(self) -> bool:
        """Whether decode steps are profiled now."""
        return self.graph("decode").window.open

    def graph(self, name: GraphName) -> LoadedGraph:
        """The opened graph that runs `name`."""
        return next(entry for entry in self.loaded if name in entry.phases)

    def bound(
        self, name: GraphName, new_tokens: int, rows: int, span: Span = None, *, guesses: bool = False
    ) -> BoundGraph:
        """The buffers of a graph for S = `new_tokens` and at least `rows` rows of logits; the last ones are kept, and
        those of a few `guesses` for each S.

        `span`: the rows of the batch that they are of; None: all.
        """
        entry = self.graph(name)
        given = self._given[entry.graph.file]
        if given == "all":
            rows = new_tokens
        elif given == "last":
            rows = 1
        elif name == "prefill":
            rows = self.graphs.logits_rows or rows
        several = int(name == "decode" and new_tokens > 1)
        place = name, new_tokens if guesses and 1 < new_tokens <= FEW_TOKENS else several
        kept = self._bound.get(place)
        if kept is None or (kept.new_tokens, kept.rows, kept.span) != (new_tokens, rows, span):
            self._bound.pop(place, None)  # let go of the old buffers before the new ones are made
            kept = self._bound[place] = BoundGraph(
                entry,
                self.cache,
                self.contract,
                phase=name,
                new_tokens=new_tokens,
                rows=rows,
                given={**self._zeros(entry), **self._given_to(span)},
                span=span,
            )
        return kept

    def last_bound(self, name: GraphName) -> BoundGraph:
        """The buffers that a graph last ran with, or would run with."""
        kept = self._bound.get((name, 0))
        return kept if kept is not None else self.bound(name, self.graphs.chunk or 1 if name == "prefill" else 1, 1)

    def prepare(self, plan: StepPlan) -> BoundGraph:
        """The graph of a plan, its logits chosen; `tokens` [B, S] is to be written before `run`."""
        kept = self._given[self.graph(plan.graph).graph.file] == "kept"
        rows = plan.new_tokens - plan.positions[0] if kept else len(plan.positions)
        graph = self.bound(plan.graph, plan.new_tokens, rows, plan.span, guesses=not plan.reads)
        graph.choose(plan.positions)
        return graph

    def will_decode(self) -> float:
        """Have the sessions that decode made ready for many runs; seconds that this took, 0 when they are."""
        return sum(will_repeat(entry.session) for entry in self.loaded if "decode" in entry.phases)

    def run(self, plan: StepPlan, graph: BoundGraph, rope_length: int) -> Outcome:
        """Run a plan on the tokens in `graph.tokens`, and move the rows' cursors.

        Raises GenerationError, ProviderError or ResourceError. However it ends early, Ctrl-C included, the cache is not
        to be used before it is cleared.
        """
        try:
            if plan.begins:
                self.cache.begin(plan.begins)
            graph.place(np.array(plan.starts, np.int64), rope_length)
            outcome = graph.run()
            self.cache.advance(graph.binding, plan.take, plan.span)
        except BaseException:
            self.cache.dirty = True
            raise
        return outcome

    def release(self) -> None:
        """Free the buffers, before the sessions that they are of."""
        for graph in self._bound.values():
            graph.binding.release()
        self.cache.release()


def moving(binding: Binding, wanted: dict[str, str], ports: Sequence[str], cache: Cache) -> list[tuple[str, Buffer]]:
    """Inputs to bind anew before each run: binding copies what is not in the memory the session wants, there and then.

    What is written into the buffer later would not be seen (shown with WebGPU, ONNX Runtime 1.27).
    """
    names = [*ports, *cache.staying]
    return [(name, binding.buffers[name]) for name in names if binding.buffers[name].memory != wanted[name]]


def _repeats(phase: PhaseName, new_tokens: int) -> bool:
    """Whether every step of a generation is this run, with other numbers in the same places."""
    return phase == "decode" and new_tokens == 1


def _fixed(shape: Sequence[Dimension]) -> tuple[int, ...]:
    """A shape with no room for an adapter where its rank is open."""
    return tuple(size if isinstance(size, int) else 0 for size in shape)


def _required(feeds: dict[str, Feed], role: str, file: str) -> Feed:
    """The buffer of a role that no graph can do without."""
    if role not in feeds:
        raise PackageError(f"{file}: the manifest lists no port with the role {role!r}", remedy=FROM_CHECKPOINT)
    return feeds[role]


def _needs_even_rows(loaded: Sequence[LoadedGraph]) -> str | None:
    """The provider that has a node which it computes right only for rows of one length; None where none has.

    A node that is in no list counts as its own: the list can miss nodes (see `Session.assigned`).
    """
    for entry in loaded:
        listed = {node.name: node.provider for node in entry.session.assigned() or ()}
        for provider in (each.provider for each in entry.session.resolutions if each.status == "active"):
            theirs = (node for node in entry.model.nodes if listed.get(node.name) in (None, provider.ort_name))
            if provider.even_rows and any(node.op_type in provider.even_rows for node in theirs):
                return provider.name
    return None
