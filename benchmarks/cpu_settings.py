"""`python -m benchmarks.cpu_settings PACKAGE`: what each setting of the CPU provider brings, one left out at a time.

Every turn is a process of its own, because memory and threads of one would be in the way of the next; turns of all
settings are interleaved, and what is printed are medians. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

SETTINGS: dict[str, dict[str, str]] = {
    "as chosen": {},
    "flash": {"attention": "flash"},
    "naive": {"attention": "naive"},
    "small pages": {"huge_pages": "0"},
    "no spinning": {"spinning": "0"},
}


def turn(package: Path, options: dict[str, str], prompt: int, new_tokens: int) -> dict[str, float]:
    """Load, prefill and decode once, with one shorter generation before; seconds, tokens per second and bytes."""
    from benchmarks.engine_steps import generate
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.choice.sampling import greedy
    from partita.runtime.generate.record import first_token_seconds
    from partita.runtime.generate.runner import load_runner

    with load_runner(package, parse_chain("cpu"), options={"cpu": options}) as runner:
        vocabulary = runner.contract.vocab_size
        tokens = [(7 * place + 11) % vocabulary for place in range(prompt)]
        sampler = greedy
        for prompt_tokens, count in ((tokens, 8), (tokens, new_tokens)):
            steps = list(generate(runner, [prompt_tokens], max_new_tokens=count, sampler=sampler))
        decode = [step.run_seconds + step.overhead_seconds for step in steps if step.phase == "decode"]
        return {
            "load_seconds": sum(entry.session.load_seconds for entry in runner.graphs),
            "prefill": prompt / (first_token_seconds(steps) or 1.0),
            "decode": len(decode) / sum(decode),
            "overhead_us": 1e6 * statistics.median(step.overhead_seconds for step in steps if step.phase == "decode"),
            "anonymous_mib": (runner.memory.anonymous_growth_bytes or 0) / 2**20,
        }


def main() -> None:
    """All settings, some rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only is not None:
        print(json.dumps(turn(given.package, SETTINGS[given.only], given.prompt, given.new_tokens)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for number in range(given.rounds):
        order = list(SETTINGS)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            command = [sys.executable, "-m", "benchmarks.cpu_settings", *sys.argv[1:], "--only", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout))
    print(f"{'setting':14} {'load s':>7} {'prefill':>8} {'decode':>7} {'overhead us':>11} {'allocated MiB':>13}")
    for name, turns in found.items():
        load, prefill, decode, overhead, held = (statistics.median(turn[key] for turn in turns) for key in turns[0])
        print(f"{name:14} {load:7.2f} {prefill:8.0f} {decode:7.1f} {overhead:11.0f} {held:13.0f}")


if __name__ == "__main__":
    main()
