"""Placement as node data for Google's Model Explorer, which shows it on the graph of the ONNX file.

Format: node_data_builder.py of ai-edge-model-explorer 0.1.34, one `GraphNodeData`. Keys are node names, which
model-explorer-onnx uses as node ids. It gives output tensors no `tensor_name`, so keys by tensor would match no node.
"""

from __future__ import annotations

import json

from partita.errors import ReportError
from partita.observations.text_format import short_provider
from partita.partition_reports.outcome import preferred_of
from partita.partition_reports.records import FileNode, Report
from partita.partition_reports.render.show import View

PREFERRED, FALLBACK, FOLDED, UNKNOWN = "#8ab4f8", "#f9ab00", "#dadce0", "#c58af9"
"""Background colours; the text colour is chosen by Model Explorer."""


def to_text(report: Report) -> str:
    """Node data of the last phase: decode, or the run of a model. Raises ReportError for a report without phases."""
    if not report.phases:
        raise ReportError("the report has no placement of nodes, so it has no node data")
    phase, preferred = report.phases[-1], preferred_of(report)
    reasons = {each.node: each.reason for each in report.fallbacks if each.phase == phase.name}
    data = {
        "name": f"{phase.file}: provider in {phase.name}",
        "results": {node.name: _result(node, preferred, reasons.get(node.name)) for node in phase.file_nodes},
        "showExpandedSummaryOnGroupNode": True,
        "showLabelCountColumnsInChildrenStatsTable": True,
    }
    return json.dumps(data, indent=1) + "\n"


def _result(node: FileNode, preferred: str | None, reason: str | None) -> dict[str, str]:
    """Label and colour of one node."""
    if node.state == "folded":
        return {"value": "folded", "bgColor": FOLDED}
    if node.provider is None or node.state == "ambiguous":
        return {"value": "unknown", "bgColor": UNKNOWN}
    name = short_provider(node.provider)
    if node.provider == preferred:
        return {"value": name, "bgColor": PREFERRED}
    return {"value": f"{name}: {reason}" if reason else name, "bgColor": FALLBACK}


VIEW = View("model-explorer", ".json", to_text, file_kind="node data")
