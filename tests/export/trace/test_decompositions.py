"""What an export leaves out of torch's exporter changes no graph."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

from tests.conftest import TinyCheckpoint


@pytest.mark.parametrize(
    ("model_type", "skipped"),
    [("qwen2", True), ("mixtral", False), pytest.param("mamba", False, marks=pytest.mark.heavy)],
)
def test_a_quick_export_changes_nothing(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, model_type: str, skipped: bool
) -> None:
    from transformers import AutoConfig

    from partita.export.trace import decompositions, tracing
    from partita.export.trace.attention import lowering
    from partita.export.trace.fake_model import build_fake_model
    from partita.export.trace.ports import TraceSpec

    config = AutoConfig.from_pretrained(tiny_checkpoint(model_type, num_hidden_layers=1))
    found: list[bool] = []
    own: Any = decompositions._has_forms

    def traced(*, quick: bool) -> tuple[Counter[str], set[str]]:
        def has_forms(*arguments: Any) -> bool:
            found.append(own(*arguments))
            return found[-1] and quick

        monkeypatch.setattr(decompositions, "_has_forms", has_forms)
        monkeypatch.setattr(tracing, "quick_export", decompositions.quick_export if quick else nullcontext)
        spec = TraceSpec(1, 32, None, 21, "contrib")
        model = tracing.trace(build_fake_model(config, "float32", 1, 32), lowering("gqa"), spec).model
        weights = {name for name, value in model.graph.initializers.items() if value.const_value is None}
        nodes = Counter(
            f"{node.op_identifier()} {node.name} {[(each.dtype, str(each.shape)) for each in node.outputs]}"
            for node in model.graph
        )
        return nodes, weights

    assert traced(quick=True) == traced(quick=False)
    assert found == [skipped, skipped]
