"""Reads and writes records as JSON files. Readers ignore unknown fields, which newer versions add within a schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from partita.errors import ReportError
from partita.files import write_text
from partita.observations.records import Record
from partita.partition_reports.records import SCHEMA, Report
from partita.untrusted_files import LARGEST_REPORT_BYTES, parsed_record, read_capped

STDIN = Path("-")
NO_REPORTS = {"partita.bench": "the result of a bench, not a partition report"}
"""Schema family -> description of files that are easily confused with reports."""
Shown = TypeVar("Shown", bound=Record)


def to_json(record: Record) -> str:
    """A record as JSON with a trailing newline, in ASCII for any encoding of stdout."""
    # Without warnings, because newer versions have other codes.
    text = record.model_dump_json(by_alias=True, indent=1, ensure_ascii=True, warnings=False)
    return text.replace("\x7f", "\\u007f") + "\n"


def write(report: Report, path: Path) -> None:
    """Write the report to `path`; see `partita.files.write_text`."""
    write_text(to_json(report), path, "report")


def read(path: Path) -> Report:
    """Read and validate the report at `path`; `-` is stdin. Raises ReportError."""
    return read_one_of(path, {SCHEMA: Report})


def read_one_of(path: Path, kinds: Mapping[str, type[Shown]]) -> Shown:
    """Read a record of one of `kinds`, by the schema in the file, ignoring unknown fields.

    Raises ReportError, with the name of an invalid field.
    """
    raw = _parse(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("schema"), str):
        raise ReportError(f"{path}: not a partition report, it has no schema field; write one with `report`")
    if raw["schema"] not in kinds:
        raise ReportError(_wrong_schema(path, raw["schema"], kinds))
    try:
        return kinds[raw["schema"]].model_validate(raw, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ReportError(f"{path}: field {where!r}: {first['msg']}{more}; write the report again") from error


def _parse(path: Path) -> Any:
    """The JSON value in the file, or on stdin. Raises ReportError."""
    try:
        if path == STDIN:
            return parsed_record(sys.stdin.buffer.read(LARGEST_REPORT_BYTES).decode("utf-8"))
        return parsed_record(read_capped(path, LARGEST_REPORT_BYTES, stream=True))
    except FileNotFoundError as error:
        raise ReportError(f"{path}: no such file; write a report with `report`") from error
    except OSError as error:
        raise ReportError(f"{path}: cannot read the report: {error.strerror or error}") from error
    except ValueError as error:
        detail = f"{error.msg} in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ReportError(f"{path}: invalid JSON, damaged or truncated ({detail}); write the report again") from error


def _wrong_schema(path: Path, schema: str, kinds: Mapping[str, type[Record]]) -> str:
    """Message for a file with an unsupported `schema`."""
    shown = repr(schema[:60])
    family, slash, _ = schema.partition("/")
    mine = next((known for known in kinds if known.partition("/")[0] == family), None)
    if mine is not None and slash:
        return f"{path}: schema is {shown}, this version reads {mine!r}; use the version of Partita that wrote it"
    if family in NO_REPORTS:
        return f"{path}: {NO_REPORTS[family]}; bench writes reports with `reports`"
    return f"{path}: not a partition report, its schema is {shown}, not {SCHEMA!r}"
