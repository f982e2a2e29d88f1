"""Observed records of a run: part of the schema `partita.report/1` of `partita.partition_reports.records`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, WrapValidator

from partita.observations.codes import ReasonCode
from partita.remedies import Remedy

Source = Literal[
    "model_file",  # the ONNX file of the package
    "optimised_model",  # the graph that ONNX Runtime runs, written by the session
    "plan_file",  # session.node_partition_config_file: final execution plan, after fusion and Memcpy insertion
    "assignment",  # get_provider_graph_assignment_info(): after level 1 optimisation
    "profile",  # ONNX Runtime's profile of the observation window
    "native_log",  # ONNX Runtime's own log lines
    "probe",  # probes: one node at a time on the preferred provider, in a child process
    "memory_info",  # memory in which the session expects inputs and outputs
    "binding",  # addresses of bound buffers
    "clock",  # Partita's clock around the session run
    "process",  # process statistics of the operating system
]
"""Source of a fact."""


PhaseName = Literal["prefill", "decode", "run"]
"""`run` is the only phase of a model that is not a package."""


def _grows(schema: dict[str, Any]) -> None:
    """Allow additional properties in the JSON Schema, because readers ignore fields of newer versions."""
    schema.pop("additionalProperties", None)


class Record(BaseModel):
    """Base of every record in a report: immutable, without NaN, infinity and unknown fields.

    Only `partition_reports.storage` ignores unknown fields, to read reports of other versions.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        json_schema_extra=_grows,
        defer_build=True,  # most commands import records that they never create
    )

    @classmethod
    def copy_of(cls, other: object, **own: object) -> Self:
        """A record with the fields of `other` that have the same name; `own` adds or replaces fields.

        Raises ValidationError for a missing field without a default, and for an unknown field in `own`.
        """
        shared = {name: getattr(other, name) for name in cls.model_fields if hasattr(other, name)}
        return cls.model_validate({**shared, **own})


def _known_or_newer(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """A reason code; unknown codes of a newer Partita are accepted."""
    return value if isinstance(value, str) else check(value)


Code = Annotated[ReasonCode, WrapValidator(_known_or_newer)]
"""A reason code in a file."""


class InstalledWheel(Record):
    """An installed distribution."""

    name: str
    version: str


class Environment(Record):
    """Machine and software of the run."""

    cpu: str
    logical_cores: int
    memory_bytes: int
    operating_system: str
    python: str
    onnxruntime_wheels: tuple[InstalledWheel, ...] = ()
    """Installed wheels of ONNX Runtime; several wheels overwrite each other's files."""
    onnxruntime_version: str
    """Version of the imported ONNX Runtime."""
    onnxruntime_build: str
    packages: dict[str, str]
    """Package name -> version."""

    @property
    def runtime(self) -> str:
        """Wheels of ONNX Runtime with their versions."""
        imported = self.onnxruntime_version
        named = ", ".join(f"{wheel.name} {wheel.version or imported}" for wheel in self.onnxruntime_wheels)
        if any(wheel.version in ("", imported) for wheel in self.onnxruntime_wheels):
            return named
        return f"{named} onnxruntime {imported}".strip()


class PackageQuality(Record):
    """Quality of a package relative to the source model, measured on a text at export."""

    text: str
    tokens: int
    """Predicted tokens."""
    provider: str
    """Provider that ran the package."""
    converted_copy: str | None = None
    """The converted graphs that ran instead, if the provider has no kernels for those of the package."""
    perplexity_ratio: float
    """Perplexity divided by that of the source model; 1 is no loss."""
    top1_agreement: float
    """Share of positions at which both have the same most likely token."""
    kl_mean: float
    """Kullback-Leibler divergence from the source model in nats, mean over positions."""
    kl_p99: float
    """99th percentile of that divergence."""


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
    """Source folder name or Hub id."""
    target: str = ""
    """Provider that its lowering was chosen for; empty for none."""
    omitted: str = ""
    """Parts of the checkpoint that were not exported, and unsupported inputs; empty for none."""
    quality: PackageQuality | None = None
    """null if not measured."""


class RemedyRecord(Record):
    """A remedy with its command or options."""

    text: str
    """Description without the command."""
    command: tuple[str, ...] = ()
    """Unquoted words of a command line; may be empty."""
    options: tuple[str, ...] = ()
    """Options to add to the user's command; may be empty."""


def remedy_records(remedy: Remedy | None) -> tuple[RemedyRecord, ...]:
    """A remedy and its alternatives as records."""
    found = []
    while remedy is not None:
        found.append(RemedyRecord.copy_of(remedy))
        remedy = remedy.alternative
    return tuple(found)


def remedy_of(records: Sequence[RemedyRecord]) -> Remedy | None:
    """The inverse of `remedy_records`; None for no records."""
    found: Remedy | None = None
    for record in reversed(records):
        found = Remedy(record.text, record.command, record.options, found)
    return found


class ChainEntry(Record):
    """Availability of one provider of the chain."""

    provider: str
    """ONNX Runtime's name."""
    status: Literal["active", "unavailable"]
    reason: Code | None = None
    """A provider-level reason, or `subgraph_rejected` or `dynamic_shape` for a rejected graph."""
    evidence: str | None = None
    remedy: str | None = None
    """Remedies as text, with commands."""
    remedies: tuple[RemedyRecord, ...] = ()
    """Remedies, the best first."""


class Memory(Record):
    """Memory of weights, cache and process, in bytes; null if not measured."""

    weight_bytes: int
    cache_bytes: int
    rss_before_load_bytes: int | None
    rss_after_load_bytes: int | None
    peak_rss_bytes: int | None
    anonymous_growth_bytes: int | None = None
    """Anonymous memory added by loading: prepacked weights, but not mapped files."""
    source: Source = "process"


class Probing(Record):
    """Time and number of probes."""

    seconds: float
    budget_seconds: float
    experiments: int
    """Variants with an outcome in this run; variants with equal models count separately but run once."""
    cached: int
    """Variants from the cache."""
    crashes: int
    missing_probes: tuple[str, ...]
    """Nodes with missing probes."""


AttentionPath = Literal["flash", "naive"]
"""Algorithms of GroupQueryAttention on the CPU: flash (tiled) or naive (full score matrix)."""


class AttentionChoice(Record):
    """The algorithm that GroupQueryAttention used, with the reason."""

    path: AttentionPath
    reason: Literal[
        "faster",  # naive: measured to be faster for this processor and head size
        "not_faster",  # flash: ONNX Runtime's default
        "memory",  # flash: the matrix of scores would be too large
        "option",  # set by the user
        "environment",  # set by an environment variable of ONNX Runtime
    ]
    detail: str
    """Explanation in one sentence."""


class CpuSession(Record):
    """Threads and kernels of the CPU provider in one session."""

    file: str
    threads: int
    """Intra-op threads, including the calling thread."""
    threads_reason: Literal["option", "cores", "affinity", "quota"]
    """option: set by the user. Otherwise the physical cores of the machine (cores), of the process's CPU affinity, or
    of its cgroup quota.
    """
    cores: int
    """Physical cores that the process may run on."""
    quota: float | None
    """CPU limit of the cgroup, in CPUs; null without a limit."""
    spinning: bool
    """Threads spin while they wait for work."""
    spinning_reason: Literal["option", "default", "crowded"]
    """option: set by the user. default: ONNX Runtime's default. crowded: off, because threads exceed cores."""
    huge_page_bytes: int | None = None
    """Session memory in pages of 2 MiB; null if the system has none, they are off, or there was no decode step."""
    huge_page_seconds: float | None = None
    """Time to move memory to huge pages, before the first decode step; not part of any step's time."""
    integer_unit: str | None = None
    """Instruction set of the processor for products of 8-bit integers, e.g. avx512_vnni; empty if it has none, null if
    unknown."""
    attention: AttentionChoice | None
    """null without a choice: no GroupQueryAttention, another preferred provider, or a short prompt."""
