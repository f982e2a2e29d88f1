"""Layers that repeat an earlier one are copied, and the graph is the same as without copies."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import onnx_ir as ir
import pytest

from tests.conftest import TinyCheckpoint

MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3, "sliding_window": 8}


@pytest.mark.parametrize(
    ("model_type", "settings", "traced"),
    [
        ("llama", {"num_hidden_layers": 5}, [0, 1, 2]),  # the first one makes nodes that all use
        ("gemma3_text", {"num_hidden_layers": 9, **MIXED}, [0, 1, 2, 3, 5]),
        ("gpt2", {"num_hidden_layers": 5, "scale_attn_by_inverse_layer_idx": True}, [0, 1, 2, 3, 4]),
        ("gpt2", {"num_hidden_layers": 5}, [0, 1, 2]),
        ("mamba", {"num_hidden_layers": 4}, [0, 1]),
        ("mixtral", {"num_hidden_layers": 4}, [0, 1, 2]),
    ],
)
def test_copied_layers_give_same_graph(
    tiny_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    settings: dict[str, Any],
    traced: list[int],
) -> None:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from transformers import AutoConfig

    from partita.export.trace import tracing
    from partita.export.trace.attention import lowering
    from partita.export.trace.fake_model import build_fake_model
    from partita.export.trace.ports import TraceSpec
    from partita.export.trace.repeats import layers

    config = AutoConfig.from_pretrained(tiny_checkpoint(model_type, **settings))
    spec = TraceSpec(1, 32, 4 if model_type == "mamba" else None, 21, "contrib")
    ran: list[int] = []

    def graph() -> bytes:
        fake = build_fake_model(config, "float32", 1, 32)

        def note(index: int) -> None:
            if get_proxy_mode() is not None:
                ran.append(index)

        for index, layer in enumerate(layers(fake.module)):
            next(layer.children()).register_forward_pre_hook(lambda *_, index=index: note(index))
        content: bytes = ir.to_proto(tracing.trace(fake, lowering("gqa"), spec).model).SerializeToString()
        return content

    with_copies = graph()
    assert ran == traced
    monkeypatch.setattr(tracing, "copied_repeats", lambda *_: nullcontext())
    assert graph() == with_copies
