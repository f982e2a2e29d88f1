"""Packed weights in huge pages: what a session has allocated is asked to be put into pages of 2 MiB.

ONNX Runtime packs weights into ordinary memory, and a decode step reads all of it once, so with pages of 4 KiB the
processor spends much of the step on finding them, most of all in a virtual machine. Linux makes huge pages of what
asks for them (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled, the usual setting), which malloc does not.
MADV_COLLAPSE (madvise(2), Linux 6.1) does it after the fact, by copying: before the first decode step, because a
prompt computes more than it reads and is no quicker for it. Only memory that came while the session was opened is
touched, and only where all of it is in use, so that no more of it is used afterwards.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

HUGE = 2 << 20
"""Bytes of a huge page on x86-64, and on ARM with base pages of 4 KiB, the only ones that are handled."""
PAGE = 4096
COLLAPSE = 25
"""MADV_COLLAPSE of linux/mman.h."""
LEAST_BYTES = 16 << 20
"""Less is found without: processors remember some 2,000 pages of any size."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS, PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
PRESENT = np.uint64(1 << 63)

Range = tuple[int, int]
"""First address, and the one after the last."""


def allowed() -> bool:
    """Whether the system makes huge pages for who asks; False where it does not, or cannot say."""
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
    """Memory of this process that is of no file and may be written, by address; none where the system does not say."""
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
    """Put into huge pages what is in use of `memory`; bytes that are in such pages then."""
    blocks = [block for part in memory for block in full_blocks(part)]
    if len(blocks) * HUGE < LEAST_BYTES:
        return 0
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(size for first, size in runs(blocks) if madvise(first, size, COLLAPSE) == 0)


def added(before: Sequence[Range], now: Sequence[Range]) -> list[Range]:
    """What of `now` is not in `before`; neighbours may have become one."""
    found = []
    for first, last in now:
        inside = sorted(entry for entry in before if entry[0] < last and entry[1] > first)
        edges = [(first, first), *inside, (last, last)]
        gaps = ((left[1], right[0]) for left, right in pairwise(edges))
        found += [(begin, end) for begin, end in gaps if begin < end]
    return found


def full_blocks(memory: Range) -> list[int]:
    """Addresses of the parts of `memory` that could be huge pages and are in use as a whole."""
    first = -(-memory[0] // HUGE) * HUGE
    count = (memory[1] - first) // HUGE
    if count <= 0:
        return []
    try:
        with PAGEMAP.open("rb") as stream:
            stream.seek(first // PAGE * 8)
            entries = np.frombuffer(stream.read(count * HUGE // PAGE * 8), np.uint64)
    except OSError:
        return []
    if len(entries) != count * HUGE // PAGE:
        return []
    full = (entries & PRESENT != 0).reshape(count, -1).all(axis=1)
    return [first + int(place) * HUGE for place in np.flatnonzero(full)]


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring blocks as one: address and size."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and sum(found[-1]) == block:
            found[-1] = (found[-1][0], found[-1][1] + HUGE)
        else:
            found.append((block, HUGE))
    return found
