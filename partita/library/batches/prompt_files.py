"""Prompt files (JSON Lines, text, Parquet) and answer files in Parquet.

An unreadable line is a row with an error. Parquet needs the extra `parquet`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from partita.errors import GenerationError, UsageError
from partita.extras import explain
from partita.library.batches.rows import FIELDS, InputRow
from partita.observations.text_format import listing

Format = Literal["jsonl", "txt", "parquet"]
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt", ".parquet": "parquet"}
PROMPT_FORMATS: tuple[Format, ...] = ("jsonl", "txt", "parquet")
ANSWER_FORMATS: tuple[Format, ...] = ("jsonl", "parquet")
Stamp = tuple[int, int, int]
TABLE_ROWS = 64
"""Rows per read or write."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A prompt file with its state at the check."""

    path: Path
    format: Format
    sha256: str
    rows: int
    stamp: Stamp | None
    """Inode, size and modification time."""


def format_of(path: Path, argument: str, formats: tuple[Format, ...]) -> Format:
    """The format, by the file suffix. Raises UsageError for another suffix. `argument`: the option of `path`."""
    found = SUFFIXES.get(path.suffix.lower())
    if found not in formats:
        suffixes = [suffix for suffix, kind in SUFFIXES.items() if kind in formats]
        raise UsageError(f"`{argument}={path}`: the name must end in one of {', '.join(suffixes)}")
    return found


def scan_file(path: Path) -> InputFile:
    """Read a prompt file once for its hash and number of rows, and check that ids are unique.

    Raises UsageError for an unreadable file, GenerationError for a damaged table and for duplicate ids.
    """
    kind = format_of(path, "input", PROMPT_FORMATS)
    try:
        stamp = stamp_of(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"`input={path}`: cannot be read: {error.strerror or error}") from error
    rows, seen = 0, dict[str | int, int]()
    for row in read_rows(path):
        rows += 1
        if row.key is not None and (first := seen.setdefault(row.key, row.index)) != row.index:
            raise GenerationError(
                f"{path}: rows {first} and {row.index} have the same id {row.key!r}; use unique ids, or none"
            )
    return InputFile(path, kind, digest, rows, stamp)


def stamp_of(path: Path) -> Stamp | None:
    """Inode, size and modification time, which detect changes; None for a missing file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def unchanged_rows(source: InputFile, journal: Path) -> Iterator[InputRow]:
    """The rows of a file. Raises GenerationError if it has changed since it was checked."""
    for row in read_rows(source.path):
        check_unchanged(source, journal)
        yield row


def check_unchanged(source: InputFile, journal: Path) -> None:
    """Raise GenerationError if the file has changed since it was checked."""
    if stamp_of(source.path) != source.stamp:
        raise GenerationError(
            f"{source.path}: changed during the run; the completions so far are in {journal}: restore the "
            "file and run the same command again, or remove the completions"
        )


def read_rows(path: Path) -> Iterator[InputRow]:
    """The rows of a file, in order. Raises GenerationError for a read error."""
    kind = format_of(path, "input", PROMPT_FORMATS)
    if kind == "parquet":
        yield from _table_rows(path)
        return
    index = 0
    try:
        with path.open("rb") as file:
            for row in _json_rows(file) if kind == "jsonl" else _text_rows(file):
                index = row.index + 1
                yield row
    except OSError as error:
        raise GenerationError(f"{path}: cannot be read after row {index} ({error.strerror or error})") from error


def _json_rows(file: IO[bytes]) -> Iterator[InputRow]:
    """One object per line; blank lines are skipped."""
    index = 0
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield _json_row(index, number, line)
            index += 1


def _json_row(index: int, number: int, line: bytes) -> InputRow:
    try:
        data = json.loads(line.decode("utf-8"))
        if b"\\ud" in line.lower():  # json accepts half a surrogate pair, which is not a character
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        return InputRow(index, error=f"line {number} is not UTF-8 text (byte {error.start})")
    except UnicodeEncodeError:
        return InputRow(index, error=f"line {number} has a lone surrogate (half a character)")
    except ValueError as error:
        return InputRow(index, error=f"line {number} is not JSON ({error})")
    except RecursionError:
        return InputRow(index, error=f"line {number} is nested too deeply")
    if not isinstance(data, dict):
        return InputRow(index, error=f"line {number} is {str(data)[:40]!r}; it must be a JSON object")
    return InputRow(index, {name: value for name, value in data.items() if value is not None})


def _text_rows(file: IO[bytes]) -> Iterator[InputRow]:
    """One prompt per line; an empty line is an empty prompt."""
    for index, line in enumerate(file):
        try:
            prompt = line.decode("utf-8-sig" if not index else "utf-8")
            yield InputRow(index, {"prompt": prompt.removesuffix("\n").removesuffix("\r")})
        except UnicodeDecodeError as error:
            yield InputRow(index, error=f"line {index + 1} is not UTF-8 text (byte {error.start})")


def import_arrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet. Raises InstallationError with the pip command."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise explain(error) or error from error
    return pyarrow, pyarrow.parquet


def _table_rows(path: Path) -> Iterator[InputRow]:
    """The rows of a table; null and NaN are missing values. Raises GenerationError for a damaged file or column."""
    _, parquet = import_arrow()
    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if wrong := sorted({name for name in names if name not in FIELDS or names.count(name) > 1}):
                message = f"column {listing(wrong)} is unknown or duplicate"
                raise GenerationError(f"{path}: {message}; docs/batches.md lists the fields of a row")
            for group in range(file.num_row_groups):
                for block in file.iter_batches(batch_size=TABLE_ROWS, row_groups=[group]):
                    for row in block.to_pylist():
                        known = {name: value for name, value in row.items() if value is not None and value == value}
                        yield InputRow(index, known)
                        index += 1
    except (OSError, ValueError, NotImplementedError) as error:  # ArrowInvalid and UnicodeDecodeError are ValueErrors
        message = " ".join(str(error).split())[:200]
        raise GenerationError(f"{path}: not a Parquet file, or damaged after row {index} ({message})") from error


def write_table(file: IO[bytes], lines: Iterator[bytes]) -> None:
    """Write answer lines as a table; ids are strings because a column has one type. Raises InstallationError,
    OSError."""
    arrow, parquet = import_arrow()
    logprob = [("token", arrow.int64()), ("logprob", arrow.float64())]
    schema = arrow.schema(
        [
            ("index", arrow.int64()),
            ("id", arrow.string()),
            ("text", arrow.string()),
            ("tokens", arrow.list_(arrow.int64())),
            ("prompt_tokens", arrow.int64()),
            ("finish_reason", arrow.string()),
            ("seed", arrow.uint64()),
            ("error", arrow.string()),
            ("logprobs", arrow.list_(arrow.struct([*logprob, ("top", arrow.list_(arrow.struct(logprob)))]))),
        ]
    )
    with parquet.ParquetWriter(file, schema) as writer:
        while rows := [_table_row(line) for line in islice(lines, TABLE_ROWS)]:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))


def _table_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    for entry in row.get("logprobs") or ():
        entry["top"] = [{"token": token, "logprob": value} for token, value in entry["top"]]
    return {**row, "id": None if row["id"] is None else str(row["id"])}
