"""`python -m benchmarks`: export cost, and generation against a bare loop and against transformers.

Speeds are medians over interleaved rounds, so that a machine that slows down slows all of them down; compare the
ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.bare_loop import BareLoop, Speed
from benchmarks.checkpoints import SHAPES, make
from benchmarks.report_cost import Cost, measure

PAUSE_SECONDS = 0.5
Run = Callable[[list[int], int], Speed]


def export_once(checkpoint: Path, out: Path) -> dict[str, object]:
    """Export bf16 -> fp32 without verification, in a child process of its own; returns its JSON summary."""
    command = [sys.executable, "-m", "partita", "export", str(checkpoint), str(out), "--max-length", "1024"]
    done = subprocess.run([*command, "--no-verify", "--force", "--json"], check=True, capture_output=True, text=True)
    summary: dict[str, object] = json.loads(done.stdout)
    return summary


def partita_loop(folder: Path, *, observe: bool) -> Run:
    """The loop behind `partita generate`, greedy."""
    from benchmarks.engine_steps import generate
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.choice.sampling import greedy
    from partita.runtime.generate.runner import load_runner

    runner = load_runner(folder, parse_chain("cpu"), observe=observe)
    sampler = greedy

    def run(prompt: list[int], new_tokens: int) -> Speed:
        began = time.perf_counter()
        prefill = 0.0
        tokens: list[int] = []
        for step in generate(runner, [prompt], max_new_tokens=new_tokens, sampler=sampler):
            if step.tokens[0]:
                if not tokens:
                    prefill = time.perf_counter() - began
                    began = time.perf_counter()
                tokens.extend(step.tokens[0])
        return Speed(prefill, time.perf_counter() - began, len(tokens) - 1, tuple(tokens))

    return run


def interleave(runs: dict[str, Run], prompt: list[int], new_tokens: int, rounds: int) -> dict[str, list[Speed]]:
    """One warm-up of each, then `rounds` rounds of all of them, each round beginning with another one.

    The pause lets the threads of the one before come to rest: ONNX Runtime's spin for a while after a run.
    """
    speeds: dict[str, list[Speed]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        order = list(runs)
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            time.sleep(PAUSE_SECONDS)
            speed = runs[name](prompt, new_tokens)
            if number:
                speeds[name].append(speed)
    return speeds


def rate(speeds: list[Speed], prompt_tokens: int) -> tuple[float, float]:
    """Median prefill and decode speed, tokens per second."""
    prefill = statistics.median(prompt_tokens / s.prefill_seconds for s in speeds)
    return prefill, statistics.median(s.decode_steps / s.decode_seconds for s in speeds)


def ratio(left: list[Speed], right: list[Speed], value: Callable[[Speed], float]) -> float:
    """Median over the rounds of how many times faster `left` is."""
    return statistics.median(value(b) / value(a) for a, b in zip(left, right, strict=True))


def main() -> None:
    """Measure and print one table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-original", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    checkpoint = make(options.work / f"checkpoint-{options.shape}", options.shape)
    package = options.work / f"package-{options.shape}"
    summary = export_once(checkpoint, package)
    runs: dict[str, Run] = {"bare loop": BareLoop(package).run, "partita": partita_loop(package, observe=False)}
    if not options.skip_original:
        from benchmarks.source_model import Original

        runs["transformers"] = Original(checkpoint).run
    vocabulary = SHAPES[options.shape]["vocab_size"]
    assert isinstance(vocabulary, int)
    prompt = [(7 + 31 * i) % vocabulary for i in range(options.prompt_tokens)]
    speeds = interleave(runs, prompt, options.new_tokens, options.rounds)
    show(summary, speeds, options)
    runs.clear()
    show_cost(measure(package, prompt[:16], options.new_tokens, options.rounds))


def show_cost(cost: Cost) -> None:
    """What a report and the loop cost."""
    rounds = ", ".join(f"{value:+.1%}" for value in cost.slowdowns)
    print(f"decode step {cost.step_ms:.2f} ms; outside the session run {cost.overhead_us:.0f} us")
    print(f"with --report, after its window: {cost.slowdown:+.2%} per step (median of {rounds})")


def show(summary: dict[str, object], speeds: dict[str, list[Speed]], options: argparse.Namespace) -> None:
    """The table and the JSON line."""
    seconds = summary["seconds"]
    assert isinstance(seconds, dict) and isinstance(summary["peak_rss_bytes"], int)
    total = sum(seconds.values())
    print(f"{platform.processor() or platform.machine()}, {platform.system()}, Python {platform.python_version()}")
    print(
        f"export {options.shape} bf16 -> fp32, --no-verify: {total:.1f} s, peak RSS "
        f"{summary['peak_rss_bytes'] / 1e9:.2f} GB"
    )
    print(f"{'':14}{'prefill tok/s':>14}{'decode tok/s':>14}{'prefill ratio':>15}{'decode ratio':>14}")
    base, result = speeds["bare loop"], {}
    for name, runs in speeds.items():
        prefill, decode = rate(runs, options.prompt_tokens)
        ratios = ratio(runs, base, lambda s: s.prefill_seconds), ratio(runs, base, lambda s: s.decode_seconds)
        print(f"{name:14}{prefill:14.1f}{decode:14.2f}{ratios[0]:14.1%} {ratios[1]:13.1%}")
        result[name] = {"prefill": prefill, "decode": decode, "prefill_ratio": ratios[0], "decode_ratio": ratios[1]}
    print("ratios are against the bare loop on the same graph, median over the rounds")
    same = {name: runs[0].tokens == base[0].tokens for name, runs in speeds.items()}
    print(
        json.dumps(
            {"export_seconds": total, "peak_rss_bytes": summary["peak_rss_bytes"], "speed": result, "same_tokens": same}
        )
    )


if __name__ == "__main__":
    main()
