"""Infer a contract from names and shapes: the roles of all inputs and outputs of a decoder's graphs. Pure.

Inputs that cannot be identified are errors. The test run before the first prompt finds wrong inferences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from partita import dtypes
from partita.errors import PackageError
from partita.foreign import GraphFacts, Size
from partita.foreign.evidence import EMPTY_CONTRACT, LAYER, Evidence, StateSettings, Written
from partita.foreign.ports import (
    GQA,
    ROWS_AXIS,
    Pair,
    batch_axis,
    by_name,
    fits,
    frequencies_change_at,
    growing_axis,
    layer_in,
    logits_of,
    named_sizes,
    pair_up,
    rolls,
    rows_axis,
    shares_buffer,
    window_of,
)
from partita.observations.text_format import listing, plural
from partita.package.contract import Contract, GraphFile, Phase, Port, Role, State
from partita.package.records import PortSource
from partita.remedies import Remedy

if TYPE_CHECKING:
    from partita.runtime.place.onnx_model import ModelPort

MOST_TOKENS = 4096
"""Default N: the length of a static cache unless requested."""
UNKNOWN_LENGTH = 2048
"""N where neither the user nor a configuration has a length."""
LONGEST = 1 << 24
"""The maximum of a requested length."""
HEADS_AXIS, WIDTH_AXIS = 1, 3
"""Axes of heads and head size in keys and values [B, KV heads, N, head size]."""
ROLES_OF_GENAI: Mapping[str, Role] = {
    "input_ids": "tokens",
    "attention_mask": "mask",
    "position_ids": "positions",
    "past_sequence_length": "write_start",
    "total_sequence_length": "total_length",
}
WRITTEN = "the contract file"
"""The source of settings in the user's contract."""
WRITE_CONTRACT = Remedy("specify its role in a file", options=("--contract", "FILE.toml"))
SPECIFY_AXIS = Remedy("specify its growing axis or its shape in a file", options=("--contract", "FILE.toml"))
OTHER_TYPE = Remedy("export it with a cache of 16- or 32-bit floats, or 8-bit integers")
CORRECT = Remedy("correct the contract file")


@dataclass(slots=True)
class Inference:
    """The inference for one folder: its graphs in the order of their phases, and other facts."""

    folder_path: str
    """The folder, for messages."""
    graphs: Sequence[tuple[GraphFacts, Phase]]
    evidence: Evidence
    written: Written = EMPTY_CONTRACT
    max_length: int | None = None
    """As requested by the user."""
    sources: dict[str, PortSource] = field(default_factory=dict)
    """Set by `run`, as are the notes."""
    notes: list[str] = field(default_factory=list)

    def run(self) -> Contract:
        """The contract. Raises PackageError where inference fails."""
        main, _ = next((entry for entry in self.graphs if entry[1] != "prefill"), self.graphs[0])
        self.check_written()
        roles = {graph.file: self.roles_of(graph) for graph, _ in self.graphs}
        pairs = self.states_of(main, roles[main.file])
        if not pairs:
            self.notes.append("its graph has no cache: every step runs on the whole sequence")
        presents = frozenset(pair.present.name for pair in pairs)
        logits = {graph.file: self.logits_port(graph, presents) for graph, _ in self.graphs}
        symbol = _batch_symbol(main, roles[main.file])
        batch = self.written.batch_size or (symbol if isinstance(symbol, int) else 1)
        fixed = self.fixed_length(main, pairs, symbol, roles[main.file])
        length = self.length(fixed, self.shorter_limits(main, pairs))
        vocab = self.vocab_size(logits[main.file], main)
        states = tuple(self.state(pair, main, symbol, batch, length) for pair in pairs)
        files = tuple(
            _graph_file(graph, phase, roles[graph.file], logits[graph.file], vocab) for graph, phase in self.graphs
        )
        return Contract(
            files=files,
            states=states,
            appends_chunks=self.appends_chunks(files, states, batch),
            batch_size=batch,
            max_length=length,
            vocab_size=vocab,
            weight_bytes=max(graph.model.weight_bytes for graph, _ in self.graphs),
            max_length_limit=None if fixed else self.evidence.max_length or LONGEST,
            cacheless=not states,
        )

    def check_written(self) -> None:
        """Raise PackageError for a port or states of the contract file that no graph has."""
        inputs = {port.name for graph, _ in self.graphs for port in graph.inputs}
        ports = inputs.union(port.name for graph, _ in self.graphs for port in graph.outputs)
        odd = [f"a port {name!r}" for name in self.written.ports if name not in ports]
        odd += [
            f"states {states.past!r}"
            for states in self.written.states
            if all(layer_in(states.past, name, LAYER) is None for name in inputs)
        ]
        if odd:
            raise PackageError(f"{self.folder_path}: {WRITTEN} has {odd[0]}, which no graph has", remedy=CORRECT)

    def roles_of(self, graph: GraphFacts) -> dict[str, Role]:
        """Input name -> role, for the inputs that are not states. Raises PackageError without an input of tokens."""
        named = {name: role for key, role in ROLES_OF_GENAI.items() if (name := self.evidence.names.get(key))}
        last_indices = {name for node in graph.model.nodes if node.op_type == GQA for name in node.inputs[5:6]}
        found: dict[str, tuple[Role, str]] = {}
        for port in graph.inputs:
            if role := self.written.ports.get(port.name):
                if not fits(port, role):
                    what = f"the input {port.name} {port.declared} does not have the type and rank of {role}"
                    raise self.graph_error(graph, what, CORRECT)
                found[port.name] = role, WRITTEN
            elif self.written.state(port.name) is None:
                role, source = named.get(port.name), "configuration"
                if role is None or not fits(port, role):
                    role, source = by_name(port), "name, type and shape"
                if role is not None:  # Olive names the last-index input after past lengths
                    found[port.name] = "last_index" if port.name in last_indices else role, source
        if all(role != "tokens" for role, _ in found.values()):
            shown = listing(f"{port.name} {port.declared}" for port in graph.inputs[:5]) or "none"
            what = f"no input for token ids was found; its inputs are {shown}"
            raise self.graph_error(graph, what, WRITE_CONTRACT)
        for name, (role, source) in found.items():
            other = next(each for each, (its_role, _) in found.items() if its_role == role)
            if other != name:
                what = f"inputs {other!r} and {name!r} could both be for {role}"
                raise self.graph_error(graph, what, WRITE_CONTRACT)
            self.sources[name] = PortSource(name=name, meaning=role, source=source)
        return {name: role for name, (role, _) in found.items()}

    def logits_port(self, graph: GraphFacts, presents: frozenset[str]) -> ModelPort:
        """The output of logits. Raises PackageError where it cannot be identified."""
        given = next((name for name, role in self.written.ports.items() if role == "logits"), None)
        name = given or self.evidence.names.get("logits")
        found = logits_of(graph, name, self.evidence.vocab_size, presents)
        if found is None:
            shown = listing(f"{port.name} {port.declared}" for port in graph.outputs[:5])
            what = f"no output with logits (last size = vocabulary) was found: {shown}"
            raise self.graph_error(graph, what, WRITE_CONTRACT)
        source = WRITTEN if given else "configuration" if name else "name, type and shape"
        self.sources[found.name] = PortSource(name=found.name, meaning="logits", source=source)
        return found

    def vocab_size(self, logits: ModelPort, graph: GraphFacts) -> int:
        """The last size of the logits, else that of the contract file or the configuration."""
        size, expected = logits.shape[-1] if logits.shape else None, self.evidence.vocab_size
        if isinstance(size, int) and expected not in (0, size):
            raise PackageError(
                f"{self.folder_path}: {self.evidence.source} contradicts the graph: its vocabulary has {expected:,} "
                f"tokens, but the logits of {graph.file} have {size:,}"
            )
        found = size if isinstance(size, int) else self.written.vocab_size or expected
        if not found:
            raise self.graph_error(graph, "the vocabulary size is unknown", WRITE_CONTRACT)
        return found

    def states_of(self, graph: GraphFacts, roles: Mapping[str, Role]) -> list[Pair]:
        """The states of a graph. Raises PackageError for inputs that are neither ports nor states."""
        written: list[Pair] = []
        inputs: list[ModelPort] = []
        for port in graph.inputs:
            if port.name in roles:
                continue
            if (found := self.written.state(port.name)) is None:
                inputs.append(port)
                continue
            states, layer = found
            name = states.present.replace(LAYER, str(layer))
            if (present := graph.output(name)) is None:
                what = f"has the input {port.name!r}, but lacks the output {name!r} of the contract"
                raise self.graph_error(graph, what, CORRECT)
            written.append(Pair(port, present, layer, states.kind, WRITTEN))
        presents = {pair.present.name for pair in written}
        outputs = [port for port in graph.outputs if port.name not in presents]
        inferred, unidentified = pair_up(inputs, outputs, self.evidence.names)
        if unidentified:
            first, more = unidentified[0], len(unidentified) - 1
            others = f" ({plural(more, 'other input')} likewise)" if more else ""
            what = f"the input {first.name} {first.declared} cannot be identified by its name, type and shape{others}"
            raise self.graph_error(graph, what, WRITE_CONTRACT)
        pairs = sorted([*written, *inferred], key=lambda pair: (pair.layer, pair.past.name))
        for pair in pairs:
            meaning = f"{pair.kind} of layer {pair.layer}"
            for port in (pair.past, pair.present):
                self.sources[port.name] = PortSource(name=port.name, meaning=meaning, source=pair.source)
        return pairs

    def state(self, pair: Pair, graph: GraphFacts, symbol: Size, batch: int, length: int) -> State:
        """One state. Raises PackageError where its shape or growing axis is unknown, and for an unsupported type."""
        element = dtypes.find(pair.past.dtype)
        if element is not None and element.storage is None:
            raise self.state_error(pair, f"numpy has no type for {element.name}", OTHER_TYPE)
        declared = self.settings(pair)
        shared, of_batch = shares_buffer(pair, graph), batch_axis(symbol, pair.past)
        in_place = shared if declared.in_place is None else declared.in_place
        axis = ROWS_AXIS if shared else growing_axis(pair, graph, of_batch)
        if declared.grows is not None:
            axis = None if declared.grows is False else declared.grows
        if axis is not None and not 0 <= axis < len(pair.shape):
            raise self.state_error(pair, f"it lacks axis {axis}")
        rows = window_of(pair, graph) or length if rolls(pair, graph) else length
        return State(
            past=pair.past.name,
            present=pair.present.name,
            layer=pair.layer,
            kind=pair.kind,
            shape=self.shape(pair, declared.shape, {of_batch: batch, axis: rows}, {"B": batch, "N": length}),
            dtype=pair.past.dtype,
            window=window_of(pair, graph),
            rolling=rolls(pair, graph),
            growing_axis=None if in_place else axis,
            in_place=in_place,
        )

    def settings(self, pair: Pair) -> StateSettings:
        """The settings of a state in the contract file."""
        found = self.written.state(pair.past.name)
        return StateSettings() if found is None else found[0]

    def shape(
        self, pair: Pair, given: Sequence[int | str] | None, axes: Mapping[int | None, int], symbols: Mapping[str, int]
    ) -> tuple[int, ...]:
        """The sizes of a state: fixed ones, those of `axes`, and those of the configuration.

        `given`: the shape in the contract file, with `symbols`. Raises PackageError for an unknown size.
        """
        declared = pair.past.shape
        if given is not None:
            sizes = tuple(symbols[size] if isinstance(size, str) else size for size in given)
            fixed = declared if declared is not None else sizes
            if len(sizes) != len(fixed) or any(
                isinstance(known, int) and known != size for known, size in zip(fixed, sizes, strict=True)
            ):
                what = f"the contract gives it the shape [{', '.join(map(str, given))}], which contradicts the graph"
                raise self.state_error(pair, what, CORRECT)
            return sizes
        if declared is None:
            raise self.state_error(pair, "its rank is not declared")
        found: list[int] = []
        for axis, size in enumerate(declared):
            known = size if isinstance(size, int) else axes.get(axis) or self.configured_size(pair, axis)
            if not isinstance(known, int):
                called = f" ({size})" if isinstance(size, str) else ""
                raise self.state_error(pair, f"the size of axis {axis}{called} is symbolic and unknown")
            found.append(known)
        return tuple(found)

    def configured_size(self, pair: Pair, axis: int) -> int | None:
        """A size of keys and values [B, KV heads, T, head size] that the graph leaves open."""
        if pair.kind not in ("key", "value") or len(pair.shape) != WIDTH_AXIS + 1:
            return None
        packed = pair.past.dtype == "uint8"  # two 4-bit numbers per byte
        width = self.evidence.head_size // 2 if packed else self.evidence.head_size
        return {HEADS_AXIS: self.evidence.kv_heads, WIDTH_AXIS: width}.get(axis) or None

    def fixed_length(
        self, graph: GraphFacts, pairs: Sequence[Pair], symbol: Size, roles: Mapping[str, Role]
    ) -> int | None:
        """The length of the cache, where the graph fixes it for all keys."""
        masks = [graph.input(name) for name, role in roles.items() if role == "mask"]
        lengths = frozenset(port.shape[-1] for port in masks if port is not None and port.shape)
        sizes: list[Size] = []
        for pair in pairs:
            axis = self.settings(pair).grows
            if axis is None or axis is False:
                axis = rows_axis(pair, graph, batch_axis(symbol, pair.past), lengths)
            if pair.kind == "key" and axis is not None and axis < len(pair.shape) and not rolls(pair, graph):
                sizes.append(pair.shape[axis])
        fixed = [size for size in sizes if isinstance(size, int)]
        return min(fixed) if fixed and len(fixed) == len(sizes) else None

    def length(self, fixed: int | None, limits: Sequence[tuple[int, str]]) -> int:
        """N: the fixed length, or as requested; else the configuration's default or limit, capped.

        `limits`: lengths up to which outputs match the model, with the reasons; exceeded only on request. Raises
        PackageError for a request above the limit of graph and configuration.
        """
        source, asked = self.evidence.source, self.max_length or self.written.max_length
        most = fixed or self.evidence.max_length
        if asked and most and asked > most:
            allows = "the graph" if fixed else source
            raise PackageError(f"{self.folder_path}: `max_length={asked}`: {allows} allows {most}")
        if fixed and self.max_length and self.max_length < fixed:
            self.notes.append(
                f"`max_length={self.max_length}`: ignored, the cache of this graph has a fixed length of {fixed:,} "
                "tokens"
            )
        usual = min(filter(None, (self.evidence.usual_length, most)), default=0)
        chosen = fixed or asked
        length = chosen or min(usual or UNKNOWN_LENGTH, MOST_TOKENS)
        shorter, reason = min(limits, default=(length, ""))
        if shorter < length:
            used = "" if chosen else f"the maximum length is {shorter:,} tokens; "
            self.notes.append(f"{reason}: {used}results for longer sequences may differ from the model")
            return length if chosen else shorter
        if not (chosen or usual):
            self.notes.append(f"the maximum length is unknown: {UNKNOWN_LENGTH:,} tokens are used")
        elif not chosen and length < (most or usual):
            self.notes.append(f"{source} supports {most or usual:,} tokens; {length:,} are used")
        return length

    def shorter_limits(self, graph: GraphFacts, pairs: Sequence[Pair]) -> list[tuple[int, str]]:
        """Lengths up to which outputs match the model, where they are limited, with the reasons."""
        source, window, found = self.evidence.source, self.evidence.window, []
        if window and not self.may_have_window(graph, pairs):
            found.append((window, f"{source} has a window of {window:,} tokens, but the graph's attention has none"))
        in_graph = frequencies_change_at(graph)
        if length := in_graph or self.evidence.rope_length:
            user = "the graph uses" if in_graph else "config.json has"
            reason = f"{user} other rotary frequencies beyond {length:,} tokens, for which the cached keys are wrong"
            found.append((length, reason))
        return found

    def may_have_window(self, graph: GraphFacts, pairs: Sequence[Pair]) -> bool:
        """Whether attention operators have a window, or standard operators may have the configuration's in a mask."""
        makers = [graph.producers.get(pair.present.name) for pair in pairs]
        if any(window_of(pair, graph) for pair in pairs):
            return True
        if makers and all(node is not None and node.op_type == GQA for node in makers):
            return False
        sizes = {abs(number) - self.evidence.window for each, _ in self.graphs for number in each.integers.values()}
        return not sizes.isdisjoint((-1, 0, 1)) or any(each.has_masks for each, _ in self.graphs)

    def appends_chunks(self, files: Sequence[GraphFile], states: Sequence[State], batch: int) -> bool:
        """Whether a step may have several tokens after past ones."""
        if self.written.appends_chunks is not None:
            return self.written.appends_chunks
        # optimum traced its branch for past for one token
        merged = any(port.role == "cache_branch" for file in files for port in file.inputs)
        if merged or len(files) > 1:
            self.notes.append(
                "tokens after the first prefill run one at a time, because its graph with past may support no more"
            )
            return False
        # the CPU kernel of GroupQueryAttention supports past in a prompt for one sequence only
        return batch == 1 or not any(state.in_place for state in states)

    def graph_error(self, graph: GraphFacts, what: str, remedy: Remedy | None = None) -> PackageError:
        """The error for a graph."""
        return PackageError(f"{self.folder_path}/{graph.file}: {what}", remedy=remedy)

    def state_error(self, pair: Pair, what: str, remedy: Remedy = SPECIFY_AXIS) -> PackageError:
        """The error for a state."""
        past = f"{pair.past.name} {pair.past.declared}"
        return PackageError(f"{self.folder_path}: the cache input {past}: {what}", remedy=remedy)


def _batch_symbol(graph: GraphFacts, roles: Mapping[str, Role]) -> Size:
    """The first size of the tokens: the name or number of the batch size."""
    shape = next(port.shape for port in graph.inputs if roles.get(port.name) == "tokens") or ()
    return shape[0] if len(shape) > 1 else 1  # ids [S] are one sequence


def _graph_file(graph: GraphFacts, phase: Phase, roles: Mapping[str, Role], logits: ModelPort, vocab: int) -> GraphFile:
    """One ONNX file with its ports."""
    ports = [
        Port(name=port.name, role=roles[port.name], shape=named_sizes(port), dtype=port.dtype)
        for port in graph.inputs
        if port.name in roles
    ]
    tokens = next(port for port in ports if port.role == "tokens")
    fixed = tokens.shape[-1] if tokens.shape else None
    sizes = (*named_sizes(logits)[:-1], vocab) if logits.shape else ()
    scores = Port(name=logits.name, role="logits", shape=sizes, dtype=logits.dtype)
    return GraphFile(
        file=graph.file,
        phase=phase,
        sequence_length=fixed if isinstance(fixed, int) else None,
        nodes=len(graph.model.nodes) + len(graph.model.subgraph_nodes),
        inputs=tuple(ports),
        outputs=(scores,),
    )
