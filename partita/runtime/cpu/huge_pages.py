"""Moves packed weights into huge pages (2 MiB), which makes decode steps faster.

A decode step reads all weights once; with 4 KiB pages, address translation takes much of that time. ONNX Runtime
allocates ordinary memory, and Linux uses huge pages only on request (`madvise` in
/sys/kernel/mm/transparent_hugepage/enabled). MADV_COLLAPSE (madvise(2), Linux 6.1) copies existing memory into huge
pages. It runs before the first decode step, on memory that was allocated while the session opened and is fully in use,
so that memory use does not grow.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

HUGE = 2 << 20
"""Bytes of a huge page on x86-64, and on ARM with 4 KiB base pages; other systems are not supported."""
PAGE = 4096
COLLAPSE = 25
"""MADV_COLLAPSE of linux/mman.h."""
LEAST_BYTES = 16 << 20
"""Minimum bytes for a measurable gain: a TLB has about 2,000 entries of any page size."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS, PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
PRESENT = np.uint64(1 << 63)

Range = tuple[int, int]
"""First address and end address (exclusive)."""


def are_available() -> bool:
    """Whether the system provides huge pages on request; False if unknown."""
    if sys.platform != "linux" or _page_size() != PAGE:
        return False
    try:
        setting = SETTING.read_text(encoding="ascii")
    except OSError:
        return False
    return "[never]" not in setting


def _page_size() -> int:
    import resource

    return resource.getpagesize()


def anonymous_memory() -> tuple[Range, ...]:
    """Writable anonymous memory of this process, by address; empty if unknown."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if inode == "0" and rights == "rw-p" and (not name or name[0].startswith(("[heap]", "[anon"))):
            first, _, last = addresses.partition("-")
            found.append((int(first, 16), int(last, 16)))
    return tuple(found)


def make_huge(memory: Sequence[Range]) -> int:
    """Collapse the used blocks of `memory` into huge pages; return the bytes that are then in huge pages."""
    blocks = [block for part in memory for block in full_blocks(part)]
    if len(blocks) * HUGE < LEAST_BYTES:
        return 0
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    breaks = [at for at in range(1, len(blocks)) if blocks[at] != blocks[at - 1] + HUGE]
    runs = [(blocks[first], (end - first) * HUGE) for first, end in pairwise((0, *breaks, len(blocks)))]
    return sum(size for address, size in runs if madvise(address, size, COLLAPSE) == 0)


def added_ranges(before: Sequence[Range], now: Sequence[Range]) -> list[Range]:
    """Ranges of `now` that are not in `before`; adjacent ranges may have been merged."""
    found = []
    for first, last in now:
        inside = sorted(entry for entry in before if entry[0] < last and entry[1] > first)
        edges = [(first, first), *inside, (last, last)]
        gaps = ((left[1], right[0]) for left, right in pairwise(edges))
        found += [(begin, end) for begin, end in gaps if begin < end]
    return found


def full_blocks(memory: Range) -> list[int]:
    """Addresses of the huge-page-sized blocks of `memory` that are fully in use."""
    first = -(-memory[0] // HUGE) * HUGE
    count = (memory[1] - first) // HUGE
    if count <= 0:
        return []
    try:
        with PAGEMAP.open("rb") as stream:
            stream.seek(first // PAGE * 8)
            entries = np.frombuffer(stream.read(count * HUGE // PAGE * 8), np.uint64)
    except (OSError, MemoryError):  # huge pages are optional
        return []
    if len(entries) != count * HUGE // PAGE:
        return []
    full = (entries & PRESENT != 0).reshape(count, -1).all(axis=1)
    return [first + int(place) * HUGE for place in np.flatnonzero(full)]
