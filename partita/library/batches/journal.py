"""The journal of a run, OUTPUT.partial: the answers so far, with which an interrupted run resumes; hashes of packages.

The first line identifies the run: input, package, options. Each further line is an answer, in order of completion. When
every row has an answer, they are written to the output in row order and the journal is removed.
"""

from __future__ import annotations

import errno
import filecmp
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

from pydantic import TypeAdapter, ValidationError

from partita.errors import PackageError, ResourceError, UsageError
from partita.files import resolve_path
from partita.library.batches.rows import AnswerRow
from partita.observations.text_format import listing, plural
from partita.package.folder import COMPANIONS, Manifest, sha256_of

SCHEMA = "partita.batch/1"
START = json.dumps({"schema": SCHEMA})[:-1].encode()
"""Beginning of the first line."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GOES_ON = "the answers so far are kept there; run the same command again to continue"
ANSWER = TypeAdapter(AnswerRow)


def journal_path(output: Path) -> Path:
    """The path of an output's journal."""
    return output.with_name(output.name + ".partial")


def interrupted_text(output: Path, done: int, total: int) -> str:
    """`3 of 10 rows answered in out.jsonl.partial; …`, the message of a run that ended early."""
    return f"{done:,} of {plural(total, 'row')} answered in {journal_path(output)}; {GOES_ON}"


class Journal:
    """The journal of an output, locked by one process at a time. A context manager."""

    def __init__(self, output: Path, run: dict[str, Any], seed: int, rows: int) -> None:
        """Begin a journal, or resume an existing one. `run`: JSON that identifies the run. `seed`: for a new run.
        `rows`: of the input.

        Raises UsageError for the journal of another run, and a journal open in another process; ResourceError when the
        journal cannot be written.
        """
        self.output = output.absolute()  # callbacks may change the current folder
        self.path = journal_path(self.output)
        self.seed = seed
        """Seed of the run, also when resumed."""
        self.errors = 0
        """Number of answers that are errors."""
        self._places = array("q", [-1]) * rows
        """Byte offset of each row's line; -1: no answer yet."""
        self._done = self._end = 0
        self._file = _locked(self.path)
        try:
            self._read(json.loads(json.dumps(run)))
        except BaseException:
            self._file.close()
            raise
        self.resumed = self._done
        """Number of answers of earlier runs."""

    def __contains__(self, index: int) -> bool:
        return self._places[index] >= 0

    def __len__(self) -> int:
        return self._done

    def missing(self) -> list[int]:
        """Indices of rows without an answer."""
        return [index for index, place in enumerate(self._places) if place < 0]

    def append(self, answer: AnswerRow) -> None:
        """Write the answer of a row; further answers of the row are dropped.

        Raises ResourceError for a full disk, which damages no answer.
        """
        if answer.index in self:
            return
        self._note(answer, self._write(answer.to_line()))

    def publish(self, write: Callable[[IO[bytes], Iterator[bytes]], object]) -> None:
        """Write the answers to the output atomically, and remove the journal.

        `write(file, lines)` writes answer lines in the output's format. Raises UsageError if another program has
        created the output, ResourceError for a full disk.
        """
        target = resolve_path(self.output)
        # One temporary name per journal, so that a killed run's file is overwritten; short, because the output's name
        # may already have the maximum length.
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        temporary = target.with_name(f".partita-{name}.tmp")
        try:
            with temporary.open("wb") as file:
                write(file, self._lines())
                file.flush()
                os.fsync(file.fileno())
            if not target.exists():
                temporary.replace(target)
            elif not filecmp.cmp(temporary, target, shallow=False):  # otherwise a run was interrupted right here
                raise UsageError(f"{self.output}: was written by another program; move it and run the command again")
        except OSError as error:
            raise _cannot_write(self.output, error, "all rows are complete") from error
        finally:
            temporary.unlink(missing_ok=True)
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._done:
            self._remove()
        self._file.close()

    def _read(self, run: dict[str, Any]) -> None:
        """Read existing lines; the rows of damaged lines are answered again. A journal without answers is started
        again. Raises UsageError for another run."""
        with self.path.open("rb") as file:
            header = file.readline()
            if not START.startswith(header[: len(START)]):
                raise UsageError(
                    f"{self.path}: exists and is not a journal of Partita; move it or choose another `output`"
                )
            self._end = len(header)
            for line in file:
                if not line.endswith(b"\n"):  # its process was killed
                    break
                with suppress(ValidationError):
                    answer = ANSWER.validate_json(line, strict=True)
                    if 0 <= answer.index < len(self._places) and answer.index not in self:
                        self._note(answer, self._end)
                self._end += len(line)
        if self._end == len(header):
            self._end = 0
            self._file.truncate(0)
            self._write(json.dumps({"schema": SCHEMA, "run": run, "seed": self.seed}).encode() + b"\n")
            return
        try:
            record = json.loads(header)
            earlier, self.seed = dict(record["run"]), int(record["seed"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise UsageError(f"{self.path}: its first line is damaged; remove the file to begin again") from error
        if different := [name for name in {**run, **earlier} if earlier.get(name) != run.get(name)]:
            named = listing(name if " " in name else f"`{name}`" for name in different)  # options are words
            raise UsageError(
                f"{self.path}: contains completions of another run, with another {named}; finish that run "
                "with its own options, remove the file to begin again, or choose another `output`"
            )
        self._file.truncate(self._end)

    def _note(self, answer: AnswerRow, place: int) -> None:
        self._places[answer.index] = place
        self._done += 1
        self.errors += answer.finish_reason == "error"

    def _lines(self) -> Iterator[bytes]:
        """The lines of all rows, in row order. Raises OSError if one is missing."""
        with self.path.open("rb") as file:
            for index, place in enumerate(self._places):
                file.seek(place)
                line = file.readline()
                if not line.endswith(b"\n"):
                    raise OSError(errno.EIO, f"{self.path} has lost the answer to row {index}")
                yield line

    def _write(self, line: bytes) -> int:
        """Write a whole line, or nothing; return its offset."""
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise _cannot_write(self.path, error) from error
        self._end += len(line)
        return self._end - len(line)

    def _remove(self) -> None:
        if os.name != "posix":
            self._file.close()
        with suppress(OSError):  # while it is locked, so that no other process resumes it
            self.path.unlink()
        self._file.close()


def _locked(path: Path) -> IO[bytes]:
    """The opened or created file, locked. Raises UsageError if another process has locked it, ResourceError."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: exists and is not a regular file; move it or choose another `output`")
    try:
        file: IO[bytes] = path.open("a+b", buffering=0)
    except OSError as error:
        raise _cannot_write(path, error) from error
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            message = f"cannot be locked ({error.strerror}): another process writes this output, or the file system"
            raise UsageError(f"{path}: {message} has no locks; wait, or choose another `output`") from error
    return file


def _cannot_write(path: Path, error: OSError, kept: str = "the answers so far are kept") -> ResourceError:
    what = "free disk space" if error.errno in FULL else "fix the cause"
    message = f"cannot be written ({error.strerror or error}); {kept}: {what} and run the same command again"
    return ResourceError(message, path=path)


OF_OTHERS = ("genai_config.json",)
"""Additional files of foreign folders."""


def contents_hash(folder: Path, manifest: Manifest) -> str:
    """SHA-256 of the manifest and of editable files such as the tokenizer's.

    Graphs and weights count by their hashes in the manifest; those of a foreign folder are hashed. Raises PackageError
    for an unreadable file.
    """
    digest = hashlib.sha256(manifest.model_dump_json(exclude={"created"}).encode())
    homes = {"", *(str(PurePosixPath(file.file).parent) for file in manifest.graph.files)}
    companions = {str(PurePosixPath(home, name)) for home in homes for name in (*COMPANIONS, *OF_OTHERS)}
    there = {name for name in companions if (folder / name).is_file()}
    for name in sorted(there | {record.name for record in manifest.files if not record.sha256}):
        try:
            digest.update(f"{name}\0{sha256_of(folder / name)}\0".encode())
        except OSError as error:
            raise PackageError(f"{folder / name}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()
