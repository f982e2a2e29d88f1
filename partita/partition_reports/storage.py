"""Records as JSON files: written whole or not at all, and read with one line on whatever is wrong.

A record grows within its schema: newer versions of Partita add fields, and never change or drop one without another
schema. So reading ignores fields that it does not know, at every level, while records that are made here are held to
the fields that they have.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from partita.capped import LARGEST_REPORT_BYTES, parsed_record, read_capped
from partita.errors import ReportError
from partita.files import write_text
from partita.observations.records import Record
from partita.partition_reports.records import SCHEMA, Report

NUMBERS = re.compile(r"\[\n([-\d\s,]*?)\]")
"""A list of whole numbers over several lines; inside a string there is no line break."""
OTHERS = re.compile(r"[^\x00-\x7e]+")
STDIN = Path("-")
NO_REPORTS = {"partita.bench": "the result of a bench, not a partition report"}
"""What a file of another family of schemas is that is easily taken for a report."""
Shown = TypeVar("Shown", bound=Record)


def to_json(record: Record) -> str:
    """A report, or another record that is kept, as JSON, ending in a newline. ASCII alone: a name is whole in every
    encoding that stdout may have, and turns no terminal around.
    """
    text = record.model_dump_json(by_alias=True, indent=1, warnings=False)  # a newer Partita has other codes
    text = OTHERS.sub(lambda found: json.dumps(found[0])[1:-1], text)  # all of them are inside of strings
    return NUMBERS.sub(lambda found: f"[{','.join(found[1].split()).replace(',,', ',')}]", text) + "\n"


def write(report: Report, path: Path) -> None:
    """Write the report to `path`; see `partita.files.write_text`."""
    write_text(to_json(report), path, "report")


def read(path: Path) -> Report:
    """Read and validate the report at `path`; `-` is stdin.

    Raises ReportError when it is missing, damaged, no report, or of another schema; the message names the field.
    """
    return read_one_of(path, {SCHEMA: Report})


def read_one_of(path: Path, kinds: Mapping[str, type[Shown]]) -> Shown:
    """Read a record of one of these kinds, by the schemas that the files name. Raises as `read` does."""
    raw = _parse(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("schema"), str):
        raise ReportError(f"{path}: not a partition report, it has no schema field; write one with `report`")
    if raw["schema"] not in kinds:
        raise ReportError(_wrong_schema(path, raw["schema"], kinds))
    return _validated(path, raw, kinds[raw["schema"]])


def _validated(path: Path, raw: dict[str, Any], record: type[Shown]) -> Shown:
    """The record that `raw` is, without the fields that it does not know. Raises ReportError, which names the field."""
    try:
        return record.model_validate(raw, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ReportError(f"{path}: field {where!r}: {first['msg']}{more}; write the report again") from error


def _parse(path: Path) -> Any:
    """The JSON value in the file, or on stdin. Raises ReportError when there is none."""
    try:
        if path == STDIN:
            return parsed_record(sys.stdin.buffer.read(LARGEST_REPORT_BYTES).decode("utf-8"))
        return parsed_record(read_capped(path, LARGEST_REPORT_BYTES, stream=True))
    except FileNotFoundError as error:
        raise ReportError(f"{path}: no such file; write a report with `report`") from error
    except OSError as error:
        raise ReportError(f"{path}: cannot read the report: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ReportError(
            f"{path}: not a report: byte {error.start} is not UTF-8 text; write the report again"
        ) from error
    except ValueError as error:
        detail = f"{error.msg} in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ReportError(f"{path}: damaged or cut off, it is not JSON ({detail}); write the report again") from error


def _wrong_schema(path: Path, schema: str, kinds: Mapping[str, type[Record]]) -> str:
    """One line on a file of another schema than those that are read; `schema` is what the file says."""
    shown = repr(schema[:60])
    family, slash, _ = schema.partition("/")
    mine = next((known for known in kinds if known.partition("/")[0] == family), None)
    if mine is not None and slash:
        return f"{path}: schema is {shown}, this Partita reads {mine!r}; use the Partita that wrote it"
    if family in NO_REPORTS:
        return f"{path}: {NO_REPORTS[family]}; bench writes reports with `reports`"
    return f"{path}: not a partition report, its schema is {shown}, not {SCHEMA!r}"
