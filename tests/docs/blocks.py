"""The fenced blocks of the Markdown pages, and how one with parts left out is compared with what is printed.

A line with nothing but `[...]` stands for lines that were left out, `[...]` within a line for words.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPOSITORY

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"<!-- block: (\S+) -->\n\s*$")
"""Stands above a block and names what it is compared with."""
CUT = "[...]"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    """Relative to the repository."""
    line: int
    """Of its first fence, counted from 1."""
    language: str
    text: str
    name: str
    """Of the comment above it; empty when there is none."""

    @property
    def lines(self) -> list[str]:
        """Its lines."""
        return self.text.splitlines()

    def __str__(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every Markdown page."""
    return [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of one page."""
    text = page.read_text("utf-8")
    for found in FENCE.finditer(text):
        name = NAME.search(text, 0, found.start())
        yield Block(
            page.relative_to(REPOSITORY).as_posix(),
            text.count("\n", 0, found.start()) + 1,
            found[2],
            textwrap.dedent(found[3]),
            name[1] if name else "",
        )


def all_blocks() -> list[Block]:
    """Those of every page."""
    return [block for page in pages() for block in blocks_of(page)]


def is_cut(line: str) -> bool:
    """Whether the line stands for others."""
    return line.strip() == CUT


def agrees(block: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether `printed` is what the block shows, apart from what the block leaves out: a line at least for each cut."""
    shown = (r"(?:.*\n)+" if is_cut(line) else f"{'.*?'.join(map(re.escape, line.split(CUT)))}\n" for line in block)
    return re.fullmatch("".join(shown), "".join(f"{line}\n" for line in printed)) is not None


def renewed(block: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The block with what is printed now, cut at the same places as far as these are found again."""
    if agrees(block, printed):
        return list(block)
    found, at, start = list[str](), 0, 0
    cuts = [number for number, line in enumerate(block) if is_cut(line)]
    for end in (*cuts, len(block)):
        part = block[start:end]
        if part:
            first = at if start == 0 else _nearest(part[0], printed, at)
            last = len(printed) - 1 if end == len(block) else _nearest(part[-1], printed, first)
            found += printed[first : last + 1]
            at = last + 1
        if end < len(block):
            found.append(block[end])
        start = end + 1
    return found


def _nearest(line: str, printed: Sequence[str], start: int) -> int:
    """Which of the printed lines from `start` on is most like this one; the first of several."""
    ratios = [difflib.SequenceMatcher(None, line, other).ratio() for other in printed[start:]]
    return start + max(range(len(ratios)), key=lambda number: (ratios[number], -number)) if ratios else start
