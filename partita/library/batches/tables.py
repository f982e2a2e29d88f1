"""Prompt files and answer files in Parquet (extra `parquet`), read and written a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from partita.errors import GenerationError
from partita.extras import explain
from partita.library.batches.rows import FIELDS, InputRow
from partita.observations.text_format import listing

ROWS = 64
"""Rows that are read together."""
BLOCK_BYTES = 4 << 20
"""Of answer lines that are written together; as Python objects log-probabilities take a dozen times as much."""


def import_arrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet. Raises InstallationError with the pip command."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise explain(error) or error from error
    return pyarrow, pyarrow.parquet


def read_table(path: Path) -> Iterator[InputRow]:
    """The rows of a table; null and NaN are missing values.

    Raises GenerationError for a file that is not Parquet or is damaged, and for a column that is not a row's field.
    """
    _, parquet = import_arrow()
    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if wrong := sorted({name for name in names if name not in FIELDS or names.count(name) > 1}):
                said = f"column {listing(wrong)} is unknown or there twice"
                raise GenerationError(f"{path}: {said}; docs/batches.md lists the fields of a row")
            for group in range(file.num_row_groups):
                for block in file.iter_batches(batch_size=ROWS, row_groups=[group]):
                    for row in block.to_pylist():
                        known = {name: value for name, value in row.items() if value is not None and value == value}
                        yield InputRow(index, known)
                        index += 1
    except (OSError, ValueError, NotImplementedError) as error:  # ArrowInvalid and UnicodeDecodeError are ValueErrors
        said = " ".join(str(error).split())[:200]
        raise GenerationError(f"{path}: not a Parquet file, or damaged after row {index} ({said})") from error


def write_table(file: IO[bytes], lines: Iterable[bytes]) -> None:
    """Write answer lines as a table; ids are text, because a column has one type. Raises InstallationError, OSError."""
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
    taken = 0

    def block_of(line: bytes) -> int:
        nonlocal taken
        taken += len(line)
        return taken // BLOCK_BYTES

    with parquet.ParquetWriter(file, schema) as writer:
        for _, block in groupby(lines, block_of):
            writer.write_table(arrow.Table.from_pylist([*map(_table_row, block)], schema=schema))


def _table_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    for entry in row.get("logprobs") or ():
        entry["top"] = [{"token": token, "logprob": value} for token, value in entry["top"]]
    return {**row, "id": None if row["id"] is None else str(row["id"])}
