"""docs/models.md: which model types can be exported, from the results of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.export.breadth.records import LOWERINGS, VERSIONS, Outcome, Results, causal_types, multimodal_types

_NAMES = {"parity": "not equal", "no checkpoint": "not tried"}
"""Statuses that users read under another name."""


_CAUSAL = (
    "## Causal language models",
    "",
    "Every causal language model type of transformers, {count} of them.",
)
_MULTIMODAL = (
    "## Text of image- and audio-text-to-text models",
    "",
    "Every type of transformers that makes text of images, video or sound and is not in the first table, "
    "{count} of them. The checkpoints had their towers, the original was the whole class, and both were "
    "given tokens alone: what is exported is the text decoder, and what is left out is said.",
)


def page(results: Results) -> str:
    """The page as Markdown."""
    others = set(multimodal_types())
    causal = [outcome for outcome in results.outcomes if outcome.model_type not in others]
    multimodal = [outcome for outcome in results.outcomes if outcome.model_type in others]
    shown = [name for name in VERSIONS if name != "transformers"]  # each result names its own
    versions = ", ".join(f"{name} {results.versions.get(name, 'unknown')}" for name in shown)
    return "\n".join(
        [
            "# Model types",
            "",
            f"What came of every model type that `partita export` takes, as `make breadth` found it on {results.date} "
            f"with {versions}. This page is written by that command.",
            "",
            "A tiny random checkpoint of each type was exported in float32 for 64 tokens by the code behind "
            "`partita export`, and run on the CPU provider beside the original model, which had transformers' default "
            "attention (results with transformers 5.23: eager attention) and no cache: the prompt at once, the "
            "prompt in chunks of 7, 24 decode steps past every sliding window, and two rows of unequal length. Real "
            "checkpoints were not run.",
            "",
            "- **verified**: every logit within 1e-4 of the original, relative to the largest, and the same greedy "
            "tokens. The number is the largest relative error. Where rows of unequal length alone are refused, the "
            "remark says so.",
            "- **refused**: the exporter says why, and writes nothing.",
            "- **not equal**: the exporter found that its graph does not match the source model, and wrote "
            "nothing (exit code 4).",
            "- **not tried**: no tiny checkpoint can be made.",
            "- An empty cell was not run.",
            "",
            *_section(_CAUSAL, causal, causal_types()),
            *_section(_MULTIMODAL, multimodal, multimodal_types()),
        ]
    )


def _section(head: Sequence[str], outcomes: Sequence[Outcome], types: Sequence[str]) -> list[str]:
    """Heading, totals and a row for each type, those of `types` that were not run among them."""
    by_type: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_type.setdefault(outcome.model_type, {})[outcome.attention] = outcome
    lowerings = [name for name in LOWERINGS if any(name in entry for entry in by_type.values())] or list(LOWERINGS)
    names = sorted({*by_type, *types})
    return [
        *(line.format(count=len(names)) for line in head),
        *_commits(outcomes),
        "",
        *_totals(outcomes, lowerings),
        "",
        f"| type | {' | '.join(lowerings)} | remarks |",
        f"|{'---|' * (len(lowerings) + 2)}",
        *(_row(name, by_type.get(name, {}), lowerings) for name in names),
        "",
    ]


def _commits(outcomes: Sequence[Outcome]) -> list[str]:
    """Which commits of Partita were run, where that is known, with the number of results of each."""
    counts = Counter(outcome.code for outcome in outcomes if outcome.code)
    if not counts:
        return []
    told = ", ".join(f"{code} ({count})" for code, count in counts.most_common())
    return [
        "",
        f"Commits of Partita that were run, with the number of results of each: {told}; `+` where its "
        "files had been changed.",
    ]


def _totals(outcomes: Sequence[Outcome], lowerings: Sequence[str]) -> list[str]:
    """A table of counts, one row per status that occurs."""
    counts = Counter((outcome.status, outcome.attention) for outcome in outcomes)
    statuses = list(dict.fromkeys(sorted((status for status, _ in counts), key=lambda name: name != "verified")))
    table = [f"| | {' | '.join(lowerings)} |", f"|{'---|' * (len(lowerings) + 1)}"]
    for status in statuses:
        cells = " | ".join(str(counts[status, name]) for name in lowerings)
        table.append(f"| {_NAMES.get(status, status)} | {cells} |")
    return table


def _row(model_type: str, entries: dict[str, Outcome], lowerings: Sequence[str]) -> str:
    """One type: a cell per lowering, then the reasons, each once with the lowerings it holds for."""
    cells = [_cell(entries.get(name)) for name in lowerings]
    remarks: dict[str, list[str]] = {}
    for name in lowerings:
        entry = entries.get(name)
        for text in (entry.reason, f"rows of unequal length: {entry.rows}" if entry.rows else "") if entry else ():
            if text:
                remarks.setdefault(_plain(text), []).append(name)
    said = [text if len(names) == len(entries) else f"{', '.join(names)}: {text}" for text, names in remarks.items()]
    original = next((entry.original for entry in entries.values() if entry.original), "")
    if original:
        said.append(f"transformers itself: {_plain(original)}")
    return f"| {model_type} | {' | '.join(cells)} | {'; '.join(said)} |"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.max_rel_error is not None and outcome.status == "verified":
        return f"verified {outcome.max_rel_error:.0e}"
    return _NAMES.get(outcome.status, outcome.status)


def _plain(text: str) -> str:
    """Text that cannot end a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
