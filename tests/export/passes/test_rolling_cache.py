"""`--cache window`: sliding window layers cache only their window; tokens equal those of a full cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import partita
from partita.errors import PartitaError, ProviderError, UsageError
from partita.export.options import ExportOptions, check_options
from partita.export.passes.cache_rounding import ask, question
from partita.export.target import Target
from partita.library.exporting import export
from partita.library.place.target import supported_by_cpu
from partita.package.folder import read_manifest
from partita.providers.resolve import parse_chain
from partita.runtime.generate.choice.drafting import no_speculation_reason
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import load_runner
from partita.runtime.verify.quality import Scorer
from tests.conftest import TinyCheckpoint

WINDOW, LENGTH = 8, 64
TEXT = [3 + (7 * place) % 90 for place in range(40)]
"""Five windows long."""


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of layers with a window and one without, with a cache that rolls, and with a whole one."""
    checkpoint, folder = tiny_checkpoint("gemma3_text"), tmp_path_factory.mktemp("window")
    made = folder / "window", folder / "fixed"
    for out in made:
        export(checkpoint, out, max_length=LENGTH, cache=out.name)  # type: ignore[arg-type]
    return made


def logits_of(folder: Path, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """Those after every token, read in chunks."""
    heard: dict[int, npt.NDArray[np.float32]] = {}
    with load_runner(folder, parse_chain("cpu"), threads=1) as runner:
        Scorer(runner).score([list(text)], lambda row, position, logits: heard.update({position: np.array(logits)}))
    return np.stack([heard[place] for place in sorted(heard)])


def test_window_cache_is_verified_and_sized_to_the_window(pair: tuple[Path, Path]) -> None:
    manifest, whole = (read_manifest(folder) for folder in pair)
    assert manifest.verification.status == "verified"
    assert max(step.max_rel_error for step in manifest.verification.steps) < 1e-5
    rows = {state.layer: (state.rolling, state.shape[2]) for state in manifest.graph.states}
    assert rows == {0: (True, WINDOW), 1: (False, LENGTH)}
    assert not any(state.rolling for state in whole.graph.states)
    per_row = whole.graph.cache_bytes // (2 * LENGTH)
    assert manifest.graph.cache_bytes == per_row * (WINDOW + LENGTH)


@pytest.mark.parametrize("chunk", [1, 3, 16, 40])
def test_tokens_match_full_cache_beyond_the_window(pair: tuple[Path, Path], chunk: int) -> None:
    answers = []
    for folder in pair:
        with partita.load(folder, providers="cpu", threads=1) as model:
            run = model.generate([TEXT], max_new_tokens=20, prefill_chunk=chunk, stop_token_ids=()).run()
            answers.append(list(run.results[0].tokens))
    assert answers[0] == answers[1] and len(answers[0]) == 20


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mistral", {"precision": "int4"}),
        ("mistral", {"precision": "fp16"}),
        ("mistral", {"precision": "int4", "prefill_precision": "int8"}),
        ("gemma2", {}),
        ("gpt_oss", {}),
    ],
    ids=str,
)
def test_window_cache_logits_match_full_cache_for_other_models(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    """Softcaps, attention sinks, quantised weights, and separate prefill and decode graphs."""
    found = []
    for cache in ("window", "fixed"):
        out = tmp_path / cache
        checkpoint = tiny_checkpoint(kind, sliding_window=WINDOW)
        export(checkpoint, out, max_length=LENGTH, cache=cache, **options)  # type: ignore[arg-type]
        assert any(state.rolling for state in read_manifest(out).graph.states) == (cache == "window")
        found.append(logits_of(out, TEXT))
    rolled, whole = found
    np.testing.assert_allclose(rolled, whole, rtol=2e-2 if options else 1e-4, atol=2e-2 if options else 1e-5)


def _run(engine: GenerationLoop, found: dict[int, list[int]] | None = None, steps: int = 1000) -> dict[int, list[int]]:
    """Tokens per row of some steps, or all that are left, added to `found`."""
    found = {} if found is None else found
    for step in itertools.islice(iter(engine.step, None), steps):
        for row, tokens in enumerate(step.tokens):
            found.setdefault(row, []).extend(tokens)
    return found


def test_rewind_succeeds_until_the_window_drops_tokens(pair: tuple[Path, Path]) -> None:
    with load_runner(pair[0], parse_chain("cpu"), threads=1) as runner:
        engine, cache = GenerationLoop(runner), runner.cache
        engine.add_request(Request(TEXT[:4], greedy, 4))
        _run(engine)
        assert cache.can_rewind(3, cache.lengths[0]), "seven tokens are in the cache"
        engine.release_row(0)
        engine.add_request(Request(TEXT[:12], greedy, 2))
        _run(engine)
        assert not cache.can_rewind(2, cache.lengths[0])
        assert not cache.saves(5, 12) and cache.saves(12, 12) and not cache.saves(1, 1 << 40)
        assert "its states cannot be rewound" in (no_speculation_reason(runner) or "")


@pytest.mark.parametrize("length", [6, 30])
def test_next_turn_reuses_the_window(pair: tuple[Path, Path], length: int) -> None:
    """Also beyond the window, because the turn continues the whole text."""
    answers = []
    for folder in pair:
        with load_runner(folder, parse_chain("cpu"), threads=1) as runner:
            engine, text = GenerationLoop(runner, shares=True), [*TEXT[:length]]
            for _ in range(2):
                engine.add_request(Request(text, greedy, 6))
                found = _run(engine)
                engine.release_row(0)
                text += [*found[0], 5]
            assert engine.prefixes is not None and engine.prefixes.reused_tokens == length + 5
            answers.append(text)
    assert answers[0] == answers[1]


def test_saved_prefix_longer_than_the_window_continues_correctly(pair: tuple[Path, Path], tmp_path: Path) -> None:
    told = []
    for folder in pair:
        kept = tmp_path / folder.name
        with partita.load(folder, providers="cpu", threads=1) as model:
            model.save_prefix(kept, TEXT[:20])
            after = model.generate([TEXT[20:23]], prefix=kept, max_new_tokens=9, stop_token_ids=()).run()
            whole = model.generate([TEXT[:23]], max_new_tokens=9, stop_token_ids=()).run()
            told += [list(after.results[0].tokens), list(whole.results[0].tokens)]
    assert told[0] == told[1] == told[2] == told[3] and len(told[0]) == 9


def test_inspect_reports_window_cache_layout_and_size(pair: tuple[Path, Path]) -> None:
    found, whole = (partita.inspect(folder).cache for folder in pair)
    assert found is not None and whole is not None and found.layout == "window"
    assert found.bytes_per_token == whole.bytes_per_token // 2
    assert found.fixed_bytes == WINDOW * found.bytes_per_token


def test_model_without_sliding_window_layers_is_a_usage_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layer with a window of less than `max_length=64`; omit it$"):
        export(tiny_checkpoint("llama"), tmp_path / "out", max_length=LENGTH, cache="window")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "others", [{"attention": "onnx24"}, {"static_shapes": True}, {"cache_precision": "int8"}], ids=str
)
def test_conflicting_window_cache_options_are_usage_errors(others: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="`cache=window`"):
        check_options(ExportOptions("there", Path("out"), cache="window", **others))  # type: ignore[arg-type]


def test_target_without_known_window_cache_support_is_rejected() -> None:
    options = ExportOptions("there", Path("out"), cache="window")
    target = Target("there", "--target", "gqa", "directly", supports=supported_by_cpu)
    ask(options, replace(target, rolls=True))
    with pytest.raises(ProviderError, match="not known to support a window cache"):
        ask(options, target)
    with pytest.raises(ProviderError, match="has no kernel for GroupQueryAttention with sliding_window_cache"):
        ask(options, replace(target, rolls=True, supports=lambda questions: [False] * len(questions)))
    assert supported_by_cpu([question("float32", window=True)]) == [True]


def test_provider_without_known_window_cache_support_fails_to_load(pair: tuple[Path, Path]) -> None:
    with pytest.raises(PartitaError, match="which webgpu is not known to support"):
        load_runner(pair[0], parse_chain("webgpu,cpu"))


@pytest.mark.heavy
def test_rows_sharing_a_prefix_match_full_cache(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """The shared prefix is longer than the window; rows copy each other's cached states."""

    def answers(folder: Path) -> tuple[list[list[int]], int]:
        prompts = [[*TEXT[:24], *rest] for rest in ([5, 9], [7], [4, 4, 11])]
        with load_runner(folder, parse_chain("cpu"), threads=1) as runner:
            engine = GenerationLoop(runner, prefill_chunk=5, shares=True)
            found: dict[int, list[int]] = {}
            for prompt in prompts:
                engine.add_request(Request(prompt, greedy, 16))
                _run(engine, found, steps=9)
            _run(engine, found)
            assert engine.prefixes is not None
            return [found[row] for row in range(3)], engine.prefixes.reused_tokens

    made = tmp_path / "window", tmp_path / "fixed"
    for out in made:
        export(tiny_checkpoint("gemma3_text"), out, max_length=LENGTH, batch_size=3, cache=out.name)  # type: ignore[arg-type]
    (rolled, copied), (whole, _) = map(answers, made)
    assert rolled == whole and [len(tokens) for tokens in rolled] == [16] * 3
    assert copied == 48
