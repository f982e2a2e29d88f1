"""Views are found by their file: one that is put into the folder is reachable from the command line as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partita import cli
from partita.errors import UsageError
from partita.partition_reports import storage
from partita.partition_reports.render.view import REPORT_VIEWS, load_view, view_names
from tests.conftest import REPOSITORY
from tests.copies import copy_of_partita
from tests.partition_reports.pages import mixed_report
from tests.partition_reports.test_narrow_terminals import made_bench
from tests.support.tables import answer, table

FOLDERS = (REPORT_VIEWS, "partita.bench.views")
PLANTED = '''"""How many nodes there are, in one line."""

from partita.partition_reports.render.view import View


def to_text(report):
    """The line."""
    return f"{sum(len(phase.nodes) for phase in report.phases)} nodes in all\\n"


VIEW = View("counted", ".txt", "how many nodes there are", to_text)
'''
NAMED = '''"""The schema of the record."""

from partita.partition_reports.render.view import View

VIEW = View("schema", ".txt", "which schema it has", lambda record: f"it is {record.schema_id}\\n")
'''
PRODUCTS = {
    "diff": (["report", "diff", "run.json", "run.json"], "partita.diff/1"),
    "explain": (["report", "explain", "run.json", "lm_head/MatMul"], "partita.explanation/1"),
    "check": (["report", "check", "run.json", "--max-copies", "99"], "partita.check/1"),
    "bench": (["report", "show", "bench.json"], "partita.bench/1"),
    "machine": (["providers"], "partita.providers/1"),
    "support": (["support", "Identity", "--provider", "cpu"], "partita.support/1"),
    "support/diff": (["support", "diff", "table.json", "table.json"], "partita.support-diff/1"),
}
"""Folder of other views than those of a report -> what shows its record, and the schema of that."""


@pytest.fixture
def stored(tmp_path):
    storage.write(mixed_report(), tmp_path / "run.json")
    return tmp_path / "run.json"


def planted(folder: Path) -> Path:
    """A copy of Partita, of links, with one more view."""
    copy = folder / "copy"
    shutil.copytree(
        REPOSITORY / "partita", copy / "partita", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    (copy / "partita" / "partition_reports" / "views" / "counted.py").write_text(PLANTED)
    return copy


def test_a_new_view_file_is_reachable_from_the_command_line_without_another_edit(stored, tmp_path):
    def told(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "partita", "report", "show", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    copy = planted(tmp_path)
    shown = told("run.json", "--view", "counted")
    nodes = sum(len(phase.nodes) for phase in mixed_report().phases)
    assert (shown.returncode, shown.stdout) == (0, f"{nodes} nodes in all\n"), shown.stderr
    assert "counted" in told("--help").stdout
    written = told("run.json", "--view", "counted", "--out", "counted.txt")
    assert written.returncode == 0 and "counted: counted.txt" in written.stderr
    assert (tmp_path / "counted.txt").read_text() == shown.stdout


def test_a_new_view_of_anything_else_is_one_file_too(stored, tmp_path):
    copy = copy_of_partita(tmp_path)
    for room in PRODUCTS:
        copy.add(f"partita/{room}/views/schema.py", NAMED)
    (tmp_path / "bench.json").write_text(storage.to_json(made_bench()))
    (tmp_path / "table.json").write_text(storage.to_json(table(answer("Cast", "taken", "T=tensor(float)"))))
    lines = {room: [*words, "--view", "schema"] for room, (words, _) in PRODUCTS.items()}
    written = [*lines["diff"], "--out", "diff.txt"]
    found = copy.ask(f"answer(written=told(*{written}), **{{room: told(*words) for room, words in {lines}.items()}})")
    assert found.pop("written")["code"] == 0
    assert (tmp_path / "diff.txt").read_text() == "it is partita.diff/1\n"
    for room, (_, schema) in PRODUCTS.items():
        assert (found[room]["code"], found[room]["out"]) == (0, f"it is {schema}\n"), found[room]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_view_keeps_the_contract(folder):
    record = mixed_report() if folder == REPORT_VIEWS else made_bench()
    assert {"brief", "html", "json", "text"} <= set(view_names(folder))
    for name in view_names(folder):
        view = load_view(name, folder)
        assert view.name == name
        assert view.suffix.startswith(".") and view.summary
        assert view.to_text(record).endswith("\n")


def test_an_unknown_view_is_a_usage_error(stored, capsys):
    with pytest.raises(UsageError, match=r"no view is called 'pie'; there are: .*json"):
        load_view("pie")
    assert cli.run(["report", "show", str(stored), "--view", "pie"]) == 2


@pytest.mark.parametrize(
    ("short", "view"),
    [
        (["show", "--json"], "json"),
        (["show", "--brief"], "brief"),
        (["markdown"], "markdown"),
        (["html", "--out", "-"], "html"),
        (["trace"], "trace"),
        (["show"], "text"),
    ],
)
def test_the_verbs_are_short_forms_of_a_view(stored, capsys, short, view):
    verb, *options = short
    assert cli.run(["report", verb, str(stored), *options]) == 0
    printed = capsys.readouterr().out
    assert cli.run(["report", "show", str(stored), "--view", view]) == 0
    assert capsys.readouterr().out == printed


def test_two_views_at_once_are_a_usage_error(stored, capsys):
    assert cli.run(["report", "show", str(stored), "--view", "html", "--brief"]) == 2
    assert "--view and --brief ask for different views" in capsys.readouterr().err
    assert cli.run(["report", "show", str(stored), "--view", "json", "--json"]) == 0


def test_a_bench_has_its_own_views(tmp_path, capsys):
    file = tmp_path / "bench.json"
    file.write_text(storage.to_json(made_bench()))
    assert cli.run(["report", "show", str(file), "--view", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "partita.bench/1"
    assert cli.run(["report", "show", str(file), "--view", "trace"]) == 1
    assert (
        "the result of a bench has no view 'trace'; it has brief, html, json, markdown, text" in capsys.readouterr().err
    )
