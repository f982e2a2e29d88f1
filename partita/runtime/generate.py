"""Generation with a loaded package: prompts in, steps out, kept in the runner's record."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

from partita.runtime.engine import checks, running
from partita.runtime.engine.loop import PREFILL_CHUNK_TOKENS
from partita.runtime.engine.recorder import Step
from partita.runtime.runner import Runner
from partita.runtime.sampling import Sampler

__all__ = ["PREFILL_CHUNK_TOKENS", "Step", "check_prompts", "generate"]


def check_prompts(runner: Runner, prompts: Sequence[Sequence[int]]) -> None:
    """Raise GenerationError for prompts that this package cannot take."""
    checks.check_prompts(runner.executor, prompts)


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | Sequence[Sampler],
    stop_ids: Collection[int] = frozenset(),
    prefill_chunk: int = PREFILL_CHUNK_TOKENS,
) -> Generator[Step, None, None]:
    """Generate up to `max_new_tokens` tokens after each prompt, one prompt of token ids per row of the batch.

    `sampler`: one for all rows, or one per row. Raises as `engine.running.generate` does.
    """
    samplers = sampler if isinstance(sampler, Sequence) else [sampler] * len(prompts)
    return running.generate(
        runner.executor,
        prompts,
        max_new_tokens=max_new_tokens,
        samplers=samplers,
        stop_ids=stop_ids,
        prefill_chunk=prefill_chunk,
        observers=(runner,),
    )
