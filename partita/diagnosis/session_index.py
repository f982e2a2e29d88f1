"""The facts of one session, indexed by node name. Joins the sources and draws no conclusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis import inlined_nodes, naming, native_log, subgraph_nodes
from partita.diagnosis.execution import (
    ProvidersBySource,
    choose_provider,
    collect_providers,
    execution_order,
    main_graph_events,
    providers_by_device,
)
from partita.diagnosis.graphs import (
    COMPILED,
    CONTROL_FLOW,
    FOLDED,
    MEMCPY_OPS,
    OptimisedGraph,
    compiled_subgraphs,
    file_nodes,
    index_graph,
)
from partita.diagnosis.inlined_nodes import inlined_branches
from partita.diagnosis.join import ExecutedNode, JoinedNodes, join_graphs, join_in_order
from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.log_pattern import LogPattern
from partita.observations.names import INLINED
from partita.observations.records import PhaseName, Source

PHASES: tuple[PhaseName, ...] = ("prefill", "decode")
"""Phases of a generation, in order."""
EVERY_PHASE: tuple[PhaseName, ...] = (*PHASES, "run")
FileNodes = Mapping[str, tuple[str, ...]]
"""Executed node -> file nodes."""


@dataclass(frozen=True, slots=True)
class SessionIndex:
    """One session's facts by node name."""

    facts: SessionFacts
    file_nodes: dict[str, GraphNode]
    subgraph_nodes: dict[str, GraphNode]
    """Nodes in control-flow subgraphs."""
    modules: frozenset[str]
    assignments: dict[str, AssignedNode]
    """Entry of the assignment list by name; for a name of several graphs, the entry of the main graph."""
    listed_names: frozenset[str]
    """Names of listed nodes in the main graph."""
    listed_in_subgraphs: tuple[AssignedNode, ...]
    """Listed nodes that are or may be in control-flow subgraphs."""
    same_name_nodes: frozenset[str]
    """Names of both a node of the order and a node of `listed_in_subgraphs`."""
    events: tuple[NodeEvent, ...]
    """Events of the main graph. The time of a control-flow node includes its subgraphs, whose events are omitted."""
    subgraphs: frozenset[str]
    """Nodes that ran only in control-flow subgraphs."""
    ran: dict[str, NodeEvent]
    """The last execution of each node."""
    order: tuple[str, ...]
    """Every node once, in execution order."""
    present: frozenset[str]
    """The names in `order`."""
    order_source: Source
    providers_by_source: dict[str, ProvidersBySource]
    log: dict[str, tuple[str, ...]]
    """Native log lines that mention a node of the order, of the file or of the assignment list."""
    graph_log: tuple[str, ...]
    """Native log lines with a reason and no node."""
    memcpy: dict[str, native_log.MemcpyLine]
    """Memcpy node of the order -> its copy, from the optimised graph or the native log; empty if neither matches."""
    optimised: OptimisedGraph | None
    """The executed graph; None if unknown."""
    compiled: dict[str, tuple[AssignedNode, ...]]
    """Compiled subgraph of the order -> its listed nodes."""
    file_nodes_of: dict[str, tuple[str, ...]]
    """Executed node -> the file nodes that it replaces."""
    rewritten_with: dict[str, tuple[str, ...]]
    """Executed node that ONNX Runtime added when it rewrote file nodes -> those file nodes."""
    replacement_candidates: dict[str, tuple[str, ...]]
    """File node that is executed under an unknown name -> executed nodes that may replace it."""
    possible_functions: dict[str, tuple[str, ...]]
    """Executed node without a name -> the file nodes (functions) that may contain it."""
    blank_log: dict[str, dict[str, tuple[str, ...]]]
    """Provider -> node of `possible_functions` -> native log lines about it that have a blank in place of the name."""

    def op_type(self, name: str) -> str | None:
        """Operator of a node: from the run, else from the optimised graph, the file, the assignment list or the log."""
        if name in self.compiled:
            return COMPILED
        optimised = self.optimised.nodes.get(name) if self.optimised else None
        graphs = self.ran.get(name) or optimised or self.file_nodes.get(name)
        known = graphs or self.assignments.get(name) or self.memcpy.get(name)
        return known.op_type if known else None

    def provider(self, name: str) -> str | None:
        """Provider of a node of the order, from the strongest source; None without a source."""
        return choose_provider(self.providers_by_source[name])

    def exported_op(self, name: str) -> str:
        """Operator of a file node, in the main graph or a control-flow subgraph; `unknown` for other names."""
        node = self.file_nodes.get(name) or self.subgraph_nodes.get(name)
        return node.op_type if node is not None else "unknown"

    def module(self, name: str, *, in_subgraph: bool = False) -> str | None:
        """Module path of a node: from the file, else from the name, else the common path of its file nodes.

        `in_subgraph`, here and in `of_file`: the node with this name in a control-flow subgraph.
        """
        node = self.of_file(name, in_subgraph=in_subgraph)
        if node is not None:
            return node.module
        by_name = naming.module_of(name, self.modules)
        replaced = () if in_subgraph else self.replaces(name)
        known = (self.file_nodes.get(each) or self.subgraph_nodes.get(each) for each in replaced)
        return by_name or naming.common_module(node.module for node in known if node is not None)

    def of_file(self, name: str, *, in_subgraph: bool = False) -> GraphNode | None:
        """The file node of a name; None without one."""
        return self.subgraph_nodes.get(name) if in_subgraph else self.file_nodes.get(name)

    @property
    def has_subgraphs(self) -> bool:
        """Whether a control-flow node is executed. ONNX Runtime replaces an If with constant condition by a branch."""
        return any(self.op_type(name) in CONTROL_FLOW for name in self.order)

    def in_subgraphs(self) -> tuple[AssignedNode, ...] | None:
        """Nodes of the assignment list in control-flow subgraphs; None without control flow in the file or the run.

        Control flow inside functions is only in the executed graph.
        """
        operators = (node.op_type for node in self.file_nodes.values())
        if not any(op in CONTROL_FLOW for op in (*operators, *map(self.op_type, self.order))):
            return None
        return self.listed_in_subgraphs

    def replaces(self, name: str, *, in_subgraph: bool = False) -> tuple[str, ...]:
        """File nodes that an executed node replaces, without the file node of its own name."""
        return () if in_subgraph else self.file_nodes_of.get(name, ())

    def is_added(self, name: str) -> bool:
        """Whether ONNX Runtime added an executed node, which replaces no file node."""
        if not self.file_nodes:
            return self.op_type(name) in MEMCPY_OPS
        known = name in self.file_nodes or self.file_nodes_of.get(name)
        return not known and not any(name in nodes for nodes in self.replacement_candidates.values())

    def probed_as(self, name: str) -> tuple[str, ...]:
        """Nodes whose experiments apply to a node: itself and the file nodes that it replaces.

        Experiments on a function do not apply to its nodes.
        """
        return (name,) if name in self.possible_functions or name.startswith(INLINED) else (name, *self.replaces(name))


def index_session(facts: SessionFacts) -> SessionIndex:
    """Index the facts of one session by node name."""
    run = _name_nodes(facts)
    facts, order, exported = run.facts, run.order, run.exported
    functions = inlined_nodes.may_be_part_of(facts, order)
    branches = inlined_branches(facts, order)
    joined = _join_graphs(run, functions, branches)
    unfolded = _unfolded_functions(run, functions, joined)
    unnamed_owners = subgraph_nodes.owners(facts, order, unfolded) if facts.subgraph_nodes else {}
    seen_inside = run.inner_names - {event.name for event in run.events}
    listed, inner = subgraph_nodes.split_list(facts, _main_graph(run), unnamed_owners, seen_inside)
    assigned = {node.name: node for node in (*inner, *listed)}
    providers_by_node = collect_providers(facts, run.events, order, run.compiled, listed)
    parts = {name: unfolded.get(name) or owners for name, owners in functions.items() if not name.startswith(INLINED)}
    parts |= unnamed_owners
    unfolded |= subgraph_nodes.owners_by_name(facts, order, unfolded)
    unfolded |= {name: owners for name, owners in unnamed_owners.items() if len(owners) == 1}
    joined = joined or _join_in_order(run, providers_by_node, listed, unfolded, {*branches, *parts})
    stands_for = {**_fused_in_subgraphs(facts, {*order, *exported}), **unfolded, **joined.file_nodes_of, **branches}
    return SessionIndex(
        facts=facts,
        file_nodes=exported,
        subgraph_nodes={node.name: node for node in facts.subgraph_nodes if node.name},
        modules=frozenset(node.module for node in facts.graph if node.module),
        assignments=assigned,
        listed_names=frozenset(node.name for node in listed),
        listed_in_subgraphs=inner,
        same_name_nodes=run.present.intersection(node.name for node in inner),
        events=run.events,
        subgraphs=seen_inside,
        ran={event.name: event for event in run.events},
        order=order,
        present=run.present,
        order_source=run.order_source,
        providers_by_source=providers_by_node,
        log=native_log.lines_by_node(facts.log, {*order, *exported, *assigned}),
        graph_log=native_log.lines_about_the_graph(facts.log, _every_pattern(facts)),
        memcpy=run.memcpy if run.optimised is None else _copied_tensors(run.optimised),
        optimised=run.optimised,
        compiled=run.compiled,
        file_nodes_of=stands_for,
        rewritten_with=joined.rewritten_with,
        replacement_candidates=_ambiguous(
            {name: exported[name] for name in exported if name not in run.present},
            {**functions, **joined.ambiguous},
            stands_for,
            (node.name for node in listed if run.optimised is None),
        ),
        possible_functions=parts,
        blank_log=_blank_log(facts, parts, providers_by_node, assigned),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One session, with the same node names in every source. For the fields see `SessionIndex`."""

    facts: SessionFacts
    exported: dict[str, GraphNode]
    events: tuple[NodeEvent, ...]
    inner_names: frozenset[str]
    """Names of nodes that ran inside control flow."""
    order: tuple[str, ...]
    order_source: Source
    optimised: OptimisedGraph | None
    compiled: dict[str, tuple[AssignedNode, ...]]
    memcpy: dict[str, native_log.MemcpyLine]
    """From the native log."""

    @property
    def present(self) -> frozenset[str]:
        """The names in `order`."""
        return frozenset(self.order)

    @property
    def compiled_file_nodes(self) -> dict[str, tuple[str, ...]]:
        """Compiled node -> its file nodes."""
        return file_nodes(self.compiled, self.exported, self.order)


def _name_nodes(facts: SessionFacts) -> _Run:
    """Give nodes the same names in every source, and find the main graph and its order."""
    facts = subgraph_nodes.with_file_names(facts)
    facts = inlined_nodes.with_names(facts, main_graph_events(facts.events)[0])
    exported = {node.name: node for node in facts.graph if node.name}
    events, inner_names = main_graph_events(facts.events)
    order, order_source = execution_order(facts, events)
    if facts.subgraph_nodes and facts.assigned:
        facts = subgraph_nodes.with_names(facts, order)
    op_types = {**{node.name: node.op_type for node in facts.graph}, **{event.name: event.op_type for event in events}}
    return _Run(
        facts,
        exported,
        events,
        inner_names,
        order,
        order_source,
        index_graph(facts.optimised, facts.graph) if facts.optimised is not None else None,
        compiled_subgraphs(facts.assigned or (), dict.fromkeys(order), exported),
        native_log.memcpy_lines(facts.log, order, op_types),
    )


def _join_graphs(run: _Run, functions: FileNodes, branches: FileNodes) -> JoinedNodes | None:
    """The join with the optimised graph; None without one."""
    if run.optimised is None:
        return None
    inputs = frozenset(port.name for port in run.facts.ports if port.direction == "input")
    candidates = {**dict.fromkeys((*branches, *run.compiled), ()), **functions}
    return join_graphs(run.order, run.exported, run.optimised, inputs, run.compiled_file_nodes, candidates)


def _unfolded_functions(run: _Run, functions: FileNodes, joined: JoinedNodes | None) -> dict[str, tuple[str, ...]]:
    """Node of an inlined function -> the file node that is the function, if known."""
    if joined is None:
        return inlined_nodes.functions_expanded(run.facts, run.order)
    return {name: joined.file_nodes_of[name] for name in functions if name in joined.file_nodes_of}


def _join_in_order(
    run: _Run,
    providers_by_node: Mapping[str, ProvidersBySource],
    listed: Iterable[AssignedNode],
    unfolded: FileNodes,
    known: Iterable[str],
) -> JoinedNodes:
    """The join without an optimised graph. `known`: executed nodes that need no join."""
    operators = {event.name: event.op_type for event in run.events}
    executed = [ExecutedNode(name, operators.get(name), choose_provider(providers_by_node[name])) for name in run.order]
    providers = {node.name: node.provider for node in listed}
    candidates = dict.fromkeys((*known, *run.compiled), ())
    return join_in_order(executed, run.exported, providers, {**unfolded, **run.compiled_file_nodes}, candidates)


def _ambiguous(
    gone: Mapping[str, GraphNode],
    undecided: Mapping[str, Sequence[str]],
    stands_for: Mapping[str, Sequence[str]],
    assigned: Iterable[str],
) -> dict[str, tuple[str, ...]]:
    """File nodes that are executed under an unknown name -> executed nodes that may replace them.

    Args:
        gone: File nodes that are not executed under their own name.
        undecided: Executed node -> file nodes that it may replace in part.
        assigned: Nodes that were assigned to a provider after constant folding.
    """
    done = {each for behind in stands_for.values() for each in behind}
    unknown = {name for name, node in gone.items() if name not in done and node.op_type not in FOLDED}
    found: dict[str, tuple[str, ...]] = {name: () for name in assigned if name in unknown}
    for executed, owners in undecided.items():
        for name in owners:
            if name in unknown and executed not in stands_for:
                found[name] = (*found.get(name, ()), executed)
    return found


def _main_graph(run: _Run) -> subgraph_nodes.MainGraph:
    """The main graph from other sources than the assignment list."""
    facts, order = run.facts, run.order
    op_types: dict[str, str | None] = {name: line.op_type for name, line in run.memcpy.items()}
    op_types |= {node.name: node.op_type for node in facts.assigned or ()}
    op_types |= {node.name: node.op_type for node in (*facts.graph, *(facts.optimised or ()))}
    op_types |= {event.name: event.op_type for event in run.events} | dict.fromkeys(run.compiled, COMPILED)
    holders = {*CONTROL_FLOW, COMPILED, None}
    ran_on = {event.name: event.provider for event in run.events}
    return subgraph_nodes.MainGraph(
        counts=Counter(order if facts.plan is None else (name for stream in facts.plan for name in stream)),
        op_types=op_types,
        providers=providers_by_device(facts) | ran_on,
        compiled=frozenset(node for nodes in run.compiled.values() for node in nodes),
        has_subgraphs=any(op_types.get(name) in holders for name in order),
    )


def _fused_in_subgraphs(facts: SessionFacts, main: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Listed node outside the main graph -> subgraph nodes that are prefixes of its name.

    The list is made after the first fusions.
    """
    inner = {node.name for node in facts.subgraph_nodes if node.name}
    listed = dict.fromkeys(node.name for node in facts.assigned or () if node.name)
    found = {
        name: tuple(each for each in naming.replaced_by(name, inner) if each not in listed)
        for name in listed
        if inner and name not in inner and name not in main
    }
    return {name: behind for name, behind in found.items() if behind}


def _every_pattern(facts: SessionFacts) -> tuple[LogPattern, ...]:
    """The distinct patterns of all providers of the chain."""
    return tuple(dict.fromkeys(pattern for known in facts.providers.values() for pattern in known.patterns))


def _blank_log(
    facts: SessionFacts,
    parts: Iterable[str],
    providers_by_node: Mapping[str, ProvidersBySource],
    assigned: Mapping[str, AssignedNode],
) -> dict[str, dict[str, tuple[str, ...]]]:
    """See `SessionIndex`. The lines are about the nodes of `parts` that no source places on the provider."""
    homes = {
        name: {each for providers in providers_by_node[name].values() for each in providers}
        if name in providers_by_node
        else {assigned[name].provider}  # in a subgraph
        for name in parts
    }
    return {
        provider: inlined_nodes.blank_lines(
            facts.log, known.patterns, [name for name, providers in homes.items() if provider not in providers]
        )
        for provider, known in facts.providers.items()
    }


def _copied_tensors(graph: OptimisedGraph) -> dict[str, native_log.MemcpyLine]:
    """The copy of each Memcpy node of an optimised graph, with the file's name of the tensor."""
    return {
        name: native_log.MemcpyLine(node.op_type, graph.original(node.inputs[0]))
        for name, node in graph.nodes.items()
        if node.op_type in MEMCPY_OPS and node.inputs
    }
