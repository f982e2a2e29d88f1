"""The facts of one session, indexed by node name. Joins the sources and draws no conclusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.diagnosis import inlined_nodes, naming, native_log, subgraph_nodes
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
from partita.diagnosis.join import ExecutedNode, join_graphs, join_in_order
from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.log_pattern import LogPattern
from partita.observations.names import CPU, INLINED
from partita.observations.records import PhaseName, Source

PHASES: tuple[PhaseName, ...] = ("prefill", "decode")
"""Phases of a generation, in order."""
HOST_DEVICE = "0"
"""ONNX Runtime's device type of the CPU."""
EVERY_PHASE: tuple[PhaseName, ...] = (*PHASES, "run")
ProvidersBySource = dict[Source, frozenset[str]]
"""Source -> providers that it names for one node; a source may name several."""


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
    """Names of listed nodes that are or may be in the main graph."""
    listed_in_subgraphs: tuple[AssignedNode, ...]
    """Listed nodes that are or may be in control-flow subgraphs."""
    listed_in_either: tuple[AssignedNode, ...]
    """Nodes of `listed_in_subgraphs` that may also be in the main graph."""
    same_name_nodes: dict[str, tuple[str, ...]]
    """Name of both a node of the order and a node of `listed_in_subgraphs` -> the file nodes of the latter."""
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
    function_of: dict[str, tuple[str, ...]]
    """Node in a graph attribute of a function such as SequenceMap -> the function nodes that may contain it."""
    copied_as: dict[str, tuple[str, ...]]
    """Node of `function_of` -> its names in the executed graph."""

    def op_type(self, name: str) -> str | None:
        """Operator of a node: from the run, else from the optimised graph, the file, the assignment list or the log."""
        if name in self.compiled:
            return COMPILED
        optimised = self.optimised.nodes.get(name) if self.optimised else None
        graphs = self.ran.get(name) or optimised or self.file_nodes.get(name)
        known = graphs or self.assignments.get(name) or self.memcpy.get(name)
        return known.op_type if known else None

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
        return self.same_name_nodes.get(name, ()) if in_subgraph else self.file_nodes_of.get(name, ())

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
    facts, copies = subgraph_nodes.with_file_names(facts)
    facts = inlined_nodes.with_names(facts, _main_graph_events(facts.events)[0])
    exported = {node.name: node for node in facts.graph if node.name}
    events, inner_names = _main_graph_events(facts.events)
    order, order_source = _execution_order(facts, events)
    if facts.subgraph_nodes:
        inside = [event for event in facts.events if event.name in inner_names and event.name not in order]
        facts = subgraph_nodes.with_names(facts, inside, order)
        events, inner_names = _main_graph_events(facts.events)
    present = frozenset(order)
    compiled = compiled_subgraphs(facts.assigned or (), dict.fromkeys(order), exported)
    optimised = index_graph(facts.optimised, facts.graph) if facts.optimised is not None else None
    inputs = frozenset(port.name for port in facts.ports if port.direction == "input")
    op_types = {**{node.name: node.op_type for node in facts.graph}, **{event.name: event.op_type for event in events}}
    logged = native_log.memcpy_lines(facts.log, order, op_types)
    branches = inlined_branches(facts, order)
    whole = file_nodes(compiled, exported, order)
    functions = inlined_nodes.may_be_part_of(facts, order)
    if optimised is not None:
        candidates = {**dict.fromkeys((*branches, *compiled), ()), **functions}
        joined = join_graphs(order, exported, optimised, inputs, whole, candidates)
        unfolded = {name: joined.file_nodes_of[name] for name in functions if name in joined.file_nodes_of}
    else:
        unfolded = inlined_nodes.functions_expanded(facts, order)
    unnamed_owners = subgraph_nodes.owners(facts, order, unfolded) if facts.subgraph_nodes else {}
    seen_inside = inner_names - {event.name for event in events}
    listed = subgraph_nodes.split_list(
        facts,
        _main_graph(facts, events, order, compiled, {name: line.op_type for name, line in logged.items()}),
        unnamed_owners,
        seen_inside,
        copies.names,
    )
    assigned = {node.name: node for node in (*listed.in_subgraphs, *listed.main_graph)}
    ours = set(map(id, listed.main_graph))
    providers_by_node = _collect_providers(facts, events, order, compiled, listed.main_graph)
    parts = {name: unfolded.get(name) or owners for name, owners in functions.items() if not name.startswith(INLINED)}
    parts |= unnamed_owners
    by_name = subgraph_nodes.owners_by_name(facts, order, unfolded)
    unfolded |= {name: owners for name, owners in by_name.items() if name not in copies.names}
    within = {**copies.owners, **{copies.names[name]: own for name, own in by_name.items() if name in copies.names}}
    unfolded |= {name: owners for name, owners in unnamed_owners.items() if len(owners) == 1}
    if optimised is None:
        joined = join_in_order(
            _executed(order, events, providers_by_node),
            exported,
            {node.name: node.provider for node in listed.main_graph},
            {**unfolded, **whole},
            dict.fromkeys((*branches, *compiled, *parts), ()),
        )
    stands_for = {**_fused_in_subgraphs(facts, {*order, *exported}), **unfolded, **joined.file_nodes_of, **branches}
    return SessionIndex(
        facts=facts,
        file_nodes=exported,
        subgraph_nodes={node.name: node for node in facts.subgraph_nodes if node.name},
        modules=frozenset(node.module for node in facts.graph if node.module),
        assignments=assigned,
        listed_names=frozenset(node.name for node in listed.main_graph),
        listed_in_subgraphs=listed.in_subgraphs,
        listed_in_either=tuple(node for node in listed.in_subgraphs if id(node) in ours),
        same_name_nodes=inlined_nodes.called_in_subgraphs(
            facts, order, present.intersection(node.name for node in listed.in_subgraphs)
        ),
        events=events,
        subgraphs=seen_inside,
        ran={event.name: event for event in events},
        order=order,
        present=present,
        order_source=order_source,
        providers_by_source=providers_by_node,
        log=subgraph_nodes.log_lines(
            native_log.lines_by_node(facts.log, {*order, *exported, *assigned, *copies.names}), copies
        ),
        graph_log=native_log.lines_about_the_graph(facts.log, _every_pattern(facts)),
        memcpy=logged if optimised is None else _copied_tensors(optimised),
        optimised=optimised,
        compiled=compiled,
        file_nodes_of=stands_for,
        rewritten_with=joined.rewritten_with,
        replacement_candidates=_ambiguous(
            {name: exported[name] for name in exported if name not in present},
            {**functions, **joined.ambiguous},
            stands_for,
            (node.name for node in listed.main_graph if optimised is None),
        ),
        possible_functions=parts,
        blank_log={
            provider: inlined_nodes.blank_lines(
                facts.log, known.patterns, _unnamed_fallback_nodes(provider, parts, providers_by_node, assigned)
            )
            for provider, known in facts.providers.items()
        },
        function_of=within,
        copied_as=copies.copied_as,
    )


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


def _main_graph(
    facts: SessionFacts,
    events: Sequence[NodeEvent],
    order: Sequence[str],
    compiled: Mapping[str, tuple[AssignedNode, ...]],
    copies: Mapping[str, str],
) -> subgraph_nodes.MainGraph:
    """The main graph from other sources than the assignment list. `copies`: operators of its Memcpy nodes."""
    op_types: dict[str, str | None] = {**copies, **{node.name: node.op_type for node in facts.assigned or ()}}
    op_types |= {node.name: node.op_type for node in (*facts.graph, *(facts.optimised or ()))}
    op_types |= {event.name: event.op_type for event in events} | dict.fromkeys(compiled, COMPILED)
    holders = {*CONTROL_FLOW, COMPILED, None}
    ran_on = {event.name: event.provider for event in events}
    return subgraph_nodes.MainGraph(
        counts=Counter(order if facts.plan is None else (name for stream in facts.plan for name in stream)),
        op_types=op_types,
        providers=_providers_by_device(facts) | ran_on,
        compiled=frozenset(node for nodes in compiled.values() for node in nodes),
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


def _unnamed_fallback_nodes(
    provider: str,
    parts: Iterable[str],
    providers_by_node: Mapping[str, ProvidersBySource],
    assigned: Mapping[str, AssignedNode],
) -> list[str]:
    """Nodes without a name that no source places on `provider`; nodes in subgraphs are only in the list."""
    homes = {
        name: {each for providers in providers_by_node[name].values() for each in providers}
        if name in providers_by_node
        else {assigned[name].provider}
        for name in parts
    }
    return [name for name, providers in homes.items() if provider not in providers]


def _executed(
    order: Iterable[str], events: Iterable[NodeEvent], providers_by_node: Mapping[str, ProvidersBySource]
) -> tuple[ExecutedNode, ...]:
    """The nodes of the order with their operators and providers."""
    operators = {event.name: event.op_type for event in events}
    return tuple(ExecutedNode(name, operators.get(name), choose_provider(providers_by_node[name])) for name in order)


def _copied_tensors(graph: OptimisedGraph) -> dict[str, native_log.MemcpyLine]:
    """The copy of each Memcpy node of an optimised graph, with the file's name of the tensor."""
    return {
        name: native_log.MemcpyLine(node.op_type, graph.original(node.inputs[0]))
        for name, node in graph.nodes.items()
        if node.op_type in MEMCPY_OPS and node.inputs
    }


def _main_graph_events(events: Iterable[NodeEvent]) -> tuple[tuple[NodeEvent, ...], frozenset[str]]:
    """Events of the main graph in order, and the names of nodes that ran inside control flow."""
    ordered = sorted(events, key=lambda event: (event.run, event.order))
    frames = _outermost(event for event in ordered if event.op_type in CONTROL_FLOW)
    if not frames:
        return tuple(ordered), frozenset()
    main, subgraph_nodes = [], set()
    for event in ordered:
        if any(_is_inside(event, frame) for frame in frames.get(event.run, ())):
            subgraph_nodes.add(event.name)
        else:
            main.append(event)
    return tuple(main), frozenset(subgraph_nodes)


def _outermost(events: Iterable[NodeEvent]) -> dict[int, list[NodeEvent]]:
    """Run -> the outermost control-flow nodes; nested nodes, possibly thousands, are inside them."""
    frames: dict[int, list[NodeEvent]] = {}
    for event in sorted(events, key=lambda event: (event.start_us, -event.host_us)):
        known = frames.setdefault(event.run, [])
        if not any(_is_inside(event, frame) for frame in known):
            known.append(event)
    return frames


def _is_inside(event: NodeEvent, frame: NodeEvent) -> bool:
    """Whether `event` began within the time of the control-flow node `frame`.

    Times are whole microseconds: an event before `frame` may have the same start if its duration is 0.
    """
    if event.run != frame.run or event is frame or event.name == frame.name:
        return False
    began_within = frame.start_us <= event.start_us < frame.start_us + frame.host_us
    return began_within and (event.host_us > 0 or event.order > frame.order)


def _execution_order(facts: SessionFacts, events: tuple[NodeEvent, ...]) -> tuple[tuple[str, ...], Source]:
    """Every node once, in execution order, and the source of the nodes.

    Streams of a plan run in parallel, so with several streams the last observed run gives the order.
    """
    if facts.plan is not None:
        plan = tuple(dict.fromkeys(name for stream in facts.plan for name in stream))
        if len(facts.plan) < 2 or not events:
            return plan, "plan_file"
        last = max(event.run for event in events)
        seen = {event.name: event.order for event in reversed(events) if event.run == last}
        ran = sorted((name for name in plan if name in seen), key=seen.__getitem__)
        return (*ran, *(name for name in plan if name not in seen)), "plan_file"
    if events:
        return tuple(dict.fromkeys(event.name for event in events)), "profile"
    if facts.assigned:
        return tuple(dict.fromkeys(node.name for node in facts.assigned)), "assignment"
    return tuple(dict.fromkeys(node.name for node in facts.graph)), "model_file"


def _collect_providers(
    facts: SessionFacts,
    events: tuple[NodeEvent, ...],
    order: tuple[str, ...],
    compiled: Mapping[str, tuple[AssignedNode, ...]],
    assigned: Iterable[AssignedNode],
) -> dict[str, ProvidersBySource]:
    """Providers by source for each node of `order`, strongest first. `assigned`: listed nodes of the main graph."""
    by_source: dict[Source, dict[str, set[str]]] = {"profile": {}, "assignment": {}}
    for event in events:
        by_source["profile"].setdefault(event.name, set()).add(event.provider)
    for node in assigned:
        by_source["assignment"].setdefault(node.name, set()).add(node.provider)
    for name, nodes in compiled.items():
        by_source["assignment"].setdefault(name, set()).update(node.provider for node in nodes)
    by_device = _providers_by_device(facts)
    by_source["plan_file"] = {
        name: {by_device[name]}
        for name in order
        if name in by_device and not any(name in by_node for by_node in by_source.values())
    }
    return {
        name: {source: frozenset(by_node[name]) for source, by_node in by_source.items() if name in by_node}
        for name in order
    }


def _providers_by_device(facts: SessionFacts) -> dict[str, str]:
    """Providers of nodes by the devices of the plan's streams, if the chain has one other provider than the CPU.

    Without another provider all nodes are on the CPU. Empty with several other providers, or with one that computes on
    the CPU and shares its stream.
    """
    others = [name for name in facts.registered if name != CPU]
    if facts.registered and not others:
        return {name: CPU for stream in facts.plan or () for name in stream}
    if len(others) != 1 or not facts.plan or not facts.plan_devices or set(facts.plan_devices) == {HOST_DEVICE}:
        return {}
    return {
        name: CPU if device == HOST_DEVICE else others[0]
        for stream, device in zip(facts.plan, facts.plan_devices, strict=False)
        for name in stream
    }


def choose_provider(by_source: ProvidersBySource) -> str | None:
    """The provider from the strongest source: profile, assignment, plan; None without a source."""
    for providers in by_source.values():
        return min(providers)
    return None
