"""The report as a JSON file: written whole or not at all, and read with one line on whatever is wrong."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from partita.errors import ReportError
from partita.partition_reports.records import SCHEMA, Report
from partita.partition_reports.views.base import View

NUMBERS = re.compile(r"\[\n([-\d\s,]*?)\]")
"""A list of whole numbers over several lines; inside a string there is no line break."""
FAMILY = SCHEMA.partition("/")[0]


def to_text(report: Report) -> str:
    """The report as JSON, ending in a newline."""
    text = report.model_dump_json(by_alias=True, indent=1)
    return NUMBERS.sub(lambda found: f"[{','.join(found[1].split()).replace(',,', ',')}]", text) + "\n"


def write(report: Report, path: Path) -> None:
    """Write the report to `path`, which is replaced in one step: readers see the old file or the whole new one.

    A pipe, a device or a symbolic link is written through instead. Raises ReportError when `path` cannot be written.
    """
    write_text(to_text(report), path, "report")


def write_text(text: str, path: Path, what: str) -> None:
    """The same for any view; `what` names it in an error."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
        else:
            replace(path, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ReportError(f"{path}: cannot write the {what}: {reason}; choose another file for it") from error


def check_writable(path: Path) -> None:
    """Raise ReportError when a report could not be written to `path`: better said before a long run than after it."""
    if path.is_dir():
        raise ReportError(f"{path}: a folder; give a file name for the report")
    if not path.parent.is_dir():
        raise ReportError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ReportError(f"{path}: no permission to write there; choose another file")


def replace(path: Path, text: str) -> None:
    """Write `text` beside `path`, then rename. Raises OSError, and leaves nothing behind then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read(path: Path) -> Report:
    """Read and validate the report at `path`.

    Raises ReportError when it is missing, damaged, no report, or from another version of Partita; the message names the
    field.
    """
    raw = parse(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("schema"), str):
        raise ReportError(f"{path}: not a partition report, it has no schema field; write one with --report FILE")
    if raw["schema"] != SCHEMA:
        raise ReportError(wrong_schema(path, raw["schema"]))
    try:
        return Report.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ReportError(f"{path}: field {where!r}: {first['msg']}{more}; write the report again") from error


def parse(path: Path) -> Any:
    """The JSON value in the file. Raises ReportError when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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


def wrong_schema(path: Path, schema: str) -> str:
    """One line on a report of another schema; `schema` is what the file says."""
    shown = repr(schema[:60])
    if not schema.startswith(f"{FAMILY}/"):
        return f"{path}: not a partition report, its schema is {shown}, not {SCHEMA!r}"
    return f"{path}: schema is {shown}, this Partita reads {SCHEMA!r}; use the Partita that wrote it"


VIEW = View("json", ".json", "the report as JSON, with a published schema", to_text)
