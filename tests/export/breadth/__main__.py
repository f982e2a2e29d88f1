"""`python -m tests.export.breadth [TYPES…]`: what comes of exporting every model type of transformers.

Prints a line per type and lowering. `--json` keeps the results, `--docs` writes the page from them. `--read` takes the
results of an earlier run; types that are named with it are run anew and replace theirs. `--check` fails when the
results are not what a full run has to show.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import partita
from tests.export.breadth.page import page
from tests.export.breadth.records import LOWERINGS, VERSIONS, Outcome, Results, all_types, complaints
from tests.export.breadth.running import LIMIT_SECONDS, run

_WHEELS = ("onnxruntime-gpu", "onnxruntime")
"""Distributions that the module onnxruntime may come in."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.export.breadth")
    parser.add_argument("types", nargs="*", help="model types; all of them when none is given")
    parser.add_argument("--attention", action="append", choices=LOWERINGS, help="a lowering, repeatable; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="types at a time")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for one type and lowering")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--read", type=Path, help="earlier results; only the types that are named are run anew")
    parser.add_argument("--missing", action="store_true", help="go on with --read: run the types that it has not")
    parser.add_argument("--docs", type=Path, help="write the page there")
    parser.add_argument("--check", action="store_true", help="fail when the results are not what they have to be")
    chosen = parser.parse_args(given)
    if chosen.missing:
        if chosen.read is None or chosen.types:
            parser.error("--missing goes with --read, and names the types itself")
        known = {outcome.model_type for outcome in Results.read(chosen.read).outcomes}
        chosen.types = [name for name in all_types() if name not in known]
    unknown = sorted(set(chosen.types) - set(all_types()))
    if unknown:
        parser.error(f"no types of this transformers that could be exported: {', '.join(unknown)}")
    return chosen


def versions() -> dict[str, str]:
    """Versions that decide what comes out."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    installed["onnxruntime"] = next((installed[name] for name in _WHEELS if name in installed), "unknown")
    return {name: installed[name] for name in VERSIONS if name in installed} | {"partita": partita.__version__}


def code() -> str:
    """The commit that is run, with `+` where files were changed since, and the version of transformers."""
    git = ("git", "-C", str(Path(__file__).parent))
    commit = subprocess.run([*git, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    changes = "+" if changed.stdout.strip() else ""
    return f"{commit.stdout.strip()}{changes} with transformers {versions().get('transformers', 'unknown')}"


def line(entry: Outcome) -> str:
    """A type and lowering with its status, and error or reason."""
    error = "" if entry.max_rel_error is None else f" {entry.max_rel_error:.1e}"
    reasons = " ".join(f"({text[:150]})" for text in (entry.reason, entry.rows) if text)
    return f"{entry.model_type} {entry.attention} {entry.status}{error} {reasons} {entry.seconds:.0f}s\n"


def main(given: Sequence[str] | None = None) -> int:
    """Run or read, print, write; 1 when `--check` finds something."""
    chosen = arguments(given)
    earlier = Results.read(chosen.read) if chosen.read else None
    results = earlier if earlier and not chosen.types else _run(chosen, earlier.outcomes if earlier else ())
    counts = Counter((entry.attention, entry.status) for entry in results.outcomes)
    for (attention, status), count in sorted(counts.items()):
        sys.stdout.write(f"{attention} {status}: {count}\n")
    if chosen.docs:
        chosen.docs.write_text(page(results), encoding="utf-8")
    found = complaints(results.outcomes) if chosen.check else []
    for line in found:
        sys.stderr.write(f"{line}\n")
    return 1 if found else 0


def _run(chosen: argparse.Namespace, earlier: Sequence[Outcome]) -> Results:
    """Run, printing as the types end. Results so far are kept in `--json` all along: a full run takes hours."""
    outcomes = {(entry.model_type, entry.attention): entry for entry in earlier}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lowerings, commit = chosen.attention or list(LOWERINGS), code()

    def kept() -> Results:
        ordered = sorted(outcomes.values(), key=lambda entry: (entry.model_type, LOWERINGS.index(entry.attention)))
        results = Results(versions(), today, tuple(ordered))
        if chosen.json:
            results.write(chosen.json)
        return results

    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("PARTITA_CACHE_DIR", cache)
        ended = run(chosen.types or all_types(), lowerings, jobs=chosen.jobs, limit_seconds=chosen.limit)
        for entry in ended:
            outcomes[entry.model_type, entry.attention] = replace(entry, code=commit)
            sys.stdout.write(line(entry))
            sys.stdout.flush()
            kept()
    return kept()


if __name__ == "__main__":
    sys.exit(main())
