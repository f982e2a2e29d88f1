"""docs/models.md: which model types can be exported, from the results of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.export.breadth.records import LOWERINGS, VERSIONS, Outcome, Results

_NAMES = {"parity": "not equal", "no checkpoint": "not tried"}
"""Statuses that users read under another name."""


def page(results: Results) -> str:
    """The page as Markdown."""
    by_type: dict[str, dict[str, Outcome]] = {}
    for outcome in results.outcomes:
        by_type.setdefault(outcome.model_type, {})[outcome.attention] = outcome
    lowerings = [name for name in LOWERINGS if any(name in entry for entry in by_type.values())]
    versions = ", ".join(f"{name} {results.versions.get(name, 'unknown')}" for name in VERSIONS)
    rows = [_row(model_type, by_type[model_type], lowerings) for model_type in sorted(by_type)]
    return "\n".join(
        [
            "# Model types",
            "",
            f"Every causal language model type of transformers, {len(by_type)} of them, as `make breadth` found it on "
            f"{results.date} with {versions}. This page is written by that command.",
            "",
            "A tiny random checkpoint of each type was exported in float32 for 64 tokens by the code behind "
            "`partita export`, and run on the CPU provider beside the original model, which had eager attention and no "
            "cache: the prompt at once, the prompt in chunks of 7, 24 decode steps past every sliding window, and two "
            "rows of unequal length. Real checkpoints were not run.",
            "",
            *_totals(results.outcomes, lowerings),
            "",
            "- **verified**: every logit within 1e-4 of the original, relative to the largest, and the same greedy "
            "tokens. The number is the largest relative error. Where rows of unequal length alone are refused, the "
            "remark says so.",
            "- **refused**: the exporter says why, and writes nothing.",
            "- **not equal**: the exporter found that its graph does not compute what the model computes, and wrote "
            "nothing (exit code 4).",
            "- **not tried**: no tiny checkpoint can be made.",
            "",
            f"| type | {' | '.join(lowerings)} | remarks |",
            f"|{'---|' * (len(lowerings) + 2)}",
            *rows,
            "",
        ]
    )


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
