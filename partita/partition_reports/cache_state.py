"""Whether the KV cache stayed in place."""

from __future__ import annotations

from typing import Literal

from partita.partition_reports.records import Cache

CacheStatus = Literal["no_cache", "not_checked", "copied", "moved", "in_place"]
"""no_cache: no cache or no states. not_checked: not observed. copied: past and present of a state were two buffers.
moved: one buffer whose address changed. in_place: one buffer at one address in every observed step.
"""


def status_of(cache: Cache | None) -> CacheStatus:
    """Status of a cache."""
    if cache is None or not cache.states:
        return "no_cache"
    if cache.checked_steps == 0:
        return "not_checked"
    if cache.in_place_states < cache.states:
        return "copied"
    return "moved" if cache.address_changes else "in_place"


def is_in_place(cache: Cache | None) -> bool | None:
    """Whether the cache stayed in place; None without a cache, or if not observed."""
    status = status_of(cache)
    return None if status in ("no_cache", "not_checked") else status == "in_place"
