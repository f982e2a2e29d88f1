"""Runs plans: writes tokens and cursors into the buffers of one graph, runs it, hands out logits.

Feeds strictly by role: what a port means comes from the contract, its name is only handed on. Every buffer is allocated
and bound once, but for those whose length is another in each step; a step writes into the buffers and runs. Knows
nothing of prompts, sampling or when to stop.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from partita.contract import Contract, Dimension, GraphFile
from partita.runtime.adapters import NOTHING, Given, stacked
from partita.runtime.cpu.settings import will_repeat
from partita.runtime.engine.bound_graph import FEW_TOKENS, BoundGraph, LoadedGraph, Outcome
from partita.runtime.engine.cache.base import Span
from partita.runtime.engine.cache.cache import Cache
from partita.runtime.engine.device_choice import DeviceChoice
from partita.runtime.engine.feeds import (
    as_declared,
    logits_given,
    logits_port,
    port_by_role,
)
from partita.runtime.engine.planner import GraphName, Graphs, StepPlan
from partita.runtime.ort.buffers import Buffer, host_buffer


class Executor:
    """The graphs of a package and its cache: a plan in, logits out."""

    def __init__(self, contract: Contract, loaded: Sequence[LoadedGraph]) -> None:
        self.contract, self.loaded = contract, tuple(loaded)
        self.cache = Cache(contract.states, self.graph("decode").session, contract.batch_size)
        fewer = contract.takes_fewer_rows and contract.batch_size > 1 and self.cache.has_parts
        apart = self.cache.separate and not contract.rereads and not _needs_even_rows(loaded)
        self.rows = contract.batch_size if apart else 1
        """Sequences that are held at a time. Where it is 1 every row of the batch is fed the same."""
        if self.rows == 1:
            self.cache.hold_one()
        prefill = self.graph("prefill").graph
        rows = port_by_role(prefill, "logits_rows")
        self._given = {entry.graph.file: logits_given(entry.graph) for entry in loaded}
        fixed = rows.shape[0] if rows is not None and isinstance(rows.shape[0], int) else None
        self.graphs = Graphs(
            max_length=contract.max_length,
            chunk=prefill.sequence_length,
            logits_rows=1 if self._given[prefill.file] == "last" else fixed,
            appends_chunks=contract.appends_chunks and not contract.rereads,
            padding_is_safe=self.cache.padding_is_safe,
            decode_takes_several=contract.rereads
            or (len(self.loaded) > 1 and self.graph("decode").graph.sequence_length is None),
            prefill_reads_past=self._reads_past(prefill),
            takes_fewer_rows=fewer and self.rows > 1,
        )
        roped = any(port_by_role(entry.graph, "rope_length") is not None for entry in loaded)
        self.takes_rope_length = roped or contract.rereads_at is not None
        self.choice = self._device_choice()
        self._bound: dict[tuple[GraphName, int], BoundGraph] = {}
        self._observed: dict[GraphName, BoundGraph] = {}
        """Of the last run that was profiled: what the report says of a step is of that one."""
        """By the graph, and S of those that verify draft tokens, which change from step to step; 1 where the graph of
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
                self._let_go(graph)
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
        self, name: GraphName, new_tokens: int, rows: int, span: Span = None, *, drafts: bool = False
    ) -> BoundGraph:
        """The buffers of a graph for S = `new_tokens` and at least `rows` rows of logits; the last ones are kept, and
        those of a few `drafts` for each S.

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
        place = name, new_tokens if drafts and 1 < new_tokens <= FEW_TOKENS else several
        kept = self._bound.get(place)
        if kept is None or (kept.new_tokens, kept.rows, kept.span) != (new_tokens, rows, span):
            old = self._bound.pop(place, None)  # let go of the old buffers before the new ones are made
            if old is not None and old.recorded:
                self._let_go(old)  # else the device keeps what was captured for as long as the session lives
            kept = self._bound[place] = BoundGraph(
                entry,
                self.cache,
                self.contract,
                phase=name,
                held=self.rows,
                new_tokens=new_tokens,
                rows=rows,
                given={**self._zeros(entry), **self._given_to(span)},
                span=span,
                choice=self.choice if entry is self.graph("decode") else None,
            )
        return kept

    def _let_go(self, graph: BoundGraph) -> None:
        graph.release()
        self._observed = {name: kept for name, kept in self._observed.items() if kept is not graph}

    def seen_bound(self, name: GraphName) -> BoundGraph:
        """The buffers of a graph's last run that was profiled, which may have been of more rows than those after it; of
        its last run where none was, or those that it would run with.
        """
        kept = self._observed.get(name) or self._bound.get((name, 0))
        return kept if kept is not None else self.bound(name, self.graphs.chunk or 1 if name == "prefill" else 1, 1)

    def prepare(self, plan: StepPlan) -> BoundGraph:
        """The graph of a plan, its logits chosen; `tokens` [B, S] is to be written before `run`."""
        kept = self._given[self.graph(plan.graph).graph.file] == "kept"
        rows = plan.new_tokens - plan.positions[0] if kept else len(plan.positions)
        graph = self.bound(plan.graph, plan.new_tokens, rows, plan.span, drafts=not plan.reads)
        graph.choose(plan.positions)
        return graph

    def will_decode(self) -> float:
        """Have the sessions that decode made ready for many runs; seconds that this took, 0 when they are."""
        seconds = sum(will_repeat(entry.session) for entry in self.loaded if "decode" in entry.phases)
        return seconds + (0.0 if self.choice is None else self.choice.check())

    def _device_choice(self) -> DeviceChoice | None:
        """Selects tokens on the device of the graph that decodes; None where its logits are made on the host."""
        entry, batch = self.graph("decode"), self.contract.batch_size
        port = logits_port(entry.graph)
        if not entry.session.on_device(port.name):
            return None
        shape = as_declared(port.shape, (batch, 1, self.contract.vocab_size))
        return DeviceChoice(entry.session, port, shape, batch)

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
            if outcome.observed and plan.graph == self.graph(plan.graph).phases[-1]:
                self._observed[plan.graph] = graph
            self.cache.advance(graph.binding, plan.starts, plan.take, plan.span)
        except BaseException:
            self.cache.dirty = True
            raise
        return outcome

    def release(self) -> None:
        """Free the buffers, before the sessions that they are of."""
        for graph in {*self._bound.values(), *self._observed.values()}:
            graph.release()
        self.cache.release()


def _fixed(shape: Sequence[Dimension]) -> tuple[int, ...]:
    """A shape with no room for an adapter where its rank is open."""
    return tuple(size if isinstance(size, int) else 0 for size in shape)


def _needs_even_rows(loaded: Sequence[LoadedGraph]) -> bool:
    """Whether a provider has a node that it computes right only for rows of one length.

    A node that is in no list counts as its own: the list can miss nodes (see `Session.assigned`).
    """
    for entry in loaded:
        listed = {node.name: node.provider for node in entry.session.assigned() or ()}
        for provider in (each.provider for each in entry.session.resolutions if each.status == "active"):
            theirs = (node for node in entry.model.nodes if listed.get(node.name) in (None, provider.ort_name))
            if provider.even_rows and any(node.op_type in provider.even_rows for node in theirs):
                return True
    return False
