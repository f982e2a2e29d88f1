"""Requests that all begin now, one for each row of the batch, and go to their end."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence

from partita.runtime.engine.drafting import DraftControl
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.loop import PREFILL_CHUNK_TOKENS, Engine, Observer
from partita.runtime.engine.recorder import Step
from partita.runtime.engine.request import Request
from partita.runtime.engine.scheduler import Policy, prompts_first


def serve(
    executor: Executor,
    requests: Iterable[Request],
    *,
    prefill_chunk: int = PREFILL_CHUNK_TOKENS,
    observers: Sequence[Observer] = (),
    policy: Policy = prompts_first,
    control: DraftControl | None = None,
) -> Generator[Step, None, None]:
    """The steps of requests that all begin now, one per row of the batch, until every one has finished.

    Observers hear of the prompts before the first step is asked for.
    """
    engine = Engine(executor, prefill_chunk, observers, policy, control=control)
    wanted = list(requests)
    for observer in observers:
        observer.on_prompts(tuple(len(request.prompt) for request in wanted))
    for request in wanted:
        engine.join(request)
    return _steps(engine)


def _steps(engine: Engine) -> Generator[Step, None, None]:
    """Steps until there is nothing to do."""
    engine.mark = time.perf_counter()  # what was done before the first one was asked for is none of its overhead
    while (step := engine.step()) is not None:
        yield step
