"""Reports built from recorded facts of real runs match the golden reports."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from partita.partition_reports.render.show import REPORT_VIEWS
from partita.partition_reports.sections.placement import layer_map
from tests.partition_reports.samples import top
from tests.recordings.runs import GOLDEN, NAMES, golden, report
from tests.views import print_text


@pytest.mark.parametrize("name", NAMES)
def test_report_of_recorded_facts_matches_golden_report(name: str) -> None:
    made = report(name)
    assert [check.name for check in made.checks if not check.passed] == []
    assert golden(made) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8"), "see tests/recordings/runs.py"


@pytest.mark.parametrize("name", NAMES)
def test_brief_view_at_60_columns_shows_verdict_and_labels(name: str) -> None:
    made, stream = report(name), io.StringIO()
    print_text(made, REPORT_VIEWS, Console(file=stream, width=60, color_system=None), "brief")
    lines = stream.getvalue().splitlines()
    labels = set(top(made)) & {"fallbacks", "remedy", "cost"}
    assert len(lines) <= 10 and lines[0].startswith(made.model_name)
    assert {label for label in labels if any(line.startswith(f"{label}: ") for line in lines)} == labels


@pytest.mark.parametrize("name", NAMES)
def test_every_table_sums_to_the_file_nodes(name: str) -> None:
    made = report(name)
    assert made.summary is not None
    for phase, summary in zip(made.phases, made.summary.phases, strict=True):
        file, added = summary.nodes, sum(node.added for node in phase.nodes)
        assert file == len(phase.placed)
        inner = {(e.node, e.provider) for e in made.fallbacks if e.phase == phase.name}
        inner -= {(node.name, node.provider) for node in phase.nodes}
        inner -= {(name, row.provider) for row in phase.placed for name in row.ran_as}
        assert sum(summary.reasons.values()) == summary.fallback_nodes + len(inner)
        assert sum(sum(entry.op_types.values()) for entry in phase.providers) == file
        for groups in (phase.providers, phase.by_op_type, phase.by_layer, phase.by_module):
            assert (sum(entry.nodes for entry in groups), sum(entry.added_nodes for entry in groups)) == (file, added)
        for shares in (phase.by_op_type, phase.by_layer, phase.by_module):
            assert sum(sum(entry.nodes_by_provider.values()) for entry in shares) == file
            on = sum(entry.nodes_by_provider.get(made.preferred, 0) for entry in shares)
            assert on == file - summary.fallback_nodes
    for at, phase in enumerate(made.used_phases):
        drawn = sum(len(cells[at].nodes) for _, cells in layer_map(made).rows)
        assert drawn == len(phase.placed) + phase.added_count


def test_golden_reports_match_the_recorded_runs() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(NAMES)
