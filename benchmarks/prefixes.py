"""`python -m benchmarks.prefixes PACKAGE`: what a shared beginning spares, in time to the first token and over a batch.

Prompts are token ids, the same in both ways, and taken in turns; the engine is that of `partita generate`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from partita.providers.resolve import parse_chain
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Prefix, Request
from partita.runtime.generate.runner import Runner, load_runner

QUESTION_TOKENS = 16
ANSWER_TOKENS = 16


def main() -> None:
    """A table of times to the first token, and one of a batch of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[32, 128, 384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=16)
    given = parser.parse_args()
    with load_runner(given.package, parse_chain(given.provider), threads=given.threads) as runner:
        longest = runner.contract.max_length - QUESTION_TOKENS - ANSWER_TOKENS
        lengths = [length for length in given.prefixes if length <= longest]
        print(f"{'prefix':>8} {'read ms':>9} {'copied ms':>10} {'gain':>6} {'state KiB':>10}")
        for length in lengths:
            _first_tokens(runner, length, given.rounds)
        print(f"\n{'prefix':>8} {'requests':>9} {'apart s':>9} {'shared s':>10} {'gain':>6} {'tokens copied':>14}")
        for length in lengths:
            _batch(runner, length, given.requests, max(1, given.rounds // 2))


def _first_tokens(runner: Runner, length: int, rounds: int) -> None:
    """The time from a request to its first token, with the prefix read and with it copied."""
    engine = GenerationLoop(runner)
    begin = _tokens(runner, length, 0)
    row = engine.add_request(Request(begin))
    while engine.step() is not None:
        pass
    prefix = engine.save_prefix(row)
    engine.release_row(row)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds + 1):
        for copied in times:
            prompt = [*begin, *_tokens(runner, QUESTION_TOKENS, turn + 1)]
            seconds = _first_token(runner, prompt, prefix if copied else None)
            if turn:  # the first of each has buffers to make
                times[copied].append(seconds)
    kib = sum(values.nbytes for values in prefix.states.values()) / 1024
    read, copied_ms = (1e3 * statistics.median(times[way]) for way in (False, True))
    print(f"{length:8} {read:9.2f} {copied_ms:10.2f} {read / copied_ms:6.2f} {kib:10.0f}")


def _first_token(runner: Runner, prompt: Sequence[int], prefix: Prefix | None) -> float:
    engine = GenerationLoop(runner, shares=prefix is not None)
    if prefix is not None:
        engine.prefixes.add(prefix)
    began = time.perf_counter()
    row = engine.add_request(Request(prompt, greedy, 1))
    while (step := engine.step()) is not None:
        if step.tokens[row]:
            break
    seconds = time.perf_counter() - began
    engine.release_row(row)
    return seconds


def _batch(runner: Runner, length: int, requests: int, rounds: int) -> None:
    """Requests with one beginning through the rows of a batch, each reading it and sharing it."""
    begin = _tokens(runner, length, 0)
    prompts = [[*begin, *_tokens(runner, QUESTION_TOKENS, number)] for number in range(1, requests + 1)]
    times: dict[bool, list[float]] = {False: [], True: []}
    answers: dict[bool, list[list[int]]] = {}
    copied = 0
    for _ in range(rounds):
        for shares in times:
            began = time.perf_counter()
            engine = GenerationLoop(runner, shares=shares)
            answers[shares] = _all(engine, prompts)
            times[shares].append(time.perf_counter() - began)
            copied = engine.prefixes.reused_tokens if engine.prefixes is not None else copied
    same = "" if answers[True] == answers[False] else "  tokens differ"
    apart, shared = (statistics.median(times[way]) for way in (False, True))
    print(f"{length:8} {requests:9} {apart:9.3f} {shared:10.3f} {apart / shared:6.2f} {copied:14}{same}")


def _all(engine: GenerationLoop, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answers, finished rows replaced at once."""
    waiting, of_row = list(enumerate(prompts)), dict[int, int]()
    found: list[list[int]] = [[] for _ in prompts]
    while waiting or of_row:
        while waiting and None in engine.rows:
            number, prompt = waiting.pop(0)
            of_row[engine.add_request(Request(prompt, greedy, ANSWER_TOKENS))] = number
        step = engine.step()
        assert step is not None
        for row, number in list(of_row.items()):
            found[number] += step.tokens[row]
            if step.finish[row] is not None:
                engine.release_row(row)
                del of_row[row]
    return found


def _tokens(runner: Runner, count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, runner.contract.vocab_size, count)]


if __name__ == "__main__":
    main()
