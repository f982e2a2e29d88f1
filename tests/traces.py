"""Traces that tests share: most of a tiny export's time is torch's trace, and many tests export the same tiny models.

The graph that a trace gives is kept by all that it depends on, and every export gets a copy of its own. A test that
replaces something (`monkeypatch`) traces by itself, and what it traces is not kept: what it put in may be in the graph.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from partita.export.attention import Lowering
    from partita.export.fake_model import FakeModel
    from partita.export.spec import TraceSpec
    from partita.export.tracing import Traced


class Traces:
    """`partita.export.tracing.trace`, which remembers."""

    def __init__(self, trace: Callable[[FakeModel, Lowering, TraceSpec], Traced]) -> None:
        self.trace, self.kept = trace, dict[Any, Any]()
        self.on = True
        self.made = self.taken = 0

    def __call__(self, fake: FakeModel, lowering: Lowering, spec: TraceSpec) -> Traced:
        if not self.on:
            return self.trace(fake, lowering, spec)
        key = what_decides(fake), lowering, spec
        if key in self.kept:
            self.taken += 1
        else:
            self.made += 1
            self.kept[key] = self.trace(fake, lowering, spec)
        traced: Traced = self.kept[key]
        return replace(traced, model=traced.model.clone())


def what_decides(fake: FakeModel) -> tuple[Any, ...]:
    """All of a model that a trace can depend on: its class, its config, its weights' shapes and its buffers' values."""
    import torch

    config: Any = fake.module.config
    buffers = hashlib.sha256()
    for name, value in sorted(fake.module.named_buffers()):
        buffers.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        buffers.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    weights = tuple(
        (name, tuple(value.shape), str(value.dtype), id(value))
        for name, value in fake.module.named_parameters(remove_duplicate=False)
    )
    first: dict[int, int] = {}
    shared = tuple(
        (name, shape, kind, first.setdefault(same, index)) for index, (name, shape, kind, same) in enumerate(weights)
    )
    return (
        type(fake.module),
        json.dumps(_without_place(config.to_dict()), sort_keys=True, default=str),
        str(config._attn_implementation),
        fake.dtype,
        repr(fake.probed),
        fake.rope_by_length,
        fake.rereads_at,
        shared,
        buffers.hexdigest(),
    )


def _without_place(config: Any) -> Any:
    """A config, and those in it, without the folder that it was read from."""
    if isinstance(config, dict):
        return {name: _without_place(value) for name, value in config.items() if name != "_name_or_path"}
    return config


def share(item: pytest.Item) -> None:
    """Have the exports of this test share traces, unless it replaces something."""
    drafts: Any = sys.modules.get("partita.export.drafts")
    if drafts is None:  # the first export of a session comes with its import
        return
    if not isinstance(drafts.trace, Traces):
        drafts.trace = Traces(drafts.trace)
    drafts.trace.on = "monkeypatch" not in getattr(item, "fixturenames", ())
