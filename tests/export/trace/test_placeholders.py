"""Placeholders of norms and rotary embeddings: what is recognised, what replaces one, and targets that refuse it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import TinyCheckpoint, require

require("torch")
import torch  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.models.bloom.modeling_bloom import BloomGelu  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm  # noqa: E402
from transformers.models.glm4 import modeling_glm4 as glm4  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss  # noqa: E402
from transformers.models.gptj import modeling_gptj as gptj  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm  # noqa: E402
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated  # noqa: E402

from partita.export.checkpoint.description import open_checkpoint  # noqa: E402
from partita.export.native import variants  # noqa: E402
from partita.export.options import ExportOptions  # noqa: E402
from partita.export.progress import Silent  # noqa: E402
from partita.export.target import Question, usual  # noqa: E402
from partita.export.trace import DOMAIN  # noqa: E402
from partita.export.trace.placeholders import Form, gelu_of, norm_of, rotations_of  # noqa: E402
from partita.export.work import Work  # noqa: E402

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


class ClampedGelu(torch.nn.GELU):
    """Equal to GELU below 30."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(max=30)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (ACT2FN["gelu_new"], "tanh"),
        (ACT2FN["gelu_fast"], "tanh"),
        (BloomGelu(), "tanh"),
        (ACT2FN["gelu_python"], "none"),
        (ACT2FN["quick_gelu"], None),
        (ACT2FN["gelu_10"], None),
        (torch.nn.Dropout(), None),
        (ClampedGelu(), None),
    ],
)
def test_gelu_module_is_recognised(module: torch.nn.Module, expected: str | None) -> None:
    assert gelu_of(module.eval()) == expected


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


def rotations(function: Callable[..., Any], *names: str, waves: int = 16) -> Any:
    """The form for arguments [1, 2, 3, 16], or [1, 3, 2, 16] for the argument `tensor`; [] for another function."""
    given: dict[str, Any] = {name: torch.zeros(1, 3, waves) for name in ("cos", "sin")}
    shape = (1, 3, 2, 16) if "tensor" in names else (1, 2, 3, 16)
    found = rotations_of(function, given | {name: torch.zeros(shape) for name in names}, list(names))
    assert found == found[:1] * len(names) or not found
    return found[0] if found else found


def form(
    first: range, second: range, *, interleaved: bool = False, axis: int = 2, order: list[int] | None = None
) -> Form:
    return Form(axis, order, {"interleaved": interleaved, "first": [*first], "second": [*second]})


def test_rotary_functions_are_recognised() -> None:
    half, evens_first = range(8), [*range(0, 16, 2), *range(1, 16, 2)]
    assert rotations(llama.apply_rotary_pos_emb, "q", "k") == form(half, range(8, 16))
    assert rotations(glm4.apply_rotary_pos_emb, "q", "k", waves=8) == form(range(4), range(4), interleaved=True)
    assert rotations(deepseek_v3.apply_rotary_pos_emb_interleave, "q", "k") == form(half, half, order=evens_first)
    assert rotations(gptj.apply_rotary_pos_emb, "tensor", waves=8) == form(half, half, interleaved=True, axis=1)
    assert rotations(gpt_oss.apply_rotary_pos_emb, "q", "k", waves=8) == form(half, half)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, cos, sin: q * cos[:, None] + q.roll(8, -1) * sin[:, None],
        lambda q, cos, sin: q * cos[:, None] + llama.rotate_half(q) * sin[:, None] * 1.001,
        lambda q, cos, sin: q * cos[:, None],
        lambda q, cos, sin: llama.apply_rotary_pos_emb(q, q, cos, sin),
        lambda q, cos, sin: q.reshape(7, 7),
    ],
    ids=["another sign", "scaled", "without sines", "two results", "a failure"],
)
def test_other_functions_are_not_rotary(function: Callable[..., Any]) -> None:
    assert rotations(function, "q") == []


@pytest.mark.parametrize(
    ("refused", "spelled_out"),
    [
        ((), (False, False)),
        (("SimplifiedLayerNormalization",), (True, False)),
        (("do_rotary", "RotaryEmbedding"), (False, True)),
    ],
)
def test_graph_is_traced_again_without_placeholders_that_the_target_refuses(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, refused: tuple[str, ...], spelled_out: tuple[bool, bool]
) -> None:
    folder = tiny_checkpoint("llama")
    options = ExportOptions(str(folder), tmp_path / "package", max_length=32)

    def supports(questions: Sequence[Question]) -> list[bool]:
        models = (onnx.load_model_from_string(model) for model, _ in questions)
        nodes = [[(node.op_type, *(each.name for each in node.attribute)) for node in m.graph.node] for m in models]
        return [not any(set(refused) & set(words) for words in each) for each in nodes]

    work = Work(options, Silent(), tmp_path, supports=supports)
    draft = variants(open_checkpoint(str(folder)), work, None).draft
    (traced,) = draft.graphs(usual("gqa")).traced_graphs
    found = {node.op_type for node in traced.graph}
    assert ("ReduceMean" in found, "Neg" in found) == spelled_out
    assert not [node for node in traced.graph if node.domain == DOMAIN]
