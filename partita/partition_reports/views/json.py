"""The report as a JSON file: written whole or not at all, and read with one line on whatever is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from partita.bench.records import SCHEMA as BENCH_SCHEMA
from partita.bench.records import Bench
from partita.errors import ReportError
from partita.files import write_text
from partita.partition_reports.records import SCHEMA, Report
from partita.partition_reports.views.base import View

NUMBERS = re.compile(r"\[\n([-\d\s,]*?)\]")
"""A list of whole numbers over several lines; inside a string there is no line break."""
Shown = TypeVar("Shown", Report, Bench)
STDIN = Path("-")


def to_text(report: Report | Bench) -> str:
    """The report, or the result of a bench, as JSON, ending in a newline."""
    text = report.model_dump_json(by_alias=True, indent=1)
    return NUMBERS.sub(lambda found: f"[{','.join(found[1].split()).replace(',,', ',')}]", text) + "\n"


def write(report: Report, path: Path) -> None:
    """Write the report to `path`; see `partita.files.write_text`."""
    write_text(to_text(report), path, "report")


def read(path: Path) -> Report:
    """Read and validate the report at `path`; `-` is stdin.

    Raises ReportError when it is missing, damaged, no report, or from another version of Partita; the message names the
    field.
    """
    return validated(path, raw_of(path, (SCHEMA,)), Report)


def read_shown(path: Path) -> Report | Bench:
    """What `report show` and `report html` take: a report, or the result of a bench. Raises as `read` does."""
    raw = raw_of(path, (SCHEMA, BENCH_SCHEMA))
    return validated(path, raw, Bench) if raw["schema"] == BENCH_SCHEMA else validated(path, raw, Report)


def raw_of(path: Path, schemas: Sequence[str]) -> dict[str, Any]:
    """The JSON object in the file, of one of these schemas. Raises ReportError."""
    raw = parse(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("schema"), str):
        raise ReportError(f"{path}: not a partition report, it has no schema field; write one with --report FILE")
    if raw["schema"] not in schemas:
        raise ReportError(wrong_schema(path, raw["schema"], schemas))
    return raw


def validated(path: Path, raw: dict[str, Any], record: type[Shown]) -> Shown:
    """The record that `raw` is. Raises ReportError, which names the field."""
    try:
        return record.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ReportError(f"{path}: field {where!r}: {first['msg']}{more}; write the report again") from error


def parse(path: Path) -> Any:
    """The JSON value in the file, or on stdin. Raises ReportError when there is none."""
    try:
        raw = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
        return json.loads(raw.decode("utf-8"))
    except FileNotFoundError as error:
        raise ReportError(f"{path}: no such file; write a report with --report FILE") from error
    except OSError as error:
        raise ReportError(f"{path}: cannot read the report: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ReportError(
            f"{path}: not a report: byte {error.start} is not UTF-8 text; write the report again"
        ) from error
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg} in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ReportError(f"{path}: damaged or cut off, it is not JSON ({detail}); write the report again") from error


def wrong_schema(path: Path, schema: str, schemas: Sequence[str]) -> str:
    """One line on a file of another schema than those that are read; `schema` is what the file says."""
    shown = repr(schema[:60])
    if schema == BENCH_SCHEMA:
        return f"{path}: the result of a bench, not a partition report; bench --report DIR writes those"
    mine = next((known for known in schemas if known.partition("/")[0] == schema.partition("/")[0]), None)
    if mine is None or "/" not in schema:
        return f"{path}: not a partition report, its schema is {shown}, not {SCHEMA!r}"
    return f"{path}: schema is {shown}, this Partita reads {mine!r}; use the Partita that wrote it"


VIEW = View("json", ".json", "the report as JSON, with a published schema", to_text)
