"""Files of answers: put together in the order of the rows once every row has its own, and there in one piece."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from partita.errors import ResourceError, UsageError
from partita.extras import explain
from partita.library.batches.reading import SUFFIXES
from partita.spelling import spelled

PARQUET_ROWS = 1024
PARQUET_BYTES = 4 << 20
"""Of lines. Both end a block, which is in memory at a time: as lists and dicts of Python log-probabilities take a dozen
times as much.
"""


def refuse_there(output: Path, journal: Path) -> None:
    """Raise UsageError for answers that are there already: they are another run's."""
    if output.exists():
        raise UsageError(
            f"{spelled('output', str(output))}: exists already; remove it or name another. A run that was cut short "
            f"has its answers in {journal.name}, and goes on with them"
        )


def write_answers(path: Path, lines: Iterable[bytes]) -> None:
    """Write the answers, a JSON object each, to a file of the format that its name says.

    Readers see the whole file or none. Raises UsageError where a file is there by now, ResourceError when there is no
    room, InstallationError without pyarrow.
    """
    write = _write_parquet if SUFFIXES[path.suffix.lower()] == "parquet" else _write_lines
    try:
        _in_one_piece(path, lambda file: write(file, lines))
    except FileExistsError as error:
        raise UsageError(
            f"{path}: was written while the rows were answered, and is left as it is; move it away, and the same "
            "command puts its own answers in order there"
        ) from error
    except OSError as error:
        what = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "correct that"
        raise ResourceError(
            f"{path}: cannot be written ({error.strerror or error}); every row has its answer, so {what} and run "
            "the same command again: it only puts them in order"
        ) from error


def is_there(path: Path, lines: Iterable[bytes]) -> bool:
    """Whether a file has just these answers: a run that was killed when it had written them left its journal."""
    write = _write_parquet if SUFFIXES[path.suffix.lower()] == "parquet" else _write_lines
    try:
        with tempfile.TemporaryFile() as made, path.open("rb") as there:
            write(made, lines)
            made.seek(0)
            while (block := there.read(PARQUET_BYTES)) == made.read(PARQUET_BYTES):
                if not block:
                    return True
    except (OSError, UsageError):  # not all rows have their answer yet
        return False
    return False


def check_library(path: Path) -> None:
    """Raise InstallationError now for a format whose library is missing, and not after the last row."""
    if SUFFIXES[path.suffix.lower()] == "parquet":
        _arrow()


def _in_one_piece(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write beside the file, then rename."""
    named, path = str(path), path.resolve()
    # Of one name, so that what a killed run has left is written over: the journal is locked by one run at a time,
    # and lies where the name was given: a link and what it leads to are two. A short one: the name of the file may be
    # as long as the file system allows.
    temporary = path.with_name(f".partita-{hashlib.sha256(os.fsencode(named)).hexdigest()[:16]}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a run that was killed at its very end has left it a name of the answers
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _publish(temporary: Path, path: Path) -> None:
    """Give a file its name. Raises FileExistsError where another has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links; a moment is left between the look and the rename
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.replace(path)
    else:
        temporary.unlink()


def _write_lines(file: IO[bytes], lines: Iterable[bytes]) -> None:
    for line in lines:
        file.write(line)


def _write_parquet(file: IO[bytes], lines: Iterable[bytes]) -> None:
    arrow, parquet = _arrow()
    schema = _schema(arrow)
    with parquet.ParquetWriter(file, schema) as writer:
        for block in _blocks(lines):
            writer.write_table(arrow.Table.from_pylist([_plain(json.loads(line)) for line in block], schema=schema))


def _blocks(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if len(block) == PARQUET_ROWS or size >= PARQUET_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: an id is text, for a column has one type, and log-probabilities are lists of structs."""
    told = row.get("logprobs")
    alike = [
        {**entry, "top": [{"token": token, "logprob": value} for token, value in entry["top"]]} for entry in told or ()
    ]
    return {**row, "id": None if row["id"] is None else str(row["id"]), "logprobs": None if told is None else alike}


def _schema(arrow: Any) -> Any:
    """The columns, which are the fields of `RowAnswer`."""
    likely = [("token", arrow.int64()), ("logprob", arrow.float64())]
    return arrow.schema(
        [
            ("index", arrow.int64()),
            ("id", arrow.string()),
            ("text", arrow.string()),
            ("tokens", arrow.list_(arrow.int64())),
            ("prompt_tokens", arrow.int64()),
            ("finish_reason", arrow.string()),
            ("seed", arrow.uint64()),
            ("error", arrow.string()),
            ("logprobs", arrow.list_(arrow.struct([*likely, ("top", arrow.list_(arrow.struct(likely)))]))),
        ]
    )


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise explain(error) or error from error
    return pyarrow, pyarrow.parquet
