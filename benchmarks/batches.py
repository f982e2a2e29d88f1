"""`python -m benchmarks.batches`: many prompts at batch 1, 2, 4, 8 and 16 against one at a time, beside the peers.

The prompts have different lengths and are to get answers of different lengths. Partita's scheduler and llama.cpp's
parallel mode give a row to the next prompt as soon as it is free; onnxruntime-genai's batch mode begins and ends a
batch together. Contenders take turns: each round asks everyone for every batch size, and is begun by another one.
Figures are medians of new tokens per second, from the first prompt read to the last token written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.other_load import DISTURBED_CORES, busy_seconds, others_cores
from benchmarks.peers.plan import Entry, Places, chosen
from benchmarks.peers.prepare import ExportFailedError, prepare
from benchmarks.peers.race import PAUSE_SECONDS, Child, ChildFailedError, Settings, environments_missing, say
from benchmarks.peers.shapes import SHAPES, make_checkpoint

BATCHING = {"partita": "batch_ours", "genai": "batch_genai", "llama": "batch_llama"}
"""Peers that have a batch mode, and what serves it."""
LENGTHS, ANSWERS = (16, 128, 48, 96, 24, 64), (32, 8, 64, 16, 48)
"""Tokens of prompts and of answers, in turns: they have no common divisor, so that every pair comes."""


@dataclass(frozen=True, slots=True)
class Task:
    """The prompts that everyone answers."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @classmethod
    def of(cls, count: int, vocabulary: int) -> Task:
        """`count` prompts of different tokens; none of the first ten, which are special in many vocabularies."""
        prompts = [
            [10 + (7 + 31 * place + 101 * index) % (vocabulary - 10) for place in range(LENGTHS[index % len(LENGTHS)])]
            for index in range(count)
        ]
        return cls(prompts, [ANSWERS[index % len(ANSWERS)] for index in range(count)])

    @property
    def length(self) -> int:
        """The most tokens that a prompt and its answer have together."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True))

    def question(self, rows: int) -> dict[str, Any]:
        """What a child is asked."""
        return {"prompts": self.prompts, "new_tokens": self.new_tokens, "rows": rows}

    def check(self, answers: list[list[int]]) -> None:
        """Raise ChildFailedError unless every prompt has its tokens."""
        if [len(answer) for answer in answers] != self.new_tokens:
            raise ChildFailedError("answered with another number of tokens than was asked for")


@dataclass(slots=True)
class Contender:
    """A peer with one form of the weights, and what it has done at each batch size."""

    entry: Entry
    seconds: dict[int, list[float]] = field(default_factory=dict)
    answers: dict[int, list[list[int]]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    """Cores that were busy with something else, in each turn."""

    def entry_for(self, rows: int) -> Entry:
        """Whose files serve so many rows: only our packages have a number of them."""
        if self.entry.peer != "partita" or rows == 1:
            return self.entry
        words = (*self.entry.words, "--batch-size", str(rows))
        return replace(self.entry, form=f"{self.entry.form}-rows{rows}", words=words)

    def record(self, task: Task) -> dict[str, Any]:
        """As JSON has it."""
        new = sum(task.new_tokens)
        rates = {rows: statistics.median(new / each for each in seconds) for rows, seconds in self.seconds.items()}
        one = rates.get(1)
        return {
            "name": self.entry.name,
            "versions": self.versions,
            "settings": self.settings,
            "errors": self.errors,
            "tokens_per_second": rates,
            "rows_per_second": {rows: rate / new * len(task.prompts) for rows, rate in rates.items()},
            "against_one_at_a_time": {rows: rate / one for rows, rate in rates.items()} if one else {},
            "same_tokens_as_one_at_a_time": {
                rows: answers == self.answers[1] for rows, answers in self.answers.items() if 1 in self.answers
            },
            "seconds": self.seconds,
            "others_cores": statistics.median(self.others) if self.others else None,
        }


def main() -> int:
    """Measure, print, store. Exit code 1 when other processes took part of the machine, 2 for bad options."""
    given = _options()
    shape = SHAPES[given.shape]
    task = Task.of(given.count, shape.settings["vocab_size"])
    places = Places(given.work, given.environments.absolute())
    try:
        entries = [entry for entry in chosen(given.peers, given.precisions) if entry.peer in BATCHING]
        if missing := environments_missing(entries, places):
            raise ValueError(f"not there: {', '.join(missing)}; run `make peer-envs`, or leave the peer out")
        if given.rounds < 1 or given.count < 1 or min(given.batches) < 1:
            raise ValueError("there is at least 1 round, 1 prompt, and 1 row")
    except ValueError as error:
        say(f"benchmarks.batches: {error}")
        return 2
    settings = Settings((task.length - 1,), 1, given.rounds, given.threads, 1, shape.settings["vocab_size"])
    make_checkpoint(places.checkpoint(shape.name), shape)
    contenders = [Contender(entry) for entry in entries]
    for contender in contenders:
        _make_files(contender, shape.name, places, settings, given.batches)
    for number in range(given.rounds + 1):
        turn = number % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            for rows in given.batches:
                _turn(contender, rows, task, shape.name, places, settings, counts=number > 0)
        say(f"round {number} of {given.rounds}{' (warm-up)' if not number else ''}")
    found = {
        "shape": shape.name,
        "prompts": given.count,
        "new_tokens": sum(task.new_tokens),
        "threads": given.threads,
        "contenders": [contender.record(task) for contender in contenders],
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print("\n".join(table(found, given.batches)))
    disturbed = [each["name"] for each in found["contenders"] if (each["others_cores"] or 0) > DISTURBED_CORES]
    if disturbed:
        say(f"disturbed: other processes took part of a core beside {', '.join(disturbed)}; not to be published")
    return 1 if disturbed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--peers", nargs="+", choices=sorted(BATCHING), default=list(BATCHING))
    parser.add_argument("--precisions", nargs="+", default=["int4-b64", "int4", "q4_0"], help="as in benchmarks.peers")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="ROWS")
    parser.add_argument("--count", type=int, default=30, help="prompts; 30 have each length with each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="default: the cores")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="checkpoints and files, which are kept")
    parser.add_argument("--environments", type=Path, default=Path(".venvs"), help="folder of peer-genai and the others")
    parser.add_argument("--json", type=Path, default=Path("build/batches.json"))
    return parser.parse_args()


def _make_files(contender: Contender, shape: str, places: Places, settings: Settings, batches: list[int]) -> None:
    """What the exporters make; a refusal is the result at that batch size."""
    for rows in batches:
        entry = contender.entry_for(rows)
        try:
            prepare(entry, shape, places, settings.length, settings.threads)
        except ExportFailedError as error:
            contender.errors[rows] = f"export: {error}"
            say(f"{entry.name}: {contender.errors[rows]}")


def _turn(
    contender: Contender, rows: int, task: Task, shape: str, places: Places, settings: Settings, *, counts: bool
) -> None:
    """All prompts at one batch size, in a process of its own: two prompts to warm it up, then the clock runs."""
    if rows in contender.errors:
        return
    time.sleep(PAUSE_SECONDS)
    entry = contender.entry_for(rows)
    command = [places.python(entry), "-m", f"benchmarks.peers.children.{BATCHING[entry.peer]}"]
    try:
        with Child(entry, shape, places, settings, command) as child:
            child.ask({"prompts": task.prompts[:2], "new_tokens": [2, 2], "rows": rows})
            busy, began = busy_seconds(), time.perf_counter()
            before = psutil.Process(child.process.pid).cpu_times()
            answer = child.ask(task.question(rows))
            after = psutil.Process(child.process.pid).cpu_times()
        task.check(answer["answers"])
    except (ChildFailedError, psutil.Error) as error:
        contender.errors[rows] = str(error)
        say(f"{entry.name}, {rows} rows: {error}")
        return
    contender.versions, contender.settings = child.opened["versions"], child.opened["settings"]
    contender.answers[rows] = answer["answers"]
    if counts:
        own = after.user + after.system - before.user - before.system
        contender.others.append(others_cores(busy_seconds() - busy, own, time.perf_counter() - began))
        contender.seconds.setdefault(rows, []).append(answer["seconds"])


def table(found: dict[str, Any], batches: list[int]) -> list[str]:
    """New tokens per second at each batch size, how many times one at a time that is, and ours against each peer."""
    lines = [
        f"{found['prompts']} prompts, {found['new_tokens']} new tokens, {found['threads']} threads, {found['shape']}"
    ]
    lines.append(f"{'new tokens per second':<28}" + "".join(f"{f'{rows} rows':>16}" for rows in batches))
    ours = next((each for each in found["contenders"] if each["name"].startswith("partita")), None)
    for each in found["contenders"]:
        rates, ratios = each["tokens_per_second"], each["against_one_at_a_time"]
        cells = [
            f"{rates[rows]:.1f}" + (f" ({ratios[rows]:.2f}x)" if rows in ratios else "") if rows in rates else "failed"
            for rows in batches
        ]
        lines.append(f"{each['name']:<28}" + "".join(f"{cell:>16}" for cell in cells))
        if ours is not None and each is not ours:
            own = ours["tokens_per_second"]
            cells = [f"{own[rows] / rates[rows]:.2f}x" if rows in rates and rows in own else "-" for rows in batches]
            lines.append(f"{'  ours against it':<28}" + "".join(f"{cell:>16}" for cell in cells))
        different = [str(rows) for rows, same in each["same_tokens_as_one_at_a_time"].items() if not same]
        if different:
            lines.append(f"  other tokens than one at a time with {', '.join(different)} rows")
    return lines


if __name__ == "__main__":
    sys.exit(main())
