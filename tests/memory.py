"""What this process holds in memory, to the byte: leaks show as a slope long before they show in resident memory."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """mallinfo2 of glibc, since 2.33."""

    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


@cache
def _library() -> Any:
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "mallinfo2"):
        pytest.skip("only glibc says what is allocated")
    library.mallinfo2.restype = _Mallinfo
    return library


def native_bytes() -> int:
    """What is allocated with malloc, in all threads; Python's own small objects are not."""
    found = _library().mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)


def python_blocks() -> int:
    """Objects of Python that are there."""
    gc.collect()
    return sys.getallocatedblocks()


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """How fast the second of a pair rises with the first, by least squares: a list that doubles now and then counts
    like one that grows all along.
    """
    return statistics.linear_regression(*zip(*samples, strict=True)).slope
