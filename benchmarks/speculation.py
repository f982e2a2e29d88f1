"""`python -m benchmarks.speculation PACKAGE`: decode with guesses of what follows, against decode without them.

Texts are paragraphs of the embedded checkpoint's held-out text, given as a task each: to sum up, to edit (the text, and
the beginning of it again), to continue, and to continue with draws, where guesses are seldom right. A task is
generated without, with guesses and without again, in every order, one round after the other; what is printed are
ratios of speeds in the same round, by the mean of both runs without: the median over all, and the lowest median of a
text. Beside it stands what these two figures are of both runs without guesses: what this machine's noise makes of
nothing. Where a machine's speed changes from one tenth of a second to the next, that is more than guesses cost where
they do not help, so this is also taken from within each run with guesses: its speed by that of its own steps for which
nobody looked for any, nor for the step before, which stand between the others and share their noise. Tokens are
compared, too. Run it on an idle machine.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import partita
from partita.demo import checkpoint_path, heldout_path
from partita.runtime.engine.recorder import Step

PAUSE_SECONDS = 0.2
LONG = 600
"""Characters of a paragraph that is long enough for a task."""
SEED = 7
WAITED = 3.0
"""Times the median of steps without guesses: one that took longer was kept waiting, and counts as so long."""
CALM = 10
"""Steps without a look that a run has to have, for its speed to be taken by them."""
ORDERS = tuple(itertools.permutations(("plain", "guessing", "again")))
Task = Callable[[str], str]
TASKS: dict[str, tuple[Task, float]] = {
    "sum up": (lambda text: f"{text[:800]}\n\n\nIn short: ", 0.0),
    "edit": (lambda text: f"{text[:600]}\n\n\n{text[:80]}", 0.0),
    "continue": (lambda text: text[:300], 0.0),
    "continue, drawn": (lambda text: text[:300], 0.8),
}
"""What becomes of a paragraph, and the temperature."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One text, one round: with guesses and without."""

    task: str
    text: int
    ratio: float
    noise: float
    """The same of two runs without guesses."""
    acceptance: float | None
    tokens_per_step: float | None
    same_tokens: bool
    within: float | None
    """Speed of the run with guesses by that of its own steps without a look; None where there are too few of them."""
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
                        **(how if name == "guessing" else {}),  # type: ignore[arg-type]
                    ).run()
                told = runs["guessing"].speculation
                if number and told is not None:
                    speed = {name: run.timings["decode_tokens_per_second"] for name, run in runs.items()}
                    yield Pair(
                        task,
                        text,
                        2 * speed["guessing"] / (speed["plain"] + speed["again"]),
                        speed["again"] / speed["plain"],
                        told.acceptance,
                        told.tokens_per_step,
                        runs["guessing"].tokens == runs["plain"].tokens,
                        within(runs["guessing"].steps),
                        speed,
                    )


def within(steps: Sequence[Step]) -> float | None:
    """Speed of decode steps by that of those without a look at them or at the step before."""
    made = [(step.run_seconds + step.overhead_seconds, step) for step in steps if step.phase == "decode"]
    plain = [seconds for seconds, step in made if not step.guessed]
    if not plain:
        return None
    most = WAITED * statistics.median(plain)
    calm = [
        min(each, most) for (_, before), (each, step) in itertools.pairwise(made) if not before.looked | step.looked
    ]
    tokens = sum(len(row) for _, step in made for row in step.tokens)
    return statistics.fmean(calm) * tokens / sum(min(each, most) for each, _ in made) if len(calm) >= CALM else None


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
        "within": lambda pair: pair.within,
    }
    heads = "".join(f"{name:>7} {'lowest':>7}" for name in figures)
    lines = [f"{'task':18}{heads} {'right':>6} {'tokens/step':>11}  same"]
    for task in dict.fromkeys(pair.task for pair in pairs):
        own = [pair for pair in pairs if pair.task == task]
        found = [medians(own, figure) for figure in figures.values()]
        told = "".join(f"{'-':>7} {'-':>7}" if each is None else f"{each[0]:7.2f} {each[1]:7.2f}" for each in found)
        right = [pair.acceptance for pair in own if pair.acceptance is not None]
        steps = [pair.tokens_per_step for pair in own if pair.tokens_per_step is not None]
        lines.append(
            f"{task:18}{told} {statistics.median(right) if right else 0:6.0%} {statistics.median(steps):11.2f}  "
            f"{sum(pair.same_tokens for pair in own)} of {len(own)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure one package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--draft", type=Path, help="guess with this package, in place of the text itself")
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
