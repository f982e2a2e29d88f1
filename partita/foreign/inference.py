"""A contract from plain facts: what every input and output of a decoder's graphs means. Pure.

Nothing is guessed: a port that cannot be understood, and a configuration that contradicts the graph, are errors that
name it and what both sides say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from partita import dtypes
from partita.contract import Contract, Dimension, GraphFile, Port, Role, State
from partita.errors import PackageError
from partita.foreign.agreement import check_agreement
from partita.foreign.evidence import Evidence
from partita.foreign.facts import GraphFacts, PortFact, Size
from partita.foreign.layouts import MERGED, Phase
from partita.foreign.ports import INTEGERS, Meaning, by_name, logits_of, tokens_by_use
from partita.foreign.states import Pair, growing_axis, pair_up, shares_buffer, window_of
from partita.foreign.written import NOTHING, Written, WrittenStates
from partita.observations.text_format import listing, plural
from partita.package_records import PortSource
from partita.remedies import Remedy

MOST_TOKENS = 4096
"""N where nobody says: buffers of a cache that is not told to be longer take no more."""
LEAST_UNKNOWN = 2048
"""N where neither the user nor a configuration says how long a text may be."""
ROLES_OF_GENAI: Mapping[str, Role] = {
    "input_ids": "tokens",
    "attention_mask": "mask",
    "position_ids": "positions",
    "past_sequence_length": "write_start",
    "total_sequence_length": "total_length",
}
WRITE_CONTRACT = Remedy("say what it is in a file", options=("--contract", "FILE.toml"))
SAY_AXIS = Remedy("say along which axis it grows, or its shape, in a file", options=("--contract", "FILE.toml"))
OTHER_FILE = Remedy("choose another file of the folder", options=("--variant", "NAME"))


@dataclass(frozen=True, slots=True)
class Inferred:
    """What was found out."""

    contract: Contract
    ports: tuple[PortSource, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class Inference:
    """One folder's graphs, in the order in which their phases run, and what is known beside them."""

    where: str
    """The folder, for messages."""
    graphs: Sequence[tuple[GraphFacts, Phase]]
    evidence: Evidence
    written: Written = NOTHING
    max_length: int | None = None
    """As the user wants it."""
    sources: dict[str, PortSource] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def batch(self) -> int:
        """B, where the graph leaves it open."""
        return self.written.batch_size or 1

    def run(self) -> Inferred:
        """The contract. Raises PackageError for what cannot be understood."""
        main = next((graph for graph, phase in self.graphs if phase != "prefill"), self.graphs[0][0])
        meant = {graph.file: self.inputs_of(graph) for graph, _ in self.graphs}
        pairs = self.states_of(main, meant[main.file])
        for graph, phase in self.graphs:
            self.check_states(graph, phase, meant[graph.file], pairs)
        logits = {graph.file: self.logits_port(graph) for graph, _ in self.graphs}
        batch = self.batch_size(main, meant[main.file])
        length = self.length(main, pairs)
        vocab = self.vocab_size(logits[main.file], main)
        states = tuple(self.state(pair, main, batch, length) for pair in pairs)
        check_agreement(self.where, self.evidence, main.file, pairs, states, vocab)
        files = tuple(
            self.file(graph, phase, meant[graph.file], logits[graph.file], vocab) for graph, phase in self.graphs
        )
        return Inferred(
            Contract(
                files=files,
                states=states,
                appends_chunks=self.appends_chunks(files, states, batch),
                batch_size=batch,
                max_length=length,
                vocab_size=vocab,
                weight_bytes=max(graph.weight_bytes for graph, _ in self.graphs),
                rereads=not states,
            ),
            tuple(self.sources.values()),
            tuple(self.notes),
        )

    # --- inputs and outputs -------------------------------------------------------------------------------------------

    def inputs_of(self, graph: GraphFacts) -> dict[str, Meaning]:
        """What the inputs of a graph mean that are no states. Raises PackageError where none is for tokens."""
        named = {name: role for key, role in ROLES_OF_GENAI.items() if (name := self.evidence.names.get(key))}
        found: dict[str, Meaning] = {}
        for port in graph.inputs:
            if port.name in self.written.ports:
                found[port.name] = Meaning(self.written.ports[port.name], "--contract")
            elif self.written.state(port.name) is None and (meaning := by_name(port, named)) is not None:
                found[port.name] = meaning
        if all(meaning.role != "tokens" for meaning in found.values()):
            left = {port.name: port for port in graph.inputs if port.name not in found}
            name = tokens_by_use(graph, left)
            if name is None:
                raise self.no_tokens(graph)
            found[name] = Meaning("tokens", "the graph")
        roles: dict[str, str] = {}
        for name, meaning in found.items():
            if meaning.role in roles:
                raise self.wrong(
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
            return self.wrong(
                graph,
                f"takes embeddings ({embeds[0]!r}) in place of token ids, so it is a part of a model of several files, "
                "which Partita does not generate from",
                OTHER_FILE,
            )
        shown = listing(port.declared for port in graph.inputs[:5]) or "none"
        return self.wrong(graph, f"no input can be told to take token ids; its inputs are {shown}", WRITE_CONTRACT)

    def logits_port(self, graph: GraphFacts) -> PortFact:
        """The output of logits. Raises PackageError where none can be told."""
        given = [name for name, role in self.written.ports.items() if role == "logits"]
        wanted = given[0] if given else self.evidence.names.get("logits")
        found = logits_of(graph, wanted, self.evidence.vocab_size)
        if found is None:
            shown = listing(port.declared for port in graph.outputs[:5])
            raise self.wrong(graph, f"no output can be told to be logits [B, S, vocabulary]: {shown}", WRITE_CONTRACT)
        source = "--contract" if given else "configuration" if wanted else "name, type and shape"
        self.sources[found.name] = PortSource(name=found.name, meaning="logits", source=source)
        return found

    # --- states -------------------------------------------------------------------------------------------------------

    def states_of(self, graph: GraphFacts, meant: Mapping[str, Meaning]) -> list[Pair]:
        """The states of a graph. Raises PackageError for inputs that are neither a port nor a state."""
        pairs: list[Pair] = []
        rest: list[PortFact] = []
        for port in graph.inputs:
            if port.name in meant:
                continue
            pair = self.written_pair(port, graph)
            pairs += [pair] if pair is not None else []
            rest += [port] if pair is None else []
        outputs = [port for port in graph.outputs if all(port.name != pair.present.name for pair in pairs)]
        found, left = pair_up(rest, outputs, graph, self.evidence.names)
        if left:
            raise self.not_understood(graph, left)
        pairs = sorted([*pairs, *found], key=lambda pair: (pair.layer, pair.past.name))
        for pair in pairs:
            meaning = f"{pair.kind} of layer {pair.layer}"
            for port in (pair.past, pair.present):
                self.sources[port.name] = PortSource(name=port.name, meaning=meaning, source=pair.source)
        return pairs

    def written_pair(self, port: PortFact, graph: GraphFacts) -> Pair | None:
        """The pair that the user wrote down. Raises PackageError where its output is not there."""
        found = self.written.state(port.name)
        if found is None:
            return None
        states, layer = found
        name = states.present.replace("{layer}", str(layer))
        present = graph.output(name)
        if present is None:
            raise self.wrong(graph, f"has the input {port.name!r}, and no output {name!r} as the contract says")
        return Pair(port, present, layer, states.kind, "--contract")

    def not_understood(self, graph: GraphFacts, left: Sequence[PortFact]) -> PackageError:
        """The error for inputs that nothing explains."""
        first = left[0]
        others = f" ({plural(len(left) - 1, 'other input')} likewise)" if len(left) > 1 else ""
        if first.dtype in INTEGERS or first.shape is None or len(first.shape) < 3:
            what = f"the input {first.declared} cannot be understood by its name, type and shape"
        else:
            what = f"the cache input {first.declared} cannot be understood: no output can be told to continue it"
        return self.wrong(graph, f"{what}{others}", WRITE_CONTRACT)

    def check_states(
        self, graph: GraphFacts, phase: Phase, meant: Mapping[str, Meaning], pairs: Sequence[Pair]
    ) -> None:
        """Raise PackageError when a graph of a pair does not give, or take, the states of the other."""
        pasts = {pair.past.name for pair in pairs}
        given = {port.name for port in graph.outputs}
        odd = [port for port in graph.inputs if port.name not in meant and port.name not in pasts]
        if odd:
            raise self.not_understood(graph, odd)
        lacking = [pair.present.name for pair in pairs if pair.present.name not in given]
        if lacking:
            raise self.wrong(
                graph, f"has no output {lacking[0]!r}, which the other graph's cache continues", OTHER_FILE
            )
        if phase != "prefill" and pasts - {port.name for port in graph.inputs}:
            raise self.wrong(graph, "lacks cache inputs that the other graph has", OTHER_FILE)

    def state(self, pair: Pair, graph: GraphFacts, batch: int, length: int) -> State:
        """One state. Raises PackageError where its shape or the axis along which it grows cannot be told."""
        found = self.written.state(pair.past.name)
        said = found[0] if found is not None else None
        batch_axis = self.batch_axis(pair.past, graph)
        shared = shares_buffer(pair, graph)
        in_place = shared if said is None or said.in_place is None else said.in_place
        axis = growing_axis(pair, graph, batch_axis)
        if said is not None and said.grows is not None:
            axis = None if said.grows is False else said.grows
        shape = self.shape(pair, said, axis, batch_axis, batch, length)
        grows = None if in_place else axis
        return State(
            past=pair.past.name,
            present=pair.present.name,
            layer=pair.layer,
            kind=pair.kind,
            shape=shape,
            dtype=pair.past.dtype,
            window=(said.window if said is not None else None) or window_of(pair, graph) or self.window(pair),
            grows=grows,
            in_place=in_place and grows is None,
        )

    def window(self, pair: Pair) -> int | None:
        """The sliding window that the configuration of onnxruntime-genai gives a layer."""
        layers = self.evidence.window_layers
        return self.evidence.window or None if layers is not None and pair.layer in layers else None

    def batch_axis(self, port: PortFact, graph: GraphFacts) -> int | None:
        """The axis that is the batch: the first, unless another is called as that of the tokens."""
        tokens = next(
            (graph.input(n) for n, s in self.sources.items() if s.meaning == "tokens" and graph.input(n)), None
        )
        symbol = tokens.shape[0] if tokens is not None and tokens.shape else None
        shape = port.shape or ()
        if isinstance(symbol, str) and symbol in shape:
            return shape.index(symbol)
        return 0 if shape and not isinstance(shape[0], int) else None

    def shape(
        self, pair: Pair, said: WrittenStates | None, axis: int | None, batch_axis: int | None, batch: int, length: int
    ) -> tuple[int, ...]:
        """The sizes of a state, N along the axis that grows. Raises PackageError for one that cannot be told."""
        if said is not None and said.shape is not None:
            known = {"B": batch, "N": length}
            return tuple(size if isinstance(size, int) else known.get(size, 0) for size in said.shape)
        declared = pair.past.shape
        if declared is None:
            raise self.wrong_state(pair, "its rank is not declared")
        sizes = []
        for place, size in enumerate(declared):
            found = length if place == axis else size if isinstance(size, int) else None
            if found is None and place == batch_axis:
                found = batch * self.folded_heads(size)
            if found is None:
                found = self.size_by_configuration(pair, place, declared)
            if found is None:
                called = f" ({size})" if isinstance(size, str) else ""
                raise self.wrong_state(pair, f"the size of axis {place}{called} is open, and nothing says what it is")
            sizes.append(found)
        return tuple(sizes)

    def folded_heads(self, size: Size) -> int:
        """Rows of the batch's axis per row of the batch: some old exports have batch x heads there."""
        folded = isinstance(size, str) and "head" in size.lower()
        return self.evidence.heads or 1 if folded else 1

    def size_by_configuration(self, pair: Pair, place: int, declared: Sequence[Size]) -> int | None:
        """A size of keys and values [B, KV heads, T, head size] that the graph leaves open."""
        if pair.kind not in ("key", "value") or len(declared) != 4:
            return None
        if place == 3 and self.evidence.head_size:
            bits = dtypes.bits_of(pair.past.dtype)
            return self.evidence.head_size // 2 if pair.past.dtype == "uint8" and bits == 8 else self.evidence.head_size
        return self.evidence.kv_heads or None if place == 1 else None

    # --- sizes --------------------------------------------------------------------------------------------------------

    def batch_size(self, graph: GraphFacts, meant: Mapping[str, Meaning]) -> int:
        """B: what the graph fixes, else what the user wrote, else 1."""
        name = next(name for name, meaning in meant.items() if meaning.role == "tokens")
        port = graph.input(name)
        fixed = port.shape[0] if port is not None and port.shape else None
        if not isinstance(fixed, int):
            return self.batch
        if self.written.batch_size not in (None, fixed):
            raise self.wrong(graph, f"the batch is fixed to {fixed}, and the contract says {self.written.batch_size}")
        return fixed

    def length(self, graph: GraphFacts, pairs: Sequence[Pair]) -> int:
        """N: as the user wants it, as far as the configuration allows; else the configuration's, up to a limit."""
        fixed = self.fixed_length(pairs, graph)
        wanted, most = self.max_length or self.written.max_length, fixed or self.evidence.max_length
        if wanted is not None:
            if most and wanted > most:
                source = "the graph" if fixed else self.evidence.source
                raise PackageError(f"{self.where}: a length of {wanted} was asked for, and {source} allows {most}")
            return fixed or wanted
        if not most:
            self.notes.append(f"nothing says how long a text may be: {LEAST_UNKNOWN} tokens were taken")
            return LEAST_UNKNOWN
        if most > MOST_TOKENS and not fixed:
            self.notes.append(
                f"{self.evidence.source} allows texts of {most:,} tokens; {MOST_TOKENS:,} were taken, and max_length "
                "changes that"
            )
            return MOST_TOKENS
        return most

    def fixed_length(self, pairs: Sequence[Pair], graph: GraphFacts) -> int | None:
        """Rows of keys [B, KV heads, N, head size] that are one buffer of fixed length."""
        sizes = [
            pair.past.shape[2] for pair in pairs if pair.kind == "key" and pair.past.shape and len(pair.past.shape) == 4
        ]
        fixed = [size for size in sizes if isinstance(size, int)]
        return min(fixed) if fixed and len(fixed) == len(sizes) else None

    def vocab_size(self, logits: PortFact, graph: GraphFacts) -> int:
        """The last size of the logits, else what the configuration or the user says."""
        size = logits.shape[-1] if logits.shape else None
        found = size if isinstance(size, int) else self.written.vocab_size or self.evidence.vocab_size
        if not found:
            raise self.wrong(graph, "nothing says how many tokens the vocabulary has", WRITE_CONTRACT)
        return found

    # --- files --------------------------------------------------------------------------------------------------------

    def file(
        self, graph: GraphFacts, phase: Phase, meant: Mapping[str, Meaning], logits: PortFact, vocab: int
    ) -> GraphFile:
        """One ONNX file with its ports."""
        ports = [(graph.input(name), meaning.role) for name, meaning in meant.items()]
        inputs = tuple(_port(port, role) for port, role in ports if port is not None)
        tokens = next(port for port in inputs if port.role == "tokens")
        fixed = tokens.shape[1] if len(tokens.shape) > 1 else None
        return GraphFile(
            file=graph.file,
            phase=phase,
            sequence_length=fixed if isinstance(fixed, int) else None,
            nodes=graph.node_count,
            inputs=inputs,
            outputs=(_port(logits, "logits", vocab),),
        )

    def appends_chunks(self, files: Sequence[GraphFile], states: Sequence[State], batch: int) -> bool:
        """Whether a step may take several tokens after past ones.

        Not where the branch for past was exported for one token: optimum's pairs and merged decoders, which were traced
        so; nor GroupQueryAttention with several rows, as its CPU kernel reads past in a prompt for one row alone.
        """
        if self.written.appends_chunks is not None:
            return self.written.appends_chunks
        merged = any(port.role == "cache_branch" for file in files for port in file.inputs)
        named = any(MERGED in file.file for file in files)
        if merged or named or len(files) > 1:
            self.notes.append("what follows a prompt is read one token at a time: its graph for past may know no other")
            return False
        return batch == 1 or not any(state.in_place for state in states)

    def wrong_state(self, pair: Pair, what: str) -> PackageError:
        """The error for a state."""
        return PackageError(f"{self.where}: the cache input {pair.past.declared}: {what}", remedy=SAY_AXIS)

    def wrong(self, graph: GraphFacts, what: str, remedy: Remedy | None = None) -> PackageError:
        """The error for a graph."""
        return PackageError(f"{self.where}/{graph.file}: {what}", remedy=remedy)


def _port(port: PortFact, role: Role, last: int | None = None) -> Port:
    """A port of the contract; sizes without a name are called after their axis."""
    shape: list[Dimension] = [
        f"{port.name}_{axis}" if size is None else size for axis, size in enumerate(port.shape or ())
    ]
    if last is not None and shape:
        shape[-1] = last
    return Port(name=port.name, role=role, shape=tuple(shape), dtype=port.dtype)


def cache_bytes(states: Sequence[State]) -> int:
    """All states together, at their longest."""
    return sum(dtypes.size_bytes(state.dtype, state.shape) for state in states)


def elements(states: Sequence[State]) -> int:
    """Numbers in all states."""
    return sum(math.prod(state.shape) for state in states)
