"""What makes a run over a file go on after it was ended, however that was: an answer is on disk as soon as it is there.

The journal lies beside the output, `out.jsonl.partial`. Its first line says of which run it is; each line after it is
the answer to a row, in the order in which rows were done. A line that was cut off by the end of the process is no
answer. When every row has its line they are put in order into the output, in one piece, and the journal goes.
"""

from __future__ import annotations

import errno
import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pydantic import TypeAdapter, ValidationError

from partita.capped import LARGEST_BYTES, parsed_record
from partita.errors import ResourceError, UsageError
from partita.library.audience import LOGGER
from partita.library.batches.rows import RowAnswer
from partita.observations.text_format import listing, plural
from partita.spelling import spelled

SCHEMA = "partita.batch/1"
SUFFIX = ".partial"
SYNC_SECONDS = 5.0
"""A power failure costs the answers of this time; the end of the process costs none."""
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS)
"""What a file system says that has no such thing."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ANSWER: TypeAdapter[RowAnswer] = TypeAdapter(RowAnswer)
GOES_ON = "the answers so far are kept there, and the same command goes on with the rest"


def journal_path(output: Path) -> Path:
    """Where the journal of an output lies."""
    return output.with_name(output.name + SUFFIX)


class Journal:
    """The answers of a run so far. One process at a time; close it, or use it as a context manager."""

    def __init__(self, path: Path, run: Mapping[str, Any], seed: int, rows: int | None = None) -> None:
        """Begin a journal, or go on with the one that is there. `run`: what the run is of, as JSON has it; `seed`: of
        the run, if it begins; `rows`: how many the input has at most.

        Raises UsageError for the journal of another run, or of one that goes on; ResourceError when it cannot be
        written.
        """
        self.path = path
        self._place = path.absolute()  # whoever hears of steps may go to another folder
        self.seed = seed
        """Of the run, which may have begun earlier."""
        self.tokens = self.errors = 0
        """New tokens, and rows without an answer, of all that is in it."""
        self.damage = ""
        """What is wrong with the journal that was there, in a sentence; empty where nothing is."""
        self._rows = rows
        self._places = array("q")
        """Where the line of each row begins; -1 for one that has none."""
        self._done = 0
        self._file = _locked(path)
        try:
            self._end = self._read(json.loads(json.dumps(run)))  # as it is read back
        except BaseException:
            self._file.close()
            raise
        self.resumed = self._done
        """Rows that were done before."""
        self._synced = time.monotonic()

    def __contains__(self, index: int) -> bool:
        return index < len(self._places) and self._places[index] >= 0

    def __len__(self) -> int:
        return self._done

    def append(self, answer: RowAnswer) -> None:
        """Keep the answer of a row. Raises ResourceError when there is no room for it; what is there stays good."""
        if answer.index in self:
            raise ValueError(f"row {answer.index} has an answer already")
        line = json.dumps(answer.to_json(), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._write(line)
        self._note(answer.index, self._end - len(line), answer.finish_reason, len(answer.tokens))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have the disk keep what was written. Raises ResourceError where it does not, as file servers say late, and
        where the file was removed.
        """
        try:
            if not os.path.samestat(os.fstat(self._file.fileno()), self._place.stat()):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            os.fsync(self._file.fileno())
        except FileNotFoundError as error:
            raise ResourceError(
                f"{self.path}: was removed or replaced while rows were answered, and their answers with it; run the "
                "same command again"
            ) from error
        except OSError as error:
            if error.errno not in CANNOT_SYNC:
                raise _cannot(self.path, error) from error
        self._synced = time.monotonic()

    def answers(self) -> Iterator[bytes]:
        """The lines of all rows, in the order of the rows. Raises UsageError where one is missing, OSError where
        the disk has lost one.
        """
        with self._place.open("rb") as file:
            for index, place in enumerate(self._places):
                if place < 0:
                    raise UsageError(f"{self.path}: row {index} has no answer, so the run is not done")
                file.seek(place)
                line = file.readline()
                if not line.endswith(b"\n"):
                    raise OSError(errno.EIO, f"{self.path} has lost the answer to row {index}")
                yield line

    def remove(self) -> None:
        """The output is there: nothing of the run is left."""
        if os.name == "posix":  # while it is locked, so that no other run opens what is about to go
            with suppress(OSError):
                self._place.unlink()
            self.close()
            return
        self.close()
        with suppress(OSError):
            self._place.unlink()

    def close(self) -> None:
        """Let go of the file, which stays. May be called twice."""
        if not self._file.closed:
            with suppress(ResourceError):  # what has to be kept was synced where that can be said
                self.sync()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._done:
            self.remove()  # nothing to go on with
        self.close()

    def _read(self, run: dict[str, Any]) -> int:
        """Take in what is there, or write the first line; where the next line goes."""
        self._end = 0
        with self._place.open("rb") as file:
            header = file.readline(LARGEST_BYTES)
        if not header.endswith(b"\n"):  # a new file, or one whose first line was cut off
            _refuse_foreign(self.path, header)
            return self._anew(run)
        _refuse_foreign(self.path, header)
        with self._place.open("rb") as file:
            file.seek(len(header))
            if not file.readline().endswith(b"\n"):  # without an answer nothing is lost, whatever run it was of
                return self._anew(run)
            self.seed = _check_header(self.path, header, run)
            self._end = len(header)
            file.seek(self._end)
            number = 1
            while (line := file.readline(LARGEST_BYTES)).endswith(b"\n") and self._take_in(line):
                number += 1
            if line.endswith(b"\n") or len(line) == LARGEST_BYTES:
                self.damage = (
                    f"{self.path}: line {number + 1} is damaged, it is no answer to a row of this run; that line and "
                    "those behind it are removed, and their rows are answered again"
                )
                LOGGER.warning(self.damage)
        self._file.truncate(self._end)
        self._file.seek(self._end)
        return self._end

    def _anew(self, run: dict[str, Any]) -> int:
        """Write the first line in the place of all that is there; where the next line goes."""
        self._file.truncate(0)
        self._file.seek(0)
        self._write(json.dumps({"schema": SCHEMA, "run": run, "seed": self.seed}).encode() + b"\n")
        return self._end

    def _take_in(self, line: bytes) -> bool:
        """Note a line that was there; whether it is the answer to a row of this run."""
        try:
            answer = ANSWER.validate_json(line, strict=True)
        except ValidationError:
            return False
        if answer.index < 0 or (self._rows is not None and answer.index >= self._rows):
            return False
        if answer.index not in self:
            self._note(answer.index, self._end, answer.finish_reason, len(answer.tokens))
        self._end += len(line)
        return True

    def _note(self, index: int, place: int, finish: str, tokens: int) -> None:
        while len(self._places) <= index:
            self._places.append(-1)
        self._places[index] = place
        self._done += 1
        self.tokens += tokens
        self.errors += finish == "error"

    def _write(self, line: bytes) -> None:
        """Write a whole line, or nothing."""
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise _cannot(self.path, error) from error
        self._end += len(line)


def _check_header(path: Path, header: bytes, run: dict[str, Any]) -> int:
    """The seed of the run that a journal is of. Raises UsageError when that is another one."""
    try:
        said = parsed_record(header.decode())
        earlier, seed = {**said["run"]}, said["seed"]
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError("its seed is no integer")
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: damaged in its first line ({error}); remove it to begin anew") from error
    different = [name for name in {**run, **earlier} if earlier.get(name) != run.get(name)]
    if different:
        told = [_difference(name, earlier.get(name), run.get(name)) for name in different]
        raise UsageError(
            f"{path}: holds the answers so far of another run: {listing(told)}; finish that one with its own options, "
            f"remove the file to begin anew, or give another {spelled('output')}"
        )
    return seed


def _difference(name: str, before: Any, now: Any) -> str:
    """What is different between two runs, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        parts = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        called = {key: spelled(key) if name == "options" else f"{key} of the {name}" for key in parts}
        shown = [f"{called[key]} was {before.get(key)!r} and is {now.get(key)!r}" for key in parts]
        return listing(shown)
    return f"the {name} is another"


def _refuse_foreign(path: Path, header: bytes) -> None:
    """Raise UsageError for a file that is no journal. One that is empty or cut off in its first line may be one."""
    try:
        known = json.loads(header).get("schema") == SCHEMA if header.endswith(b"\n") else _begins(header)
    except (ValueError, AttributeError, RecursionError):
        known = False
    if not known:
        raise UsageError(
            f"{path}: not written by Partita, and the answers of a run would be kept there; move it away, or give "
            f"another {spelled('output')}"
        )


def _begins(header: bytes) -> bool:
    """Whether these bytes are how the first line of a journal begins."""
    begin = json.dumps({"schema": SCHEMA}).encode()[:-1]
    return begin.startswith(header) or header.startswith(begin)


def _locked(path: Path) -> IO[bytes]:
    """The file, opened or made, and kept from others. Raises UsageError where another process has it, ResourceError."""
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path}: no regular file, and the answers of a run would be kept there; move it away, or give another "
            f"{spelled('output')}"
        )
    try:
        file: IO[bytes] = path.open("a+b", buffering=0)
    except OSError as error:
        raise _cannot(path, error) from error
    try:
        _lock(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: IO[bytes], path: Path) -> None:
    """Keep others out as long as the file is open; where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"{path}: another process is at work on this output; wait for it, or name another") from error
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be locked ({error.strerror}); give an {spelled('output')} on a file system with file locks"
        ) from error


def _cannot(path: Path, error: OSError) -> ResourceError:
    """The error for a journal that cannot be written."""
    what = "make room for it" if error.errno in FULL else "correct that"
    return ResourceError(f"{path}: cannot be written ({error.strerror or error}); {what}: {GOES_ON}")


def kept_words(path: Path, done: int, total: int | None) -> str:
    """`3 of 10 rows answered in out.jsonl.partial; …`: what is left of a run that ended early."""
    where = f"answered in {path}; {GOES_ON}" if path.is_file() else f"were answered, and {path} is gone with them"
    return f"{progress_words(done, total)} {where}"


def progress_words(done: int, total: int | None) -> str:
    """`3 of 10 rows`."""
    return plural(done, "row") if total is None else f"{done:,} of {plural(total, 'row')}"
