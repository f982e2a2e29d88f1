"""`python -m benchmarks.sampling`: what drawing a token takes, for a vocabulary of 151,936, on one core."""

from __future__ import annotations

import statistics
import time

import numpy as np

from partita.options.generation import Sampling
from partita.runtime.generate.choice.sampling import make_sampler

VOCABULARY = 151_936
TURNS = 300
OPTIONS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.9, min_p 0.05": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05},
}
SPREADS = {"peaked": 6.0, "wide": 3.0, "flat": 1.0}
"""Standard deviation of the logits: some tens, some thousands and some ten thousands of tokens make 0.9 of the sum."""


def main() -> None:
    """Lowest and median CPU time per draw, in microseconds."""
    history = np.zeros(0, np.int64)
    print(f"{'logits':8} {'options':22} {'lowest us':>9} {'median us':>9}")
    for shape, spread in SPREADS.items():
        logits = (spread * np.random.default_rng(0).standard_normal(VOCABULARY)).astype(np.float32)
        for name, options in OPTIONS.items():
            sampler = make_sampler(Sampling(seed=0, **options))  # type: ignore[arg-type]
            times = []
            for _ in range(TURNS):
                began = time.thread_time()
                sampler(logits, history)
                times.append(1e6 * (time.thread_time() - began))
            print(f"{shape:8} {name:22} {min(times):9.0f} {statistics.median(times):9.0f}")


if __name__ == "__main__":
    main()
