"""Whether a product is slower than a plain one on the CPU provider: timed once per machine, build and form, and kept.

Both are run in turns (`products.py`), so that other work on the machine is in the way of both, and what counts is how
many times as long one takes as the other. A kernel that is missing costs a factor, which no other work makes up; what
seems slower is timed again all the same, and the best is believed. What is near the limit, on either side, is not kept:
it is timed again the next time. What is kept is timed again after a day, and once both times said the same, after a
month: so no busy minute decides for ever, and what is timed again costs some hundredths of a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from partita.files import replace
from partita.providers.resolve import Resolution
from partita.runtime.cpu.products import Question, product_seconds
from partita.runtime.cpu.timing import file_of_machine

FORMAT = 2
"""To be raised when timings are made otherwise, so that old ones count for nothing."""
KIND = "products"
"""Of what Partita keeps."""
TRIES = 3
"""What seems slower than the plain product is timed so often."""
CLEAR = 4.0
"""What takes so many times as long needs no third try, and is kept."""
FASTER = 0.8
"""What takes at most this part of the time of the plain one is kept, too: other work makes up no such difference."""
DAY, MONTH = 86_400.0, 30 * 86_400.0
"""Seconds for which a verdict is believed: one that was found once, and one that was found again."""
Timed = tuple[str, Callable[[], Question]]
"""What tells a product from every other, and what makes its model: that is large, so only where it has to be timed."""
Pair = tuple[float, float]
"""Seconds of a run of a product, and of the plain one meanwhile."""
Seconds = Callable[[Sequence[Question], Resolution], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is kept of a product."""

    seconds: float
    plain: float
    at: float
    """When it was timed, in seconds since 1970."""
    agreed: bool
    """An earlier timing had said the same."""

    @property
    def pair(self) -> Pair:
        """Its times."""
        return self.seconds, self.plain

    def holds(self, now: float) -> bool:
        """Whether it is young enough to be believed; one of the future is not: the clock was wrong."""
        return 0 <= now - self.at <= (MONTH if self.agreed else DAY)


_IN_MEMORY: dict[str, Verdict] = {}
"""What was found where nothing is to be kept on disk."""


def compared(
    products: Sequence[Timed],
    plain: Timed,
    cpu: Resolution,
    seconds: Seconds = product_seconds,
    seen: dict[str, Pair] | None = None,
) -> list[Pair]:
    """Times of each product and of the plain one. Raises what opening or running a session raises.

    `seconds`: times models in turns. `seen`: what whoever asks was told before, so that nobody is told two things of
    one product; it is added to.
    """
    path, seen = file_of_machine(KIND, FORMAT), {} if seen is None else seen
    now = time.time()
    before = dict(_IN_MEMORY) if path is None else _read(path)
    kept = {**{name: verdict.pair for name, verdict in before.items() if verdict.holds(now)}, **seen}
    names = {index: f"{name} beside {plain[0]}" for index, (name, _) in enumerate(products)}
    found = {index: kept[name] for index, name in names.items() if name in kept}
    missing = [index for index in names if index not in found]
    if missing:
        timed = _timed([products[index] for index in missing], plain, cpu, seconds)
        found |= dict(zip(missing, timed, strict=True))
        told = {names[index]: found[index] for index in missing}
        seen.update(told)
        _keep(path, {name: _verdict(pair, before.get(name), now) for name, pair in told.items()})
    return [found[index] for index in names]


def _verdict(pair: Pair, before: Verdict | None, now: float) -> Verdict | None:
    """What is to be kept of a timing; None where it is too near the limit."""
    if not _is_clear(pair):
        return None
    agreed = before is not None and (_share(before.pair) > 1) == (_share(pair) > 1)
    return Verdict(*pair, at=now, agreed=agreed)


def _timed(products: Sequence[Timed], plain: Timed, cpu: Resolution, seconds: Seconds) -> list[Pair]:
    """Time what is not known."""
    best: dict[int, Pair] = {}
    again = list(range(len(products)))
    for number in range(TRIES):
        made = [products[index][1]() for index in again]
        *times, beside = seconds([*made, plain[1]()], cpu)
        for index, taken in zip(again, times, strict=True):
            best[index] = min(best.get(index, (taken, beside)), (taken, beside), key=_share)
        again = [index for index in again if _share(best[index]) > 1 and not (number and _share(best[index]) >= CLEAR)]
        if not again:
            break
    return [best[index] for index in range(len(products))]


def _share(pair: Pair) -> float:
    return pair[0] / pair[1]


def _is_clear(pair: Pair) -> bool:
    """Whether no other work on the machine can have made it what it is."""
    return _share(pair) <= FASTER or _share(pair) >= CLEAR


def _keep(path: Path | None, found: Mapping[str, Verdict | None]) -> None:
    """Keep what was found beside what other processes have kept meanwhile, and forget what is None. What cannot be
    written is not.
    """
    if path is None:
        merged = {**_IN_MEMORY, **found}
        _IN_MEMORY.clear()
        _IN_MEMORY.update(_there(merged))
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        verdicts = {name: astuple(verdict) for name, verdict in _there({**_read(path), **found}).items()}
        replace(path, json.dumps({"format": FORMAT, "verdicts": verdicts}))


def _there(found: Mapping[str, Verdict | None]) -> dict[str, Verdict]:
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def _read(path: Path) -> dict[str, Verdict]:
    """What is in a file; nothing when it cannot be read, or is not ours."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            return {}
        found = {str(name): _verdict_of(*values) for name, values in raw["verdicts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: verdict for name, verdict in found.items() if min(verdict.pair) > 0}


def _verdict_of(seconds: float, plain: float, at: float, agreed: bool) -> Verdict:
    """A verdict as JSON has it. Raises ValueError or TypeError for what is none."""
    return Verdict(float(seconds), float(plain), float(at), agreed is True)
