"""The answers of a run so far, in OUTPUT.partial: the run goes on with them after it was ended in any way.

The first line says which run it is: input, package, options. Each further line is the answer to a row, in the order of
completion, and is the line of the answer file. A line without its end is dropped. When every row has its line they are
written to the output in the order of the rows, and the journal is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from partita.errors import ResourceError, UsageError
from partita.files import resolved
from partita.library.audience import LOGGER
from partita.library.batches.rows import RowAnswer
from partita.observations.text_format import listing, plural
from partita.spelling import spelled

SCHEMA = "partita.batch/1"
START = json.dumps({"schema": SCHEMA})[:-1].encode()
"""How the first line begins."""
LONGEST_HEADER = 1 << 20
SYNC_SECONDS = 5.0
"""A power failure costs the answers of this time; the end of the process costs none."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GOES_ON = "the answers so far are kept there, and the same command goes on with the rest"
DAMAGED = (ValueError, TypeError, KeyError, RecursionError)
"""Raised by reading a damaged line."""


def journal_path(output: Path) -> Path:
    """The journal of an output."""
    return output.with_name(output.name + ".partial")


def kept_words(output: Path, done: int, total: int) -> str:
    """`3 of 10 rows answered in out.jsonl.partial; …`, for a run that ended early."""
    return f"{done:,} of {plural(total, 'row')} answered in {journal_path(output)}; {GOES_ON}"


class Journal:
    """The journal of an output, locked for one process at a time. A context manager; see the module."""

    def __init__(
        self,
        output: Path,
        run: dict[str, Any],
        seed: int,
        rows: int,
        noted: Callable[[str], object] = LOGGER.warning,
    ) -> None:
        """Begin a journal, or go on with the one that is there. `run`: what identifies the run, as JSON; `seed`: of a
        run that begins; `rows`: of the input. `noted` is called with what was wrong with the journal.

        Raises UsageError for the journal of another run, one that another process has open, or an output that exists
        and is not this run's; ResourceError when the journal cannot be written.
        """
        self.output = output.absolute()  # callbacks may change the current folder
        self.path = journal_path(self.output)
        self.seed = seed
        """Of the run, which may have begun earlier."""
        self.errors = 0
        """Answers that are errors."""
        self._places = array("q", [-1]) * rows
        """Where the line of each row begins; -1: no answer yet."""
        self._done = self._end = 0
        self._published: list[int] = []
        """Size and time of change of the output that this run has written."""
        self._synced = time.monotonic()
        self._file = _locked(self.path)
        try:
            self._read(json.loads(json.dumps(run)), noted)
            self.finished = self._is_finished()
            """The output is there: a run was killed before it removed the journal."""
        except BaseException:
            self._file.close()
            raise
        self.resumed = self._done
        """Answers of earlier runs."""

    def __contains__(self, index: int) -> bool:
        return self._places[index] >= 0

    def __len__(self) -> int:
        return self._done

    def missing(self) -> list[int]:
        """Rows without an answer."""
        return [index for index, place in enumerate(self._places) if place < 0]

    def append(self, answer: RowAnswer) -> None:
        """Write the answer of a row; a second one is dropped. Raises ResourceError for a full disk, which damages no
        answer.
        """
        if answer.index in self:
            return
        place = self._end
        self._write(answer.to_line())
        self._note(answer.index, place, answer.finish_reason)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have the disk keep what was written. Raises ResourceError; file servers report a full disk here."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._synced = time.monotonic()

    def publish(self, write: Callable[[IO[bytes], Iterator[bytes]], object]) -> None:
        """Write the answers to the output, whole or not at all, and remove the journal. `write(file, lines)` writes
        answer lines in the format of the output.

        Raises UsageError for an output that somebody else has made meanwhile, ResourceError for a full disk.
        """
        self.sync()
        target = resolved(self.output)
        # One name for each journal, so that a killed run's file is overwritten; short, because the output's name may be
        # as long as the file system allows.
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        temporary = target.with_name(f".partita-{name}.tmp")
        try:
            if not self.finished:
                with temporary.open("wb") as file:
                    write(file, self._lines())
                    file.flush()
                    os.fsync(file.fileno())
                found = temporary.stat()
                self._write(json.dumps({"output": [found.st_size, found.st_mtime_ns]}).encode() + b"\n")
                if target.exists():
                    raise UsageError(
                        f"{self.output}: was written while the rows were answered; move it away, and the same command "
                        "writes the answers"
                    )
                temporary.replace(target)
        except OSError as error:
            what = "make room" if error.errno in FULL else "correct that"
            raise ResourceError(
                f"{self.output}: cannot be written ({error.strerror or error}); every row has its answer, so {what} "
                "and run the same command again"
            ) from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file.closed:
            return
        if error is not None and not self._done:
            self._remove()
            return
        with suppress(ResourceError):
            self.sync()
        self._file.close()

    def _is_finished(self) -> bool:
        """Whether the output is there and this run has written it. Raises UsageError for another file."""
        if not self.output.exists():
            return False
        found = self.output.stat()
        if self._published == [found.st_size, found.st_mtime_ns]:
            return True
        raise UsageError(f"{spelled('output', str(self.output))}: exists already; remove it or name another")

    def _read(self, run: dict[str, Any], noted: Callable[[str], object]) -> None:
        """Read the lines that are there, or write the first one."""
        with self.path.open("rb") as file:
            header = file.readline(LONGEST_HEADER)
            if not START.startswith(header[: len(START)]):
                raise UsageError(
                    f"{self.path}: exists and is not a journal of Partita; move it or choose another "
                    f"{spelled('output')}"
                )
            line = file.readline()
            if not header.endswith(b"\n") or not line.endswith(b"\n"):  # no answer, so nothing is lost
                self._file.truncate(0)
                self._write(json.dumps({"schema": SCHEMA, "run": run, "seed": self.seed}).encode() + b"\n")
                return
            self.seed = self._seed_of(header, run)
            self._end, number = len(header), 2
            while line.endswith(b"\n") and self._take(line):
                number += 1
                line = file.readline()
            if line.endswith(b"\n"):
                noted(f"{self.path}: line {number} is damaged; it and those after it are dropped, to be answered again")
        self._file.truncate(self._end)

    def _seed_of(self, header: bytes, run: dict[str, Any]) -> int:
        """The seed of the run that the journal is of. Raises UsageError where that is another run."""
        try:
            record = json.loads(header)
            earlier, seed = dict(record["run"]), record["seed"]
            if type(seed) is not int:
                raise TypeError("its seed is not an integer")
        except DAMAGED as error:
            raise UsageError(f"{self.path}: damaged in its first line ({error}); remove it to begin anew") from error
        if different := [name for name in {**run, **earlier} if earlier.get(name) != run.get(name)]:
            what = listing([_difference(name, earlier.get(name), run.get(name)) for name in different])
            raise UsageError(
                f"{self.path}: has the answers so far of another run: {what}; finish that run with its own options, "
                f"remove the file to begin anew, or choose another {spelled('output')}"
            )
        return seed

    def _take(self, line: bytes) -> bool:
        """Note a line of an earlier run; False for one that is damaged."""
        try:
            record = json.loads(line)
            if "output" in record:
                self._published = record["output"]
            else:
                index, finish = record["index"], record["finish_reason"]
                whole = type(index) is int and isinstance(finish, str) and isinstance(record["tokens"], list)
                if not whole or not 0 <= index < len(self._places):
                    return False
                if index not in self:
                    self._note(index, self._end, finish)
        except DAMAGED:
            return False
        self._end += len(line)
        return True

    def _note(self, index: int, place: int, finish: str) -> None:
        self._places[index] = place
        self._done += 1
        self.errors += finish == "error"

    def _lines(self) -> Iterator[bytes]:
        """The lines of all rows, in the order of the rows. Raises OSError where one has been lost."""
        with self.path.open("rb") as file:
            for index, place in enumerate(self._places):
                file.seek(place)
                line = file.readline()
                if not line.endswith(b"\n"):
                    raise OSError(errno.EIO, f"{self.path} has lost the answer to row {index}")
                yield line

    def _write(self, line: bytes) -> None:
        """Write a whole line, or nothing."""
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise _cannot_write(self.path, error) from error
        self._end += len(line)

    def _remove(self) -> None:
        if os.name != "posix":
            self._file.close()
        with suppress(OSError):  # while it is locked, so that no other process goes on with it
            self.path.unlink()
        self._file.close()


def _difference(name: str, before: Any, now: Any) -> str:
    """What differs between two runs, in words."""
    if name != "options" or not isinstance(before, dict):
        return f"the {name} is another"
    options = [option for option in {**before, **now} if before.get(option) != now.get(option)]
    return listing([f"{spelled(each)} was {before.get(each)!r} and is {now.get(each)!r}" for each in options])


def _locked(path: Path) -> IO[bytes]:
    """The file, opened or made, and locked. Raises UsageError where another process has it, ResourceError."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: exists and is not a regular file; move it or choose another {spelled('output')}")
    try:
        file: IO[bytes] = path.open("a+b", buffering=0)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError as error:
        file.close()
        said = "another process writes this output; wait for it, or choose another"
        if not isinstance(error, BlockingIOError):
            said = f"cannot be locked ({error.strerror}); choose an output on a file system with file locks"
        raise UsageError(f"{path}: {said}") from error
    return file


def _cannot_write(path: Path, error: OSError) -> ResourceError:
    what = "make room for it" if error.errno in FULL else "correct that"
    return ResourceError(f"{path}: cannot be written ({error.strerror or error}); {what}: {GOES_ON}")
