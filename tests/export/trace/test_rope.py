"""Length-dependent rotary frequencies match transformers' rotary modules, in eager mode and in a graph."""

from __future__ import annotations

from typing import Any

import pytest

from partita.errors import UnsupportedModelError
from tests.conftest import require

require("torch")
import torch  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding  # noqa: E402
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding  # noqa: E402

from partita.export.trace.replacements import recompute_above, rope_by_length, rotaries, static_up_to  # noqa: E402

CONTEXT = 16
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
THETA = {"rope_theta": 10_000.0}
LONGROPE = {
    "rope_type": "longrope",
    **THETA,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
}
# A factor at which the formula, computed in float32, is not exactly 1 within the original context.
DYNAMIC = {"rope_type": "dynamic", **THETA, "factor": 3.3}


def rotary_of(kind: Any, model_type: str, parameters: dict[str, Any], **settings: Any) -> torch.nn.Module:
    """The rotary module of a config with these rope parameters."""
    settings = {**SIZES, "max_position_embeddings": CONTEXT, "rope_parameters": parameters, **settings}
    module: torch.nn.Module = kind(AutoConfig.for_model(model_type, **settings))
    return module


def phi3(**parameters: Any) -> torch.nn.Module:
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": CONTEXT}
    return rotary_of(Phi3RotaryEmbedding, "phi3", {**LONGROPE, **parameters}, **sizes)


def llama(**parameters: Any) -> torch.nn.Module:
    return rotary_of(LlamaRotaryEmbedding, "llama", {**DYNAMIC, **parameters})


def gemma3(full: dict[str, Any]) -> torch.nn.Module:
    parameters = {"sliding_attention": {"rope_type": "default", **THETA}, "full_attention": full}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return rotary_of(Gemma3RotaryEmbedding, "gemma3_text", parameters, **layers)


class Model(torch.nn.Module):
    """A rotary module somewhere in a model, its length an input."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.rotary = rotary

    def forward(self, x: torch.Tensor, positions: torch.Tensor, length: torch.Tensor) -> Any:
        with rope_by_length(self.model, length):
            rotary: Any = self.model.rotary
            return rotary(x, positions)


def inputs(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, end - first, 64), torch.arange(first, end, dtype=torch.int32)[None]


def scalar(length: int) -> torch.Tensor:
    return torch.tensor(length, dtype=torch.int32)


def same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


ROTARIES = {
    "longrope": phi3,
    "longrope, attention factor": lambda: phi3(attention_factor=1.7),
    "dynamic": llama,
    "dynamic, integer factor": lambda: llama(factor=2),
}
LENGTHS = [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 40, 63]


@pytest.mark.parametrize("make", ROTARIES.values(), ids=ROTARIES)
def test_graph_with_length_input_matches_transformers(make: Any) -> None:
    """Also for the first tokens of a long sequence, which use the frequencies of that sequence."""
    tokens = torch.export.Dim("tokens", min=1, max=64)
    program = torch.export.export(
        Model(make()),
        (*inputs(0, 3), scalar(3)),
        strict=False,
        dynamic_shapes={"x": {1: tokens}, "positions": {1: tokens}, "length": {}},
    ).module()
    for length in LENGTHS:
        expected = make()(*inputs(0, length))
        assert same(program(*inputs(0, length), scalar(length)), expected)
        head = program(*inputs(0, min(5, length)), scalar(length))
        assert same(head, [wave[:, :5] for wave in expected])
    assert not same(head, make()(*inputs(0, 5)))


@pytest.mark.parametrize("make", ROTARIES.values(), ids=ROTARIES)
def test_missing_length_selects_short_frequencies(make: Any) -> None:
    rotary = make()
    with rope_by_length(rotary, None):
        waves = rotary(*inputs(0, 40))
    assert same([wave[:, :CONTEXT] for wave in waves], make()(*inputs(0, CONTEXT)))


@pytest.mark.parametrize("full", [DYNAMIC, {**LONGROPE, "original_max_position_embeddings": CONTEXT, "factor": 4.0}])
def test_layer_types_may_differ_in_length_dependence(full: dict[str, Any]) -> None:
    rotary = gemma3(full)
    assert [(each.name, each.kind) for each in rotaries(Model(rotary))] == [
        ("model.rotary.full_attention", full["rope_type"])
    ]
    for length in LENGTHS:
        with rope_by_length(rotary, scalar(length)):
            for layer_type in ("full_attention", "sliding_attention"):
                expected = gemma3(full)(*inputs(0, length), layer_type)
                assert same(rotary(*inputs(0, length), layer_type), expected)


def test_only_longrope_requires_recomputation_of_cached_keys() -> None:
    assert recompute_above(Model(phi3())) == CONTEXT
    assert recompute_above(Model(llama())) is None


def test_longrope_with_different_original_lengths_is_rejected() -> None:
    model = Model(phi3())
    model.other = gemma3({**LONGROPE, "original_max_position_embeddings": 24, "factor": 4.0})
    with pytest.raises(UnsupportedModelError, match=r"model\.rotary beyond 16, other\.full_attention beyond 24"):
        recompute_above(model)


STATIC: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8},
    "llama3": {"factor": 2.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"factor": 2.0},
}


@pytest.mark.parametrize("rope_type", sorted({*ROPE_INIT_FUNCTIONS, "default"} - {"dynamic", "longrope"}))
def test_other_rope_types_have_fixed_frequencies(rope_type: str) -> None:
    """A new rope type of transformers has no entry in STATIC and fails here until it is reviewed."""
    parameters = {"rope_type": rope_type, **THETA, **({} if rope_type == "default" else STATIC[rope_type])}
    rotary = rotary_of(LlamaRotaryEmbedding, "llama", parameters)
    assert not rotaries(rotary) and static_up_to(rotary) is None and recompute_above(rotary) is None
    long = rotary(*inputs(0, 60))
    assert same(rotary(*inputs(0, 5)), [wave[:, :5] for wave in long])


def test_custom_frequency_computation_is_rejected_with_module_name() -> None:
    """Phimoe scales its cosines and sines by length, outside transformers' wrapper."""
    parameters = {**LONGROPE, "original_max_position_embeddings": CONTEXT, "short_mscale": 1.2, "long_mscale": 1.4}
    model = Model(rotary_of(PhimoeRotaryEmbedding, "phimoe", parameters, max_position_embeddings=64))
    with pytest.raises(UnsupportedModelError, match="rotary computes its frequencies in an unknown way"):
        model(*inputs(0, 5), scalar(5))


def test_dynamic_rope_without_transformers_wrapper_is_rejected_by_name() -> None:
    class Other(torch.nn.Module):
        rope_type = "dynamic"

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(UnsupportedModelError, match="Other has length-dependent freq"), rope_by_length(Other(), None):
        pass
