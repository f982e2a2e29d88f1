"""Infer a contract from plain facts: the roles of all inputs and outputs of a decoder's graphs. Pure.

Inputs that cannot be identified, and contradictions between configuration and graph, are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.errors import PackageError
from partita.foreign import GraphFacts, PortFact, Size
from partita.foreign.evidence import EMPTY_CONTRACT, LAYER, Evidence, Written
from partita.foreign.layouts import MERGED, Phase
from partita.foreign.ports import INTEGERS, Meaning, by_name, called_otherwise, fits, logits_of, tokens_by_use
from partita.foreign.shapes import CORRECT, Shapes, ShorterLimit, batch_axis, length_of, longest_of
from partita.foreign.states import GQA, Pair, frequencies_change_at, layer_in, pair_up, rolls, rows_axis, window_of
from partita.observations.text_format import listing, plural
from partita.package.contract import Contract, Dimension, GraphFile, Port, Role, State
from partita.package.records import PortSource
from partita.remedies import Remedy

ROLES_OF_GENAI: Mapping[str, Role] = {
    "input_ids": "tokens",
    "attention_mask": "mask",
    "position_ids": "positions",
    "past_sequence_length": "write_start",
    "total_sequence_length": "total_length",
}
CURSORS: frozenset[Role] = frozenset(("mask", "positions", "last_index", "total_length", "write_start", "valid_length"))
"""Roles that define the valid rows of a cache."""
WRITTEN = "the contract file"
"""The source of settings in the user's contract."""
WRITE_CONTRACT = Remedy("specify its role in a file", options=("--contract", "FILE.toml"))
OTHER_INPUT = Remedy(
    "export the model with a supported input, or specify the role of this input in a file",
    options=("--contract", "FILE.toml"),
)
OTHER_FILE = Remedy("choose another file of the folder", options=("--variant", "NAME"))


@dataclass(frozen=True, slots=True)
class InferredContract:
    """The result of the inference."""

    contract: Contract
    ports: tuple[PortSource, ...]
    notes: tuple[str, ...]


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
    notes: list[str] = field(default_factory=list)

    def run(self) -> InferredContract:
        """The contract. Raises PackageError where inference fails."""
        main = next((graph for graph, phase in self.graphs if phase != "prefill"), self.graphs[0][0])
        self.check_written()
        meant = {graph.file: self.inputs_of(graph) for graph, _ in self.graphs}
        pairs = self.states_of(main, meant[main.file])
        if not pairs:
            self.check_causal(main)
        for graph, phase in self.graphs:
            self.check_states(graph, phase, meant[graph.file], pairs)
        presents = frozenset(pair.present.name for pair in pairs)
        logits = {graph.file: self.logits_port(graph, presents) for graph, _ in self.graphs}
        batch = self.batch_size(main, meant[main.file])
        whole = [pair for pair in pairs if not rolls(pair, main)]
        axes = [self.rows_of(pair, main, meant[main.file]) for pair in whole]
        length = length_of(
            self.folder_path,
            whole,
            axes,
            self.evidence,
            self.written,
            self.max_length,
            self.notes,
            short=self.shorter_limit(main, pairs),
        )
        vocab = self.vocab_size(logits[main.file], main)
        symbol = self.batch_symbol(main, meant[main.file])
        cursors = frozenset(name for name, meaning in meant[main.file].items() if meaning.role in CURSORS)
        shapes = Shapes(self.folder_path, main, self.evidence, self.written, symbol, batch, length, cursors)
        states = tuple(map(shapes.state, pairs))
        files = tuple(
            self.file(graph, phase, meant[graph.file], logits[graph.file], vocab) for graph, phase in self.graphs
        )
        return InferredContract(
            Contract(
                files=files,
                states=states,
                appends_chunks=self.appends_chunks(files, states, batch),
                batch_size=batch,
                max_length=length,
                vocab_size=vocab,
                weight_bytes=max(graph.weight_bytes for graph, _ in self.graphs),
                max_length_limit=longest_of(whole, axes, self.evidence),
                cacheless=not states,
            ),
            tuple(self.sources.values()),
            tuple(self.notes),
        )

    def check_written(self) -> None:
        """Raise PackageError for a port or states of the contract file that no graph has."""
        there = {port.name for graph, _ in self.graphs for port in (*graph.inputs, *graph.outputs)}
        odd = [name for name in self.written.ports if name not in there]
        if odd:
            raise PackageError(
                f"{self.folder_path}: {WRITTEN} has a port {odd[0]!r}, which is in none of the graphs", remedy=CORRECT
            )
        inputs = {port.name for graph, _ in self.graphs for port in graph.inputs}
        for states in self.written.states:
            if all(layer_in(states.past, name, LAYER) is None for name in inputs):
                raise PackageError(
                    f"{self.folder_path}: {WRITTEN} has states {states.past!r}, but no graph has this input",
                    remedy=CORRECT,
                )

    # --- inputs and outputs -------------------------------------------------------------------------------------------

    def inputs_of(self, graph: GraphFacts) -> dict[str, Meaning]:
        """Input name -> role, for the inputs that are not states. Raises PackageError without an input of tokens."""
        named = {name: role for key, role in ROLES_OF_GENAI.items() if (name := self.evidence.names.get(key))}
        found: dict[str, Meaning] = {}
        for port in graph.inputs:
            if port.name in self.written.ports:
                role = self.written.ports[port.name]
                if not fits(port, role):
                    raise self.graph_error(
                        graph, f"the input {port.declared} does not have the type and rank of {role}"
                    )
                found[port.name] = Meaning(role, WRITTEN)
            elif self.written.state(port.name) is None and (meaning := by_name(port, named)) is not None:
                # Olive names the last-index input after past lengths.
                last = any(node.op_type == GQA and node.inputs[5:6] == (port.name,) for node in graph.nodes)
                found[port.name] = replace(meaning, role="last_index") if last else meaning
        if all(meaning.role != "tokens" for meaning in found.values()):
            unidentified = {port.name: port for port in graph.inputs if port.name not in found}
            name = tokens_by_use(graph, unidentified)
            if name is None:
                raise self.no_tokens(graph)
            found[name] = Meaning("tokens", "the graph")
        roles: dict[str, str] = {}
        for name, meaning in found.items():
            if meaning.role in roles:
                raise self.graph_error(
                    graph,
                    f"inputs {roles[meaning.role]!r} and {name!r} could both be for {meaning.role}",
                    WRITE_CONTRACT,
                )
            roles[meaning.role] = name
            self.sources[name] = PortSource(name=name, meaning=meaning.role, source=meaning.source)
        return found

    def no_tokens(self, graph: GraphFacts) -> PackageError:
        """The error for a graph without token ids."""
        embeds = [port.name for port in graph.inputs if "embed" in port.name.lower()]
        if embeds:
            return self.graph_error(
                graph,
                f"takes embeddings ({embeds[0]!r}) instead of token ids, so it is one component of a "
                "multi-file model, which Partita does not support",
                OTHER_FILE,
            )
        shown = listing(port.declared for port in graph.inputs[:5]) or "none"
        return self.graph_error(graph, f"no input for token ids was found; its inputs are {shown}", WRITE_CONTRACT)

    def logits_port(self, graph: GraphFacts, presents: frozenset[str]) -> PortFact:
        """The output of logits. Raises PackageError where it cannot be identified."""
        given = [name for name, role in self.written.ports.items() if role == "logits"]
        logits_name = given[0] if given else self.evidence.names.get("logits")
        found = logits_of(graph, logits_name, self.evidence.vocab_size, presents)
        if found is None:
            shown = listing(port.declared for port in graph.outputs[:5])
            raise self.graph_error(
                graph, f"no output with logits (last size = vocabulary) was found: {shown}", WRITE_CONTRACT
            )
        source = WRITTEN if given else "configuration" if logits_name else "name, type and shape"
        self.sources[found.name] = PortSource(name=found.name, meaning="logits", source=source)
        return found

    # --- states -------------------------------------------------------------------------------------------------------

    def states_of(self, graph: GraphFacts, meant: Mapping[str, Meaning]) -> list[Pair]:
        """The states of a graph. Raises PackageError for inputs that are neither ports nor states."""
        pairs: list[Pair] = []
        rest: list[PortFact] = []
        for port in graph.inputs:
            if port.name in meant:
                continue
            pair = self.written_pair(port, graph)
            pairs += [pair] if pair is not None else []
            rest += [port] if pair is None else []
        outputs = [port for port in graph.outputs if all(port.name != pair.present.name for pair in pairs)]
        found, unidentified = pair_up(rest, outputs, graph, self.evidence.names)
        if unidentified:
            raise self.not_understood(graph, unidentified)
        pairs = sorted([*pairs, *found], key=lambda pair: (pair.layer, pair.past.name))
        for pair in pairs:
            meaning = f"{pair.kind} of layer {pair.layer}"
            for port in (pair.past, pair.present):
                self.sources[port.name] = PortSource(name=port.name, meaning=meaning, source=pair.source)
        return pairs

    def written_pair(self, port: PortFact, graph: GraphFacts) -> Pair | None:
        """The pair in the contract file. Raises PackageError where its output does not exist."""
        found = self.written.state(port.name)
        if found is None:
            return None
        states, layer = found
        name = states.present.replace("{layer}", str(layer))
        present = graph.output(name)
        if present is None:
            raise self.graph_error(graph, f"has the input {port.name!r}, but lacks the output {name!r} of the contract")
        return Pair(port, present, layer, states.kind, WRITTEN)

    def check_causal(self, graph: GraphFacts) -> None:
        """Raise PackageError for a graph without a cache that may not be a decoder: text encoders look the same."""
        architecture = self.evidence.architecture
        if architecture and not self.evidence.is_causal:
            raise self.graph_error(
                graph,
                (f"has no cache, and {architecture} is not the name of a decoder, so it may not be able to generate"),
            )
        self.notes.append("its graph has no cache: every step runs on the whole sequence")

    def not_understood(self, graph: GraphFacts, unidentified: Sequence[PortFact]) -> PackageError:
        """The error for inputs that cannot be identified."""
        first = unidentified[0]
        others = f" ({plural(len(unidentified) - 1, 'other input')} likewise)" if len(unidentified) > 1 else ""
        if (sign := called_otherwise(first)) is not None:
            what = (
                f"the input {first.declared} is named like {sign.role}, for which Partita supplies {sign.forms}{others}"
            )
            return self.graph_error(graph, what, OTHER_INPUT)
        if first.dtype in INTEGERS or first.shape is None or len(first.shape) < 3:
            what = f"the input {first.declared} cannot be identified by its name, type and shape"
        else:
            what = f"the cache input {first.declared} cannot be identified: it has no matching output"
        return self.graph_error(graph, f"{what}{others}", WRITE_CONTRACT)

    def check_states(
        self, graph: GraphFacts, phase: Phase, meant: Mapping[str, Meaning], pairs: Sequence[Pair]
    ) -> None:
        """Raise PackageError when the graphs of a pair have different states."""
        pasts = {pair.past.name for pair in pairs}
        given = {port.name for port in graph.outputs}
        odd = [port for port in graph.inputs if port.name not in meant and port.name not in pasts]
        if odd:
            raise self.not_understood(graph, odd)
        lacking = [pair.present.name for pair in pairs if pair.present.name not in given]
        if lacking:
            raise self.graph_error(
                graph, f"lacks the output {lacking[0]!r}, which continues the other graph's cache", OTHER_FILE
            )
        if phase != "prefill" and pasts - {port.name for port in graph.inputs}:
            raise self.graph_error(graph, "lacks cache inputs of the other graph", OTHER_FILE)

    def rows_of(self, pair: Pair, graph: GraphFacts, meant: Mapping[str, Meaning]) -> int | None:
        """The axis of a state with one entry per token: of the contract file, else of the graph."""
        found = self.written.state(pair.past.name)
        if found is not None and found[0].grows not in (None, False):
            return found[0].grows
        ports = [graph.input(name) for name, meaning in meant.items() if meaning.role == "mask"]
        masks = [port.shape for port in ports if port is not None and port.shape]
        lengths = frozenset(shape[-1] for shape in masks if isinstance(shape[-1], int))
        batch = batch_axis(self.batch_symbol(graph, meant), pair.past)
        return rows_axis(pair, graph, batch, lengths)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def batch_symbol(self, graph: GraphFacts, meant: Mapping[str, Meaning]) -> Size:
        """The first size of the tokens: the name or number of the batch size."""
        name = next(name for name, meaning in meant.items() if meaning.role == "tokens")
        port = graph.input(name)
        shape = () if port is None else port.shape or ()
        return shape[0] if len(shape) > 1 else 1  # ids [S] are one sequence

    def batch_size(self, graph: GraphFacts, meant: Mapping[str, Meaning]) -> int:
        """B: fixed by the graph, else of the contract file, else 1."""
        fixed = self.batch_symbol(graph, meant)
        if not isinstance(fixed, int):
            return self.written.batch_size or 1
        if self.written.batch_size not in (None, fixed):
            raise self.graph_error(
                graph, f"the batch size is fixed to {fixed}, but is {self.written.batch_size} in the contract"
            )
        return fixed

    def vocab_size(self, logits: PortFact, graph: GraphFacts) -> int:
        """The last size of the logits, else that of the configuration or the contract file."""
        size = logits.shape[-1] if logits.shape else None
        if isinstance(size, int) and self.written.vocab_size not in (None, size):
            size_text = f"{self.written.vocab_size:,}"
            raise self.graph_error(graph, f"the logits have {size:,} tokens, but the contract has {size_text}", CORRECT)
        expected = self.evidence.vocab_size
        if isinstance(size, int) and expected not in (0, size):
            raise PackageError(
                f"{self.folder_path}: {self.evidence.source} contradicts the graph: its vocabulary has {expected:,} "
                f"tokens, but the logits of {graph.file} have {size:,}"
            )
        found = size if isinstance(size, int) else self.written.vocab_size or self.evidence.vocab_size
        if not found:
            raise self.graph_error(graph, "the vocabulary size is unknown", WRITE_CONTRACT)
        return found

    def missing_window(self, graph: GraphFacts, pairs: Sequence[Pair]) -> int:
        """The window of the configuration that no attention in the graph has; 0 where it may have it."""
        makers = [graph.producer_of(pair.present.name) for pair in pairs]
        window, compared = self.evidence.window, frozenset[int]().union(*(each.compared for each, _ in self.graphs))
        by_operator = bool(makers) and all(node is not None and node.op_type == GQA for node in makers)
        if any(window_of(pair, graph) for pair in pairs) or (
            not by_operator and compared & {0, window - 1, window, window + 1}
        ):
            return 0
        return window

    def shorter_limit(self, graph: GraphFacts, pairs: Sequence[Pair]) -> ShorterLimit | None:
        """The length up to which outputs match the model, where it is limited."""
        source, window, found = self.evidence.source, self.missing_window(graph, pairs), []
        if window:
            reason = f"{source} has a window of {window:,} tokens, but the graph's attention has none"
            found.append(ShorterLimit(window, reason))
        in_graph, in_config = frequencies_change_at(graph), self.evidence.rope_length
        if length := in_graph or in_config:
            user = "the graph uses" if in_graph else "config.json has"
            reason = f"{user} other rotary frequencies beyond {length:,} tokens, for which the cached keys are wrong"
            found.append(ShorterLimit(length, reason))
        return min(found, key=lambda each: each.length, default=None)

    # --- files --------------------------------------------------------------------------------------------------------

    def file(
        self, graph: GraphFacts, phase: Phase, meant: Mapping[str, Meaning], logits: PortFact, vocab: int
    ) -> GraphFile:
        """One ONNX file with its ports."""
        ports = [(graph.input(name), meaning.role) for name, meaning in meant.items()]
        inputs = tuple(_port(port, role) for port, role in ports if port is not None)
        tokens = next(port for port in inputs if port.role == "tokens")
        fixed = tokens.shape[-1] if tokens.shape else None
        if self.evidence.slides_inputs:
            self.check_windows(graph, fixed, inputs)
        return GraphFile(
            file=graph.file,
            phase=phase,
            sequence_length=fixed if isinstance(fixed, int) else None,
            nodes=graph.node_count,
            inputs=inputs,
            outputs=(_port(logits, "logits", vocab),),
        )

    def check_windows(self, graph: GraphFacts, fixed: Size, inputs: Sequence[Port]) -> None:
        """Raise PackageError for padded windows of inputs with a fixed number of tokens or mask length."""
        whole = [port for port in inputs if port.role == "mask" and isinstance(port.shape[-1], int)]
        if isinstance(fixed, int) or whole:
            what = f"mask {whole[0].name!r}" if whole else "number of tokens"
            raise self.graph_error(
                graph,
                f"{self.evidence.source} requires padded windows of inputs (slide_inputs), and the graph "
                f"has a fixed {what}, which Partita does not support",
                OTHER_FILE,
            )
        self.notes.append("prompts are prefilled in chunks, which may differ from the window size of slide_inputs")

    def appends_chunks(self, files: Sequence[GraphFile], states: Sequence[State], batch: int) -> bool:
        """Whether a step may have several tokens after past ones."""
        if self.written.appends_chunks is not None:
            return self.written.appends_chunks
        # optimum traced its branch for past for one token
        merged = any(port.role == "cache_branch" for file in files for port in file.inputs)
        named = any(MERGED in file.file for file in files)
        if merged or named or len(files) > 1:
            self.notes.append(
                "tokens after the first prefill run one at a time, because its graph with past may support no more"
            )
            return False
        # the CPU kernel of GroupQueryAttention supports past in a prompt for one sequence only
        return batch == 1 or not any(state.in_place for state in states)

    def graph_error(self, graph: GraphFacts, what: str, remedy: Remedy | None = None) -> PackageError:
        """The error for a graph."""
        return PackageError(f"{self.folder_path}/{graph.file}: {what}", remedy=remedy)


def _port(port: PortFact, role: Role, last: int | None = None) -> Port:
    """A port of the contract; unnamed sizes get the name of their axis."""
    shape: list[Dimension] = [
        f"{port.name}_{axis}" if size is None else size for axis, size in enumerate(port.shape or ())
    ]
    if last is not None and shape:
        shape[-1] = last
    return Port(name=port.name, role=role, shape=tuple(shape), dtype=port.dtype)
