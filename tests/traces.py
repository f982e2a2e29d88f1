"""Traces that tests share: most of a tiny export's time is torch's trace, and many tests export the same tiny models.

The graph of a trace is stored under everything that it depends on, and every export gets its own copy. A test that
replaces an attribute of the exporter, torch or transformers (`monkeypatch`) shares no trace: the replacement may be in
its graph.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from partita.export.passes.base import TracedGraph
    from partita.export.progress import Stage
    from partita.export.trace.attention import Lowering
    from partita.export.trace.fake_model import FakeModel
    from partita.export.trace.ports import TraceSpec


TRACED = ("partita.export", "torch", "transformers")
NOT_TRACED = ("partita.export.optimum", "partita.export.verify.known_answer", "partita.export.verify.quality")
"""Modules of the exporter that only run before or after a trace."""


class Traces:
    """`partita.export.trace.tracing.trace`, which remembers."""

    def __init__(self, trace: Callable[[FakeModel, Lowering, TraceSpec, Stage | None], TracedGraph]) -> None:
        self.trace, self.kept = trace, dict[Any, Any]()
        self.on = True
        self.item: pytest.Item | None = None

    def __call__(
        self, fake: FakeModel, lowering: Lowering, spec: TraceSpec, progress: Stage | None = None
    ) -> TracedGraph:
        if not self.on or replaces_export_code(self.item):
            return self.trace(fake, lowering, spec, progress)
        key = what_decides(fake), lowering, spec
        if key not in self.kept:
            self.kept[key] = self.trace(fake, lowering, spec, progress)
        traced: TracedGraph = self.kept[key]
        return traced.copy()


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
        fake.recompute_above,
        shared,
        buffers.hexdigest(),
    )


def _without_place(config: Any) -> Any:
    """A config, and those in it, without the folder that it was read from."""
    if isinstance(config, dict):
        return {name: _without_place(value) for name, value in config.items() if name != "_name_or_path"}
    return config


def replaces_export_code(item: pytest.Item | None) -> bool:
    """Whether the test has replaced an attribute on which a trace may depend."""
    patch: pytest.MonkeyPatch | None = getattr(item, "funcargs", {}).get("monkeypatch")
    replaced = [] if patch is None else [owner for owner, _, _ in patch._setattr]
    modules = [str(getattr(owner, "__module__", None) or getattr(owner, "__name__", "")) for owner in replaced]
    return any(module.startswith(TRACED) and not module.startswith(NOT_TRACED) for module in modules)


def share(item: pytest.Item) -> None:
    """Let the exports of this test share traces."""
    drafts: Any = sys.modules.get("partita.export.drafts")
    if drafts is None:  # the first export of a session comes with its import
        return
    if not isinstance(drafts.trace, Traces):
        drafts.trace = Traces(drafts.trace)
    drafts.trace.on, drafts.trace.item = True, item
