"""Sampling: token distributions match transformers' logits processors."""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.errors import PackageError, UsageError
from partita.library.sampling import Suggestion, suggestion
from partita.options.generation import Sampling
from partita.runtime.generate.choice import sampling
from partita.runtime.generate.choice.sampling import Draws, greedy, make_sampler
from tests.conftest import require

HISTORY = np.array([3, 5, 5, 100, 3], np.int64)


def logits_of(seed: int, size: int = 1000) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def reference(logits, history, temperature, top_k, top_p, min_p, penalty):
    require("torch")
    import torch
    from transformers.generation import logits_process as generation

    ids, scores = torch.from_numpy(history)[None], torch.from_numpy(logits.copy())[None]
    processors = [
        generation.RepetitionPenaltyLogitsProcessor(penalty) if penalty != 1 else None,
        generation.TemperatureLogitsWarper(temperature) if temperature != 1 else None,
        generation.TopKLogitsWarper(top_k) if top_k else None,
        generation.TopPLogitsWarper(top_p) if top_p < 1 else None,
        generation.MinPLogitsWarper(min_p) if min_p else None,
    ]
    for processor in filter(None, processors):
        scores = processor(ids, scores)
    return scores.softmax(-1)[0].numpy()


def ours(logits, history, *options):
    """The distribution that is drawn from: [vocab]."""
    places, weights = Draws(lambda: 0.5, *options).distribution(logits, history)
    found = np.zeros(len(logits), np.float64)
    found[slice(None) if places is None else places] = weights
    return found / found.sum()


@pytest.mark.parametrize(
    "options", list(itertools.product([0.7, 1.0, 2.5], [0, 1, 40, 5000], [0.05, 0.9, 1.0], [0.0, 0.1], [1.0, 1.3, 0.8]))
)
def test_distribution_matches_transformers(options):
    logits = logits_of(hash(options) % 1000)
    expected = reference(logits, HISTORY, *options)
    found = ours(logits, HISTORY, *options)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)


def test_temperature_zero_is_greedy_with_repetition_penalty():
    logits = logits_of(4)
    best = int(logits.argmax())
    assert make_sampler(Sampling(temperature=0.0))(logits, HISTORY) == greedy(logits, HISTORY) == best
    seen = np.array([best], np.int64)
    assert make_sampler(Sampling(temperature=0.0, repetition_penalty=100.0))(logits, seen) != best


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", float("inf")), ("temperature", 1e-320), ("temperature", 100.1), ("top_k", -1), ("top_p", 1.5)]
    + [("min_p", 2), ("repetition_penalty", 0.0099), ("repetition_penalty", 100.1), ("seed", -1)],
)
def test_out_of_range_option_raises_usage_error_with_range(option, value):
    with pytest.raises(UsageError, match=f"`{option}` is {value}; it must be"):
        make_sampler(Sampling(**{"temperature": 1.0, option: value}))


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 100.0])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
def test_distribution_is_exact_for_values_of_every_size(temperature, penalty):
    draw = np.random.default_rng(7)
    logits = (draw.standard_normal(24) * 10.0 ** draw.integers(-44, 35, 24)).astype(np.float32)
    history = np.array([1, 3, 3], np.int64)
    scores, factor = logits.astype(np.float64), float(np.float32(penalty))
    scores[[1, 3]] *= np.where(scores[[1, 3]] < 0, factor, 1 / factor)
    with np.errstate(under="ignore"):
        weights = np.exp((scores - scores.max()) / temperature)
    expected = weights / weights.sum()
    np.testing.assert_allclose(ours(logits, history, temperature, 0, 1.0, 0.0, penalty), expected, rtol=2e-5, atol=1e-9)
    sampler = make_sampler(Sampling(temperature=temperature, repetition_penalty=penalty, seed=1))
    assert expected[sampler(logits, history)] > 0


def test_tokens_are_drawn_as_often_as_their_weights_in_every_block():
    weights = np.zeros(5 * sampling.BLOCK + 7, np.float32)
    weights[[sampling.BLOCK - 1, 3 * sampling.BLOCK, len(weights) - 1]] = (0.5, 0.3, 0.2)
    drawn = [sampling.draw(weights, uniform) for uniform in np.linspace(0, 1 - 2**-53, 1000)]
    counts = np.bincount(drawn, minlength=len(weights))
    assert set(np.flatnonzero(counts)) == set(np.flatnonzero(weights))
    np.testing.assert_allclose(counts[weights > 0] / 1000, (0.5, 0.3, 0.2), atol=0.002)


@pytest.mark.parametrize(
    "options", list(itertools.product([0.3, 1.5], [0, 40, 9000], [0.3, 0.95, 1.0], [0.0, 0.1], [1.0, 1.3]))
)
def test_distribution_of_large_vocabulary_matches_transformers(options):
    """A large vocabulary is sampled without sorting all logits."""
    logits = logits_of(zlib.crc32(str(options).encode()), 30_000)
    expected, found = (of(logits, HISTORY, *options) for of in (reference, ours))
    assert abs(np.count_nonzero(found) - np.count_nonzero(expected)) <= 2  # rounding of a long float32 sum
    assert np.abs(found - expected).max() < 1e-6


@pytest.mark.parametrize("size", [100, 20_000])
@pytest.mark.parametrize("shape", ["steps", "equal", "one and dust"])
def test_nucleus_is_the_smallest_set_of_largest_weights(shape, size):
    """Of equal weights at its edge, the first are included."""
    weights = {
        "steps": np.exp2(np.random.default_rng(5).integers(-6, 0, size)),
        "equal": np.full(size, 0.25),
        "one and dust": np.where(np.arange(size) == size // 2, 1, 1e-7),
    }[shape].astype(np.float32)
    ordered = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[ordered], dtype=np.float64)
    for share in (0.001, 0.3, 0.95, 0.999):
        places, kept = sampling.nucleus(weights.copy(), share, 0.0)
        found = np.flatnonzero(kept) if places is None else places[kept > 0]
        target = share * sums[-1]
        slack = 1 + np.count_nonzero(abs(sums - target) < 1e-6 * sums[-1])  # rounding of a long float32 sum
        assert abs(len(found) - (int(np.searchsorted(sums, target)) + 1)) <= slack
        assert set(found) == set(ordered[: len(found)])


@pytest.mark.parametrize("shape", ["ordinary", "huge", "masked", "flat"])
def test_extreme_settings_sample_valid_tokens_without_overflow(shape):
    size = 10_000
    logits = {
        "ordinary": logits_of(7, size),
        "huge": (logits_of(7, size) * 1e37).astype(np.float32),
        "masked": np.where(np.arange(size) == 777, 1, -np.inf).astype(np.float32),
        "flat": np.zeros(size, np.float32),
    }[shape]
    edges: tuple[dict[str, Any], ...] = (
        {"top_k": size},
        {"top_k": size - 1},
        {"top_k": 10**9},
        {"top_p": 1e-9},
        {"top_p": 0.999999},
        {"min_p": 1.0},
        {"repetition_penalty": 100.0},
        {"repetition_penalty": 0.01, "top_p": 0.9},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.2},
    )
    with np.errstate(all="raise", under="ignore"):
        for edge, temperature in itertools.product(edges, (0.0, 1e-3, 0.7, 100.0)):
            token = make_sampler(Sampling(temperature=temperature, seed=3, **edge))(logits, np.array([1, 2, 2]))
            assert np.isfinite(logits[token]) and (shape != "masked" or token == 777), (edge, temperature)


def drawing(**options: Any) -> Draws:
    sampler = make_sampler(Sampling(**options))
    assert isinstance(sampler, Draws)
    return sampler


@pytest.mark.parametrize("vocab", [100, 20_000])
@pytest.mark.parametrize(
    "options", [{"top_k": 20}, {"top_k": 50, "top_p": 0.9}, {"top_k": 5, "min_p": 0.2, "temperature": 1e-3}]
)
def test_sampling_from_largest_logits_matches_all_logits(vocab, options):
    """float16 logits produce ties at the cut-off."""
    samplers = [drawing(**{"temperature": 0.8, "seed": 7, **options}) for _ in range(2)]
    random = np.random.default_rng(3)
    for _ in range(50):
        logits = random.normal(size=vocab).astype(np.float16).astype(np.float32)
        places = sampling.largest(logits, samplers[0].candidate_count)
        assert samplers[0].choose_from(places, logits[places]) == samplers[1](logits, HISTORY[:0])


# Suggested settings: generation_config.json, else genai_config.json of onnxruntime-genai


DRAWS = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
DRAWN = Suggestion(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)


def written(folder: Path, search: Any, file: str = "genai_config.json") -> Path:
    content = {"model": {}, "search": search} if file == "genai_config.json" else search
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (DRAWS, DRAWN),
        ({"do_sample": True}, Suggestion(temperature=1.0, top_k=50)),
        ({**DRAWS, "do_sample": False}, Suggestion(repetition_penalty=1.1)),
        ({**DRAWS, "temperature": 0.0}, Suggestion(repetition_penalty=1.1)),
        ({**DRAWS, "top_k": 1}, Suggestion(repetition_penalty=1.1)),
        ({**DRAWS, "top_k": 0, "top_p": 0.0}, Suggestion(temperature=0.6, repetition_penalty=1.1)),
        ({"num_beams": 4, "min_length": 0, "max_length": 64}, Suggestion(unknown=("num_beams 4",))),
        ({}, Suggestion()),
    ],
    ids=str,
)
def test_genai_search_section_gives_suggested_sampling(
    search: dict[str, Any], expected: Suggestion, tmp_path: Path
) -> None:
    assert suggestion(written(tmp_path, search)) == expected


def test_generation_config_takes_precedence_over_genai_config(tmp_path: Path) -> None:
    written(tmp_path, DRAWS)
    written(tmp_path, {"do_sample": True, "temperature": 0.3}, "generation_config.json")
    assert suggestion(tmp_path) == Suggestion(temperature=0.3, top_k=50)


def test_empty_folder_gives_default_suggestion(tmp_path: Path) -> None:
    assert suggestion(tmp_path) == Suggestion()


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({**DRAWS, "top_p": 3}, r"genai_config\.json: top_p is 3; it must be above 0"),
        ([1], r"genai_config\.json: damaged \(its section 'search' is not an object\); download the folder again"),
    ],
    ids=str,
)
def test_invalid_genai_search_section_raises_package_error(search: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=said):
        suggestion(written(tmp_path, search))
