"""A file of prompts to a file of answers, through a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.library.batches.filing import FileAnswers, check_unchanged, identity, is_finished, rows_of
from partita.library.batches.journal import Journal, journal_path
from partita.library.batches.reading import InputFile, look_at
from partita.library.batches.rows import told_unread
from partita.library.batches.writing import write_answers
from partita.library.cluster.options import ClusterOptions
from partita.library.cluster.records import ClusterReport
from partita.library.cluster.running import ClusterRun
from partita.library.cluster.worker import Setup
from partita.package import Manifest


@dataclass(frozen=True, slots=True)
class FiledByCluster:
    """What became of a file of prompts, and who did it."""

    filed: FileAnswers
    report: ClusterReport


def answer_file(
    source: Path,
    output: Path,
    options: ClusterOptions,
    setup: Setup,
    manifest: Manifest,
    *,
    told: dict[str, Any],
    heard: Callable[[ClusterRun, InputFile], object],
    noted: Callable[[str], object] = lambda _: None,
) -> FiledByCluster:
    """Answer every row of `source` into `output`, or those that an earlier run has left, wherever that one ran.

    `told`: the options that tell this run from another, as JSON has them. `heard` is called with every block, `noted`
    with what is worth knowing before. Raises what `ClusterRun.go` does, and UsageError, GenerationError,
    InstallationError for the files.
    """
    looked = look_at(source)
    seed, place = setup.defaults.base_seed, output.absolute()
    with Journal(journal_path(output), identity(looked, setup.contents, told), seed, looked.rows) as journal:
        finished = is_finished(output, place, journal)
        began = time.perf_counter()
        run = ClusterRun(
            options,
            replace(setup, defaults=replace(setup.defaults, base_seed=journal.seed), form=looked.format),
            manifest.graph.batch_size,
            journal,
            looked.rows,
            lambda at: heard(at, looked),
            noted,
        )
        report = run.go(rows_of(looked, journal.path))
        journal.sync()
        check_unchanged(looked, journal.path)
        if not finished:
            write_answers(place, journal.answers())
        journal.remove()
        filed = FileAnswers(
            output,
            len(journal),
            journal.errors,
            journal.resumed,
            run.prompt_tokens,
            run.tokens,
            time.perf_counter() - began,
            told_unread(run.unread),
            journal.seed,
        )
        return FiledByCluster(filed, report)
