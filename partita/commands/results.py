"""Records that `--json` of the verbs prints, source of the JSON Schemas in docs/; the table of refused nodes.

`place --json` prints a report, `providers --json` a record of machine/records.py.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from rich.console import Console

import partita
from partita.errors import PartitaError, ProviderError, ProviderRefusal, RefusedNode, public_type
from partita.library.batches.batch_run import BatchRunResult
from partita.machine import MachineReport
from partita.observations.records import ChainEntry, Record, RemedyRecord, remedy_records
from partita.observations.text_format import name_some, plural, short_provider
from partita.options.fields import with_flags
from partita.options.generation import SamplingValues
from partita.package.folder import Manifest
from partita.package.records import Evaluation, Quality, StepError, Verification
from partita.partition_reports.records import Speculation
from partita.partition_reports.render.terminal import Page
from partita.partition_reports.sections.fallbacks import REASONS_PAGE
from partita.partition_reports.sections.model import Column, table


class Result(Record):
    """Fields of every result of a package."""

    schema_id: str = Field(alias="schema")
    partita_version: str = partita.__version__
    package: str


class ErrorFact(Record):
    """The error of a command with an exit code other than 0."""

    kind: str
    """A class of partita/errors.py (UsageError, PackageError, ...), or Interrupted, Terminated, InternalError."""
    message: Annotated[str, BeforeValidator(lambda text: text.encode("utf-8", "backslashreplace").decode())]
    """The line on stderr, without `partita: `."""
    remedy: str | None
    """The remedy at the end of the message; null if there is none."""
    remedies: tuple[RemedyRecord, ...] = ()
    """Remedies as data, the best first."""
    nodes: tuple[RefusedNode, ...] = ()
    """Nodes that the chain does not run: the rows of the table on stderr."""
    exit_code: int


class ErrorResult(Record):
    """Output of a command with --json that failed before it had a result."""

    schema_id: Literal["partita.error/1"] = Field(default="partita.error/1", alias="schema")
    error: ErrorFact


class DoctorResult(Record):
    """Output of `doctor --json`: versions, hardware, and the record of `providers`."""

    schema_id: Literal["partita.doctor/1"] = Field(default="partita.doctor/1", alias="schema")
    python: str
    operating_system: str
    cpu: str
    logical_cores: int
    packages: dict[str, str]
    """Version of each installed package that affects a run or an export."""
    machine: MachineReport


def fact_of(error: PartitaError) -> ErrorFact:
    """A PartitaError as a record; a remedy that is not data is part of the message."""
    return ErrorFact(
        kind=public_type(error),
        message=with_flags(" ".join(str(error).split())),
        remedy=None if error.remedy is None else " ".join(str(error.remedy).split()),
        remedies=remedy_records(error.remedy),
        nodes=error.nodes if isinstance(error, ProviderError) else (),
        exit_code=error.exit_code,
    )


class GeneratedRow(Record):
    """The completion of one prompt."""

    text: str | None
    """Null with --token-ids."""
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str | None
    """stop, length, cache_full, interrupted or error."""


class GenerationTimings(Record):
    """Speed; null after too few steps."""

    prompt_tokens: int
    prefill_seconds: float | None
    prefill_tokens_per_second: float | None
    first_token_seconds: float | None
    decode_steps: int
    decode_tokens: int
    decode_tokens_per_second: float | None
    decode_p50_ms: float | None
    overhead_p50_ms: float | None


class RunResult(Result):
    """Fields of every result of a run."""

    chain: tuple[ChainEntry, ...]
    chain_source: str
    options: SamplingValues
    """For a prompt file, the defaults of rows. The seed of a sampled row is derived from this one and its index."""
    adapter: str | None = None
    """The adapter that was used; null for none."""
    threads: int | None
    """null: ONNX Runtime's default."""
    load_seconds: float
    """Time to open the sessions."""
    notes: tuple[str, ...] = ()


class BatchResult(BatchRunResult, RunResult):
    """Output of `generate --input FILE --output FILE --json`: the run and its figures, without completions."""

    schema_id: Literal["partita.batch_result/1"] = Field(default="partita.batch_result/1", alias="schema")
    slots: int
    """Maximum rows that run at a time."""
    input: str


class ClusterResult(BatchRunResult, Result):
    """Output of `generate --input FILE --output FILE --address ADDRESS --json`: figures of the run."""

    schema_id: Literal["partita.cluster_result/1"] = Field(default="partita.cluster_result/1", alias="schema")
    address: str
    input: str


class GenerateResult(RunResult):
    """Output of `generate --json`: chain, options, one completion per prompt, and timings."""

    schema_id: Literal["partita.generate/1"] = Field(default="partita.generate/1", alias="schema")
    prefill_chunk_tokens: int
    """Maximum prompt tokens per run."""
    tokenizer_load_seconds: float
    rows: tuple[GeneratedRow, ...]
    timings: GenerationTimings
    speculation: Speculation | None = None
    """Figures of speculative decoding; null without it."""
    error: ErrorFact | None


class StepResult(StepError, Record):  # noqa: N818 - not an exception
    """A step of the known answer; null for a figure that is not a number."""

    max_abs_error: float | None  # type: ignore[assignment]
    max_rel_error: float | None  # type: ignore[assignment]


class VerifyResult(Verification, Result):
    """Output of `verify --json`: the package's known answer, replayed."""

    schema_id: Literal["partita.verify/1"] = Field(default="partita.verify/1", alias="schema")
    steps: tuple[StepResult, ...]


class EvaluateResult(Evaluation, Result):
    """Output of `evaluate --json`: the quality of the package on a provider. Null for a figure that is not a number."""

    schema_id: Literal["partita.evaluate/1"] = Field(default="partita.evaluate/1", alias="schema")
    precision: str
    perplexity: float | None  # type: ignore[assignment]
    original_perplexity: float | None  # type: ignore[assignment]
    perplexity_ratio: float | None  # type: ignore[assignment]
    top1_agreement: float | None  # type: ignore[assignment]
    at_export: Quality | None
    """Figures that the export measured, on the CPU provider."""


class ExportResult(Result):
    """Output of `export --json`: manifest, reason for the attention lowering, duration and memory of the export."""

    schema_id: Literal["partita.export/1"] = Field(default="partita.export/1", alias="schema")
    manifest: Manifest
    attention_reason: str
    passes: dict[str, int]
    """Number of changes per pass over the graph."""
    cache_bytes_per_token: int
    fixed_state_bytes: int
    peak_rss_bytes: int
    seconds: dict[str, float]
    notes: tuple[str, ...]
    variants: tuple[Manifest, ...] = ()
    """One for each of several targets, the first of which is `manifest`."""


class ServedModel(Record):
    """A package of a server."""

    name: str
    """Name of the model in the API."""
    package: str
    slots: int
    """Rows of its batch: maximum requests that run at a time."""
    max_length: int
    """Maximum prompt and new tokens together."""
    chat: bool
    """It has a chat template, so it accepts messages."""
    adapters: tuple[str, ...] = ()
    """Its separate adapters; model NAME:ADAPTER in requests."""


class ServeResult(Record):
    """Output of `serve --json` when it listens."""

    schema_id: Literal["partita.serve/1"] = Field(default="partita.serve/1", alias="schema")
    partita_version: str = partita.__version__
    url: str
    """URL of the server; the API is at URL/v1."""
    pid: int
    models: tuple[ServedModel, ...]


WIDTH = 120
"""Width of the terminal if it is unknown."""
MOST_ROWS = 40
NAMES = 4
"""Maximum families of nodes that a group names."""
EVIDENCE = 2
"""Maximum quoted log lines per reason, below the table."""
NO_NAME = "(no name)"


def render_refusal(rows: Sequence[RefusedNode], width: int | None = None) -> str:
    """A table of the nodes, then the evidence per reason, as text without colour; empty without nodes.

    `width`: columns; that of the terminal when it is left out.
    """
    if not rows:
        return ""
    stream, columns = io.StringIO(), width or shutil.get_terminal_size((WIDTH, 0)).columns
    page = Page(Console(file=stream, width=columns, color_system=None, force_terminal=False, legacy_windows=False))
    requested = " or ".join(dict.fromkeys(entry.provider for row in rows for entry in row.available_refusals))
    page.line(f"{plural(len(rows), 'node')} would not run on {requested}:", indent=0)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        group = row.op_type or "unknown", short_provider(row.provider), _reasons_text(row)
        groups.setdefault(group, []).append(row.node or NO_NAME)
    ranked = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    cells = [
        (operator, str(len(names)), provider, reason, name_some(names, NAMES))
        for (operator, provider, reason), names in ranked
    ]
    heads = ("operator", Column("nodes"), "would run on", "reason", "names")
    page.table(table("Nodes", heads, cells, most=MOST_ROWS, obvious=True))
    _show_evidence(page, rows)
    return stream.getvalue()


def _reasons_text(row: RefusedNode) -> str:
    """The reason of a node; with several available providers, the reason of each."""
    if len(row.available_refusals) == 1:
        return row.available_refusals[0].reason
    return ", ".join(f"{short_provider(entry.provider)}: {entry.reason}" for entry in row.available_refusals)


def _show_evidence(page: Page, rows: Sequence[RefusedNode]) -> None:
    """Evidence and remedy of each reason, per provider if there are several."""
    found: dict[tuple[str, str, bool], list[ProviderRefusal]] = {}
    for entry in (entry for row in rows for entry in row.refusals):
        found.setdefault((entry.provider, entry.reason, entry.available), []).append(entry)
    several = len({provider for provider, _, _ in found}) > 1
    for (provider, reason, available), members in found.items():
        missing = "" if available else " is not available"
        about = f"{short_provider(provider)}{missing}: " if several else ""
        page.line(f"{about}{reason}: {members[0].remedy}")
        texts = list(dict.fromkeys(f"{entry.evidence_kind}: {entry.evidence}" for entry in members))
        rest = [f"and {len(texts) - EVIDENCE} similar lines"] if len(texts) > EVIDENCE else []
        for text in (*texts[:EVIDENCE], *rest, f"see {REASONS_PAGE}#{reason}"):
            page.line(text, indent=4)
