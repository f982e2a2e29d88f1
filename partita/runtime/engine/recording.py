"""A graph that a provider records in one run and replays in those after it (graph capture).

A replay runs the same kernels on the same addresses and looks at nothing else, so all that a step is fed lies on the
device, in buffers that stay, and is written into them before each run. What a kernel reads in host memory is as it was
when the run was recorded. While runs are observed none is recorded: a replay has no events to profile.
"""

from __future__ import annotations

from collections.abc import Mapping

from partita.runtime.engine.cache.cache import Cache
from partita.runtime.engine.feeds import Feed
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.session import Session

CONSTANT = "total_length"
"""The one cursor that a recorded run may read in host memory. It bounds the lengths of the rows, which GroupQueryAttention
reads on the device (`last_index`), so the length of the cache is as right as that of the longest row: what onnxruntime-genai
gives it (PR 271 of its repository). Seen on no GPU."""


class Recording:
    """The buffers of a graph on the device, and the run that is replayed. In place of a `Binding` for what binds."""

    def __init__(self, session: Session, binding: Binding, cache: Cache) -> None:
        self._session, self._binding = session, binding
        self._fed: list[tuple[Buffer, Buffer]] = []
        self._given: list[tuple[Buffer, Buffer]] = []
        self._on_host: set[int] = set()
        self._recorded = False
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
        self._fed.append((buffer, device))

    def bind_constant(self, name: str, buffer: Buffer) -> None:
        """Have the graph read `name` on the device, where `buffer` is copied once."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory != HOST_MEMORY:
            device.write(buffer)
        self._binding.bind_input(name, buffer if device.memory == HOST_MEMORY else device)

    def bind_output(self, name: str, buffer: Buffer) -> None:
        """Have the graph write `name` on the device, into memory that is copied to `buffer` after each run."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory == HOST_MEMORY:
            self._binding.bind_output(name, buffer)
            return
        self._binding.bind_output(name, device)
        self._given.append((buffer, device))

    def fix(self, inputs: Mapping[str, Feed], max_length: int) -> frozenset[str]:
        """Write what the host reads once and for all; the roles of these inputs."""
        feed = inputs.get(CONSTANT)
        if feed is None or id(feed.buffer) not in self._on_host:
            return frozenset()
        feed.array.fill(max_length)
        return frozenset({CONSTANT})

    def run(self, *, observed: bool) -> None:
        """One run of the graph: as it is while it is observed, else recorded, or replayed. Its outputs are on the host."""
        for host, device in self._fed:
            device.write(host)
        if observed or self._recorded:
            self._binding.run()
        else:
            self._record()
        for host, device in self._given:
            device.read(host)

    def _record(self) -> None:
        """Record a run. Keys and values are written again to the same place, other states go back and take the token in
        once, in a replay.
        """
        held = [host_buffer(tuple(buffer.value.shape()), buffer.dtype) for buffer in self._advancing]
        for before, buffer in zip(held, self._advancing, strict=True):
            buffer.read(before)
        self._binding.record(self._session.next_recording())
        self._binding.run()
        self._recorded = True
        if not held:
            return
        for before, buffer in zip(held, self._advancing, strict=True):
            buffer.write(before)
        self._binding.run()
