"""An opened package: its graphs, one cache, and the bound buffers of each graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from partita.observations.records import Memory
from partita.package.folder import Manifest
from partita.runtime.chain.cpu_settings import will_repeat
from partita.runtime.generate.bound_graph import SMALL_STEP_TOKENS, BoundGraph, LoadedGraph
from partita.runtime.generate.cache import Cache, Span
from partita.runtime.generate.choice.device_choice import DeviceChoice
from partita.runtime.generate.feeds import Adapters, as_declared, logit_positions, logits_port, port_by_role
from partita.runtime.generate.planner import Capacity, GraphName, StepPlan
from partita.runtime.generate.record import Recorder


class Runner:
    """The opened graphs of a package and its cache: plan in, logits out. Used by one loop at a time.

    Close it, or use it as a context manager.
    """

    def __init__(self, folder: Path, manifest: Manifest, graphs: tuple[LoadedGraph, ...], memory: Memory) -> None:
        """`memory`: of the process when the graphs were opened."""
        self.folder, self.contract, self.graphs, self.memory = folder, manifest.graph, graphs, memory
        contract = self.contract
        self.recorder = Recorder()
        self.adapters = Adapters(folder, manifest)
        self._by_phase = {phase: entry for entry in reversed(graphs) for phase in entry.phases}
        decode = self.graph("decode")
        self.resolutions = graphs[-1].session.resolutions
        """The state of each provider of the chain after the sessions were opened."""
        self.cache = Cache(contract.states, decode.session, contract.batch_size)
        separate = all(store.separate for store in self.cache.stores)
        """Whether a row can begin and continue independently of the others."""
        apart = separate and not contract.cacheless and not _needs_even_rows(graphs)
        self.rows = contract.batch_size if apart else 1
        """Sequences at a time. If 1, every row of the batch has the same tokens."""
        self.cache.lengths = [0] * self.rows
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

    def _capacity(self) -> Capacity:
        contract, prefill, decode = self.contract, self.graph("prefill"), self.graph("decode").graph
        rows = port_by_role(prefill.graph, "logits_rows")
        fixed = rows.shape[0] if rows is not None and isinstance(rows.shape[0], int) else None
        has_spans = self.rows > 1 and all(buffer.has_spans for buffer in self.cache.buffers)
        return Capacity(
            max_length=contract.max_length,
            chunk=prefill.graph.sequence_length,
            logits_rows=1 if logit_positions(prefill.graph) == "last" else fixed,
            appends_chunks=contract.appends_chunks and not contract.cacheless,
            padding_is_safe=self.cache.padding_is_safe,
            decode_any_length=contract.cacheless or (len(self.graphs) > 1 and decode.sequence_length is None),
            prefill_reads_past=all(state.past in prefill.model.inputs for state in contract.states),
            symbolic_batch=contract.symbolic_batch and has_spans,
        )

    def begin(self) -> None:
        """Begin a new record."""
        self.recorder.begin()
        for entry in self.graphs:
            entry.window.begin()

    def use_adapters(self, *names: str | None) -> None:
        """Use these adapters in following runs: one for all rows, or one for each row [B]; None for no adapter.

        Cached tokens keep the values of their earlier adapter. Raises UsageError for an unknown name, PackageError for
        a damaged file.
        """
        changed = self.adapters.use(names if len(names) > 1 else names * self.contract.batch_size)
        for place, graph in [*self._bound.items()] if any(changed) else ():
            if any(changed[slice(*graph.span or (None,))]):  # a bound input stays bound
                self._release(graph)
                del self._bound[place]

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
        if given in ("all", "last"):
            rows = new_tokens if given == "all" else 1
        elif name == "prefill":
            rows = self.capacity.logits_rows or rows
        several = int(name == "decode" and new_tokens > 1)
        place = name, new_tokens if drafts and 1 < new_tokens <= SMALL_STEP_TOKENS else several
        kept = self._bound.get(place)
        if kept is None or (kept.new_tokens, kept.rows, kept.span) != (new_tokens, rows, span):
            old = self._bound.pop(place, None)
            if old is not None and old.replays is not None:
                self._release(old)  # otherwise the device keeps the captured graph until the session closes
            del kept, old  # free the old buffers before the new are allocated
            kept = self._bound[place] = BoundGraph(
                entry,
                self.cache,
                self.contract,
                phase=name,
                new_tokens=new_tokens,
                rows=rows,
                adapter_values=self.adapters.inputs(entry.graph, entry.model.inputs, span),
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

    def __exit__(self, *details: object) -> None:
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
