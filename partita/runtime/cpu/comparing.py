"""Whether a product is slower than a plain one on the CPU provider: timed once per machine, build and form, and kept.

Both are run in turns (`products.py`), so that other work on the machine is in the way of both, and what counts is how
many times as long one takes as the other. A kernel that is missing costs a factor, which no other work makes up; what
seems slower is timed again all the same, and the best is believed. What is near the limit is not kept: it is timed
again the next time, so that a busy minute does not decide for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from partita.files import replace
from partita.providers.resolve import Resolution
from partita.runtime.cpu.products import Question, product_seconds
from partita.runtime.cpu.timing import file_of_machine

FORMAT = 1
"""To be raised when timings are made otherwise, so that old ones count for nothing."""
KIND = "products"
"""Of what Partita keeps."""
TRIES = 3
"""What seems slower than the plain product is timed so often."""
CLEAR = 4.0
"""What takes so many times as long needs no third try, and is kept."""
Timed = tuple[str, Callable[[], Question]]
"""What tells a product from every other, and what makes its model: that is large, so only where it has to be timed."""
Pair = tuple[float, float]
"""Seconds of a run of a product, and of the plain one meanwhile."""
Seconds = Callable[[Sequence[Question], Resolution], Sequence[float]]

_IN_MEMORY: dict[str, Pair] = {}
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
    kept = {**(_IN_MEMORY if path is None else _read(path)), **seen}
    names = {index: f"{name} beside {plain[0]}" for index, (name, _) in enumerate(products)}
    found = {index: kept[name] for index, name in names.items() if name in kept}
    missing = [index for index in names if index not in found]
    if missing:
        timed = _timed([products[index] for index in missing], plain, cpu, seconds)
        found |= dict(zip(missing, timed, strict=True))
        seen.update({names[index]: found[index] for index in missing})
        _keep(path, {names[index]: found[index] for index in missing if _is_clear(found[index])})
    return [found[index] for index in names]


def _timed(products: Sequence[Timed], plain: Timed, cpu: Resolution, seconds: Seconds) -> list[Pair]:
    """Time what is not known."""
    best: dict[int, Pair] = {}
    again = list(range(len(products)))
    for number in range(TRIES):
        made = [products[index][1]() for index in again]
        *times, beside = seconds([*made, plain[1]()], cpu)
        for index, time in zip(again, times, strict=True):
            best[index] = min(best.get(index, (time, beside)), (time, beside), key=_share)
        again = [index for index in again if _share(best[index]) > 1 and not (number and _share(best[index]) >= CLEAR)]
        if not again:
            break
    return [best[index] for index in range(len(products))]


def _share(pair: Pair) -> float:
    return pair[0] / pair[1]


def _is_clear(pair: Pair) -> bool:
    """Whether no other work on the machine can have made it what it is."""
    return _share(pair) <= 1 or _share(pair) >= CLEAR


def _keep(path: Path | None, found: dict[str, Pair]) -> None:
    """Keep what was found beside what other processes have kept meanwhile. What cannot be written is not."""
    if path is None:
        _IN_MEMORY.update(found)
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps({"format": FORMAT, "seconds": {**_read(path), **found}}))


def _read(path: Path) -> dict[str, Pair]:
    """What is in a file; nothing when it cannot be read, or is not ours."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            return {}
        found = {str(name): (float(first), float(second)) for name, (first, second) in raw["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: pair for name, pair in found.items() if min(pair) > 0}
