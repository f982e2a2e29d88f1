"""Memory that only copies reach, as that of a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from partita.runtime.ort.buffers import Buffer, host_buffer


class OnDevice:
    """A buffer in device memory; `copies` counts those to the host."""

    memory = "Device"

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.dtype, self.held, self.copies = dtype, np.zeros(shape, dtype), 0
        self.value = SimpleNamespace(shape=lambda: list(shape))
        self.size_bytes = self.held.nbytes

    def write(self, buffer: Buffer) -> None:
        self.held[...] = buffer.host

    def copy(self, buffer: Buffer) -> Any:
        self.copies += 1
        buffer.host[...] = self.held
        return buffer.host

    def host_copy(self) -> Buffer:
        target = host_buffer(self.held.shape, self.dtype)
        self.copy(target)
        return target

    def clear(self) -> None:
        self.held.fill(0)
