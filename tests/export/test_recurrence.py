"""Recurrences match transformers' functions for any initial state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partita.export.trace import hooks
from partita.export.trace.recurrence import delta_rule, recurrences, state_space


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Any, wanted: Any) -> None:
    """Output and state."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is not None and torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 5, 64, 100])
@pytest.mark.parametrize("kind", ["one head", "shared keys", "decay per key dimension"])
def test_gated_delta_rule_matches_transformers(length: int, kind: str) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    by_dimension = kind == "decay per key dimension"
    original, key_heads = (
        (chunk_kimi_delta_attention, 4)
        if by_dimension
        else (torch_chunk_gated_delta_rule, 2 + 2 * (kind == "one head"))
    )
    query, key = numbers(2, length, key_heads, 8, seed=1), numbers(2, length, key_heads, 8, seed=2)
    value, beta = numbers(2, length, 4, 12, seed=3), numbers(2, length, 4, seed=4).sigmoid()
    keywords: dict[str, Any] = {
        "g": -numbers(2, length, 4, *([8] if by_dimension else []), seed=5).abs(),
        "beta": beta,
        "initial_state": numbers(2, 4, 8, 12, seed=6),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    found = delta_rule.run("standard", query, key, value, **keywords)
    assert_close(found, original(query, key, value, **keywords))


def test_triangular_inverse_is_stable_for_equal_keys() -> None:
    """Powers of a triangular matrix of ones grow like binomials; inversion by halves avoids them."""
    size = 64
    system = torch.ones(1, 1, size, size)
    wanted = torch.linalg.inv(torch.eye(size) + torch.ones(size, size).tril(-1))
    assert torch.allclose(delta_rule.invert_triangular(system)[0, 0], wanted, atol=1e-4)


@pytest.mark.parametrize("length", [1, 5, 64, 100])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 0.9)])
def test_mamba_2_scan_matches_transformers(length: int, limit: tuple[float, float]) -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan as original

    hidden, dt = numbers(2, length, 4, 6, seed=1), numbers(2, length, 4, seed=2)
    A, B, C = -numbers(4, seed=3).abs(), numbers(2, length, 2, 8, seed=4), numbers(2, length, 2, 8, seed=5)  # noqa: N806
    keywords: dict[str, Any] = {
        "chunk_size": 16,
        "D": numbers(4, seed=6),
        "dt_bias": numbers(4, seed=7),
        "dt_softplus": True,
        "initial_states": numbers(2, 4, 6, 8, seed=8),
        "dt_limit": limit,
        "return_final_states": True,
    }
    found = state_space.chunk_scan("standard", hidden, dt, A, B, C, **keywords)
    assert_close(found, original(hidden, dt, A, B, C, **keywords))


def resumed(monkeypatch: pytest.MonkeyPatch, scan: Any, parts: list[slice], axis: int) -> tuple[torch.Tensor, Any]:
    """Output and last state of calls for `parts` of the tokens, each from the state of the one before."""
    plug, outputs = SimpleNamespace(last_state=None), []
    monkeypatch.setattr(hooks, "_active", [plug])
    for part in parts:
        output, plug.last_state = scan(part)
        outputs.append(output)
    return torch.cat(outputs, dim=axis), plug.last_state


def test_selective_scan_resumed_from_state_matches_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan as original

    hidden, dt, z = (numbers(2, 6, 9, seed=seed) for seed in (1, 2, 3))
    A, B, C = -numbers(6, 4, seed=4).abs(), numbers(2, 4, 9, seed=5), numbers(2, 4, 9, seed=6)  # noqa: N806
    D, bias = numbers(6, seed=7), numbers(6, seed=8)  # noqa: N806
    keywords: dict[str, Any] = {"D": D, "delta_bias": bias, "delta_softplus": True, "return_last_state": True}

    def scan(part: slice) -> Any:
        x, step, b, c, gate = (each[..., part] for each in (hidden, dt, B, C, z))
        return state_space.selective_scan("standard", x, step, A, b, c, z=gate, **keywords)

    found = resumed(monkeypatch, scan, [slice(0, 5), slice(5, 9)], -1)
    assert_close(found, original(hidden, dt, A, B, C, z=z, **keywords))


def test_mamba_2_scan_resumed_from_state_matches_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step of one token, where transformers' code omits the limit on dt."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan as original

    hidden, dt = numbers(1, 6, 2, 3, seed=1), numbers(1, 6, 2, seed=2)
    A, B, C = -numbers(2, seed=3).abs(), numbers(1, 6, 1, 4, seed=4), numbers(1, 6, 1, 4, seed=5)  # noqa: N806
    keywords: dict[str, Any] = {"chunk_size": 4, "dt_limit": (0.5, 1.0), "return_final_states": True}

    def scan(part: slice) -> Any:
        return state_space.chunk_scan("standard", hidden[:, part], dt[:, part], A, B[:, part], C[:, part], **keywords)

    found = resumed(monkeypatch, scan, [slice(0, 4), slice(4, 5), slice(5, 6)], 1)
    assert_close(found, original(hidden, dt, A, B, C, **keywords))


def test_transformers_has_every_replaced_function() -> None:
    """A renamed function would silently be traced unreplaced."""
    import importlib

    homes = {
        "torch_chunk_gated_delta_rule": "qwen3_next",
        "chunk_kimi_delta_attention": "kimi_linear",
        "mamba_selective_scan": "mamba",
        "mamba2_chunk_scan": "mamba2",
    }
    assert set(homes) == set(recurrences())
    for name, home in homes.items():
        assert hasattr(importlib.import_module(f"transformers.models.{home}.modeling_{home}"), name)
