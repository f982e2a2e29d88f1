"""Views of a report by name, and the commands and options that are short forms of a view."""

from __future__ import annotations

import json

import pytest

from partita import cli
from partita.errors import UsageError
from partita.partition_reports import storage
from partita.partition_reports.render.show import load_view
from tests.partition_reports.pages import mixed_report
from tests.partition_reports.test_narrow_terminals import made_bench


@pytest.fixture
def stored(tmp_path):
    storage.write(mixed_report(), tmp_path / "run.json")
    return tmp_path / "run.json"


def test_unknown_view_is_a_usage_error(stored, capsys):
    with pytest.raises(UsageError, match=r"unknown view 'pie'; choose from: .*json"):
        load_view("pie")
    assert cli.run(["report", "show", str(stored), "--view", "pie"]) == 2


@pytest.mark.parametrize(
    ("short", "view"),
    [
        (["show", "--json"], "json"),
        (["show", "--full"], "text"),
        (["markdown"], "markdown"),
        (["html", "--out", "-"], "html"),
        (["show"], "brief"),
    ],
)
def test_report_verbs_match_their_view(stored, capsys, short, view):
    verb, *options = short
    assert cli.run(["report", verb, str(stored), *options]) == 0
    printed = capsys.readouterr().out
    assert cli.run(["report", "show", str(stored), "--view", view]) == 0
    assert capsys.readouterr().out == printed


def test_conflicting_views_are_a_usage_error(stored, capsys):
    assert cli.run(["report", "show", str(stored), "--view", "html", "--full"]) == 2
    assert "--view and --full select different views" in capsys.readouterr().err
    assert cli.run(["report", "show", str(stored), "--view", "json", "--json"]) == 0


def test_bench_results_have_json_view_and_list_views(tmp_path, capsys):
    file = tmp_path / "bench.json"
    file.write_text(storage.to_json(made_bench()))
    assert cli.run(["report", "show", str(file), "--view", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "partita.bench/1"
    assert cli.run(["report", "show", str(file), "--view", "pie"]) == 2
    assert "unknown view 'pie'; choose from: brief, html, json, markdown, text" in capsys.readouterr().err
