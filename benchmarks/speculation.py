"""`python -m benchmarks.speculation PACKAGE`: decode with and without speculative decoding.

Texts are paragraphs of the embedded checkpoint's held-out text, each as four tasks: summarise, edit (the text and the
beginning of it again), continue, and continue with sampling, where draft tokens are seldom accepted. Each round runs a
task without, with, and again without drafts, in every order. Printed are ratios of speeds within a round: the median
over all texts and the lowest median of a text, and the same of the two runs without drafts, which is the noise of the
machine. Tokens are compared, too. Run it on an idle machine.

With --export the embedded checkpoint is exported to PACKAGE first, with these options of `partita export`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import partita
from partita.demo import checkpoint_path, heldout_path

PAUSE_SECONDS = 0.2
LONG = 600
"""Characters of a paragraph that is long enough for a task."""
SEED = 7
ORDERS = tuple(itertools.permutations(("plain", "drafting", "again")))
Task = Callable[[str], str]
TASKS: dict[str, tuple[Task, float]] = {
    "summarise": (lambda text: f"{text[:800]}\n\n\nIn short: ", 0.0),
    "edit": (lambda text: f"{text[:600]}\n\n\n{text[:80]}", 0.0),
    "continue": (lambda text: text[:300], 0.0),
    "continue, sampled": (lambda text: text[:300], 0.8),
}
"""What becomes of a paragraph, and the temperature."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One text, one round: with and without drafts."""

    task: str
    text: int
    ratio: float
    noise: float
    """The same of two runs without drafts."""
    acceptance: float | None
    tokens_per_step: float | None
    same_tokens: bool
    speeds: dict[str, float]
    """Tokens per second of each run."""


def paragraphs() -> list[str]:
    """The long paragraphs of the held-out text."""
    text = heldout_path().read_text(encoding="utf-8")
    return [part for part in text.split("\n\n\n") if len(part) >= LONG]


def prompts(model: partita.Model, task: Task, texts: list[str], new_tokens: int) -> list[list[int]]:
    """Token ids of each text as a task, the last of them where the cache would not hold the answer behind all."""
    room = model.max_length - new_tokens
    return [model.encode(task(text))[-room:] for text in texts]


def measure(model: partita.Model, how: dict[str, str], given: argparse.Namespace) -> Iterator[Pair]:
    """Every task in every round; the first round warms up, and is left out."""
    texts = paragraphs()[: given.texts]
    for task in given.tasks:
        make, temperature = TASKS[task]
        ids = prompts(model, make, texts, given.new_tokens)
        for number in range(given.rounds + 1):
            for text, prompt in enumerate(ids):
                runs = dict[str, partita.Generation]()
                for name in ORDERS[(number + text) % len(ORDERS)]:
                    time.sleep(PAUSE_SECONDS)
                    runs[name] = model.generate(
                        prompt,
                        max_new_tokens=given.new_tokens,
                        temperature=temperature,
                        seed=SEED,
                        stop_token_ids=(),
                        **(how if name == "drafting" else {}),  # type: ignore[arg-type]
                    ).run()
                figures = runs["drafting"].speculation
                if number and figures is not None:
                    speed = {name: run.timings["decode_tokens_per_second"] for name, run in runs.items()}
                    yield Pair(
                        task,
                        text,
                        2 * speed["drafting"] / (speed["plain"] + speed["again"]),
                        speed["again"] / speed["plain"],
                        figures.acceptance_rate,
                        figures.tokens_per_step,
                        runs["drafting"].tokens == runs["plain"].tokens,
                        speed,
                    )


def medians(pairs: list[Pair], figure: Callable[[Pair], float | None]) -> tuple[float, float] | None:
    """Of all pairs, and the lowest of a text; None where no pair has it."""
    known = [(pair.text, value) for pair in pairs if (value := figure(pair)) is not None]
    by_text = [
        statistics.median(value for other, value in known if other == text) for text in {text for text, _ in known}
    ]
    return (statistics.median(value for _, value in known), min(by_text)) if known else None


def table(pairs: list[Pair]) -> str:
    """A row per task."""
    figures: dict[str, Callable[[Pair], float | None]] = {
        "speed": lambda pair: pair.ratio,
        "noise": lambda pair: pair.noise,
    }
    heads = "".join(f"{name:>7} {'lowest':>7}" for name in figures)
    lines = [f"{'task':18}{heads} {'accepted':>8} {'tokens/step':>11}  same"]
    for task in dict.fromkeys(pair.task for pair in pairs):
        own = [pair for pair in pairs if pair.task == task]
        found = [medians(own, figure) for figure in figures.values()]
        told = "".join(f"{'-':>7} {'-':>7}" if each is None else f"{each[0]:7.2f} {each[1]:7.2f}" for each in found)
        right = [pair.acceptance for pair in own if pair.acceptance is not None]
        steps = [pair.tokens_per_step for pair in own if pair.tokens_per_step is not None]
        lines.append(
            f"{task:18}{told} {statistics.median(right) if right else 0:8.0%} {statistics.median(steps):11.2f}  "
            f"{sum(pair.same_tokens for pair in own)} of {len(own)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure one package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--draft", type=Path, help="use this draft package instead of n-gram lookup")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--rounds", type=int, default=6, help="multiples of 6 have every order equally often")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS], metavar="TASK", help="%(choices)s")
    parser.add_argument("--texts", type=int, help="of the 19 long paragraphs, the first so many; all")
    parser.add_argument("--new-tokens", type=int, default=150)
    parser.add_argument("--export", metavar="OPTIONS", help="as '--precision int4'; '' for none")
    parser.add_argument("--json", type=Path, help="also write every pair to this file")
    given = parser.parse_args()
    if given.export is not None:
        command = [sys.executable, "-m", "partita", "export", str(checkpoint_path()), str(given.package), "--force"]
        subprocess.run([*command, *shlex.split(given.export)], check=True)
    how = {"speculate": "ngram"} if given.draft is None else {"draft": str(given.draft)}
    with partita.load(given.package, given.provider, observe=False) as model:
        pairs = list(measure(model, how, given))
    print(table(pairs))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
