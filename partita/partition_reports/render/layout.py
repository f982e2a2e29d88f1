"""Text layout at a given width: paragraphs, names with values, tables.

Numbers are never broken, and nothing is omitted. If a table is too wide, its texts are wrapped; then its columns are
split into several tables; then its cells are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

from rich.cells import cell_len

from partita.partition_reports.sections.model import Column
from partita.remedies import quoted

GAP = 2
"""Cells between columns of a table, and indentation of nested lines."""
READABLE, READABLE_NAME = 12, 20
"""Minimum width of a text column and of the first column before a table is split."""
LEAST = 4
"""Minimum width of wrapped text."""
NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)*|\d+(?:\.\d+)*")
NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
"""A number, or comma-separated numbers such as a shape."""
UNIT = re.compile(r"(?<=\d) (?=(?:B|KiB|MiB|GiB|TiB|ms|s|%)(?:\W|$))")
JOINT = "\N{NO-BREAK SPACE}"
"""Joins a number and its unit during layout."""
BREAK_AFTER, BREAK_BEFORE = frozenset("/._-,:;)]}=+|@&?") | {JOINT}, frozenset("([{") | {JOINT}
PROMPT, GO_ON = "$ ", " \\"
Kind = Literal["head", "rule", "row"]


NAME = Column("", number=False)


def fold(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` cells, broken at spaces, else after punctuation, never inside a number."""
    lines: list[str] = []
    line = ""
    for word in UNIT.sub(JOINT, text).split(" "):
        longer = f"{line} {word}" if line else word
        if cell_len(longer) <= width:
            line = longer
            continue
        if line.strip():
            lines.append(line)
        *whole, line = _pieces(word, max(width, LEAST))
        lines += whole
    return [each.replace(JOINT, " ").rstrip() for each in (*lines, line)]


def _pieces(word: str, width: int) -> list[str]:
    """A word in parts of at most `width` cells."""
    parts = []
    while cell_len(word[: 8 * width]) > width or cell_len(word) > width:  # the first test is fast
        end = _cut(word, width)
        parts.append(word[:end])
        word = word[end:]
    return [*parts, word]


def _cut(word: str, width: int) -> int:
    """End of the first part of a word that is longer than `width`."""
    end = 1
    while end < len(word) and cell_len(word[: end + 1]) <= width:
        end += 1
    for atom in (NUMBERS, NUMBER):
        inside = {at for found in atom.finditer(word, 0, 2 * end) for at in range(found.start() + 1, found.end())}
        whole = [at for at in range(end, 0, -1) if at not in inside]
        marked = next((at for at in whole if _is_joint(word[at - 1], word[at])), 0)
        if marked > end // 3:
            return marked
    return whole[0] if whole else end


def _is_joint(before: str, after: str) -> bool:
    """Whether a long word is preferably broken between these two characters."""
    return before in BREAK_AFTER or after in BREAK_BEFORE or (before.islower() and after.isupper())


def paragraph(text: str, width: int, *, indent: int = 0, hang: int = 0) -> list[str]:
    """Lines of a paragraph, indented by `indent`; lines after the first by `hang` more."""
    lines = fold(text, width - indent)
    if hang and len(lines) > 1:
        lines = [lines[0], *(" " * hang + line for line in fold(text[len(lines[0]) :].lstrip(), width - indent - hang))]
    return [(" " * indent + line).rstrip() for line in lines]


def command(words: Sequence[str], width: int, *, indent: int = 0) -> list[str]:
    """A shell command in lines that can be copied, broken between words with a backslash; words are not broken."""
    lines: list[str] = []
    line, room = "", width - indent - 2 * len(PROMPT) - len(GO_ON)
    for word in map(quoted, words):
        if line and cell_len(f"{line} {word}") > room:
            lines.append(f"{line}{GO_ON}")
            line = word
        else:
            line = f"{line} {word}" if line else word
    first, *rest = (*lines, line)
    return [f"{' ' * indent}{PROMPT}{first}", *(f"{' ' * (indent + 2 * len(PROMPT))}{part}" for part in rest)]


def pairs(rows: Sequence[tuple[str, str]], width: int, *, indent: int = 2) -> list[str]:
    """Names and values; values are below their names if the width is small. A value without a name continues the
    previous one.
    """
    names = max((cell_len(name) for name, _ in rows), default=0)
    room = width - indent - names - GAP
    lines = []
    for name, value in rows:
        if room < 2 * READABLE:
            lines += paragraph(name, width, indent=indent) if name else []
            lines += paragraph(value, width, indent=indent + GAP)
        else:
            first, *rest = fold(value, room)
            lines += [" " * indent + _pad(name, names + GAP) + first]
            lines += [" " * (indent + names + GAP) + line for line in rest]
    return [line.rstrip() for line in lines]


def _pad(text: str, width: int, *, right: bool = False) -> str:
    """`text` padded to `width` cells."""
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, *, indent: int = 2, rule: str = "─"
) -> list[tuple[Kind, str]]:
    """The lines of a table with their kinds. Every part of a split table repeats the first column."""
    room = width - indent
    lines: list[tuple[Kind, str]] = []
    natural = [max(map(cell_len, (column.title, *(row[n] for row in rows)))) for n, column in enumerate(columns)]
    below = [n for n, column in enumerate(columns) if column.below and _total(natural) > room]
    least = [
        _narrowest(column, [row[n] for row in rows], min(READABLE if n else READABLE_NAME, room // 2))
        for n, column in enumerate(columns)
    ]
    parts = _split([n for n in range(1, len(columns)) if n not in below], columns, least, room)
    if parts is None:
        lines += _stacked(columns, rows, room)
    for number, part in enumerate(parts or ()):
        lines += [("row", "")] if number else []
        last = below if number == len(parts or ()) - 1 else []
        lines += _grid(columns, rows, part, last, least, room, rule)
    return [(kind, (" " * indent + line).rstrip()) for kind, line in lines]


def _narrowest(column: Column, cells: Sequence[str], readable: int) -> int:
    """Minimum width of a column: words of its heading, numbers, and `readable` cells of a text."""
    words = [word for text in (column.title, *(cells if column.number else ())) for word in _whole_words(text)]
    numbers = [found[0] for cell in cells for found in NUMBERS.finditer(cell)]
    text = 0 if column.number else min(max(map(cell_len, cells), default=0), readable)
    return max(text, *map(cell_len, (*words, *numbers)), 0)


def _whole_words(text: str) -> list[str]:
    """Words, with a number and its unit as one word."""
    return UNIT.sub(JOINT, text).split(" ")


def _split(others: Sequence[int], columns: Sequence[Column], least: Sequence[int], room: int) -> list[list[int]] | None:
    """Column numbers of each part: the first column and some of `others`. None if a column does not fit next to the
    first.
    """
    if _total([least[n] for n in (0, *others)]) <= room:
        return [[0, *others]]
    parts: list[list[int]] = []
    for _, block in groupby(others, lambda n: columns[n].group or n):
        group = list(block)
        if parts and _total([least[n] for n in (*parts[-1], *group)]) <= room:
            parts[-1] += group
        elif _total([least[n] for n in (0, *group)]) <= room:
            parts.append([0, *group])
        else:
            return None
    return parts


def _total(widths: Sequence[int]) -> int:
    """Total width of columns."""
    return sum(widths) + GAP * (len(widths) - 1)


def _grid(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    part: Sequence[int],
    below: Sequence[int],
    least: Sequence[int],
    room: int,
    rule: str,
) -> Iterator[tuple[Kind, str]]:
    """Columns of `part` side by side, those of `below` under each row."""
    chosen = [columns[n] for n in part]
    titles, *cells = [[row[n] for n in part] for row in ([column.title for column in columns], *rows)]
    widths = [max(least[n], *(cell_len(row[at]) for row in (titles, *cells))) for at, n in enumerate(part)]
    while _total(widths) > room:
        # Shrink the widest column, texts before numbers.
        can = [at for at, n in enumerate(part) if widths[at] > least[n]]
        widths[max([at for at in can if not chosen[at].number] or can, key=widths.__getitem__)] -= 1
    for line in _side_by_side(titles, chosen, widths):
        yield "head", line
    yield "rule", rule * _total(widths)
    for whole, row in zip(rows, cells, strict=True):
        for line in _side_by_side(row, chosen, widths):
            yield "row", line
        for n in below:
            for line in paragraph(f"{columns[n].title}: {whole[n]}", room, indent=GAP) if whole[n] else ():
                yield "row", line


def _side_by_side(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    """The lines of one row."""
    folded = [fold(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, folded))):
        texts = [lines[number] if number < len(lines) else "" for lines in folded]
        parts = zip(texts, columns, widths, strict=True)
        yield (" " * GAP).join(_pad(text, width, right=column.number) for text, column, width in parts)


def _stacked(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int) -> Iterator[tuple[Kind, str]]:
    """Every row as its name, followed by heading and value of each other cell."""
    for row in rows:
        for line in fold(row[0], room):
            yield "head", line
        for column, cell in zip(columns[1:], row[1:], strict=True):
            title = column.title if column.group in column.title else f"{column.group} {column.title}"
            for line in paragraph(f"{title}: {cell}" if title else cell, room, indent=GAP):
                yield "row", line
