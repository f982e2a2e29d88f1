"""Whether the KV cache stayed in place: decided here, and nowhere else."""

from __future__ import annotations

from typing import Literal

from partita.partition_reports.records import Cache

CacheStatus = Literal["no_cache", "not_checked", "copied", "moved", "in_place"]
"""no_cache: there is none, or it has no states. not_checked: nobody looked. copied: past and present of some state were
two buffers. moved: they were one, and its address changed. in_place: one buffer at one address at every step that was
observed.
"""


def status_of(cache: Cache | None) -> CacheStatus:
    """What is known of a cache."""
    if cache is None or not cache.states:
        return "no_cache"
    if cache.checked_steps == 0:
        return "not_checked"
    if cache.in_place_states < cache.states:
        return "copied"
    return "moved" if cache.address_changes else "in_place"


def is_in_place(cache: Cache | None) -> bool | None:
    """The same as yes or no; None where there is nothing that could be, or nobody looked."""
    status = status_of(cache)
    return None if status in ("no_cache", "not_checked") else status == "in_place"
