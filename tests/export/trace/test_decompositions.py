"""Where torch's decomposition is skipped, the graph is the one that it would give."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.conftest import TinyCheckpoint


@pytest.mark.parametrize(("model_type", "skipped"), [("qwen2", True), ("mixtral", False)])
def test_a_skipped_decomposition_changes_nothing(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, model_type: str, skipped: bool
) -> None:
    from transformers import AutoConfig

    from partita.export.trace import decompositions
    from partita.export.trace.attention import lowering
    from partita.export.trace.fake_model import build_fake_model
    from partita.export.trace.spec import TraceSpec
    from partita.export.trace.tracing import trace

    config = AutoConfig.from_pretrained(tiny_checkpoint(model_type, num_hidden_layers=1))
    found: list[bool] = []
    own: Any = decompositions._has_forms

    def traced(*, skips: bool) -> tuple[Counter[str], set[str]]:
        def has_forms(*arguments: Any) -> bool:
            found.append(own(*arguments))
            return found[-1] and skips

        monkeypatch.setattr(decompositions, "_has_forms", has_forms)
        spec = TraceSpec(1, 32, None, 21, "contrib")
        model = trace(build_fake_model(config, "float32", 1, 32), lowering("gqa"), spec).model
        weights = {name for name, value in model.graph.initializers.items() if value.const_value is None}
        return Counter(f"{node.domain}::{node.op_type} {node.name}" for node in model.graph), weights

    assert traced(skips=True) == traced(skips=False)
    assert found == [skipped, skipped]
