"""Records of a run that reports and refusals hold as they were observed: frozen, validated, numbers with their unit.

Parts of the schema `partita.report/1`; the rest of it is `partita.partition_reports.records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from partita.observations.codes import ReasonCode
from partita.remedies import Remedy

Source = Literal[
    "model_file",  # the ONNX file of the package
    "optimised_model",  # the graph as ONNX Runtime runs it, written by a second session
    "plan_file",  # session.node_partition_config_file: final execution plan, after fusion and Memcpy insertion
    "assignment",  # get_provider_graph_assignment_info(): after level 1 optimisation
    "profile",  # ONNX Runtime's profile of the observation window
    "native_log",  # ONNX Runtime's own log lines
    "probe",  # experiments: one node at a time on the preferred provider, in a child process
    "memory_info",  # where the session wants its inputs and outputs
    "binding",  # addresses of the buffers that were bound
    "clock",  # our own clock around the session run
    "process",  # the operating system's account of this process
]
"""Where a fact comes from."""


PhaseName = Literal["prefill", "decode", "run"]
"""`run` is the one phase of a model that is no package."""


def _grows(schema: dict[str, Any]) -> None:
    """Let the JSON Schema of a record say what readers do: a newer Partita may add fields, which are ignored."""
    schema.pop("additionalProperties", None)


class Record(BaseModel):
    """Base of every record in a report: immutable; NaN and infinity are errors, and so are unknown fields.

    Only `partition_reports.storage`, which reads what another version of Partita may have written, ignores those.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        json_schema_extra=_grows,
        defer_build=True,  # most verbs import records that they never make
    )

    @classmethod
    def taken_from(cls, other: object, **own: object) -> Self:
        """The record that has the fields of the same name of `other`, and `own` beside them or in their place.

        So what one record takes over from another, or from an observed fact, is written down once. Raises
        ValidationError when a field without a default is in neither, or `own` has one that the record has not.
        """
        shared = {name: getattr(other, name) for name in cls.model_fields if hasattr(other, name)}
        return cls.model_validate({**shared, **own})


def _known_or_newer(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """A reason code; one that a newer Partita wrote is kept as it is, so that its reports can be read."""
    return value if isinstance(value, str) else check(value)


Code = Annotated[ReasonCode, WrapValidator(_known_or_newer)]
"""A reason code on disk."""


class InstalledWheel(Record):
    """A distribution in this environment, with its version."""

    name: str
    version: str
    """Empty in what an older Partita wrote without."""


class Environment(Record):
    """The machine and the software the run happened on."""

    cpu: str
    logical_cores: int
    memory_bytes: int
    operating_system: str
    python: str
    onnxruntime_package: str
    """`onnxruntime_wheels` for people, on one line."""
    onnxruntime_wheels: tuple[InstalledWheel, ...] = ()
    """What ONNX Runtime came in: more than one where they overwrote each other's files."""
    onnxruntime_version: str
    """That of the ONNX Runtime that was imported."""
    onnxruntime_build: str
    packages: dict[str, str]
    """Package name to version."""

    @model_validator(mode="before")
    @classmethod
    def _older(cls, given: Any) -> Any:
        """What was written without the wheels as data has them in its text, `NAME VERSION, NAME VERSION`."""
        if not isinstance(given, dict) or "onnxruntime_wheels" in given:
            return given
        text = given.get("onnxruntime_package")
        if not isinstance(text, str):
            return given
        pairs = [part.partition(" ") for part in text.split(", ")]
        return {**given, "onnxruntime_wheels": [{"name": name, "version": version} for name, _, version in pairs]}


class PackageQuality(Record):
    """What the precision of a package costs, as measured when it was exported: beside the original, on one text."""

    text: str
    tokens: int
    """Tokens that were predicted."""
    provider: str
    """What the package ran on."""
    twin: str | None = None
    """What was run in place of the package's own graphs, where the provider has no kernels for those."""
    perplexity_ratio: float
    """Its perplexity by that of the original; 1 is no loss."""
    top1_agreement: float
    """Share of the positions at which both think the same token most likely."""
    kl_mean: float
    """Kullback-Leibler divergence of the package from the original in nats, mean over the positions."""
    kl_p99: float
    """Its 99th percentile."""


class PackageFacts(Record):
    """The package that was run."""

    name: str
    manifest_sha256: str
    model_type: str
    attention: str
    precision: str
    batch_size: int
    max_length: int
    verification: Literal["verified", "unverified"]
    verification_detail: str
    checkpoint: str = ""
    """What it was exported from: the name of a folder, or a hub id; empty in a report that was written without."""
    target: str = ""
    """The provider that its lowering was chosen for; empty when it was not chosen for one."""
    left_out: str = ""
    """What the package has not of its checkpoint, and the inputs that it cannot take therefore; empty for nothing."""
    quality: PackageQuality | None = None
    """null where none was measured, and in a report that was written without."""


class RemedyRecord(Record):
    """A remedy as stored: what to do, and the command or options for it."""

    text: str
    """In words, without the command."""
    command: tuple[str, ...] = ()
    """A command line, word by word and unquoted; empty when there is none."""
    options: tuple[str, ...] = ()
    """What to add to the command that was given, instead."""


def remedy_records(remedy: Remedy | None) -> tuple[RemedyRecord, ...]:
    """A remedy and what else helps, as records."""
    found = []
    while remedy is not None:
        found.append(RemedyRecord.taken_from(remedy))
        remedy = remedy.otherwise
    return tuple(found)


def remedy_of(records: Sequence[RemedyRecord]) -> Remedy | None:
    """The remedy that `remedy_records` made records of; None for none."""
    found: Remedy | None = None
    for record in reversed(records):
        found = Remedy(record.text, record.command, record.options, found)
    return found


class ChainEntry(Record):
    """What became of one provider of the chain."""

    provider: str
    """ONNX Runtime's name."""
    status: Literal["active", "unavailable"]
    reason: Code | None = None
    """A provider-level one, or `subgraph_rejected` or `dynamic_shape` of a provider that failed over the graph."""
    evidence: str | None = None
    remedy: str | None = None
    """In words, commands among them."""
    remedies: tuple[RemedyRecord, ...] = ()
    """The same as data, the best first; empty in a report that was written without."""


class Memory(Record):
    """Memory of weights, cache and process, in bytes; None where it was not measured."""

    weight_bytes: int
    cache_bytes: int
    rss_before_load_bytes: int | None
    rss_after_load_bytes: int | None
    peak_rss_bytes: int | None
    anonymous_growth_bytes: int | None = None
    """What loading added of memory that is of no file: packed forms of weights, and not weights that are mapped."""
    source: Source = "process"


class Probing(Record):
    """What the experiments took."""

    seconds: float
    budget_seconds: float
    experiments: int
    """Variants answered in this run; those that come to the same model are run once, and count each."""
    cached: int
    """Known from before."""
    crashes: int
    unprobed: tuple[str, ...]
    """Nodes for which experiments are missing."""
