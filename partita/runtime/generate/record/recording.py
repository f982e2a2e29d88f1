"""A graph that a provider records in one run and replays in those after it (graph capture).

A replay runs the same kernels on the same addresses and looks at nothing else, so all that a step is fed lies on the
device, in buffers that stay, and is written into them before each run. What a kernel reads in host memory is as it was
when the run was recorded. While runs are observed none is recorded: a replay has no events to profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from partita.errors import ProviderError
from partita.remedies import Remedy
from partita.runtime.generate.cache.cache import Cache
from partita.runtime.generate.feeds import Feed
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.session import Session
from partita.runtime.verify.comparison import difference, scale_of

WITHOUT = Remedy("leave graph capture out, or export the checkpoint for this provider")
TOLERANCE = 1e-3
"""Of the largest logit."""
CONSTANT = "total_length"
"""The one cursor that a recorded run may read in host memory. It bounds the lengths of the rows, which
GroupQueryAttention reads on the device (`last_index`), so the length of the cache is as right as that of the longest
row: what onnxruntime-genai gives it (PR 271 of its repository). Seen on no GPU.
"""


class Recording:
    """The buffers of a graph on the device, and the run that is replayed. In place of a `Binding` for what binds."""

    def __init__(self, session: Session, binding: Binding, cache: Cache) -> None:
        self._session, self._binding = session, binding
        self._fed: list[tuple[str, Buffer, Buffer]] = []
        self._given: list[Buffer] = []
        self._on_host: set[int] = set()
        self._number: int | None = None
        self._confirmed = False
        self._advancing = tuple(
            buffer for store in cache.stores if not store.padding_is_safe for _, buffer in store.named()
        )
        """States that take a token in: to record, a provider runs the graph several times."""

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Have the graph read `name` on the device, from memory that `buffer` is copied to before each run."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory == HOST_MEMORY:
            self._on_host.add(id(buffer))
            self._binding.bind_input(name, buffer)
            return
        self._binding.bind_input(name, device)
        self._fed.append((name, buffer, device))

    def bind_constant(self, name: str, buffer: Buffer) -> None:
        """Have the graph read `name` on the device, where `buffer` is copied once."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory != HOST_MEMORY:
            device.write(buffer)
        self._binding.bind_input(name, buffer if device.memory == HOST_MEMORY else device)

    def bind_output(self, name: str, device: Buffer) -> None:
        """Have the graph write `name` into memory of the device."""
        self._binding.bind_output(name, device)
        self._given.append(device)

    @property
    def fed_bytes(self) -> dict[str, int]:
        """Bytes that are written to the device before each run, by input."""
        return {name: buffer.size_bytes for name, buffer, _ in self._fed}

    def fix(self, inputs: Mapping[str, Feed], max_length: int) -> frozenset[str]:
        """Write what the host reads once and for all; the roles of these inputs."""
        feed = inputs.get(CONSTANT)
        if feed is None or id(feed.buffer) not in self._on_host:
            return frozenset()
        feed.array.fill(max_length)
        return frozenset({CONSTANT})

    def run(self, *, observed: bool) -> None:
        """One run of the graph. Raises ProviderError where a replay computes something else.

        While it is observed it runs as it is. Then one run is recorded, and the next is both replayed and run as it is:
        what a provider leaves out of a recording shows there, for its inputs are other ones.
        """
        for _, host, device in self._fed:
            device.write(host)
        if observed:
            self._binding.run()
        elif self._number is None:
            self._record()
        elif not self._confirmed:
            self._confirm(self._number)
        else:
            self._binding.replay(self._number)

    def _record(self) -> None:
        """Record a run, and run it: keys and values are written to the same place again, other states go back first."""
        before = self._states()
        self._number = self._session.next_recording()
        self._binding.replay(self._number)
        self._put_back(before)
        self._binding.run()

    def _confirm(self, number: int) -> None:
        """Replay, then run, and compare."""
        before = self._states()
        for device in self._given:
            device.clear()
        self._binding.replay(number)
        replayed = [_copy(device) for device in self._given]
        self._put_back(before)
        self._binding.run()
        for device, found in zip(self._given, replayed, strict=True):
            if not _agree(_copy(device), found):
                raise ProviderError(
                    "graph capture is not possible: a step that is replayed does not compute what the step itself "
                    "computes, so the provider leaves something of this graph out of what it records",
                    remedy=WITHOUT,
                )
        self._confirmed = True

    def _states(self) -> list[Buffer]:
        """What the states are that a run takes further."""
        return [_copy(buffer) for buffer in self._advancing]

    def _put_back(self, states: Sequence[Buffer]) -> None:
        for held, buffer in zip(states, self._advancing, strict=True):
            buffer.write(held)


def _copy(device: Buffer) -> Buffer:
    """What is on the device, in memory of the host."""
    held = host_buffer(tuple(device.value.shape()), device.dtype)
    device.read(held)
    return held


def _agree(ran: Buffer, replayed: Buffer) -> bool:
    """Whether two runs of the same kernels gave the same logits; kernels may sum in another order each time."""
    if np.array_equal(ran.host, replayed.host):
        return True
    if ran.dtype == "bfloat16":
        return False  # as numpy has it these are bits
    one, other = (buffer.host.astype(np.float32).reshape(-1, buffer.host.shape[-1]) for buffer in (ran, replayed))
    scale = scale_of(one)
    return all(difference(*rows, scale) <= TOLERANCE * scale for rows in zip(other, one, strict=True))
