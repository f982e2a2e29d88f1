"""Contents of a package, a foreign folder or an ONNX file, read without running it.

Schema `partita.inspection/1`; the JSON Schema is published in docs/inspect.schema.json. Unknown values are null.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from partita.observations.records import Record, RemedyRecord
from partita.observations.text_format import human_bytes, plural
from partita.package.contract import State
from partita.package.folder import AdapterRecord
from partita.package.records import ForeignRecord

Size = int | str | None
"""A fixed size, the name of a symbolic size, or null if unknown."""


class InspectionFinding(Record):
    """A problem, with remedies."""

    problem: str
    remedies: tuple[RemedyRecord, ...] = ()


class ModelFacts(Record):
    """The model, from the manifest or config.json."""

    model_type: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    """Number of weights that the graphs use; null without a manifest."""
    precision: str | None = None
    attention: str | None = None
    """Name of the attention lowering."""
    layout: str | None = None
    """partita, or the name of a foreign layout; null if unknown."""
    omitted: str = ""
    """Parts of the checkpoint that were not exported, and unsupported inputs; empty for none."""


class PortFacts(Record):
    """An input or output of a graph that is not a state."""

    name: str
    dtype: str | None
    shape: tuple[Size, ...] | None
    """null: the rank is unknown, or it is not a tensor."""
    role: str | None
    """Role in the contract; null without a contract."""


Kind: TypeAlias = Literal["package", "model package", "onnx folder", "onnx file"]


class GraphFacts(Record):
    """One ONNX file."""

    file: str
    size_bytes: int
    phase: str | None
    """any, prefill or decode; null without a contract."""
    sequence_length: int | None
    """Static sequence length; null if dynamic."""
    ir_version: int
    producer: str
    opsets: dict[str, int]
    """Operator set version by domain; "" is ai.onnx."""
    nodes: int
    """Nodes of the main graph."""
    subgraph_nodes: int
    """Nodes in control-flow subgraphs."""
    functions: int
    """Model-local functions."""
    operators: dict[str, int]
    """Nodes by operator (`com.microsoft:MatMulNBits`) in main graph and control-flow subgraphs, the most frequent of a
    domain first."""
    inputs: tuple[PortFacts, ...]
    outputs: tuple[PortFacts, ...]
    data_files: tuple[str, ...]
    """Files with external weights."""
    metadata: dict[str, str]
    """Metadata properties of the file."""
    variant: str | None = None
    """Component, variant and provider in a model package of ONNX Runtime."""


class ContractFacts(Record):
    """Run-time properties of the package."""

    batch_size: int
    max_length: int
    vocab_size: int
    appends_chunks: bool
    symbolic_batch: bool = False
    adapters_by_row: bool = False
    """Rows of a batch may use different adapters."""
    recompute_above: int | None
    source: str
    """manifest, or how the contract was inferred."""


class CacheFacts(Record):
    """States and their size."""

    states: tuple[State, ...]
    size_bytes: int
    """All states at maximum length."""
    bytes_per_token: int
    """Keys and values of one token of one row, in layers without a rolling window."""
    fixed_bytes: int
    """States of constant size: recurrent states and rolling windows."""
    layout: Literal["growing", "window", "fixed"] = "fixed"
    """growing: every step returns longer keys and values, as in optimum's graphs. window: layers with a sliding window
    store only the window.
    """


class WeightKind(Record):
    """Stored tensors of one element type."""

    dtype: str
    tensors: int
    elements: int
    size_bytes: int


class WeightFacts(Record):
    """Stored tensors of all graphs; shared tensors count once."""

    size_bytes: int
    kinds: tuple[WeightKind, ...]
    """Sorted by size, the largest first."""


class ModulePrecision(Record):
    """Weights of one module with one storage format."""

    module: str
    """Module path; empty if unknown."""
    precision: str
    """int4, int8, nf4 …, or the element type."""
    operator: str = ""
    """Operator that dequantises them; empty for weights that are not quantised."""
    block_size: int | None = None
    """Weights that share a scale; 0: a whole row, column or tensor; null for weights that are not quantised."""
    zero_points: bool | None = None
    compute_dtype: str = ""
    """Type that they are cast to before use; empty if they are not cast."""
    tensors: int
    parameters: int
    size_bytes: int
    """Size including scales and zero points."""
    shared_with: tuple[str, ...] = ()
    """Other modules that read the same weights."""


class FileFacts(Record):
    """One file of the folder."""

    name: str
    size_bytes: int | None
    """Size on disk; null if it is missing."""
    sha256: str | None
    """Hash from the manifest or the blob name of a Hub snapshot; null if neither has one and hashing was not requested.
    `partita verify` checks hashes of a manifest.
    """


class Provenance(Record):
    """Origin of the package, as far as recorded."""

    created: str | None = None
    checkpoint: str | None = None
    dtype: str | None = None
    """Most frequent weight type of the checkpoint."""
    source_files: tuple[FileFacts, ...] = ()
    """Files of the checkpoint, with their hashes at export."""
    toolchain: dict[str, str]
    """Package name -> version of the packages used for the export."""
    target: str | None = None
    verification: str | None = None
    """Status and method of the verification."""
    quality: str | None = None


class TokenizerFacts(Record):
    """The tokenizer of the folder."""

    kind: str
    """Library that loads it: none, tokenizers, transformers."""
    files: tuple[str, ...]
    model: str | None
    """BPE, Unigram, WordPiece; null if tokenizer.json does not name it."""
    vocabulary: int | None
    """Number of entries, including added tokens."""
    special: dict[str, str]
    """bos_token, eos_token …"""
    chat_template: bool


class LicenceFacts(Record):
    """Licence of the weights, from files of the folder."""

    name: str | None
    """null: no file names it."""
    source: str
    """The file that names it, or the files that were searched."""
    link: str | None = None


class Inspection(Record):
    """Contents of a package, a foreign folder or an ONNX file."""

    schema_id: Literal["partita.inspection/1"] = Field(default="partita.inspection/1", alias="schema")
    partita_version: str
    path: str
    kind: Kind
    findings: tuple[InspectionFinding, ...]
    model: ModelFacts
    graphs: tuple[GraphFacts, ...]
    other_graphs: tuple[FileFacts, ...] = ()
    """Other ONNX files of the folder, which the contract does not name."""
    contract: ContractFacts | None = None
    """null if there is no manifest and the layout could not be inferred."""
    foreign: ForeignRecord | None = None
    """Detected layout of a folder that Partita did not write."""
    cache: CacheFacts | None = None
    weights: WeightFacts
    modules: tuple[ModulePrecision, ...]
    adapters: tuple[AdapterRecord, ...] = ()
    files: tuple[FileFacts, ...]
    provenance: Provenance
    tokenizer: TokenizerFacts
    licence: LicenceFacts

    def __repr__(self) -> str:
        found = f"; {plural(len(self.findings), 'finding')}" if self.findings else ""
        size = human_bytes(self.weights.size_bytes)
        return f"<Inspection {self.path}: {self.kind}, {plural(len(self.graphs), 'graph')}, weights {size}{found}>"

    __str__ = __repr__
