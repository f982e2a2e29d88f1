"""Files of prompts: JSON Lines, plain lines, Parquet. A row that cannot be read is a row, with why."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from partita.errors import GenerationError, UsageError
from partita.extras import explain
from partita.library.batches.rows import IDS, PROMPTS, READ, InputRow
from partita.observations.text_format import listing
from partita.spelling import spelled

Format = Literal["jsonl", "txt", "parquet"]
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt", ".parquet": "parquet"}
BLOCK_BYTES = 1 << 20
DEEPEST = 100
"""Lists and objects in each other; other readers of JSON, to which a row may go, stop at 128 or 200."""
PARQUET_ROWS = 256
PARQUET_BYTES = 4 << 20
"""Both end a block, which is in memory at a time, but not before its first row. Token ids are five times as large as
objects of Python.
"""


Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of prompts, and what it was when it was looked at."""

    path: Path
    format: Format
    sha256: str
    size_bytes: int
    rows: int
    """How many, at most: lines with nothing on them count, too."""
    stamp: Stamp | None
    """By which a change shows without reading it again."""


def format_of(path: Path, argument: str, formats: tuple[Format, ...]) -> Format:
    """What a file is, by the end of its name. Raises UsageError for an end that says nothing. `argument`: its name."""
    found = SUFFIXES.get(path.suffix.lower())
    if found not in formats:
        ends = [suffix for suffix, kind in SUFFIXES.items() if kind in formats]
        raise UsageError(f"{spelled(argument, str(path))}: the name has to end in one of {', '.join(ends)}")
    return found


def stamp_of(path: Path) -> Stamp | None:
    """What tells a file from what it was: its number, size, and time of the last change; None for one that is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def look_at(path: Path) -> InputFile:
    """Read a file once for its hash, and how many rows it has. Raises UsageError, GenerationError."""
    stamp = stamp_of(path)  # before: what changes meanwhile is another file
    kind = format_of(path, "input", ("jsonl", "txt", "parquet"))
    digest, size, lines, last = hashlib.sha256(), 0, 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                size += len(block)
                lines += block.count(b"\n")
                last = block[-1:]
    except OSError as error:
        raise UsageError(f"{spelled('input', str(path))}: cannot be read: {error.strerror or error}") from error
    rows = int(_parquet(path).metadata.num_rows) if kind == "parquet" else lines + (last != b"\n")
    return InputFile(path, kind, digest.hexdigest(), size, rows, stamp)


def read_rows(path: Path) -> Iterator[InputRow]:
    """The rows of a file, in their order. Raises GenerationError for one that is no file of its format."""
    kind = format_of(path, "input", ("jsonl", "txt", "parquet"))
    if kind == "parquet":
        yield from _parquet_rows(path)
        return
    index = 0
    try:
        with path.open("rb") as file:
            for row in _json_rows(file) if kind == "jsonl" else _text_rows(file):
                index = row.index + 1
                yield row
    except OSError as error:  # a disk that fails, or a file server that is gone
        raise GenerationError(f"{path}: cannot be read behind row {index} ({error.strerror or error})") from error


def _json_rows(file: IO[bytes]) -> Iterator[InputRow]:
    """An object per line; lines with nothing on them are no rows."""
    index = 0
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        yield _json_row(index, number, line)
        index += 1


def _json_row(index: int, number: int, line: bytes) -> InputRow:
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return InputRow(index, error=f"line {number} is not UTF-8 text (byte {error.start})")
    except ValueError as error:
        return InputRow(index, error=f"line {number} is not JSON ({error})")
    except RecursionError:
        return InputRow(index, error=f"line {number} is not JSON that can be read: it is nested too deeply")
    if line.count(b"[") + line.count(b"{") > DEEPEST and _depth(data) > DEEPEST:
        return InputRow(index, error=f"line {number} is nested more than {DEEPEST} deep")
    if b"\\ud" in line.lower() and not _is_text(data):
        named = (
            {name: data[name] for name in IDS if name in data and _is_text(data[name])}
            if isinstance(data, dict)
            else {}
        )
        return InputRow(index, named, f"line {number} has half a character (a lone surrogate), which no text has")
    if not isinstance(data, dict):
        return InputRow(index, error=f"line {number} is {str(data)[:40]!r} and no JSON object")
    return InputRow(index, {name: value for name, value in data.items() if value is not None})


def _depth(data: Any) -> int:
    """How deep lists and objects are in each other."""
    depth, level = 0, [data]
    while level := [each for each in level if isinstance(each, (list, dict))]:
        depth += 1
        level = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
    return depth


def _is_text(data: Any) -> bool:
    """Whether every string in it is one that can be written: JSON can name halves of characters."""
    try:
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _text_rows(file: IO[bytes]) -> Iterator[InputRow]:
    """A prompt per line, also where the line is empty: the answers stand beside the lines."""
    for index, line in enumerate(file):
        try:
            prompt = line.decode("utf-8-sig" if not index else "utf-8")
        except UnicodeDecodeError as error:
            yield InputRow(index, error=f"line {index + 1} is not UTF-8 text (byte {error.start})")
            continue
        yield InputRow(index, {"prompt": prompt.removesuffix("\n").removesuffix("\r")})


def _parquet_rows(path: Path) -> Iterator[InputRow]:
    file, index = _parquet(path), 0
    names = list(file.schema_arrow.names)
    if twice := sorted({name for name in READ if names.count(name) > 1}):
        raise GenerationError(f"{path}: it has several columns named {listing(twice)}; leave one of each")
    read, others = [name for name in names if name in READ], frozenset(names) - READ
    if not set(names) & set(PROMPTS):
        raise GenerationError(
            f"{path}: none of the columns {listing(PROMPTS)} is there; it has {listing(sorted(names)) or 'none'}"
        )
    try:
        for group in range(file.num_row_groups):  # apart, so that damage in one does not take the rows before it along
            # Columns that mean nothing here may hold what is large, or has no form in Python.
            size = _rows_at_once(file.metadata.row_group(group), read)
            for block in file.iter_batches(batch_size=size, row_groups=[group], columns=read):
                for part in _parts(block):
                    yield from (replace(row, others=others) for row in _block_rows(part, index))
                    index += part.num_rows
    except (OSError, ValueError, NotImplementedError) as error:  # ArrowInvalid is a ValueError
        raise GenerationError(f"{path}: damaged behind row {index} ({' '.join(str(error).split())})") from error


def _rows_at_once(group: Any, columns: Sequence[str]) -> int:
    """How many rows of a group to decode together, by how large they are in the file on average."""
    chunks = (group.column(place) for place in range(group.num_columns))
    sizes = (chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)
    size, rows = int(sum(sizes)), int(group.num_rows)
    return max(1, min(PARQUET_ROWS, PARQUET_BYTES * rows // max(size, 1)))


def _parts(block: Any) -> Iterator[Any]:
    """A block in parts to be converted one by one: what is the same in many rows may be in the file once."""
    rows = max(1, PARQUET_BYTES * block.num_rows // max(block.nbytes, 1))
    return (block.slice(first, rows) for first in range(0, block.num_rows, rows))


def _block_rows(block: Any, first: int) -> Iterator[InputRow]:
    """The rows of a block, one by one where they cannot be read together: a text that is none is one row's error."""
    try:
        rows = block.to_pylist()
    except (ValueError, OverflowError):  # UnicodeDecodeError is a ValueError
        for number in range(block.num_rows):
            try:
                (data,) = block.slice(number, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                said = " ".join(str(error).split())[:200]
                yield InputRow(first + number, error=f"row {first + number} cannot be read ({said})")
            else:
                yield InputRow(first + number, _without_nulls(data))
        return
    for number, data in enumerate(rows):
        yield InputRow(first + number, _without_nulls(data))


def _parquet(path: Path) -> Any:
    """The file, opened. Raises InstallationError, GenerationError."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise explain(error) or error from error
    try:
        return ParquetFile(path)
    except (OSError, ValueError, NotImplementedError) as error:
        raise GenerationError(f"{path}: not a Parquet file ({' '.join(str(error).split())[:200]})") from error


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """A row of a table has every column; what is null in it was not given, nor what is not a number."""
    return {name: value for name, value in data.items() if value is not None and value == value}
