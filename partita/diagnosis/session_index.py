"""The facts of one session, indexed by node name. Joins the sources and draws no conclusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from partita.diagnosis import naming, sources
from partita.diagnosis.graphs import (
    COMPILED,
    CONTROL_FLOW,
    FOLDED,
    MEMCPY_OPS,
    Graph,
    OptimisedGraph,
    compiled_subgraphs,
    file_nodes,
)
from partita.diagnosis.join import Join
from partita.diagnosis.sources import ProvidersBySource
from partita.diagnosis.unnamed_nodes import branch_nodes, function_nodes, op_types_of, with_names
from partita.observations.facts import AssignedNode, GraphNode, SessionFacts
from partita.observations.grouping import grouped
from partita.observations.names import INLINED
from partita.observations.records import PhaseName, Source

PHASES: tuple[PhaseName, ...] = ("prefill", "decode")
"""Phases of a generation, in order."""
EVERY_PHASE: tuple[PhaseName, ...] = (*PHASES, "run")


class SessionIndex:
    """One session's facts by node name."""

    def __init__(self, facts: SessionFacts) -> None:
        self.facts = facts = with_names(facts)
        self.events, inner_names = sources.main_graph_events(facts.events)
        """Events of the main graph, whose control-flow nodes include the time of their subgraphs."""
        self.subgraphs = inner_names - {event.name for event in self.events}
        """Nodes that ran only in control-flow subgraphs."""
        self.order, self.order_source = sources.execution_order(facts, self.events)
        """Every node once, in execution order, and the source of the order."""
        self.present = frozenset(self.order)
        self.file = Graph(node for node in facts.graph if node.name)
        """The main graph of the ONNX file."""
        self.file_nodes = self.file.nodes
        self.subgraph_nodes = {node.name: node for node in facts.subgraph_nodes if node.name}
        """Nodes in control-flow subgraphs."""
        self.modules = frozenset(node.module for node in facts.graph if node.module)
        self.optimised = OptimisedGraph(facts.optimised, facts.graph) if facts.optimised is not None else None
        """The executed graph; None if unknown."""
        self.compiled = compiled_subgraphs(facts.assigned or (), dict.fromkeys(self.order), self.file_nodes)
        """Compiled subgraph of the order -> its listed nodes."""
        known = op_types_of(facts.graph, self.events)
        self.memcpy = self.optimised.copies() if self.optimised else sources.copied_in_log(facts.log, self.order, known)
        """Memcpy node of the order -> its copy; empty if neither optimised graph nor log has it."""
        self.op_types = {name: copy.op_type for name, copy in self.memcpy.items()}
        self.op_types |= op_types_of(facts.assigned, facts.graph, facts.optimised, self.events)
        self.op_types |= dict.fromkeys(self.compiled, COMPILED)
        self.op_types.pop("", None)  # of nodes without a name
        listed, self.listed_in_subgraphs = self._split_list()
        """Listed nodes of the main graph, and nodes that are or may be in control-flow subgraphs."""
        self.assignments = {node.name: node for node in (*self.listed_in_subgraphs, *listed)}
        """Entry of the assignment list by name; for a name of several graphs, the entry of the main graph."""
        self.same_name_nodes = self.present.intersection(node.name for node in self.listed_in_subgraphs)
        """Names of both a node of the order and a node of `listed_in_subgraphs`."""
        self.providers_by_source = self._providers(listed)
        names = {*self.order, *self.file_nodes, *(node.name for node in facts.assigned or ())}
        self.log = sources.lines_by_node(facts.log, names)
        """Native log lines that mention a node of the order, of the file or of the assignment list."""
        self.graph_log = sources.lines_about_the_graph(facts.log, facts.providers.values())
        """Native log lines with a reason and no node."""
        self._join({node.name: node.provider for node in listed})

    def _split_list(self) -> tuple[tuple[AssignedNode, ...], tuple[AssignedNode, ...]]:
        """The entries of the assignment list in the main graph, and those in control-flow subgraphs.

        The list does not name the graph, and a node name is unique only within a graph. So the entries of a name are
        counted: as many as the main graph has belong to it. An entry without evidence counts as in a subgraph, so that
        a check never passes wrongly. ONNX Runtime partitions subgraphs first, so the last entry of a name is in the
        main graph.
        """
        facts, listed = self.facts, self.facts.assigned or ()
        optimised = [bool(node.subgraph_nodes) for node in facts.optimised or ()]
        if not any(optimised or (self.op_type(name) in {*CONTROL_FLOW, COMPILED, None} for name in self.order)):
            return listed, ()
        compiled = {node for nodes in self.compiled.values() for node in nodes}
        executed = Counter(name for stream in facts.plan or (self.order,) for name in stream)
        in_main, in_subgraphs = (
            Counter(node.name for node in nodes if node.name) for nodes in (facts.graph, facts.subgraph_nodes)
        )
        ran_on = sources.providers_by_device(facts) | {event.name: event.provider for event in self.events}
        below = {*in_subgraphs, *(node.name for node in facts.graph if node.op_type in CONTROL_FLOW)}
        counts, names = in_main - Counter(node.name for node in compiled), {*in_main, *in_subgraphs}
        left = [place for place, node in enumerate(listed) if node not in compiled]
        # Nodes without a name are distinguished by operator.
        groups = grouped(left, lambda at: (listed[at].name, "" if listed[at].name else listed[at].op_type))
        inner: set[int] = set()
        for (name, _), places in groups.items():
            # E.g. MatMul, Add and Relu before an If: the list has NAME/MatMulAddFusion, the plan a node that fuses it.
            fused = name not in in_subgraphs and name not in self.subgraphs
            begins = naming.replaced_by(name, names) if fused else ()
            if begins and begins[-1] not in below:
                continue
            op, home = self.op_type(name), ran_on.get(name)
            ranked = sorted((listed[at].op_type == op, listed[at].provider == home, at) for at in places)
            rest = sorted(at for *_, at in ranked[: max(len(places) - executed[name], 0)])
            most = in_subgraphs[name] if counts[name] and in_subgraphs[name] else len(places) - counts[name]
            inner.update(rest[: max(most, 0)])
        main = tuple(node for at, node in enumerate(listed) if at not in inner)
        return main, tuple(listed[at] for at in sorted(inner))

    def _providers(self, listed: Iterable[AssignedNode]) -> dict[str, ProvidersBySource]:
        """Providers by source for each node of the order, strongest first. `listed`: nodes of the main graph."""
        by_source: dict[Source, dict[str, set[str]]] = {"profile": {}, "assignment": {}}
        for event in self.events:
            by_source["profile"].setdefault(event.name, set()).add(event.provider)
        compiled = ((name, node) for name, nodes in self.compiled.items() for node in nodes)
        for name, node in (*((node.name, node) for node in listed), *compiled):
            by_source["assignment"].setdefault(name, set()).add(node.provider)
        by_device = sources.providers_by_device(self.facts)
        unknown = self.present & by_device.keys() - by_source["profile"].keys() - by_source["assignment"].keys()
        by_source["plan_file"] = {name: {by_device[name]} for name in unknown}
        return {
            name: {source: frozenset(by_node[name]) for source, by_node in by_source.items() if name in by_node}
            for name in self.order
        }

    def _join(self, listed: Mapping[str, str]) -> None:
        """Join the executed nodes with file nodes. `listed`: main graph's entries of the assignment list.

        Nodes of inlined functions and branches are known by name; all others are joined by their tensors, without an
        optimised graph by name and operator.
        """
        facts, order, file = self.facts, self.order, self.file
        assigned = dict.fromkeys(node.name for node in facts.assigned or () if node.name)
        gone, gone_inside = (
            [node for node in nodes if node.name and node.name not in assigned and node.name not in self.present]
            for nodes in (facts.graph, facts.subgraph_nodes)
        )
        inside = [name for name in assigned if name not in self.present and name not in file.nodes]
        functions = function_nodes(facts, order, gone)
        inner_functions = function_nodes(facts, inside, gone_inside or gone) if self.listed_in_subgraphs else {}
        branches = branch_nodes((*order, *assigned), gone_inside)
        compiled = file_nodes(self.compiled, file, order)
        known = dict.fromkeys((*branches, *self.compiled), ())
        if self.optimised is not None:
            executed = self.optimised.nodes
            join = Join({name: executed[name].op_type if name in executed else None for name in order}, file, compiled)
            inputs = {port.name for port in facts.ports if port.direction == "input"}
            join.by_tensors(self.optimised, inputs, {**known, **functions})
            own = {name: join.file_nodes_of[name] for name in functions if name in join.file_nodes_of}
        else:
            own = _single(functions)
            ran = op_types_of(self.events)
            join = Join({name: ran.get(name) for name in order}, file, {**own, **compiled})
            nameless = (name for name in functions if not name.startswith(INLINED))
            join.by_names(listed, {name: self.provider(name) for name in order}, {*known, *nameless})
        own |= _single(inner_functions)
        # The list is made after the first fusions: its names may begin with the names of subgraph nodes.
        inner = self.subgraph_nodes.keys() - assigned.keys()
        fused = {name: naming.replaced_by(name, inner) for name in inside if name not in self.subgraph_nodes}
        fused = {name: behind for name, behind in fused.items() if behind}
        self.file_nodes_of = {**fused, **own, **join.file_nodes_of, **branches}
        """Executed node -> the file nodes that it replaces."""
        self.rewritten_with = join.rewritten_with
        """Executed node that ONNX Runtime added when it rewrote file nodes -> those file nodes."""
        self.replacement_candidates = self._candidates(
            {**functions, **join.ambiguous}, listed if self.optimised is None else ()
        )
        """File node that is executed under an unknown name -> executed nodes that may replace it."""
        self.possible_functions = {
            name: own.get(name) or owners
            for name, owners in {**functions, **inner_functions}.items()
            if not name.startswith(INLINED)
        }
        """Executed node without a name -> the file nodes (functions) that may contain it."""
        self.blank_log = {name: self._blank_lines(name) for name in facts.providers if self.possible_functions}
        """Provider -> node of `possible_functions` -> a native log line about it with a blank in place of the name."""

    def _candidates(
        self, undecided: Mapping[str, Sequence[str]], assigned: Iterable[str]
    ) -> dict[str, tuple[str, ...]]:
        """File nodes that are executed under an unknown name -> executed nodes that may replace them.

        Args:
            undecided: Executed node -> file nodes that it may replace in part.
            assigned: Nodes that were assigned to a provider after constant folding.
        """
        done = self.present.union(*self.file_nodes_of.values())
        unknown = {name for name, node in self.file_nodes.items() if name not in done and node.op_type not in FOLDED}
        found: dict[str, tuple[str, ...]] = {name: () for name in assigned if name in unknown}
        for executed, owners in undecided.items():
            for name in owners if executed not in self.file_nodes_of else ():
                if name in unknown:
                    found[name] = (*found.get(name, ()), executed)
        return found

    def _blank_lines(self, provider: str) -> dict[str, str]:
        """Node without a name that no source places on the provider -> a log line about it, with a blank for its name.

        Lines with an operator are about its nodes, if there is a line for each. Other lines are about the remaining
        nodes, if their number is a multiple of the number of nodes: ONNX Runtime queries a provider more than once.
        """
        facts, found = self.facts, dict[str, str]()
        listed = {name for name, node in self.assignments.items() if node.provider == provider}
        homes = {name: self.providers_by_source.get(name, {}).values() for name in self.possible_functions}
        fallbacks = [
            name for name, known in homes.items() if name not in listed and not any(provider in each for each in known)
        ]
        blanks = [blank for pattern in facts.of(provider).patterns if (blank := pattern.with_blank) is not None]
        for blank in sorted(blanks, key=lambda each: "op" not in each.groupindex):
            matches = [match for line in facts.log if fallbacks and (match := blank.search(line))]
            for op, about in grouped(matches, lambda match: match.groupdict().get("op")).items():
                nodes = [name for name in fallbacks if name not in found and op in (None, self.op_type(name))]
                if nodes and (len(about) >= len(nodes) if op else len(about) % len(nodes) == 0):
                    found |= dict.fromkeys(nodes, about[0].string)
        return found

    def op_type(self, name: str) -> str | None:
        """Operator of a node: from the run, else from the optimised graph, the file, the assignment list or the log."""
        return self.op_types.get(name)

    def provider(self, name: str) -> str | None:
        """Provider of a node of the order, from the strongest source; None without a source."""
        return next((min(providers) for providers in self.providers_by_source[name].values()), None)

    def module(self, name: str, *, in_subgraph: bool = False) -> str | None:
        """Module path of a node: from the file, else from the name, else the common path of its file nodes.

        `in_subgraph`, here and in `of_file`: the node with this name in a control-flow subgraph.
        """
        node = self.of_file(name, in_subgraph=in_subgraph)
        if node is not None:
            return node.module
        by_name = naming.module_of(name, self.modules)
        replaced = self.replaces(name, in_subgraph=in_subgraph)
        known = map(self.of_file, replaced)
        return by_name or naming.common_module(node.module for node in known if node is not None)

    def of_file(self, name: str, *, in_subgraph: bool = False) -> GraphNode | None:
        """The file node of a name, in a control-flow subgraph if the main graph has none; None without one."""
        return (None if in_subgraph else self.file_nodes.get(name)) or self.subgraph_nodes.get(name)

    @property
    def has_subgraphs(self) -> bool:
        """Whether a control-flow node is executed. ONNX Runtime replaces an If with constant condition by a branch."""
        return any(self.op_type(name) in CONTROL_FLOW for name in self.order)

    def in_subgraphs(self) -> tuple[AssignedNode, ...] | None:
        """Nodes of the assignment list in control-flow subgraphs; None without control flow in the file or the run.

        Control flow inside functions is only in the executed graph.
        """
        in_file = any(node.op_type in CONTROL_FLOW for node in self.file_nodes.values())
        return self.listed_in_subgraphs if in_file or self.has_subgraphs else None

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


def _single(functions: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The nodes of functions with a single call."""
    return {name: calls for name, calls in functions.items() if len(calls) == 1}
