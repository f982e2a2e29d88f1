"""What `--report` costs once its observation window is over, and what the loop itself costs per step.

Two runners of one package stand side by side and take their steps in turn, so that a machine that slows down slows both
down. The one that was loaded first was seen to be up to 3 % slower, with or without a report, so every round has both
orders, and the square root of the ratio of their ratios is what the report costs.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_steps import generate
from partita.providers.resolve import parse_chain
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.record.recorder import Step
from partita.runtime.generate.runner import load_runner

PAUSE_SECONDS = 0.02
"""Between steps: the threads of the other session spin for a while before they sleep."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over the rounds."""

    slowdown: float
    """Median session run with a report over median session run without, minus 1."""
    slowdowns: tuple[float, ...]
    """The same of every round."""
    overhead_us: float
    """Time per decode step outside the session run: feeding, sampling, the generator."""
    step_ms: float


def measure(package: Path, prompt: list[int], new_tokens: int, rounds: int) -> Cost:
    """Compare `rounds` pairs of pairs."""
    slowdowns = []
    for _ in range(rounds):
        ratios = [side_by_side(package, prompt, new_tokens, observed_first=first) for first in (True, False)]
        slowdowns.append(math.sqrt(ratios[0] / ratios[1]) - 1)
    alone = decode_alone(package, prompt, new_tokens)
    return Cost(
        statistics.median(slowdowns),
        tuple(slowdowns),
        1e6 * statistics.median(step.overhead_seconds for step in alone),
        1e3 * statistics.median(step.run_seconds + step.overhead_seconds for step in alone),
    )


def side_by_side(package: Path, prompt: list[int], new_tokens: int, *, observed_first: bool) -> float:
    """Median ratio of the session runs of the runner loaded first to those of the second, observed ones left out."""
    sampler = greedy
    pairs: list[tuple[Step, ...]] = []
    with ExitStack() as stack:
        runners = [
            stack.enter_context(load_runner(package, parse_chain("cpu"), observe=observe))
            for observe in (observed_first, not observed_first)
        ]
        loops = [generate(runner, [prompt], max_new_tokens=new_tokens, sampler=sampler) for runner in runners]
        for number in range(new_tokens):
            steps: dict[int, Step] = {}
            for index in (0, 1) if number % 2 else (1, 0):
                time.sleep(PAUSE_SECONDS)
                step = next(loops[index], None)
                if step is not None:
                    steps[index] = step
            if len(steps) == 2:
                pairs.append((steps[0], steps[1]))
    free = [pair for pair in pairs if pair[0].phase == "decode" and not any(step.observed for step in pair)]
    return statistics.median(first.run_seconds / second.run_seconds for first, second in free)


def decode_alone(package: Path, prompt: list[int], new_tokens: int) -> list[Step]:
    """Decode steps of one fresh run without a report."""
    with load_runner(package, parse_chain("cpu")) as runner:
        steps = generate(runner, [prompt], max_new_tokens=new_tokens, sampler=greedy)
        return [step for step in steps if step.phase == "decode"]
