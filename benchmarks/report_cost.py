"""What `--report` costs once its observation window is over, and what the loop itself costs per step.

Each round opens the package twice, with and without observation, in alternating order, and decodes the same prompt;
the steps of the window are left out on both sides.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from partita.providers.resolve import parse_chain
from partita.runtime.generate import generate
from partita.runtime.runner import Step, load_runner
from partita.runtime.sampling import make_sampler


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over the rounds."""

    slowdown: float
    """Median step with a report over median step without, minus 1."""
    slowdowns: tuple[float, ...]
    """The same of every round."""
    overhead_us: float
    """Time per decode step outside the session run: feeding, sampling, the generator."""
    step_ms: float


def measure(package: Path, prompt: list[int], new_tokens: int, rounds: int) -> Cost:
    """Compare `rounds` pairs of runs."""
    slowdowns, overheads, steps = [], [], []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        runs = {observe: _decode(package, prompt, new_tokens, observe=observe) for observe in order}
        window = sum(step.observed for step in runs[True])
        late = {observe: [s.run_seconds + s.overhead_seconds for s in run[window:]] for observe, run in runs.items()}
        slowdowns.append(statistics.median(late[True]) / statistics.median(late[False]) - 1)
        overheads.append(statistics.median(s.overhead_seconds for s in runs[False][window:]))
        steps.append(statistics.median(late[False]))
    return Cost(
        statistics.median(slowdowns),
        tuple(slowdowns),
        1e6 * statistics.median(overheads),
        1e3 * statistics.median(steps),
    )


def _decode(package: Path, prompt: list[int], new_tokens: int, *, observe: bool) -> list[Step]:
    """Decode steps of one fresh run."""
    with load_runner(package, parse_chain("cpu"), observe=observe) as runner:
        steps = generate(runner, [prompt], max_new_tokens=new_tokens, sampler=make_sampler(temperature=0.0))
        return [step for step in steps if step.phase == "decode"]
