"""Steps of prompts that begin together, without the scheduler: for benchmarks and tests of the loop."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from partita.runtime.generate.checks import check_budget, check_prompt
from partita.runtime.generate.choice.sampling import Sampler
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.loop import PREFILL_CHUNK_TOKENS, serve
from partita.runtime.generate.record import Step
from partita.runtime.generate.request import Request


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | Sequence[Sampler],
    stop_ids: Collection[int] = frozenset(),
    prefill_chunk: int = PREFILL_CHUNK_TOKENS,
) -> Iterator[Step]:
    """Generate up to `max_new_tokens` tokens after each prompt, at most one prompt of token ids per row of the cache.

    `sampler`: one for all rows, or one per row. A row ends with `stop` (its last token is in `stop_ids`), `length`, or
    `cache_full` (prompt and new tokens fill the cache). Invalid arguments raise at once: UsageError for an option,
    GenerationError for a prompt. The iterator raises GenerationError when logits are not finite, ProviderError or
    ResourceError when a run fails. It can be closed at any time.
    """
    check_budget(max_new_tokens)
    for row, prompt in enumerate(prompts):
        check_prompt(prompt, runner.contract, f"prompt {row + 1}" if len(prompts) > 1 else "the prompt")
    samplers = sampler if isinstance(sampler, Sequence) else [sampler] * len(prompts)
    stops = frozenset(stop_ids)
    requests = [Request(prompt, each, max_new_tokens, stops) for prompt, each in zip(prompts, samplers, strict=True)]
    return serve(runner, requests, prefill_chunk=prefill_chunk, records=True)
