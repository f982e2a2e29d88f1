"""Subset of `make breadth`: many architectures, exported and compared with transformers in separate processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, require
from tests.export.breadth import recipes
from tests.export.breadth.__main__ import arguments
from tests.export.breadth.page import page
from tests.export.breadth.records import (
    LEAST,
    LOWERINGS,
    NAMED,
    Outcome,
    Results,
    all_types,
    causal_types,
    complaints,
    multimodal_types,
)
from tests.export.breadth.running import run, run_type

# What each brings that the others have not; test_parity.py and test_experts.py have windows, softcaps, two rotations,
# norms over all heads, layers without rotation, selective state spaces (jamba), plain experts and those of gpt_oss.
QUICK = {
    "bloom": "onnx24",  # position biases, queries, keys and values in one matrix, split by head
    "cohere2": "gqa",  # parallel layers, interleaved rotation, layers without positions
    "deepseek_v3": "primitives",  # keys and values out of a latent, keys wider than values, experts in groups
    "falcon": "onnx24",  # one head of keys and values
    "falcon_h1": "gqa",  # attention and a state space in the same layer
    "gpt_neo": "gqa",  # which key a query sees is a buffer, cut by the number of keys
    "idefics3": "primitives",  # an image's tokens are put into those of the text
    "lfm2": "onnx24",  # short convolutions
    "llama4_text": "gqa",  # attention in chunks, temperature by position
    "nemotron_h": "onnx24",  # a limit on the time step of a state space, layers that are only experts
    "qwen3_5": "onnx24",  # a class of the text part, built from the config of the whole model
    "qwen3_next": "primitives",  # the delta rule, gates
    "qwen2_5_vl": "onnx24",  # positions in three rows
}
SAMPLE = ("bloom", "qwen3_5")
"""Of which `make test` has the time; the others are heavy."""
STATUSES = ("verified", "refused", "not equal", "not tried")
REFUSED = "reformer"
"""It hashes its keys into buckets at random."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Outcome]]:
    """The outcomes of what runs of the subset, made two at a time."""
    require("torch")
    params = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    ]
    wanted = {entry["model_type"] for entry in params if "model_type" in entry}
    by_lowering = {
        name: [kind for kind, chosen in QUICK.items() if chosen == name and kind in wanted] for name in LOWERINGS
    }
    by_lowering["gqa"].append(REFUSED)
    yield {outcome.model_type: outcome for name, types in by_lowering.items() for outcome in run(types, [name], jobs=2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.heavy) for name in QUICK]
)
def test_architecture_matches_transformers(found: dict[str, Outcome], model_type: str) -> None:
    outcome = found[model_type]
    assert outcome.status == "verified", outcome.reason
    assert outcome.max_rel_error is not None and outcome.max_rel_error <= 1e-4


@pytest.mark.slow
def test_unsupported_architecture_is_refused_with_a_reason(found: dict[str, Outcome]) -> None:
    assert found[REFUSED].status == "refused"
    assert found[REFUSED].reason


def test_different_reference_logits_give_outcome_wrong(tmp_path: Path) -> None:
    """The last reference logits are scaled by 1.001; the package itself is verified."""
    require("torch")
    from tests.export.breadth.outcomes import PROMPT, SHORT_PROMPT, outcome
    from tests.export.breadth.reference import load, reference

    recipes.save(tmp_path, "llama")
    model = load(tmp_path)
    wanted = [reference(model, prompt) for prompt in (PROMPT, SHORT_PROMPT)]
    moved = wanted[0].logits.copy()
    moved[-1] *= 1.001
    result = outcome(tmp_path, "llama", "gqa", [replace(wanted[0], logits=moved), wanted[1]])
    assert result.status == "wrong"
    assert "new token 25" in result.reason


def test_timeouts_and_crashes_are_recorded_as_outcomes() -> None:
    require("torch")
    (hung,) = run_type("llama", ["gqa"], limit_seconds=0.001)
    assert hung.status == "hung"
    broken = run_type("no_such_type", ["gqa", "onnx24"], limit_seconds=300)
    assert [entry.status for entry in broken] == ["crashed", "crashed"]
    assert "no_such_type" in broken[0].reason


def test_tiny_models_contain_every_layer_type() -> None:
    require("torch")
    from transformers import CONFIG_MAPPING, AutoConfig

    assert set(recipes.SPECIAL) <= set(CONFIG_MAPPING), "a recipe for a type that transformers does not have"
    assert set(recipes.SEEDS) | set(recipes.STDS) | set(recipes.IMPOSSIBLE) <= set(all_types())
    for model_type in causal_types():
        if model_type in recipes.IMPOSSIBLE:
            continue
        default = AutoConfig.for_model(model_type).get_text_config()
        tiny = AutoConfig.for_model(model_type, **recipes.settings(model_type)).get_text_config()
        for name in ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers", "block_types"):
            kinds = set(getattr(default, name, None) or ())
            assert kinds <= set(getattr(tiny, name, None) or ()), f"{model_type}: {name}"
        for name in ("sliding_window", "attention_chunk_size", "window_size"):
            assert (getattr(tiny, name, None) or 0) <= 8, f"{model_type}: {name}"


def test_complaints_name_missed_goals() -> None:
    verified = [*NAMED, *(f"other_{index}" for index in range(LEAST["gqa"] - len(NAMED)))]
    good = [Outcome(name, lowering, "verified", 1e-6) for name in verified for lowering in LEAST]
    assert complaints(good) == []
    assert complaints([*good, Outcome("bad", "gqa", "wrong", reason="row 1")]) == ["bad with gqa: wrong: row 1"]
    assert complaints(good[:-3]) == ["84 types are verified with gqa, at least 85 have to be"]
    without = [replace(entry, status="refused") if entry.model_type == "mixtral" else entry for entry in good]
    assert complaints(without)[-1] == "not verified with gqa: mixtral"


def test_results_round_trip_and_render_as_a_page(tmp_path: Path) -> None:
    outcomes = (
        Outcome("a", "gqa", "verified", 2e-6, rows="states that padding would spoil"),
        Outcome("a", "onnx24", "refused", reason="a|b"),
        Outcome("b", "gqa", "parity", reason="first difference", original="generate fails"),
        Outcome("b", "onnx24", "parity", reason="first difference"),
        Outcome("c", "gqa", "verified", 2e-6, original="generate fails: KeyError"),
        Outcome("c", "onnx24", "verified", 3e-6, original="generate fails: KeyError"),
    )
    Results({"torch": "2"}, "2026-01-01", outcomes).write(tmp_path / "results.json")
    text = page(Results.read(tmp_path / "results.json"))
    assert "| a | gqa: verified 2e-06, onnx24: refused | 1, 2 |" in text
    assert "\n1. gqa: rows of unequal length: states that padding would spoil\n2. onnx24: a|b\n" in text
    assert "| b | not equal | 3 |" in text and "\n3. first difference\n4. transformers' `generate` fails." in text
    assert "| c | verified 3e-06 | 4 |" in text, "the largest error of all lowerings"
    assert "torch 2" in text and "onnxruntime unknown" in text


def test_missing_option_selects_types_without_results(tmp_path: Path) -> None:
    """A full run takes hours; partial results allow it to resume."""
    require("torch")
    done, *others = all_types()
    kept = tmp_path / "results.json"
    Results({}, "2026-01-01", (Outcome(done, "gqa", "verified", 2e-6),)).write(kept)
    assert arguments(["--read", str(kept), "--missing"]).types == others
    with pytest.raises(SystemExit):
        arguments(["--missing"])


def test_models_page_lists_the_installed_types() -> None:
    require("torch")
    text = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    listed = [re.findall(r"^\| ([\w.-]+) \|", table, re.MULTILINE) for table in text.split("| type |")[1:]]
    tables = [[name for name in table if name not in STATUSES] for table in listed]
    assert tables == [causal_types(), multimodal_types()], (
        "docs/models.md is of another transformers: run `make breadth`"
    )
