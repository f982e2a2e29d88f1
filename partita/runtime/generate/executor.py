"""An opened package: its graphs, one cache, and the bound buffers of each graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from partita.package.contract import Dimension
from partita.package.folder import Manifest
from partita.providers.resolve import Resolution
from partita.runtime.chain.cpu_settings import will_repeat
from partita.runtime.generate.bound_graph import SMALL_STEP_TOKENS, BoundGraph, LoadedGraph
from partita.runtime.generate.cache import Cache, Span
from partita.runtime.generate.choice.device_choice import DeviceChoice
from partita.runtime.generate.feeds import (
    NOTHING,
    Adapters,
    InputValues,
    as_declared,
    logit_positions,
    logits_port,
    port_by_role,
    stack_values,
)
from partita.runtime.generate.planner import Capacity, GraphName, StepPlan
from partita.runtime.generate.record import Recorder, Step
from partita.runtime.ort.buffers import Buffer, host_buffer


class Runner:
    """The opened graphs of a package and its cache: plan in, logits out. Used by one loop at a time.

    Close it, or use it as a context manager.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        graphs: tuple[LoadedGraph, ...],
        rss: tuple[int, int],
        anonymous: int | None = None,
    ) -> None:
        """`rss`: resident memory before and after the graphs were opened; `anonymous`: growth of anonymous memory."""
        self.folder, self.contract, self.graphs = folder, manifest.graph, graphs
        contract = self.contract
        self.rss_before_load_bytes, self.rss_after_load_bytes = rss
        self.anonymous_growth_bytes = anonymous
        self.recorder = Recorder()
        self._values = Adapters(folder, manifest)
        self.adapter_names: list[str | None] = [None] * contract.batch_size
        """[B]: the adapter of each row."""
        self._by_phase = {phase: entry for entry in reversed(graphs) for phase in entry.phases}
        decode = self.graph("decode")
        self.cache = Cache(contract.states, decode.session, contract.batch_size)
        apart = self.cache.separate and not contract.cacheless and not _needs_even_rows(graphs)
        self.rows = contract.batch_size if apart else 1
        """Sequences at a time. If 1, every row of the batch has the same tokens."""
        if self.rows == 1:
            self.cache.lengths = [0]
        self.capacity = self._capacity()
        roped = any(port_by_role(entry.graph, "rope_length") is not None for entry in graphs)
        self.has_rope_length = roped or contract.recompute_above is not None
        self.choice: DeviceChoice | None = None
        """Selects tokens on the device; None if logits are in host memory."""
        logits = logits_port(decode.graph)
        if decode.session.on_device(logits.name):
            shape = as_declared(logits.shape, (contract.batch_size, 1, contract.vocab_size))
            self.choice = DeviceChoice(decode.session, logits, shape, contract.batch_size)
        self._bound: dict[tuple[GraphName, int], BoundGraph] = {}
        """By graph and S. S is 1 for decode steps of several tokens, 0 for others; actual S for steps with draft
        tokens."""
        self._observed: dict[GraphName, BoundGraph] = {}
        """Buffers of the last profiled run, for the report."""
        self._adapters: list[InputValues] = [NOTHING] * contract.batch_size
        self._stacked: dict[Span, InputValues] = {}
        self._zeros: dict[tuple[tuple[Dimension, ...], str], Buffer] = {}

    def _capacity(self) -> Capacity:
        contract, prefill, decode = self.contract, self.graph("prefill"), self.graph("decode").graph
        rows = port_by_role(prefill.graph, "logits_rows")
        fixed = rows.shape[0] if rows is not None and isinstance(rows.shape[0], int) else None
        return Capacity(
            max_length=contract.max_length,
            chunk=prefill.graph.sequence_length,
            logits_rows=1 if logit_positions(prefill.graph) == "last" else fixed,
            appends_chunks=contract.appends_chunks and not contract.cacheless,
            padding_is_safe=self.cache.padding_is_safe,
            decode_any_length=contract.cacheless or (len(self.graphs) > 1 and decode.sequence_length is None),
            prefill_reads_past=all(state.past in prefill.model.inputs for state in contract.states),
            symbolic_batch=contract.symbolic_batch and self.rows > 1 and self.cache.has_spans,
        )

    # --- the record ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a new record."""
        self.recorder.begin()
        for entry in self.graphs:
            entry.window.begin()

    @property
    def steps(self) -> list[Step]:
        """The recorded steps."""
        return self.recorder.steps

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """The state of each provider of the chain after the sessions were opened."""
        return self.graphs[-1].session.resolutions

    # --- adapters -----------------------------------------------------------------------------------------------------

    def use_adapters(self, *names: str | None) -> None:
        """Use these adapters in following runs: one for all rows, or one for each row [B]; None for no adapter.

        Cached tokens keep the values of their earlier adapter. Raises UsageError for an unknown name, PackageError for
        a damaged file.
        """
        every = [*names] if len(names) > 1 else [names[0]] * self.contract.batch_size
        given = [self._values.named(name) for name in every]
        changed = [new is not old for new, old in zip(given, self._adapters, strict=True)]
        self.adapter_names = every
        if not any(changed):
            return
        for place, graph in [*self._bound.items()]:
            if any(changed[slice(*graph.span or (None,))]):  # a bound input stays bound
                self._release(graph)
                del self._bound[place]
        self._adapters = given
        self._stacked.clear()

    def _adapter_inputs(self, entry: LoadedGraph, span: Span) -> Mapping[str, Buffer]:
        """Values of a graph's adapter inputs. Without an adapter: the input's default, or zeros."""
        zeros = {}
        for port in entry.graph.adapter_inputs:
            if port.name in entry.model.inputs:
                key = port.shape, port.dtype
                if key not in self._zeros:
                    shape = tuple(size if isinstance(size, int) else 0 for size in port.shape)
                    self._zeros[key] = host_buffer(shape, port.dtype)
                zeros[port.name] = self._zeros[key]
        if span not in self._stacked:
            rows = self._adapters[slice(*span or (None,))]
            self._stacked[span] = stack_values(rows, every=self.contract.adapters_of_every_row)
        return {**zeros, **self._stacked[span]}

    # --- runs ---------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def can_remove_last(self) -> bool:
        """Whether the last token of a row can be removed from the cache."""
        contract = self.contract
        return contract.recompute_above is None and not contract.cacheless and self.cache.can_rewind(1)

    def graph(self, name: GraphName) -> LoadedGraph:
        """The opened graph of a phase."""
        return self._by_phase[name]

    def bound(
        self, name: GraphName, new_tokens: int, rows: int, span: Span = None, *, drafts: bool = False
    ) -> BoundGraph:
        """The buffers of a graph for S = `new_tokens` and at least `rows` rows of logits, for the rows in `span`.

        The last buffers of each graph are reused, and with `drafts` those of each small S.
        """
        entry = self.graph(name)
        given = logit_positions(entry.graph)
        if given == "all":
            rows = new_tokens
        elif given == "last":
            rows = 1
        elif name == "prefill":
            rows = self.capacity.logits_rows or rows
        several = int(name == "decode" and new_tokens > 1)
        place = name, new_tokens if drafts and 1 < new_tokens <= SMALL_STEP_TOKENS else several
        kept = self._bound.get(place)
        if kept is None or (kept.new_tokens, kept.rows, kept.span) != (new_tokens, rows, span):
            old = self._bound.pop(place, None)  # free the old buffers before the new are allocated
            if old is not None and old.replays is not None:
                self._release(old)  # otherwise the device keeps the captured graph until the session closes
            kept = self._bound[place] = BoundGraph(
                entry,
                self.cache,
                self.contract,
                phase=name,
                sequences=self.rows,
                new_tokens=new_tokens,
                rows=rows,
                adapter_values=self._adapter_inputs(entry, span),
                span=span,
                choice=self.choice if entry is self.graph("decode") else None,
            )
        return kept

    def _release(self, graph: BoundGraph) -> None:
        graph.release()
        self._observed = {name: kept for name, kept in self._observed.items() if kept is not graph}

    def last_bound(self, name: GraphName) -> BoundGraph:
        """The buffers of a graph's last profiled run, else of its last run, else new buffers."""
        kept = self._observed.get(name) or self._bound.get((name, 0))
        return kept if kept is not None else self.bound(name, self.capacity.chunk or 1 if name == "prefill" else 1, 1)

    @property
    def replays(self) -> int | None:
        """Number of steps that replayed a captured run; None without graph capture."""
        graphs = {*self._bound.values(), *self._observed.values()}
        counts = [graph.replays for graph in graphs if graph.replays is not None]
        return sum(counts) if counts else None

    def prepare(self, plan: StepPlan) -> BoundGraph:
        """The bound graph of a plan, with its logits positions set. Write `tokens` [B, S] before `run`."""
        rows = len(plan.positions)
        if logit_positions(self.graph(plan.graph).graph) == "kept":
            rows = plan.new_tokens - plan.positions[0]
        graph = self.bound(plan.graph, plan.new_tokens, rows, plan.span, drafts=not plan.is_prefill)
        graph.choose(plan.positions)
        return graph

    def will_decode(self) -> float:
        """Prepare the decode session for many runs; return the seconds that it took, 0 if already prepared."""
        seconds = will_repeat(self.graph("decode").session)
        return seconds + (0.0 if self.choice is None else self.choice.check())

    def run(self, plan: StepPlan, graph: BoundGraph, rope_length: int) -> float:
        """Run a plan on the tokens in `graph.tokens` and move the rows' cursors; return the seconds of the session run.

        Raises GenerationError, ProviderError or ResourceError. After any exception the cache is invalid.
        """
        try:
            if plan.new_rows:
                self.cache.begin(plan.new_rows)
            graph.place(np.array(plan.starts, np.int64), rope_length)
            seconds = graph.run()
            if graph.observed and plan.graph == self.graph(plan.graph).phases[-1]:
                self._observed[plan.graph] = graph
            self.cache.advance(graph.binding, plan.starts, plan.counts, plan.span)
        except BaseException:
            self.cache.dirty = True
            raise
        return seconds

    def close(self) -> None:
        """End profiling, free the buffers, then the sessions, and delete their files. Facts stay available."""
        for entry in self.graphs:
            entry.window.close()
        for graph in {*self._bound.values(), *self._observed.values()}:
            graph.release()
        self.cache.release()
        for entry in self.graphs:
            entry.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _needs_even_rows(loaded: Sequence[LoadedGraph]) -> bool:
    """Whether an active provider has a node that is only correct for rows of equal length.

    Nodes in no list count as its own, because the lists may lack nodes (see `Session.assigned`).
    """
    for entry in loaded:
        listed = {node.name: node.provider for node in entry.session.assigned() or ()}
        for provider in (each.provider for each in entry.session.resolutions if each.status == "active"):
            theirs = (node for node in entry.model.nodes if listed.get(node.name) in (None, provider.ort_name))
            if provider.even_rows and any(node.op_type in provider.even_rows for node in theirs):
                return True
    return False
