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


def kinds(model: torch.nn.Module) -> dict[str, str]:
    return {rotary.name: rotary.kind for rotary in rotaries(model)}


def phi3(**parameters: Any) -> torch.nn.Module:
    config: Any = AutoConfig.for_model(
        "phi3",
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=CONTEXT,
        rope_parameters={**LONGROPE, **parameters},
    )
    return Phi3RotaryEmbedding(config)


def llama(**parameters: Any) -> torch.nn.Module:
    config: Any = AutoConfig.for_model(
        "llama", **SIZES, max_position_embeddings=CONTEXT, rope_parameters={**DYNAMIC, **parameters}
    )
    return LlamaRotaryEmbedding(config)


def gemma3(full: dict[str, Any]) -> torch.nn.Module:
    config: Any = AutoConfig.for_model(
        "gemma3_text",
        **SIZES,
        num_hidden_layers=2,
        max_position_embeddings=CONTEXT,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", **THETA}, "full_attention": full},
    )
    return Gemma3RotaryEmbedding(config)


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


ROTARIES = {"longrope": phi3, "dynamic": llama, "dynamic, integer factor": lambda: llama(factor=2)}
LENGTHS = [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 40, 63]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("make", ROTARIES.values(), ids=ROTARIES)
def test_rope_by_length_matches_transformers_exactly(make: Any, length: int) -> None:
    expected = make()(*inputs(0, length))
    rotary = make()
    with rope_by_length(rotary, scalar(length)):
        assert same(rotary(*inputs(0, length)), expected)


@pytest.mark.parametrize("make", ROTARIES.values(), ids=ROTARIES)
def test_frequencies_depend_on_length_not_positions(make: Any) -> None:
    """The first tokens of a long sequence use the frequencies of that sequence."""
    long = make()(*inputs(0, 40))
    rotary = make()
    with rope_by_length(rotary, scalar(40)):
        head = rotary(*inputs(0, 5))
    assert same(head, [wave[:, :5] for wave in long])
    assert not same(head, make()(*inputs(0, 5)))


@pytest.mark.parametrize("make", ROTARIES.values(), ids=ROTARIES)
def test_graph_with_length_input_matches_transformers(make: Any) -> None:
    tokens = torch.export.Dim("tokens", min=1, max=64)
    program = torch.export.export(
        Model(make()),
        (*inputs(0, 3), scalar(3)),
        strict=False,
        dynamic_shapes={"x": {1: tokens}, "positions": {1: tokens}, "length": {}},
    ).module()
    for length in LENGTHS:
        assert same(program(*inputs(0, length), scalar(length)), make()(*inputs(0, length)))


@pytest.mark.parametrize("make", ROTARIES.values(), ids=ROTARIES)
def test_missing_length_selects_short_frequencies(make: Any) -> None:
    rotary = make()
    with rope_by_length(rotary, None):
        waves = rotary(*inputs(0, 40))
    assert same([wave[:, :CONTEXT] for wave in waves], make()(*inputs(0, CONTEXT)))


def test_attention_factor_is_applied() -> None:
    expected = phi3(attention_factor=1.7)(*inputs(0, 40))
    assert not same(expected, phi3()(*inputs(0, 40)))
    rotary = phi3(attention_factor=1.7)
    with rope_by_length(rotary, scalar(40)):
        assert same(rotary(*inputs(0, 40)), expected)


@pytest.mark.parametrize("full", [DYNAMIC, {**LONGROPE, "original_max_position_embeddings": CONTEXT, "factor": 4.0}])
def test_layer_types_may_differ_in_length_dependence(full: dict[str, Any]) -> None:
    rotary = gemma3(full)
    assert kinds(Model(rotary)) == {"model.rotary.full_attention": full["rope_type"]}
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
    config: Any = AutoConfig.for_model("llama", **SIZES, max_position_embeddings=CONTEXT, rope_parameters=parameters)
    rotary = LlamaRotaryEmbedding(config)
    assert not rotaries(rotary) and static_up_to(rotary) is None and recompute_above(rotary) is None
    long = rotary(*inputs(0, 60))
    assert same(rotary(*inputs(0, 5)), [wave[:, :5] for wave in long])


def test_hunyuan_fixed_alpha_is_not_length_dependent() -> None:
    """Its config labels the rope type dynamic."""
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

    config: Any = AutoConfig.for_model(
        "hunyuan_v1_dense", **SIZES, max_position_embeddings=CONTEXT, rope_parameters={**DYNAMIC, "alpha": 1000.0}
    )
    assert not rotaries(HunYuanDenseV1RotaryEmbedding(config))


def test_custom_frequency_computation_is_rejected_with_module_name() -> None:
    """Phimoe scales its cosines and sines by length, outside transformers' wrapper."""
    config: Any = AutoConfig.for_model(
        "phimoe",
        **SIZES,
        max_position_embeddings=64,
        rope_parameters={
            **LONGROPE,
            "original_max_position_embeddings": CONTEXT,
            "short_mscale": 1.2,
            "long_mscale": 1.4,
        },
    )
    model = Model(PhimoeRotaryEmbedding(config))
    with pytest.raises(UnsupportedModelError, match="rotary computes its frequencies in an unknown way"):
        model(*inputs(0, 5), scalar(5))


def test_dynamic_rope_without_transformers_wrapper_is_rejected_by_name() -> None:
    class Other(torch.nn.Module):
        rope_type = "dynamic"

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(UnsupportedModelError, match="Other has length-dependent freq"), rope_by_length(Other(), None):
        pass
