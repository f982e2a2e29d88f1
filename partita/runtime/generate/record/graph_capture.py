"""Graph capture: the provider captures one run of a graph and replays it.

A replay runs the same kernels on the same addresses, so all inputs are in fixed device buffers that are written before
each run. Inputs that a kernel reads in host memory keep the values of the captured run. Observed runs are not captured,
because a replay has no events to profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from partita.errors import ProviderError
from partita.remedies import Remedy
from partita.runtime.generate.cache.cache import Cache
from partita.runtime.generate.feeds import BoundInput
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.session import Session
from partita.runtime.verify.comparison import difference, scale_of

WITHOUT = Remedy("disable graph capture, or export the checkpoint for this provider")
TOLERANCE = 1e-3
"""Relative to the largest logit."""
CONSTANT = "total_length"
"""The only cursor that a captured run may read in host memory: an upper bound of the row lengths, which
GroupQueryAttention reads on the device (`last_index`). The cache length is a valid bound, as in onnxruntime-genai
(PR 271 of its repository). Not tested on a GPU."""


class Recording:
    """The device buffers of a graph and its captured run. Replaces a `Binding`."""

    def __init__(self, session: Session, binding: Binding, cache: Cache) -> None:
        self._session, self._binding = session, binding
        self._fed: list[tuple[str, Buffer, Buffer]] = []
        self._outputs: list[Buffer] = []
        self._on_host: set[int] = set()
        self._number: int | None = None
        self.replays = 0
        """Number of runs that replayed the captured run."""
        self._replay_verified = False
        self._advancing = tuple(store.buffer for store in cache.stores if not store.padding_is_safe)
        """States that take in tokens; restored because capturing runs the graph several times."""

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Bind the input `name` to device memory, to which `buffer` is copied before each run."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory == HOST_MEMORY:
            self._on_host.add(id(buffer))
            self._binding.bind_input(name, buffer)
            return
        self._binding.bind_input(name, device)
        self._fed.append((name, buffer, device))

    def bind_constant(self, name: str, buffer: Buffer) -> None:
        """Bind the input `name` to device memory, to which `buffer` is copied once."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory != HOST_MEMORY:
            device.write(buffer)
        self._binding.bind_input(name, buffer if device.memory == HOST_MEMORY else device)

    def bind_output(self, name: str, device: Buffer) -> None:
        """Bind the output `name` to device memory."""
        self._binding.bind_output(name, device)
        self._outputs.append(device)

    @property
    def fed_bytes(self) -> dict[str, int]:
        """Bytes copied to the device before each run, by input."""
        return {name: buffer.size_bytes for name, buffer, _ in self._fed}

    def fix(self, inputs: Mapping[str, BoundInput], max_length: int) -> frozenset[str]:
        """Write the inputs that the host reads once; return their roles."""
        feed = inputs.get(CONSTANT)
        if feed is None or id(feed.buffer) not in self._on_host:
            return frozenset()
        feed.array.fill(max_length)
        return frozenset({CONSTANT})

    def run(self, *, observed: bool) -> None:
        """Run the graph. Raises ProviderError if a replay computes another result.

        Observed runs are not captured. Then one run is captured, and the next is both replayed and run with its new
        inputs, which shows whether the capture is incomplete.
        """
        for _, host, device in self._fed:
            device.write(host)
        if observed:
            self._binding.run()
        elif self._number is None:
            self._record()
        elif not self._replay_verified:
            self._verify_replay(self._number)
        else:
            self._binding.replay(self._number)
            self.replays += 1

    def _record(self) -> None:
        """Capture a run and run it. Keys and values are overwritten in place; other states are restored in between."""
        before = self._states()
        self._number = self._session.next_recording()
        self._binding.replay(self._number)
        self._put_back(before)
        self._binding.run()

    def _verify_replay(self, number: int) -> None:
        """Replay, then run, and compare the results."""
        before = self._states()
        for device in self._outputs:
            device.clear()
        self._binding.replay(number)
        replayed = [_copy(device) for device in self._outputs]
        self._put_back(before)
        self._binding.run()
        for device, found in zip(self._outputs, replayed, strict=True):
            if not _results_match(_copy(device), found):
                raise ProviderError(
                    "graph capture is not possible: a replayed step computes a different result, so the "
                    "provider does not capture the whole graph",
                    remedy=WITHOUT,
                )
        self._replay_verified = True

    def _states(self) -> list[Buffer]:
        """Copies of the states that a run advances."""
        return [_copy(buffer) for buffer in self._advancing]

    def _put_back(self, states: Sequence[Buffer]) -> None:
        for held, buffer in zip(states, self._advancing, strict=True):
            buffer.write(held)


def _copy(device: Buffer) -> Buffer:
    """A copy of a device buffer in host memory."""
    held = host_buffer(tuple(device.value.shape()), device.dtype)
    device.copy_to(held)
    return held


def _results_match(ran: Buffer, replayed: Buffer) -> bool:
    """Whether two runs of the same kernels gave the same logits, up to the order of summation."""
    if np.array_equal(ran.host, replayed.host):
        return True
    if ran.dtype == "bfloat16":
        return False  # raw bits in numpy
    one, other = (buffer.host.astype(np.float32).reshape(-1, buffer.host.shape[-1]) for buffer in (ran, replayed))
    scale = scale_of(one)
    return all(difference(*rows, scale) <= TOLERANCE * scale for rows in zip(other, one, strict=True))
