"""RMS norms as placeholders: which modules are norms, and the operators that replace a placeholder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.conftest import TinyCheckpoint, require

require("torch")
import torch  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm  # noqa: E402
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated  # noqa: E402

from partita.export.checkpoint.description import open_checkpoint  # noqa: E402
from partita.export.passes import fused_norms  # noqa: E402
from partita.export.trace.placeholders import norm_of  # noqa: E402
from partita.export.weights.sources import checkpoint_weight  # noqa: E402
from tests.export.nets import Net, context, operators, random, run, run_passes  # noqa: E402

WIDTH = 64


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (LlamaRMSNorm(WIDTH, eps=1e-5), (1e-5, 0.0)),
        (Gemma3RMSNorm(WIDTH, eps=1e-6), (1e-6, 1.0)),
        (Llama4TextL2Norm(eps=1e-6), (1e-6, 0.0)),
    ],
    ids=["weight", "1 + weight", "no weight"],
)
def test_rms_norm_module_is_recognised(module: torch.nn.Module, expected: tuple[float, float]) -> None:
    assert norm_of(module) == expected


class Other(torch.nn.Module):
    """A module with the attributes of a norm and another function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.eps, self.function, self.weight = 1e-6, function, torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, self.eps)


OTHERS = {
    "gated": Qwen3NextRMSNormGated(WIDTH),
    "centred": torch.nn.LayerNorm(WIDTH, bias=False),
    "epsilon outside of the root": Other(lambda x, w, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w),
    "epsilon added to the sum": Other(lambda x, w, eps: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) * w),
    "2 - weight": Other(lambda x, w, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (2 - w)),
    "over rows": Other(lambda x, w, eps: x * torch.rsqrt(x.square().mean(0, keepdim=True) + eps) * w),
    "a failure": Other(lambda x, w, eps: x.reshape(3, 1000, 7)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_modules_are_not_norms(kind: str) -> None:
    assert norm_of(OTHERS[kind]) is None


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("fused", ["contrib", "standard"])
@pytest.mark.parametrize(
    "refused", [(), ("SimplifiedLayerNormalization", "RMSNormalization")], ids=["taken", "refused"]
)
def test_placeholder_becomes_the_operator_or_what_it_stands_for(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, offset: float, fused: Any, refused: tuple[str, ...]
) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("llama")))
    weight = checkpoint_weight(checkpoint, "model.norm.weight", ir.DataType.FLOAT)
    net = Net(24 if fused == "standard" else 21)
    x = net.input("x", [1, "s", WIDTH])
    y = net.op("partita::RMSNorm", x, net.weight(weight), epsilon=0.3, offset=offset)
    y.shape, y.type = x.shape, x.type
    net.give(y)
    model, given = net.model(), random(1, 5, WIDTH)
    run_passes(model, [fused_norms.PASS], context(fused, refused=refused))
    operator = "SimplifiedLayerNormalization" if fused == "contrib" else "RMSNormalization"
    assert operator not in operators(model) if refused else operators(model) == [operator]
    expected = given / np.sqrt(np.square(given).mean(-1, keepdims=True) + 0.3) * (weight.numpy() + offset)
    np.testing.assert_allclose(run(model, tmp_path, {"x": given})[0], expected, rtol=2e-5, atol=2e-5)
