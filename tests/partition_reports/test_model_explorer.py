"""`report show --view model-explorer`: node data for Model Explorer."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from partita import cli
from partita.observations.text_format import short_provider
from partita.partition_reports import storage
from partita.partition_reports.outcome import preferred_of
from partita.partition_reports.sections.report import FALLBACK, FOLDED, PREFERRED, UNKNOWN
from partita.partition_reports.sections.report import node_data as to_text
from tests.partition_reports.pages import cpu_report, deep_report, mixed_report, refused_report

GRAPH_FIELDS = {
    "name": str,
    "results": dict,
    "showExpandedSummaryOnGroupNode": bool,
    "showLabelCountColumnsInChildrenStatsTable": bool,
}
"""The fields of GraphNodeData that are written, of node_data_builder.py in ai-edge-model-explorer 0.1.34. A file with
`results` is data of one graph; other files are read as graph id -> data."""
COLOUR = re.compile("#[0-9a-f]{6}")


@pytest.mark.parametrize("made", [mixed_report, cpu_report, deep_report])
def test_every_file_node_has_label_and_colour_by_placement(made):
    report = made()
    data = json.loads(to_text(report))
    phase = report.phases[-1]
    assert {name: type(value) for name, value in data.items()} == GRAPH_FIELDS
    assert list(data["results"]) == [node.name for node in phase.file_nodes]
    for node in phase.file_nodes:
        result = data["results"][node.name]
        assert set(result) == {"value", "bgColor"} and COLOUR.fullmatch(result["bgColor"]) and result["value"]
        blue = result["bgColor"] == PREFERRED
        assert blue == (node.state == "executed" and node.provider == preferred_of(report)), node
    for provider, count in Counter(node.provider for node in phase.file_nodes if node.state == "executed").items():
        labels = [result["value"].partition(":")[0] for result in data["results"].values()]
        assert labels.count(short_provider(provider)) == count


def test_fallback_folded_and_ambiguous_nodes_have_own_labels():
    report = mixed_report()
    *earlier, last = report.phases
    fallback = next(each for each in report.fallbacks if each.phase == last.name)
    first, second, *others = [node for node in last.file_nodes if node.name != fallback.node]
    changed = (
        first.model_copy(update={"state": "folded", "provider": None, "ran_as": ()}),
        second.model_copy(update={"state": "ambiguous"}),
        *others,
        *(node for node in last.file_nodes if node.name == fallback.node),
    )
    phases = (*earlier, last.model_copy(update={"file_nodes": changed}))
    results = json.loads(to_text(report.model_copy(update={"phases": phases})))["results"]
    assert results[first.name] == {"value": "folded", "bgColor": FOLDED}
    assert results[second.name] == {"value": "unknown", "bgColor": UNKNOWN}
    shown = results[fallback.node]
    assert shown == {"value": f"{short_provider(fallback.provider)}: {fallback.reason}", "bgColor": FALLBACK}


def test_report_without_phases_is_an_error(tmp_path, capsys):
    storage.write(refused_report().model_copy(update={"phases": ()}), tmp_path / "run.json")
    assert cli.run(["report", "show", str(tmp_path / "run.json"), "--view", "model-explorer"]) == 1
    assert "has no placement of nodes" in capsys.readouterr().err
