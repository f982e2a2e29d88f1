"""Scheduler: requests that share the rows of a batch produce the tokens of individual runs."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import tests.runtime.handmade_packages as hand
from partita.errors import GenerationError, PackageError, ProviderError, ReportError
from partita.library.engine.base import Engine, ReportRequest
from partita.library.engine.local import LocalEngine
from partita.library.engine.requests import RequestOutput, Ticket, Work
from partita.library.sampling import Sampling
from partita.options.generation import BatchOptions
from partita.runtime.generate.choice.sampling import IMPOSSIBLE, token_logprobs
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.ort.binding import Binding
from tests.library.engine.test_speculation import always_draft, knowing
from tests.runtime.handmade_packages import ALL, VOCAB, handmade, known_logits, known_tokens

KEYS = ("key",)
PROMPTS = [tuple((5 * i + n) % VOCAB for i in range(1 + (7 * n) % 19)) for n in range(1, 8)]


class Words:
    """A tokenizer whose tokens are numbers, each with a space behind it. The text of `odd` fails at its third token."""

    def __init__(
        self, stops: tuple[str, ...] = (), odd: tuple[int, ...] = (), error: Exception | None = None, left: int = 10**6
    ) -> None:
        self.stops, self.odd, self.error, self.left = stops, odd, error, left
        self.message, self.stopped = "", False

    def stream(self, prompt: Any = (), stops: Any = (), stop_ids: Any = ()) -> Words:
        return Words(tuple(stops), self.odd, self.error, 2 if prompt == self.odd else 10**6)

    def push(self, token: int) -> str:
        self.left -= 1
        if self.left < 0 and self.error is not None:
            raise self.error
        self.message += f"{token} "
        self.stopped = any(f" {self.message}".endswith(f" {stop}") for stop in self.stops)
        return "" if self.stopped else f"{token} "

    def finish(self) -> str:
        return ""


def work(prompt: tuple[int, ...], count: int = 6, **options: Any) -> Work:
    return Work(prompt, Sampling(temperature=0.0, max_new_tokens=count), **options)


def run(scheduler: Engine) -> int:
    """Step until there is nothing to do; how many steps that took."""
    steps = 0
    while scheduler.step():
        steps += 1
    return steps


@pytest.mark.parametrize("states", [KEYS, ALL], ids=["keys", "states"])
@pytest.mark.parametrize("shapes", ["any", "one", "pair"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("appends", [True, False], ids=["chunks", "chunks-at-the-beginning"])
def test_batched_requests_match_individual_runs(tmp_path, opened, states, shapes, batch, appends):
    scheduler = opened(handmade(tmp_path / "p", batch=batch, states=states, shapes=shapes, appends=appends))
    first = [scheduler.submit(work(prompt, 3 + n)) for n, prompt in enumerate(PROMPTS[:4])]
    assert (scheduler.slots, scheduler.running, scheduler.waiting) == (batch, 0, 4)
    for _ in range(4):
        assert scheduler.step()
    late = [scheduler.submit(work(prompt, 3 + n)) for n, prompt in enumerate(PROMPTS[4:])]
    run(scheduler)
    for n, ticket in enumerate([*first, *late]):
        wanted = known_tokens(ticket.work.prompt, 3 + n % 4, states)
        assert list(ticket.result.tokens) == wanted and ticket.result.finish_reason == "length"
    assert (scheduler.running, scheduler.waiting) == (0, 0) and not scheduler.step()


@pytest.mark.parametrize("states", [KEYS, ALL], ids=["keys", "states"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("child", [False, True], ids=["here", "in-a-child"])
def test_shared_prefix_is_prefilled_once(tmp_path, opened, states, batch, child):
    """The first request prefills the system prompt; waiting requests copy it. A recurrent state is not shared."""
    steps: list[Any] = []
    folder = handmade(tmp_path / "p", batch=batch, states=states)
    scheduler = opened(folder, child=child)
    system = tuple((7 * i + 3) % VOCAB for i in range(20))
    prompts = [(*system, 9, 4, 33), (*system, 2), (*system, 7, 7, 1, 50), (*system, 60, 1), (*system, 9, 5)]
    tickets = [scheduler.submit(work(prompt, 4), None, steps.append) for prompt in prompts]
    run(scheduler)
    assert [list(ticket.result.tokens) for ticket in tickets] == [known_tokens(p, 4, states) for p in prompts]
    copied = sum(sum(step.prefix_tokens) for step in steps)
    read = sum(step.row_tokens for step in steps if step.phase == "prefill")
    assert states == ALL or copied + read == sum(map(len, prompts))
    assert copied == sum(ticket.copied_tokens for ticket in tickets)
    # In a worker, the first request may be read before the second one arrives.
    assert copied >= (0 if states == ALL else 3 if child else 4) * len(system) and (states == KEYS or not copied)


def test_free_row_is_assigned_to_next_request_immediately(tmp_path, opened):
    """Twelve short requests finish while one long request runs."""
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=KEYS))
    long = scheduler.submit(work((5,), 36))
    short = [scheduler.submit(work((n,), 2)) for n in range(12)]
    while long.state != "finished":
        scheduler.step()
    assert all(ticket.state == "finished" for ticket in short)
    assert [ticket.ended for ticket in short] == sorted(ticket.ended or 0 for ticket in short), (
        "first come, first served"
    )


@pytest.mark.parametrize("child", [False, True], ids=["here", "child"])
def test_listener_receives_every_token_with_logprobs(tmp_path, opened, child):
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=KEYS), child=child)
    heard: list[RequestOutput] = []
    asking = scheduler.submit(work(PROMPTS[0], 4, logprobs=3), lambda ticket, piece: heard.append(piece))
    other = scheduler.submit(work(PROMPTS[1], 5))
    run(scheduler)
    wanted = known_tokens(PROMPTS[0], 4, KEYS)
    assert [token for piece in heard for token in piece.tokens] == wanted == list(asking.result.tokens)
    assert [piece.finish_reason for piece in heard] == [None, None, None, "length"]
    logits = known_logits([*PROMPTS[0], *wanted], KEYS).astype(np.float64)[len(PROMPTS[0]) - 1 : -1]
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= logits.max(1, keepdims=True)
    told = [entry for piece in heard for entry in piece.logprobs]
    assert [entry.token for entry in told] == wanted
    for entry, row in zip(told, expected, strict=True):
        assert entry.logprob == pytest.approx(row.max(), abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)
    assert list(other.result.tokens) == known_tokens(PROMPTS[1], 5, KEYS)


def test_cancelled_request_ends_without_affecting_others(tmp_path, opened):
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=ALL))
    heard: list[RequestOutput] = []
    gone = scheduler.submit(work(PROMPTS[0], 20), lambda ticket, piece: heard.append(piece))
    other = scheduler.submit(work(PROMPTS[1], 9))
    waiting = scheduler.submit(work(PROMPTS[2], 3))
    never = scheduler.submit(work(PROMPTS[3], 3))
    while not gone.result.tokens:
        scheduler.step()
    threading.Thread(target=gone.cancel).start()
    never.cancel()
    run(scheduler)
    assert gone.result.finish_reason == "interrupted" and heard[-1].finish_reason == "interrupted"
    assert never.result.finish_reason == "interrupted" and never.began is None
    assert list(other.result.tokens) == known_tokens(PROMPTS[1], 9, ALL)
    assert list(waiting.result.tokens) == known_tokens(PROMPTS[2], 3, ALL)


@pytest.mark.parametrize("child", [False, True], ids=["here", "child"])
def test_non_finite_logits_end_only_their_row(tmp_path, opened, monkeypatch, child):
    texts = [[*prompt, *known_tokens(prompt, count, ALL)] for prompt, count in zip(PROMPTS, (8, 4, 4, 4), strict=False)]
    poison = next(token for token in range(1, VOCAB) if not any(token in text for text in texts))
    poisoned = hand.EMBEDDING.copy()
    poisoned[poison] = np.nan
    monkeypatch.setattr(hand, "EMBEDDING", poisoned)
    engine = scheduler = opened(handmade(tmp_path / "p", batch=2, states=ALL), child=child)
    good = scheduler.submit(work(PROMPTS[0], 8))
    bad = scheduler.submit(work((3, poison, 4), 8))
    after = [scheduler.submit(work(prompt, 4)) for prompt in PROMPTS[1:4]]
    run(scheduler)
    assert bad.result.finish_reason == "error" and "not finite" in str(bad.error)
    for ticket in (good, *after):
        assert list(ticket.result.tokens) == known_tokens(ticket.work.prompt, len(ticket.result.tokens), ALL)
        assert ticket.result.finish_reason == "length"
    if isinstance(engine, LocalEngine):
        assert all(np.isfinite(buffer.host).all() for buffer in engine.runner.cache.buffers)


@pytest.mark.parametrize("whole", [False, True], ids=["next request", "next generation"])
def test_cancelled_prefill_leaves_no_non_finite_cache_values(tmp_path, opened, monkeypatch, whole):
    """A chunk in the middle of the prompt produces non-finite states."""
    poison = next(token for token in range(1, VOCAB) if token not in [*PROMPTS[0], *known_tokens(PROMPTS[0], 4, ALL)])
    poisoned = hand.EMBEDDING.copy()
    poisoned[poison] = np.nan
    monkeypatch.setattr(hand, "EMBEDDING", poisoned)
    engine = scheduler = opened(handmade(tmp_path / "p", states=ALL), prefill_chunk=2)
    gone = scheduler.submit(work((3, poison, 4, 5, 6, 7), 4))
    scheduler.step()
    if whole:
        gone.cancel()
        engine.open(BatchOptions(prefill_chunk=2))
    else:
        gone.cancel()
        run(scheduler)
    after = scheduler.submit(work(PROMPTS[0], 4))
    run(scheduler)
    assert (after.error, list(after.result.tokens)) == (None, known_tokens(PROMPTS[0], 4, ALL))
    assert all(np.isfinite(buffer.host).all() for buffer in engine.runner.cache.buffers)


def test_provider_error_ends_running_requests_only(tmp_path, opened, monkeypatch):
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=KEYS))
    tickets = [scheduler.submit(work(prompt, 5)) for prompt in PROMPTS[:4]]
    for _ in range(3):
        scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(Binding, "run", lambda *_: (_ for _ in ()).throw(ProviderError("the device is gone")))
        scheduler.step()
    assert [str(ticket.error) for ticket in tickets[:2]] == ["the device is gone"] * 2
    run(scheduler)
    for ticket in tickets[2:]:
        assert list(ticket.result.tokens) == known_tokens(ticket.work.prompt, 5, KEYS)


def test_killed_worker_ends_every_request_with_provider_error(tmp_path, opened):
    engine = opened(handmade(tmp_path / "p", batch=2, states=KEYS), child=True)
    tickets = [engine.submit(work(prompt, 40 - len(prompt))) for prompt in PROMPTS[:4]]
    os.kill(engine._worker.process.pid, signal.SIGSTOP)
    engine._worker.process.kill()
    run(engine)
    for ticket in tickets:
        assert isinstance(ticket.error, ProviderError) and ticket.result.finish_reason == "error"
        assert "CPUExecutionProvider: the worker process ended during generation: it was killed by SIGKILL" in str(
            ticket.error
        )
    with pytest.raises(ProviderError, match="load the package again"):
        engine.submit(work(PROMPTS[0]))


def _keep(pieces: list[RequestOutput], ticket: Ticket, piece: RequestOutput) -> None:
    pieces.append(piece)


def told_to_requests(engine: Engine, batch: BatchOptions) -> tuple[list[Any], list[Any], list[Any]]:
    """What every request of PROMPTS is told in a batch that they join as others leave: text, tokens and why it ended,
    and the tokens with their log-probabilities; and the steps of it.
    """
    steps: list[Any] = []
    scheduler = engine
    scheduler.use_text(Words())  # type: ignore[arg-type]
    scheduler.open(batch)
    pieces: list[list[RequestOutput]] = [[] for _ in PROMPTS]
    tickets = []
    for number, prompt in enumerate(PROMPTS):
        stop = (f"{known_tokens(prompt, 30, KEYS)[10]} ",) if number % 2 else ()
        asked = work(prompt, 26 - 3 * number, logprobs=2, stop=stop)
        tickets.append(scheduler.submit(asked, partial(_keep, pieces[number]), steps.append))
        scheduler.step()
        if number == 3:
            run(scheduler)
    run(scheduler)
    said = [(ticket.result.text, ticket.result.tokens, ticket.result.finish_reason) for ticket in tickets]
    return said, [[entry for piece in own for entry in piece.logprobs] for own in pieces], steps


@pytest.mark.parametrize("fewer", [True, False], ids=["a row alone", "all rows"])
def test_speculative_decoding_does_not_change_request_output(tmp_path, opened, monkeypatch, fewer):
    """Covers stop strings inside accepted tokens, log-probabilities and requests that start and end in between."""
    always_draft(monkeypatch)
    knowing(monkeypatch, *((*prompt, *known_tokens(prompt, 30, KEYS)) for prompt in PROMPTS))
    engine = opened(handmade(tmp_path / "p", batch=3, states=KEYS, appends=not fewer, fewer=fewer))
    plain, likely, _ = told_to_requests(engine, BatchOptions())
    fast, still, steps = told_to_requests(engine, BatchOptions(speculate="ngram"))
    assert fast == plain and {finish for _, _, finish in plain} == {"stop", "length"}
    for one, other in zip(likely, still, strict=True):
        assert [entry.token for entry in one] == [entry.token for entry in other]
        np.testing.assert_allclose([e.logprob for e in one], [e.logprob for e in other], atol=1e-5)
    assert 0 < sum(step.accepted for step in steps) < sum(step.drafted for step in steps)
    beside = [step for step in steps if step.phase == "decode" and sum(map(bool, step.tokens)) > 1]
    assert beside and any(step.drafted for step in beside) != fewer


@pytest.mark.parametrize("child", [False, True], ids=["here", "child"])
def test_report_during_batch_does_not_interrupt_requests(tmp_path, opened, child, monkeypatch):
    """The recorder retains only the last steps, and a note in the report states this."""
    monkeypatch.setattr("partita.runtime.generate.record.KEPT_STEPS", 5)
    scheduler = engine = opened(handmade(tmp_path / "p", batch=2, states=KEYS), child=child)
    with pytest.raises(ReportError, match="no request has been answered"):
        engine.report(ReportRequest())
    tickets = [scheduler.submit(work(prompt, 9)) for prompt in PROMPTS[:3]]
    if child:  # it steps whether anybody waits or not
        run(scheduler)
    for _ in range(0 if child else 12):
        scheduler.step()
    report = engine.report(ReportRequest(finish_reason="stop", complete=False))
    assert report.totals is not None and report.totals.prompt_tokens == sum(map(len, PROMPTS[:3]))
    assert all(check.passed for check in report.checks)
    assert any("3 requests shared the rows" in note for note in report.notes)
    if not child:
        assert any("of 12 steps" in note for note in report.notes)
    run(scheduler)
    for ticket in tickets:
        assert list(ticket.result.tokens) == known_tokens(ticket.work.prompt, 9, KEYS), "it goes on after a report"


@pytest.mark.parametrize("recompute_above", [None, 20])
def test_length_dependent_rope_rows_do_not_affect_each_other(tmp_path, opened, recompute_above):
    """The graph outputs the length used for its rotary frequencies; up to `recompute_above` they are constant."""
    engine = opened(handmade(tmp_path / "p", graph="rope", batch=3, recompute_above=recompute_above))
    asked = [
        work(tuple(range(1, size + 1)), count) for size, count in ((4, 3), (18, 8), (5, 6), (25, 4), (3, 2), (9, 9))
    ]
    alone = []
    for one in asked:
        alone.append(engine.submit(one))
        run(engine)
    scheduler = engine
    together = [scheduler.submit(one) for one in asked]
    run(scheduler)
    least = 0 if recompute_above is None else recompute_above
    seen = [[[max(token, least) for token in one.result.tokens] for one in each] for each in (alone, together)]
    assert seen[0] == seen[1] and len({tuple(tokens) for tokens in seen[0]}) > 2, "it shows the length"


@pytest.mark.parametrize("error", [GenerationError("no such token"), ValueError("a bug")])
def test_decoding_error_ends_only_its_row(tmp_path, opened, error):
    """The other row receives its token of the same step."""
    other = known_tokens(PROMPTS[2], 6, KEYS)
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=KEYS))
    scheduler.use_text(Words(odd=PROMPTS[1], error=error))
    heard: dict[int, list[str]] = {}
    tickets = [
        scheduler.submit(work(prompt), lambda ticket, piece: heard.setdefault(ticket.number, []).append(piece.text))
        for prompt in PROMPTS[1:3]
    ]
    run(scheduler)
    assert "".join(heard[tickets[1].number]).split() == [str(token) for token in other]
    assert tickets[0].result.finish_reason == "error" and isinstance(tickets[0].error, GenerationError)
    again = scheduler.submit(work(PROMPTS[2]))
    run(scheduler)
    assert list(again.result.tokens) == other, "its row is free"


def test_failing_listener_does_not_affect_other_requests(tmp_path, opened):
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=KEYS))
    heard: list[int] = []

    def fails(ticket: Ticket, piece: RequestOutput) -> None:
        if piece.finish_reason is None:
            raise ValueError("no room")

    failing = scheduler.submit(work(PROMPTS[1], 30), fails)
    other = scheduler.submit(work(PROMPTS[2]), lambda ticket, piece: heard.extend(piece.tokens))
    with pytest.raises(ValueError, match="no room"):
        run(scheduler)
    run(scheduler)
    assert heard == list(other.result.tokens) == known_tokens(PROMPTS[2], 6, KEYS)
    assert failing.result.finish_reason == "interrupted" and scheduler.running == 0


def test_zero_probability_logprob_is_finite_in_json():
    logits = np.array([1.0, -np.inf, 0.5, -np.inf], np.float32)
    told = token_logprobs(logits, 1, 4)
    assert told.logprob == IMPOSSIBLE == min(value for _, value in told.top) and len(told.top) == 4
    assert json.loads(json.dumps([told.logprob, told.top], allow_nan=False))


def test_damaged_adapter_fails_only_its_request(tmp_path, opened, monkeypatch):
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=KEYS))
    beside = scheduler.submit(work(PROMPTS[1], 8))
    scheduler.step()
    monkeypatch.setattr(
        GenerationLoop, "add_request", lambda *_: (_ for _ in ()).throw(PackageError("its adapter is damaged"))
    )
    damaged = scheduler.submit(work(PROMPTS[0], 3))
    run(scheduler)
    assert damaged.result.finish_reason == "error" and "its adapter is damaged" in str(damaged.error)
    assert list(beside.result.tokens) == known_tokens(PROMPTS[1], 8, KEYS) and scheduler.lost_by is None


def test_unexpected_error_on_request_start_ends_its_ticket(tmp_path, opened, monkeypatch):
    scheduler = opened(handmade(tmp_path / "p", batch=2, states=KEYS))
    monkeypatch.setattr(GenerationLoop, "add_request", lambda *_: (_ for _ in ()).throw(ValueError("no room")))
    ticket = scheduler.submit(work(PROMPTS[0], 3))
    with pytest.raises(ValueError):
        scheduler.step()
    assert ticket.state == "finished" and "ValueError: no room" in str(ticket.error)
    assert scheduler.lost_by is ticket.error, "nobody takes it for the request's own"


def test_ctrl_c_during_request_start_does_not_lose_a_row(tmp_path, opened, monkeypatch):
    scheduler = opened(handmade(tmp_path / "p", states=KEYS))
    ticket = scheduler.submit(work(PROMPTS[0], 4))
    method = GenerationLoop.add_request

    def pressed(*given: Any) -> None:
        method(*given)
        monkeypatch.setattr(GenerationLoop, "add_request", method)
        raise KeyboardInterrupt

    monkeypatch.setattr(GenerationLoop, "add_request", pressed)
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    run(scheduler)
    assert list(ticket.result.tokens) == known_tokens(PROMPTS[0], 4, KEYS)
