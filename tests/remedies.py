"""The remedy of a command that fails, as data; `python -m tests.remedies generate pkg hi` prints it as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence

from partita import cli
from partita.errors import PartitaError
from partita.remedies import Remedy


def remedy_of(*arguments: object) -> Remedy:
    """What the error of this command line carries. Fails when there is none."""
    try:
        cli.app([str(argument) for argument in arguments], standalone_mode=False)
    except PartitaError as error:
        assert error.remedy is not None, error
        return error.remedy
    raise AssertionError(f"{arguments}: did not fail")


def alternatives(remedy: Remedy | None) -> Iterator[Remedy]:
    """A remedy and what else helps."""
    while remedy is not None:
        yield remedy
        remedy = remedy.alternative


def pattern(remedy: Remedy) -> str:
    """A regular expression of its words, with anything in its blanks."""
    return ".+".join(map(re.escape, re.split(r"\{\w+\}", remedy.text)))


def main(arguments: Sequence[str]) -> None:
    """Print commands and options of the remedy, in order."""
    listed = [[list(each.command), list(each.options)] for each in alternatives(remedy_of(*arguments))]
    sys.stdout.write(json.dumps(listed) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
