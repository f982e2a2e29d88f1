"""`report show --view model-explorer`: node data for Model Explorer, and its page with them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from partita import cli
from partita.partition_reports import storage
from partita.partition_reports.records import Report
from partita.partition_reports.sections.report import FALLBACK, FOLDED, PREFERRED, UNKNOWN
from partita.partition_reports.sections.report import node_data as to_text
from tests.conftest import require
from tests.partition_reports.chromium import chromium, find_chromium
from tests.partition_reports.pages import cpu_report, refused_report
from tests.partition_reports.report_changes import mixed

SERVER = Path(__file__).with_name("serve_model_explorer.py")
BROWSER_OPTIONS = ("--enable-unsafe-swiftshader", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
"""The page draws with WebGL, and would send statistics."""
TABLE = """
(async () => {
  for (let round = 0; round < 3000; round++) {
    const rows = [...document.querySelectorAll("table.results tr:has(td)")];
    if (rows.length) return rows.map(row => {
      const value = row.querySelector(".value-col");
      return [row.querySelector(".node-label").innerText.trim(), value.innerText.trim(), value.style.backgroundColor];
    });
    await new Promise(resolve => setTimeout(resolve, 10));
  }
  throw new Error(document.body.innerText);
})()
"""
"""The table of node data, with 50 rows: operator, label and background colour; the label is `-` where there is none."""


def test_report_without_phases_is_an_error(tmp_path, capsys):
    storage.write(refused_report().model_copy(update={"phases": ()}), tmp_path / "run.json")
    assert cli.run(["report", "show", str(tmp_path / "run.json"), "--view", "model-explorer"]) == 1
    assert "has no placement of nodes" in capsys.readouterr().err


def with_four_placements(report: Report) -> Report:
    """The report as if nodes had been folded, were ambiguous, or ran on another provider."""
    fallback = mixed().fallbacks[0]
    *earlier, last = report.phases
    folded, ambiguous, moved, *others = last.file_nodes
    nodes = (
        folded.model_copy(update={"state": "folded", "provider": None, "ran_as": ()}),
        ambiguous.model_copy(update={"state": "ambiguous"}),
        moved.model_copy(update={"provider": "WebGpuExecutionProvider"}),
        *others,
    )
    fallbacks = (fallback.model_copy(update={"node": moved.name, "phase": last.name}),)
    phases = (*earlier, last.model_copy(update={"file_nodes": nodes}))
    return report.model_copy(update={"phases": phases, "fallbacks": fallbacks})


def expected(report: Report) -> list[tuple[str, str]]:
    """Label and colour of every file node."""
    kinds = {"folded": ("folded", FOLDED), "ambiguous": ("unknown", UNKNOWN), "executed": ("CPU", PREFERRED)}
    others = [kinds[node.state] for node in report.phases[-1].file_nodes[3:]]
    fallback = (f"WebGpu: {report.fallbacks[0].reason}", FALLBACK)
    return [("folded", FOLDED), ("unknown", UNKNOWN), fallback, *others]


def test_fallback_folded_and_ambiguous_nodes_have_own_labels():
    report = with_four_placements(cpu_report())
    results = json.loads(to_text(report))["results"]
    assert [*results] == [node.name for node in report.phases[-1].file_nodes]
    assert [tuple(result.values()) for result in results.values()] == expected(report)


@contextmanager
def served(python: Path, model: Path, node_data: Path) -> Iterator[str]:
    """The address of Model Explorer's page with both files."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nowhere = {"https_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}  # it would look for newer versions
    command = [str(python), "-u", str(SERVER), str(model), str(node_data), str(port)]
    process = subprocess.Popen(
        command, env={**os.environ, **nowhere}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("http://"):
                yield line.strip()
                return
        raise AssertionError("Model Explorer has ended:\n" + "".join(lines))
    finally:
        process.kill()
        process.communicate()


def test_page_shows_label_and_colour_of_every_node(
    package: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its server, its ONNX adapter and its page read the node data."""
    environment = request.config.rootpath / request.config.getoption("--venvs") / "model-explorer"
    require("environment model-explorer (make env-model-explorer)", (environment / ".installed").is_file())
    require("chromium", find_chromium() is not None)
    run, changed, node_data = tmp_path / "run.json", tmp_path / "changed.json", tmp_path / "node_data.json"
    assert cli.run(["place", str(package), "--provider", "cpu", "--report", str(run)]) == 0
    report = with_four_placements(storage.read(run))
    storage.write(report, changed)
    assert cli.run(["report", "show", str(changed), "--view", "model-explorer", "--out", str(node_data)]) == 0
    with (
        served(environment / "bin" / "python", package / "model.onnx", node_data) as address,
        chromium(tmp_path / "profile", *BROWSER_OPTIONS) as tab,
    ):
        tab.open(address, width=600, height=400)
        shown = [(operator.rpartition("::")[2], *rest) for operator, *rest in tab.run(TABLE) if rest[0] != "-"]
    operators = [node.op_type for node in report.phases[-1].file_nodes]
    rows = [
        (operator, label, f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})")
        for operator, (label, colour) in zip(operators, expected(report), strict=True)
    ]
    assert shown == rows
