"""Assignments of types in words, as short as they can be said without saying something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.observations.text_format import plural
from partita.support.records import Assignments

Row = tuple[str, ...]
MOST_GROUPS = 6
"""Groups of types that go with the same others, up to which they are listed."""


def taken_text(types: Assignments) -> str:
    """The types that are taken, as a cell of a table."""
    if not types.taken:
        return "none" if _refused(types) else "-"
    text = _described(types, types.taken)
    if not _refused(types) and not types.untried and len(types.taken) > 1:
        text = f"all: {text}"
    if not types.replaced:
        return text
    return f"{text} ({'' if len(types.replaced) == len(types.taken) else 'some '}not as itself)"


def refused_text(types: Assignments) -> str:
    """What is not, though it is a valid model."""
    listed = _refused(types)
    if not listed or len(_moving_variables(types)) < 2:
        return _described(types, listed) if listed else ""
    return f"the other {plural(len(listed), 'combination')}" if types.taken else f"all {len(listed)} combinations"


def _refused(types: Assignments) -> tuple[Row, ...]:
    """Assignments that are valid and not taken."""
    return (*types.left, *types.failed, *types.crashed)


def _valid(types: Assignments) -> tuple[Row, ...]:
    """Assignments that are valid models."""
    return (*types.taken, *_refused(types))


def is_fixed(variable: str) -> bool:
    """Whether it is no variable, but the only type that an input may have."""
    return "(" in variable


def _moving_variables(types: Assignments) -> list[int]:
    """Places of the variables that had more than one type."""
    return [at for at in range(len(types.variables)) if len({row[at] for row in _valid(types)}) > 1]


def _described(types: Assignments, rows: Sequence[Row]) -> str:
    """Some of the assignments: by variable where these say it, else which goes with which, else how many."""
    moving = _moving_variables(types)
    if not moving:
        own = zip(types.variables, rows[0], strict=True) if rows else ()
        return ", ".join(kind for name, kind in own if kind and not is_fixed(name)) or "yes"
    cut = list(dict.fromkeys(tuple(row[at] for at in moving) for row in rows))
    if len(moving) == 1:
        return ", ".join(row[0] for row in cut)
    names = [types.variables[at] for at in moving]
    columns = [list(dict.fromkeys(row[at] for row in cut)) for at in range(len(moving))]
    everything = {tuple(row[at] for at in moving) for row in _valid(types)}
    inside = sum(all(row[at] in columns[at] for at in range(len(moving))) for row in everything)
    if inside == len(cut):
        return "; ".join(f"{name}: {', '.join(column)}" for name, column in zip(names, columns, strict=True))
    if all(len(set(row)) == 1 for row in cut):
        return f"{' = '.join(names)}: {', '.join(row[0] for row in cut)}"
    groups = list(_grouped(cut)) if len(moving) == 2 else []
    if 0 < len(groups) <= MOST_GROUPS:
        return "; ".join(f"{names[0]} {', '.join(first)} with {names[1]} {', '.join(rest)}" for first, rest in groups)
    return f"{len(cut)} of {len(everything)} combinations of {', '.join(names)}"


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[list[str], list[str]]]:
    """First types that go with the same second types."""
    seconds: dict[str, list[str]] = {}
    for row in rows:
        seconds.setdefault(row[0], []).append(row[1])
    firsts: dict[tuple[str, ...], list[str]] = {}
    for first, listed in seconds.items():
        firsts.setdefault(tuple(listed), []).append(first)
    for others, found in firsts.items():
        yield found, list(others)
