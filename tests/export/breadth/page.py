"""docs/models.md: which model types can be exported, from the results of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tests.export.breadth.records import LOWERINGS, VERSIONS, Outcome, Results, causal_types, multimodal_types

_NAMES = {"parity": "not equal", "no checkpoint": "not tried"}
"""Statuses that the page shows under another name."""
_NOTES = {
    r"sparse attention indexer": "The model caches the keys of a sparse attention indexer. No lowering supports this.",
    r"number of cached tokens as a Python int": "The model code needs the number of cached tokens as a Python int, "
    "which a graph does not have. Chunked prefill differs from the model. "
    "`--exporter optimum` exports six of these types: [from_optimum.md](from_optimum.md#optimums-exporter).",
    r"is inconsistent": "transformers' logits with a cache differ from its logits without one, "
    "so there is no reference.",
    r"has no cache argument": "The model class has no cache argument.",
    r"of its own and is not compatible|accesses the layers of transformers' cache": "The model requires its own "
    "cache class.",
    r"(?:pixel_values|input_features).*has to be|have to specify `?either|must specify exactly one|on text alone": (
        "The model does not run on text alone."
    ),
    r"on fake tensors failed|specialises on one number": "The model code cannot be traced. `partita export` prints "
    "the error.",
    r"outside transformers' experts interface": "The model loops over the selected experts outside transformers' "
    "experts interface.",
    r"passes sinks": "No lowering supports the attention sinks of this class.",
    r"encoder-decoder": "The model is an encoder-decoder. Partita exports decoders only.",
    r"caches keys twice": "A layer caches keys twice in one step.",
    r"outside transformers' cache": "The model keeps state outside transformers' cache.",
    r"selective state space separately": "Several scans share one state.",
    r"is not causal": "Later tokens change the logits of earlier ones.",
    r"^rows of unequal length: .*--batch-size 1": "Rows of unequal length are refused, because the model derives "
    "positions from the cache length. Export it with `--batch-size 1`.",
    r"^transformers itself: generate differs": "transformers' `generate` differs from its forward pass without a "
    "cache. The package matches the forward pass.",
    r"^transformers itself: generate fails": "transformers' `generate` fails. The package matches the forward pass.",
}
"""Part of the exporter's reason -> the note on the page. Other reasons are shown as they are."""
_HEAD = """# Model types

The result of `partita export` for every model type of transformers that generates text. [exporting.md](exporting.md)
describes the export. `make breadth` writes this page.

Basis: {date}, {versions}, CPU provider. Results by commit and transformers version: {commits}.

Each type was exported as a tiny random checkpoint in float32, for 64 tokens, with each `--attention` ({lowerings}).
The package was compared with the transformers model without a cache: one prompt at once and in chunks of 7, 24 decode
steps past every sliding window, and two rows of unequal length. Checkpoints of real size were not run.

| result | meaning |
|---|---|
| verified | Every logit is within 1e-4 of transformers and the greedy tokens are equal. The number is the largest \
relative error. |
| refused | The exporter prints a reason and writes nothing. |
| not equal | The exported graph does not compute what the model computes. The exporter writes nothing (exit code 4). |
| not tried | No tiny checkpoint can be made. |

A result without the name of a lowering holds for all of them. Numbers in the last column refer to the
[notes](#notes).
"""
_CAUSAL = "## Causal language models\n\nEvery causal language model type of transformers, {count} of them."
_MULTIMODAL = """## Text of image- and audio-text-to-text models

Every other type of transformers that generates text from images, video or sound, {count} of them. Only the text decoder
is exported, and the export names the parts that it omits. The comparison used text tokens only."""


def page(results: Results) -> str:
    """The page as Markdown."""
    others = set(multimodal_types())
    causal = [outcome for outcome in results.outcomes if outcome.model_type not in others]
    multimodal = [outcome for outcome in results.outcomes if outcome.model_type in others]
    shown = [name for name in VERSIONS if name != "transformers"]  # _commits has it, by result
    versions = ", ".join(f"{name} {results.versions.get(name, 'unknown')}" for name in shown)
    notes: list[str] = []
    tables = [
        *_section(_CAUSAL, causal, causal_types(), notes),
        *_section(_MULTIMODAL, multimodal, multimodal_types(), notes),
    ]
    head = _HEAD.format(
        date=results.date, versions=versions, commits=_commits(results.outcomes), lowerings=", ".join(LOWERINGS)
    )
    numbered = (f"{number}. {note}" for number, note in enumerate(notes, 1))
    return "\n".join([head, *tables, "## Notes", "", *numbered, ""])


def _section(head: str, outcomes: Sequence[Outcome], types: Sequence[str], notes: list[str]) -> list[str]:
    """Heading, totals and a row for each type, those of `types` without an outcome included. Adds to `notes`."""
    by_type: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_type.setdefault(outcome.model_type, {})[outcome.attention] = outcome
    names = sorted({*by_type, *types})
    return [
        head.format(count=len(names)),
        "",
        *_totals(outcomes),
        "",
        "| type | result | notes |",
        "|---|---|---|",
        *(_row(name, by_type.get(name, {}), notes) for name in names),
        "",
    ]


def _commits(outcomes: Sequence[Outcome]) -> str:
    """Commits of Partita and versions of transformers, with the number of results of each."""
    counts = Counter(outcome.code or "unknown" for outcome in outcomes)
    return ", ".join(f"{code} ({count})" for code, count in counts.most_common())


def _totals(outcomes: Sequence[Outcome]) -> list[str]:
    """A table of counts, one row per status that occurs."""
    counts = Counter((outcome.status, outcome.attention) for outcome in outcomes)
    statuses = list(dict.fromkeys(sorted((status for status, _ in counts), key=lambda name: name != "verified")))
    table = [f"| | {' | '.join(LOWERINGS)} |", f"|{'---|' * (len(LOWERINGS) + 1)}"]
    for status in statuses:
        cells = " | ".join(str(counts[status, name]) for name in LOWERINGS)
        table.append(f"| {_NAMES.get(status, status)} | {cells} |")
    return table


def _row(model_type: str, entries: dict[str, Outcome], notes: list[str]) -> str:
    """A type, its result and the numbers of its notes; a note that is new is added to `notes`."""
    numbers: dict[int, None] = {}
    for text in _remarks(entries):
        if text not in notes:
            notes.append(text)
        numbers[notes.index(text) + 1] = None
    return f"| {model_type} | {_result(entries)} | {', '.join(map(str, numbers))} |"


def _result(entries: dict[str, Outcome]) -> str:
    """The status of all lowerings with the largest error; by lowering where statuses differ."""
    statuses = {name: _NAMES.get(entry.status, entry.status) for name, entry in entries.items()}
    if len(set(statuses.values())) > 1:
        return ", ".join(f"{name}: {_error(status, [entries[name]])}" for name, status in statuses.items())
    return _error("".join(set(statuses.values())), list(entries.values()))


def _error(status: str, entries: Sequence[Outcome]) -> str:
    """The status, with the largest relative error where it is verified."""
    errors = [entry.max_rel_error for entry in entries if entry.max_rel_error is not None]
    return f"{status} {max(errors):.0e}" if status == "verified" and errors else status


def _remarks(entries: dict[str, Outcome]) -> list[str]:
    """The notes of a type, each with the names of its lowerings where it does not hold for all of them."""
    found: dict[str, list[str]] = {}
    for name, entry in entries.items():
        texts = [entry.reason, entry.rows and f"rows of unequal length: {entry.rows}"]
        if entry.status == "verified":
            texts.append(entry.original and f"transformers itself: {entry.original}")
        for text in filter(None, texts):
            found.setdefault(_note(text), []).append(name)
    return [text if len(names) == len(entries) else f"{', '.join(names)}: {text}" for text, names in found.items()]


def _note(text: str) -> str:
    """The note for a reason of the exporter."""
    return next((note for pattern, note in _NOTES.items() if re.search(pattern, text)), text.replace("\n", " "))
