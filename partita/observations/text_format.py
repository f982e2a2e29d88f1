"""Text formats: units, plurals, short provider names, sanitised text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from partita.observations.grouping import grouped

NOT_KNOWN = "-"
BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB")
DIGITS = re.compile(r"([0-9]+)")
LISTED_NUMBERS = 3
"""Maximum numbers that a name lists; longer ranges without gaps are shown as first and last."""


def clean(text: str, encoding: str = "utf-8") -> str:
    """`text` on one line, without control, bidirectional and unencodable characters."""
    plain = "".join(
        "?" if unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else mark for mark in text
    )
    return plain.encode(encoding, "replace").decode(encoding)


def short_provider(name: str) -> str:
    """`WebGpu` for WebGpuExecutionProvider."""
    return name.removesuffix("ExecutionProvider") or name


def named_provider(name: str | None) -> str:
    """Short name of a provider, or `an unknown provider`."""
    return "an unknown provider" if name is None else short_provider(name)


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `3 copies`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'sh', 'ch', 'x')) else 's'}"


def human_bytes(size: int | None) -> str:
    """512 B, 256 KiB, 1.5 GiB; `-` if unknown."""
    if size is None:
        return NOT_KNOWN
    if abs(size) < 1024:
        return f"{size} B"
    steps = min(int(math.log(abs(size), 1024)), len(BINARY_UNITS))
    value = size / 1024**steps
    return f"{value:.3g} {BINARY_UNITS[steps - 1]}" if value < 100 else f"{value:,.0f} {BINARY_UNITS[steps - 1]}"


def decimals(value: float | None, scale: float = 1.0) -> str:
    """Three significant digits, no exponent; `-` if unknown."""
    if value is None:
        return NOT_KNOWN
    scaled = value * scale
    size = abs(scaled)
    if size >= 100 or size == 0:
        return f"{scaled:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 2 - math.floor(math.log10(size)) if size < 0.001 else 3
    return f"{scaled:.{digits}f}"


def nats(value: float, digits: int = 4) -> str:
    """A divergence with `digits` decimals; smaller values with two significant digits, such as 1.3e-06."""
    return f"{value:.{digits}f}" if value == 0 or value >= 10**-digits else f"{value:.1e}"


SUM_TOLERANCE = 1e-9
"""Tolerance for sums of shares."""


def percent(part: float | None, digits: int = 1) -> str:
    """`44.5 %`; `-` if unknown. Only exact values give 0 % and 100 %."""
    if part is None:
        return NOT_KNOWN
    unit = 10.0**-digits
    if SUM_TOLERANCE < part < unit / 200:
        return f"under {unit:g} %"
    return f"over {100 - unit:g} %" if 1 - unit / 200 <= part < 1 - SUM_TOLERANCE else f"{100 * part:.{digits}f} %"


def listing(parts: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = list(parts) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def tally(counts: Mapping[str, int], most: int = 6) -> str:
    """`MatMul 15, Mul 7`, largest first; kinds beyond `most` are summed."""
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    # A single remaining entry is as short as its summary.
    cut = most if len(ranked) > most + 1 else len(ranked)
    shown = [f"{name} {count}" for name, count in ranked[:cut]]
    rest = sum(count for _, count in ranked[cut:])
    return ", ".join([*shown, f"{len(ranked) - cut} more kinds {rest}"] if rest else shown)


def per_run(phase: str) -> str:
    """`per run of decode`, or `per run` for a model with one phase."""
    return "per run" if phase == "run" else f"per run of {phase}"


def in_phases(phases: Iterable[str]) -> str:
    """` in prefill and decode`; empty for a model with one phase."""
    names = list(phases)
    return "" if names == ["run"] else f" in {listing(names)}"


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in numbers: `layers.{0..5}/Add`, `layers.{1,4}/Add`, in order of appearance.

    `*` replaces numbers if several of them vary or one has many gaps.
    """
    alike = grouped(dict.fromkeys(names), lambda name: DIGITS.sub("0", name))
    return {_family(members): members for members in alike.values()}


def _family(members: Sequence[str]) -> str:
    """One name for members that differ in numbers only."""
    columns = [list(dict.fromkeys(column)) for column in zip(*map(DIGITS.split, members), strict=True)]
    varying = sum(len(values) > 1 for values in columns)
    return "".join(_written(values, alone=varying == 1) for values in columns)


def _written(values: Sequence[str], *, alone: bool) -> str:
    """The text or the numbers at one position: single, range, list, or `*`."""
    if len(values) == 1:
        return values[0]
    if alone and len(values) <= LISTED_NUMBERS:
        return f"{{{','.join(values)}}}"
    whole = [str(number) for number in range(int(values[0]), int(values[0]) + len(values))]
    return f"{{{values[0]}..{values[-1]}}}" if alone and values == whole else "*"


def name_some(names: Iterable[str], most: int = 20) -> str:
    """The first names and the number of others; names that differ in one number are merged: `layers.{0..5}/Add (6)`.

    Names with commas in them are separated by semicolons.
    """
    names = list(names)
    mark = "; " if any(", " in name for name in names) else ", "
    shown: list[tuple[str, int]] = []
    for name, members in families(names).items():
        together = len(members) > 1 and "*" not in name
        shown += [(f"{name} ({len(members)})", len(members))] if together else [(each, 1) for each in members]
    left = sum(count for _, count in shown[most:])
    return mark.join(name for name, _ in shown[:most]) + (f" and {left} more" if left else "")
