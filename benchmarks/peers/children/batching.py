"""Turns of many prompts at once: what a child answers when it is asked for a batch. Standard library and numpy only."""

from __future__ import annotations

import time
from typing import Any, Protocol

from benchmarks.peers.children.serving import peak_rss_bytes


class Batches(Protocol):
    """An open model that answers prompts, several at a time."""

    def answer(self, prompts: list[list[int]], new_tokens: list[int], rows: int) -> list[list[int]]:
        """So many greedy tokens after each prompt, with at most `rows` prompts at work at a time."""
        ...


def timed_batch(engine: Batches, prompts: list[list[int]], new_tokens: list[int], rows: int) -> dict[str, Any]:
    """One turn: seconds from the first prompt to the last token, and the tokens of each prompt."""
    began = time.perf_counter()
    answers = engine.answer(prompts, new_tokens, rows)
    return {
        "seconds": time.perf_counter() - began,
        "answers": answers,
        "peak_rss_bytes": peak_rss_bytes(),
        "cpu_seconds": time.process_time(),
    }
