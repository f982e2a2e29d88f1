"""What a package, a foreign folder or an ONNX file holds, read without running it: frozen and versioned.

Schema `partita.inspection/1`; the JSON Schema is published in docs/inspect.schema.json. Nothing is guessed: what the
files do not say is null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record, RemedyRecord
from partita.observations.text_format import human_bytes, plural
from partita.package.contract import State
from partita.package.records import ForeignRecord

Size = int | str | None
"""A fixed size, the name of a symbolic one, or null where the file does not say."""


class InspectionFinding(Record):
    """Something wrong with what was looked at, and what to do."""

    what: str
    remedies: tuple[RemedyRecord, ...] = ()


class ModelFacts(Record):
    """Which model it is, as manifest or config.json say."""

    model_type: str | None
    architecture: str | None
    parameters: int | None
    """Weights that the graphs use; null where no manifest counts them."""
    precision: str | None
    attention: str | None
    """How attention and cache are written, by name."""
    layout: str | None
    """Who wrote the folder, and how: partita, or the name of a foreign layout; null where it is not known."""
    left_out: str = ""
    """What the package has not of its checkpoint, and the inputs that it cannot take therefore; empty for nothing."""


class PortFacts(Record):
    """An input or output of a graph that is not a state."""

    name: str
    dtype: str | None
    shape: tuple[Size, ...] | None
    """null: the rank is not known, or it is no tensor."""
    role: str | None
    """What the contract says it means; null where there is none."""


class OperatorCount(Record):
    """Nodes of one operator."""

    domain: str
    """Empty for ONNX itself."""
    operator: str
    nodes: int


class GraphFacts(Record):
    """One ONNX file."""

    file: str
    size_bytes: int
    phase: str | None
    """any, prefill or decode; null where no contract says so."""
    sequence_length: int | None
    """S, where it is fixed in the file."""
    ir_version: int
    producer: str
    opsets: dict[str, int]
    """Operator set per domain; "" is ONNX itself."""
    nodes: int
    """Of the main graph."""
    inner_nodes: int
    """In the bodies of control flow."""
    functions: int
    """Functions that the file defines itself."""
    operators: tuple[OperatorCount, ...]
    """Of main graph and bodies, the most frequent of a domain first."""
    inputs: tuple[PortFacts, ...]
    outputs: tuple[PortFacts, ...]
    data_files: tuple[str, ...]
    """Files that hold its weights outside of it."""
    metadata: dict[str, str]
    """What its writer noted in it."""


class ContractFacts(Record):
    """What running needs, apart from the graphs."""

    batch_size: int
    max_length: int
    vocab_size: int
    appends_chunks: bool
    takes_fewer_rows: bool = False
    adapters_by_row: bool = False
    """Rows of a batch may have adapters of their own."""
    rereads_at: int | None
    source: str
    """manifest, or how it was inferred."""


class CacheFacts(Record):
    """States by what they take."""

    states: tuple[State, ...]
    size_bytes: int
    """All of them, as long as they get."""
    bytes_per_token: int
    """Of keys and values, for one token of one row, in the layers that keep every token."""
    fixed_bytes: int
    """States whose size does not depend on how many tokens there are: recurrent ones, and windows kept alone."""
    layout: Literal["growing", "window", "fixed"] = "fixed"
    """growing: every step makes keys and values anew, longer by its tokens, as optimum's graphs do. window: layers with
    a sliding window keep that alone.
    """


class WeightKind(Record):
    """Stored tensors of one element type."""

    dtype: str
    tensors: int
    elements: int
    size_bytes: int


class StoredTensor(Record):
    """One stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str


class WeightFacts(Record):
    """Everything that the graphs have stored; what several graphs share counts once."""

    size_bytes: int
    kinds: tuple[WeightKind, ...]
    """The largest first."""
    largest: tuple[StoredTensor, ...]


class ModulePrecision(Record):
    """The weights of one module that are kept in one way."""

    module: str
    """Its path; empty where neither node nor tensor tell one."""
    precision: str
    """int4, int8, nf4 …, or the element type."""
    packed: str
    """The operator that unpacks them; empty where they are stored as they are computed with."""
    block_size: int | None
    """Weights that share a scale; 0: a whole row, column or tensor; null where nothing is packed."""
    zero_points: bool | None
    computed: str
    """The type that they are cast to before they are used; empty where that is the stored one."""
    tensors: int
    parameters: int
    size_bytes: int
    """With scales and zero points."""
    shared_with: tuple[str, ...] = ()
    """Other modules that read the same weights."""


class FileFacts(Record):
    """One file of the folder."""

    name: str
    size_bytes: int | None
    """On disk; null when it is missing."""
    sha256: str | None
    """As the manifest has it, or the name of the file that a hub snapshot links to; null where neither says and hashes
    were not asked for. `partita verify` compares that of a manifest with the file.
    """


class Provenance(Record):
    """Where it comes from, as far as it says."""

    created: str | None
    checkpoint: str | None
    dtype: str | None
    """Of most weights of the checkpoint."""
    source_files: tuple[FileFacts, ...]
    """Files of the checkpoint, with the hashes that they had."""
    toolchain: dict[str, str]
    """Package name to version, of everything that had a part in it."""
    target: str | None
    verification: str | None
    """The status, and how it was found out."""
    quality: str | None


class TokenizerFacts(Record):
    """The tokenizer that lies beside the graphs."""

    kind: str
    """What reads it: none, tokenizers, transformers."""
    files: tuple[str, ...]
    model: str | None
    """BPE, Unigram, WordPiece; null where tokenizer.json does not say."""
    vocabulary: int | None
    """Entries, added ones included."""
    special: dict[str, str]
    """bos_token, eos_token …"""
    chat_template: bool


class LicenceFacts(Record):
    """Under which licence the weights are, as the files beside them say."""

    name: str | None
    """null: no file says it."""
    source: str
    """Which file says so, or which were looked for."""
    link: str | None = None


class AdapterFacts(Record):
    """An adapter in the weights, or beside them."""

    name: str
    merged: bool
    """It is part of the weights; else a run can switch it on."""
    kind: str | None
    """lora or dora."""
    ranks: tuple[int, ...]
    modules: int | None
    """Modules of which it changes the weight."""
    whole: tuple[str, ...] = ()
    """Parameters that it replaces."""
    base_model: str | None
    """The model that it was trained on, as it says itself."""
    file: str | None
    """That has its values; null where it is merged."""
    source_files: tuple[FileFacts, ...]
    """The files that it was read from, as the manifest has them."""


class Inspection(Record):
    """What a package, a foreign folder or an ONNX file holds."""

    schema_id: Literal["partita.inspection/1"] = Field(default="partita.inspection/1", alias="schema")
    partita_version: str
    path: str
    kind: Literal["package", "onnx folder", "onnx file"]
    findings: tuple[InspectionFinding, ...]
    model: ModelFacts
    graphs: tuple[GraphFacts, ...]
    other_graphs: tuple[FileFacts, ...] = ()
    """ONNX files beside them that the contract does not name."""
    contract: ContractFacts | None
    """null where none is on disk and none could be inferred."""
    foreign: ForeignRecord | None = None
    """How a folder that Partita did not write was understood."""
    cache: CacheFacts | None
    weights: WeightFacts
    modules: tuple[ModulePrecision, ...]
    adapters: tuple[AdapterFacts, ...] = ()
    files: tuple[FileFacts, ...]
    provenance: Provenance
    tokenizer: TokenizerFacts
    licence: LicenceFacts

    def __repr__(self) -> str:
        found = f"; {plural(len(self.findings), 'finding')}" if self.findings else ""
        size = human_bytes(self.weights.size_bytes)
        return f"<Inspection {self.path}: {self.kind}, {plural(len(self.graphs), 'graph')}, weights {size}{found}>"

    __str__ = __repr__
