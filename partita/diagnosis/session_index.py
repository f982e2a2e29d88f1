"""The facts of one session, indexed by node name. Joins the sources and draws no conclusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.diagnosis import naming, sources
from partita.diagnosis.evidence import with_blank
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
from partita.diagnosis.join import ExecutedNode, join_graphs, join_in_order
from partita.diagnosis.sources import Memcpy, ProvidersBySource, choose_provider
from partita.diagnosis.unnamed_nodes import branch_nodes, function_nodes, op_types_of, with_file_names, with_names
from partita.observations.facts import AssignedNode, GraphNode, NodeEvent, SessionFacts
from partita.observations.names import INLINED
from partita.observations.records import PhaseName, Source

PHASES: tuple[PhaseName, ...] = ("prefill", "decode")
"""Phases of a generation, in order."""
EVERY_PHASE: tuple[PhaseName, ...] = (*PHASES, "run")


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
    memcpy: Mapping[str, Memcpy]
    """Memcpy node of the order -> its copy, from the optimised graph or the native log; empty if neither matches."""
    optimised: OptimisedGraph | None
    """The executed graph; None if unknown."""
    compiled: dict[str, tuple[AssignedNode, ...]]
    """Compiled subgraph of the order -> its listed nodes."""
    file_nodes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Executed node -> the file nodes that it replaces."""
    rewritten_with: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Executed node that ONNX Runtime added when it rewrote file nodes -> those file nodes."""
    replacement_candidates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """File node that is executed under an unknown name -> executed nodes that may replace it."""
    possible_functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Executed node without a name -> the file nodes (functions) that may contain it."""
    blank_log: dict[str, dict[str, str]] = field(default_factory=dict)
    """Provider -> node of `possible_functions` -> a native log line about it with a blank in place of the name."""

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
    facts = with_file_names(facts)
    facts = with_names(facts, sources.main_graph_events(facts.events)[0])
    events, inner_names = sources.main_graph_events(facts.events)
    exported = {node.name: node for node in facts.graph if node.name}
    order, order_source = sources.execution_order(facts, events)
    optimised = index_graph(facts.optimised, facts.graph) if facts.optimised is not None else None
    compiled = compiled_subgraphs(facts.assigned or (), dict.fromkeys(order), exported)
    op_types: dict[str, str | None] = {**op_types_of(facts.graph, events)}
    memcpy = sources.copied_in_log(facts.log, order, op_types) if optimised is None else _copied_tensors(optimised)
    copies = {name: copy.op_type for name, copy in memcpy.items()}
    op_types = {**copies, **op_types_of(facts.assigned, facts.optimised), **op_types}
    op_types |= dict.fromkeys(compiled, COMPILED)
    ran_inside = inner_names - {event.name for event in events}
    entries = {node for nodes in compiled.values() for node in nodes}
    listed, inner = sources.split_list(facts, order, op_types, events, entries, ran_inside)
    index = SessionIndex(
        facts=facts,
        file_nodes=exported,
        subgraph_nodes={node.name: node for node in facts.subgraph_nodes if node.name},
        modules=frozenset(node.module for node in facts.graph if node.module),
        assignments={node.name: node for node in (*inner, *listed)},
        listed_in_subgraphs=inner,
        same_name_nodes=frozenset(order).intersection(node.name for node in inner),
        events=events,
        subgraphs=ran_inside,
        ran={event.name: event for event in events},
        order=order,
        present=frozenset(order),
        order_source=order_source,
        providers_by_source=sources.collect_providers(facts, events, order, compiled, listed),
        log=sources.lines_by_node(facts.log, {*order, *exported, *(node.name for node in facts.assigned or ())}),
        graph_log=sources.lines_about_the_graph(facts.log, facts.providers.values()),
        memcpy=memcpy,
        optimised=optimised,
        compiled=compiled,
    )
    return _joined(index, {node.name: node.provider for node in listed})


def _joined(index: SessionIndex, listed: Mapping[str, str]) -> SessionIndex:
    """The index with its executed nodes joined with file nodes. `listed`: main graph's entries of the assignment list.

    Nodes of inlined functions and branches are known by name; all others are joined by their tensors, without an
    optimised graph by name and operator.
    """
    facts, order, exported, optimised = index.facts, index.order, index.file_nodes, index.optimised
    assigned = dict.fromkeys(node.name for node in facts.assigned or () if node.name)
    gone, gone_inside = (
        [node for node in nodes if node.name and node.name not in assigned and node.name not in index.present]
        for nodes in (facts.graph, facts.subgraph_nodes)
    )
    inside = [name for name in assigned if name not in index.present and name not in exported]
    functions = function_nodes(facts, order, gone)
    inner_functions = function_nodes(facts, inside, gone_inside or gone) if index.listed_in_subgraphs else {}
    branches = branch_nodes((*order, *assigned), gone_inside)
    compiled = file_nodes(index.compiled, exported, order)
    unjoined = dict.fromkeys((*branches, *index.compiled), ())
    if optimised is not None:
        inputs = frozenset(port.name for port in facts.ports if port.direction == "input")
        joined = join_graphs(order, exported, optimised, inputs, compiled, {**unjoined, **functions})
        own = {name: joined.file_nodes_of[name] for name in functions if name in joined.file_nodes_of}
    else:
        own = {name: calls for name, calls in functions.items() if len(calls) == 1}
        operators = {event.name: event.op_type for event in index.events}
        executed = [ExecutedNode(name, operators.get(name), index.provider(name)) for name in order]
        nameless = {name: () for name in functions if not name.startswith(INLINED)}
        joined = join_in_order(executed, exported, listed, {**own, **compiled}, {**unjoined, **nameless})
    own |= {name: calls for name, calls in inner_functions.items() if len(calls) == 1}
    found = {**_fused_in_subgraphs(facts, inside), **own, **joined.file_nodes_of, **branches}
    possible = {name: own.get(name) or owners for name, owners in {**functions, **inner_functions}.items()}
    possible = {name: owners for name, owners in possible.items() if not name.startswith(INLINED)}
    return replace(
        index,
        file_nodes_of=found,
        rewritten_with=joined.rewritten_with,
        replacement_candidates=_ambiguous(
            {name: exported[name] for name in exported if name not in index.present},
            {**functions, **joined.ambiguous},
            found,
            listed if optimised is None else (),
        ),
        possible_functions=possible,
        blank_log={provider: _blank_lines(index, provider, possible) for provider in facts.providers if possible},
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


def _fused_in_subgraphs(facts: SessionFacts, listed: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Listed node outside the main graph -> subgraph nodes that are prefixes of its name.

    The list is made after the first fusions.
    """
    inner = {node.name for node in facts.subgraph_nodes if node.name}
    present = {node.name for node in facts.assigned or ()}
    found = {name: naming.replaced_by(name, inner - present) for name in listed if name not in inner}
    return {name: behind for name, behind in found.items() if behind}


def _blank_lines(index: SessionIndex, provider: str, nameless: Iterable[str]) -> dict[str, str]:
    """Node of `nameless` that no source places on the provider -> a log line about it, with a blank for its name.

    Lines with an operator are about its nodes, if there is a line for each. Other lines are about the remaining nodes,
    if their number is a multiple of the number of nodes: ONNX Runtime queries a provider more than once.
    """
    facts, found = index.facts, dict[str, str]()
    listed = {name for name, node in index.assignments.items() if node.provider == provider}
    homes = {name: index.providers_by_source.get(name, {}).values() for name in nameless if name not in listed}
    fallbacks = [name for name, known in homes.items() if not any(provider in each for each in known)]
    blanks = [blank for pattern in facts.of(provider).patterns if (blank := with_blank(pattern)) is not None]
    for blank in sorted(blanks, key=lambda each: "op" not in each.groupindex):
        by_operator: dict[str | None, list[str]] = {}
        for line in facts.log if fallbacks else ():
            if match := blank.search(line):
                by_operator.setdefault(match.groupdict().get("op"), []).append(line)
        for op, lines in by_operator.items():
            nodes = [name for name in fallbacks if name not in found and op in (None, index.op_type(name))]
            if nodes and (len(lines) >= len(nodes) if op else len(lines) % len(nodes) == 0):
                found |= dict.fromkeys(nodes, lines[0])
    return found


def _copied_tensors(graph: OptimisedGraph) -> dict[str, Memcpy]:
    """The copy of each Memcpy node of an optimised graph, with the file's name of the tensor."""
    return {
        name: Memcpy(node.op_type, graph.original(node.inputs[0]))
        for name, node in graph.nodes.items()
        if node.op_type in MEMCPY_OPS and node.inputs
    }
