"""Numbers and names as people read them: units, plurals, short provider names, harmless text. Knows no report."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable

NOT_KNOWN = "-"
BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB")


def clean(text: str, encoding: str = "utf-8") -> str:
    """`text` on one line, without control or bidirectional characters, and with nothing `encoding` cannot write."""
    plain = "".join(
        "?" if unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else mark for mark in text
    )
    return plain.encode(encoding, "replace").decode(encoding)


def short_provider(name: str) -> str:
    """WebGpu for WebGpuExecutionProvider."""
    return name.removesuffix("ExecutionProvider") or name


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `3 copies`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def human_bytes(size: int | None) -> str:
    """512 B, 256 KiB, 1.5 GiB; `-` when not known."""
    if size is None:
        return NOT_KNOWN
    if abs(size) < 1024:
        return f"{size} B"
    steps = min(int(math.log(abs(size), 1024)), len(BINARY_UNITS))
    value = size / 1024**steps
    return f"{value:.3g} {BINARY_UNITS[steps - 1]}" if value < 100 else f"{value:,.0f} {BINARY_UNITS[steps - 1]}"


def decimals(value: float | None, scale: float = 1.0) -> str:
    """Three significant digits, no exponent; `-` when not known."""
    if value is None:
        return NOT_KNOWN
    scaled = value * scale
    size = abs(scaled)
    if size >= 100 or size == 0:
        return f"{scaled:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{scaled:.{digits}f}"


def percent(part: float | None) -> str:
    """`44.5 %`; `-` when not known."""
    return NOT_KNOWN if part is None else f"{100 * part:.1f} %"


def listing(parts: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = list(parts) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def tally(counts: dict[str, int], most: int = 6) -> str:
    """`MatMul 15, Mul 7`, largest first; what is over `most` is summed up."""
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    # A rest of one is shown: it takes no more room than saying that there is one more.
    cut = most if len(ranked) > most + 1 else len(ranked)
    shown = [f"{name} {count}" for name, count in ranked[:cut]]
    rest = sum(count for _, count in ranked[cut:])
    return ", ".join([*shown, f"{len(ranked) - cut} more kinds {rest}"] if rest else shown)
