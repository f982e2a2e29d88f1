"""What other processes, and other machines on the same host, take of this one meanwhile."""

from __future__ import annotations

import psutil

DISTURBED_CORES = 0.2
"""More of a core than this, and figures are not to be published."""


def busy_seconds() -> float:
    """Seconds of all cores that were not idle, those included in which the host ran something else."""
    times = psutil.cpu_times()._asdict()
    guest = times.get("guest", 0.0) + times.get("guest_nice", 0.0)  # counted in user and nice, too
    return float(sum(times.values()) - times["idle"] - times.get("iowait", 0.0) - guest)


def others_cores(busy: float, own: float, seconds: float) -> float:
    """Cores that were busy with something else, of busy and own core seconds in `seconds`."""
    return max(0.0, busy - own) / seconds
