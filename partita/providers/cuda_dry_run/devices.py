"""Device profiles: properties of real GPUs that the stub CUDA library reports.

Sources: "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++ Programming Guide 13.0, data sheets and
architecture white papers. `name` is the device name in CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.errors import UsageError
from partita.messages import did_you_mean, nearest
from partita.remedies import Remedy

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
DEFAULT_DEVICE = "h100"
PREFIX = "PARTITA_STANDIN_"
"""Prefix of the environment variables with the profile for a child process; standins/cudart.c reads them."""


LIMITS = (
    "threads_per_multiprocessor",
    "blocks_per_multiprocessor",
    "shared_per_multiprocessor",  # bytes of shared memory
    "shared_per_block_optin",  # maximum opt-in shared memory of a kernel, in bytes
)
CAPABILITIES: Mapping[tuple[int, int], tuple[int, int, int, int]] = {
    (7, 5): (1024, 16, 64 * KIB, 64 * KIB),
    (8, 0): (2048, 32, 164 * KIB, 163 * KIB),
    (8, 6): (1536, 16, 100 * KIB, 99 * KIB),
    (8, 9): (1536, 24, 100 * KIB, 99 * KIB),
    (9, 0): (2048, 32, 228 * KIB, 227 * KIB),
    (10, 0): (2048, 32, 228 * KIB, 227 * KIB),
}
"""Compute capability -> its `LIMITS`, per streaming multiprocessor (SM) and per thread block."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU model."""

    key: str
    """Value of --device."""
    name: str
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    memory_bytes: int
    """Memory size of the data sheet, read as GiB; a process gets a few percent less."""
    multiprocessors: int
    l2_bytes: int
    gigabytes_per_second: int
    """Memory bandwidth of the data sheet."""
    teraflops: tuple[float, float]
    """Dense arithmetic of the data sheet per second: float32 without tensor cores, float16 with them."""

    @property
    def bytes_per_second(self) -> float:
        """Memory bandwidth."""
        return 1e9 * self.gigabytes_per_second

    def flops(self, dtype: str) -> float:
        """Dense arithmetic per second of products in `dtype`."""
        return 1e12 * self.teraflops[dtype != "float32"]

    def environment(self) -> dict[str, str]:
        """The profile as environment variables."""
        figures: dict[str, object] = {
            "name": f"{self.name} (dry run)",  # distinguishes its logs from those of a real device
            "major": self.capability[0],
            "minor": self.capability[1],
            "memory_bytes": self.memory_bytes,
            "multiprocessors": self.multiprocessors,
            "l2_bytes": self.l2_bytes,
            **dict(zip(LIMITS, CAPABILITIES[self.capability], strict=True)),
        }
        return {f"{PREFIX}{name.upper()}": str(figure) for name, figure in figures.items()}


DEVICES: tuple[Device, ...] = (
    Device("t4", "Tesla T4", (7, 5), 16 * GIB, 40, 4 * MIB, 320, (8.1, 65)),
    Device("a10", "NVIDIA A10", (8, 6), 24 * GIB, 72, 6 * MIB, 600, (31.2, 125)),
    Device("l4", "NVIDIA L4", (8, 9), 24 * GIB, 58, 48 * MIB, 300, (30.3, 121)),
    Device("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 40 * GIB, 108, 40 * MIB, 1555, (19.5, 312)),
    Device("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB, 108, 40 * MIB, 2039, (19.5, 312)),
    Device("l40s", "NVIDIA L40S", (8, 9), 48 * GIB, 142, 96 * MIB, 864, (91.6, 362)),
    Device("rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, 128, 72 * MIB, 1008, (82.6, 165)),
    Device("h100", "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 132, 50 * MIB, 3350, (67, 989)),
    Device("h200", "NVIDIA H200", (9, 0), 141 * GIB, 132, 50 * MIB, 4800, (67, 989)),
    Device("b200", "NVIDIA B200", (10, 0), 180 * GIB, 148, 126 * MIB, 8000, (80, 2250)),
)


EXAMPLE_DEVICE = Remedy("for example", options=("--device", "{device}"))


def device(name: str = DEFAULT_DEVICE, others: Sequence[str] = ()) -> Device:
    """The profile of a name, ignoring case. Raises UsageError with suggestions for unknown names.

    `others`: further values of the option, for the message.
    """
    by_key = {profile.key: profile for profile in DEVICES}
    found = by_key.get(name.strip().lower())
    if found is None:
        problem = f"`device`: unknown device {name!r}"
        near = nearest(name, by_key)
        remedy = EXAMPLE_DEVICE.filled(device=near[0]) if near else None
        raise UsageError(
            f"{problem}; {did_you_mean(near)}known devices: {', '.join([*others, *by_key])}", remedy=remedy
        )
    return found
