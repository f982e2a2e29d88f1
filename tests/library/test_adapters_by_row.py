"""Per-row adapters in handmade packages whose states all depend on the row's adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.errors import GenerationError, UsageError
from partita.library.engine.requests import Work
from partita.library.sampling import Sampling
from partita.package.folder import read_manifest
from tests.runtime.handmade_packages import ALL, VOCAB, handmade, known_tokens

RANKS = {"loud": 3, "small": 1}
SYSTEM = tuple((7 * i + 3) % VOCAB for i in range(20))
ASKED: list[tuple[tuple[int, ...], str | None]] = [
    ((*SYSTEM, 9, 4), "loud"),
    ((*SYSTEM, 9, 4), None),
    ((*SYSTEM, 9, 4), "small"),
    ((*SYSTEM, 2), "loud"),
    ((*SYSTEM, 2), None),
    ((5,), "small"),
    ((*SYSTEM, 7, 7, 1), "small"),
    ((*SYSTEM, 9, 4), "loud"),
]
"""Most of them begin alike, so that states are copied from row to row."""
Opened = Callable[..., Any]


def known(prompt: tuple[int, ...], name: str | None, count: int = 5, states: Any = ALL) -> tuple[int, ...]:
    return tuple(known_tokens(prompt, count, states, None if name is None else (name, RANKS[name])))


TOGETHER: list[dict[str, Any]] = [{}, {"shapes": "pair"}]
APART: list[dict[str, Any]] = [{}, {"fewer": True}, {"shapes": "one"}, {"shapes": "pair"}]


@pytest.mark.parametrize("states", [("key",), ALL], ids=["keys", "states"])
@pytest.mark.parametrize(
    ("batch", "apart", "options"),
    [*((3, True, each) for each in APART), *((batch, False, each) for batch in (1, 3) for each in TOGETHER)],
    ids=str,
)
def test_requests_with_different_adapters_match_individual_runs(
    tmp_path: Path, opened: Opened, states: Any, batch: int, apart: bool, options: Any
) -> None:
    folder = handmade(tmp_path / "p", batch=batch, states=states, adapters=RANKS, apart=apart, **options)
    assert read_manifest(folder).graph.adapters_by_row == apart
    steps: list[Any] = []
    scheduler = opened(folder)
    asked = [Work(prompt, Sampling(temperature=0.0, max_new_tokens=5), adapter=name) for prompt, name in ASKED]
    tickets = [scheduler.submit(work, None, steps.append) for work in asked]
    beside = set[int]()
    while scheduler.step():
        beside.add(len({ticket.work.adapter for ticket in tickets if ticket.state == "running"}))
    assert [ticket.result.tokens for ticket in tickets] == [known(*each, states=states) for each in ASKED]
    assert max(beside) == (3 if apart else 1), "as many adapters beside each other as there are rows"
    if batch > 1 and states != ALL:
        assert any(step.prefix_tokens for step in steps), "what begins alike is read once, with the same adapter"
    assert len({known(ASKED[0][0], name) for name in (None, *RANKS)}) == 3, "the adapters make no difference"


@pytest.mark.parametrize("shapes", ["any", "pair"])
def test_generate_accepts_an_adapter_per_prompt(tmp_path: Path, shapes: str) -> None:
    folder = handmade(tmp_path / "p", batch=3, shapes=shapes, adapters=RANKS)
    names = ["loud", None, "small"]
    prompts = [(*SYSTEM, 9, 4), (*SYSTEM, 9, 4), (*SYSTEM, 9, 5)]
    with partita.load(folder, providers="cpu", threads=1) as model:
        for given in (names, tuple(names), names[::-1], "small", None):
            each = [given] * 3 if given is None or isinstance(given, str) else given
            found = model.generate(prompts, max_new_tokens=5, adapter=given).run().tokens
            assert found == tuple(known(prompt, name) for prompt, name in zip(prompts, each, strict=True)), given
        model.generate(prompts, max_new_tokens=2, adapter=names).run()
        assert model.report(probe_seconds=0).request.options["adapter"] == "loud / none / small"
        with pytest.raises(UsageError, match=r"`adapter=other`: .* choose one of loud, small"):
            model.generate(prompts, adapter=["loud", "other", None])
        with pytest.raises(UsageError, match="`adapter` has 2 entries for 3 prompts; pass a name or None for each"):
            model.generate(prompts, adapter=["loud", None])


def test_prefix_requires_the_adapter_it_was_saved_with(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "p", batch=2, states=("key",), adapters=RANKS)
    file, prompts = tmp_path / "prefix", [(9, 4), (2,)]
    with partita.load(folder, providers="cpu", threads=1) as model:
        model.save_prefix(file, list(SYSTEM), adapter="loud")
        found = model.generate(prompts, max_new_tokens=4, adapter=["loud", "loud"], prefix=file).run().tokens
        assert found == tuple(known((*SYSTEM, *prompt), "loud", 4, ("key",)) for prompt in prompts)
        with pytest.raises(GenerationError, match="saved with adapter loud, but this run uses adapter small"):
            model.generate(prompts, adapter="small", prefix=file)
        with pytest.raises(UsageError, match="was saved with one adapter or none, but the prompts use several"):
            model.generate(prompts, adapter=["loud", None], prefix=file)
