"""Text view: outcome first, hostile names escaped, colours, copyable commands; formats of numbers and names."""

from __future__ import annotations

import io
import re
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from partita.observations.text_format import clean, decimals, families, human_bytes, plural, tally
from partita.partition_reports.render.show import REPORT_VIEWS
from partita.partition_reports.sections.fallbacks import top_actions
from tests.partition_reports.reports import many_inputs
from tests.partition_reports.samples import (
    GPU_CHAIN,
    MIXED_PLAN,
    NO_GPU_CHAIN,
    PACKAGE,
    event,
    mixed_facts,
    recorded_facts,
    report_of,
    run_facts,
    session_facts,
    shown,
    windows,
)
from tests.views import print_text


def rendered(report, width=80, encoding="utf-8"):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_text(report, REPORT_VIEWS, Console(file=stream, width=width, force_terminal=False, color_system=None))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_cache_not_in_place_and_unverified_package_are_reported_at_the_top():
    facts = recorded_facts()
    moved = replace(facts.states[1], same_address=False, address_changes=2)
    package = PACKAGE.model_copy(update={"verification": "unverified", "verification_detail": "--no-verify"})
    out = rendered(report_of(replace(facts, states=(facts.states[0], moved, *facts.states[2:])), package=package))
    assert out.startswith("tiny: All nodes ran on CPU\n\n  unverified package: --no-verify\n")
    assert "cache: NOT in place: 1 of 4 states copied (64 KiB on Cpu)" in out
    assert "NOT in place: past_key_values.0.value" in out


def test_failed_checks_are_listed_individually():
    facts = mixed_facts(plan=((*(name for name, _, _ in MIXED_PLAN), "ghost"),))
    out = rendered(report_of(facts, GPU_CHAIN), 200)
    assert "3 of 6 checks passed" in out and "3 checks of this report failed" in out
    assert "FAILED model.onnx: every plan node was executed: 1 not executed: ghost" in out


HOSTILE = "[bold]a[/nope]\x1b[31m\x07\r\n\u202eevil\u2028é漢/Mul"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_hostile_names_are_escaped_on_the_terminal(encoding):
    names = (HOSTILE, "x" * 500)
    events = tuple(event(0, order, name, HOSTILE, HOSTILE) for order, name in enumerate(names))
    session = session_facts(plan=(names,), events=events, runs=windows("decode"), phases=("decode",), file=HOSTILE)
    facts = run_facts(session, notes=(HOSTILE,), finish_detail=HOSTILE)
    package = PACKAGE.model_copy(update={"name": HOSTILE})
    out = rendered(report_of(facts, package=package), encoding=encoding)
    assert not set(out) & set("\x1b\x07\r\u202e\u2028")
    assert "[bold]a[/nope]?[31m" in out


def test_numbers_names_and_counts_are_formatted():
    sizes = {None: "-", 0: "0 B", 1023: "1023 B", 1024: "1 KiB", 3 << 29: "1.5 GiB", 5 << 50: "5,120 TiB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
    values = {None: "-", 0: "0", 0.0123: "0.012", 1.5: "1.50", 12.34: "12.3", 2302.6: "2,303"}
    assert {value: decimals(value) for value in values} == values
    assert (plural(1, "node"), plural(2, "copy"), plural(1500, "node")) == ("1 node", "2 copies", "1,500 nodes")
    assert tally({"A": 1, "B": 3, "C": 2, "D": 1}, most=2) == "B 3, C 2, 2 more kinds 2"
    assert tally({"A": 1, "B": 3, "C": 2}, most=2) == "B 3, C 2, A 1"
    assert clean("a\tb\x00c") == "a?b?c"


def coloured(report, **settings):
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, color_system="standard", **settings)
    print_text(report, REPORT_VIEWS, console)
    return stream.getvalue()


ESCAPE = re.compile(r"\x1b\[([\d;]*)m")


def colours_of(line):
    return {code for found in ESCAPE.findall(line) for code in found.split(";")} & {"31", "32", "33", "36"}


@pytest.mark.parametrize(
    ("report", "colour"),
    [
        (report_of(recorded_facts()), "32"),
        (report_of(mixed_facts(), GPU_CHAIN), "33"),
        (report_of(recorded_facts(), NO_GPU_CHAIN), "31"),
    ],
    ids=["good", "warning", "bad"],
)
def test_terminal_verdict_is_coloured_and_text_is_unchanged(report, colour, monkeypatch):
    out = coloured(report)
    assert colours_of(out.splitlines()[0]) == {colour}
    assert ESCAPE.sub("", out) == rendered(report, 100) and "\x1b" not in rendered(report, 100)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not [line for line in coloured(report).splitlines() if colours_of(line)]


def test_commands_are_copyable_from_narrow_terminal():
    report = report_of(mixed_facts(), GPU_CHAIN)
    for width in (30, 80):
        lines = rendered(report, width).splitlines()
        first = next(n for n, line in enumerate(lines) if line.startswith("  $ "))
        whole = lines[first].removeprefix("  $ ")
        while whole.endswith("\\"):
            first += 1
            whole = whole[:-1] + lines[first]
        assert shlex.split(whole) == list(next(top_actions(report)).remedy.command)


def test_single_phase_report_omits_phase_name_run():
    for out in (rendered(many_inputs(), 200), shown(many_inputs(), "html")):
        assert not re.search(r"of run\b|in run\b|per run of", out)


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (["a.0/x", "a.1/x", "a.2/x", "a.3/x"], {"a.{0..3}/x": 4}),
        (["a.0/x", "a.2/x"], {"a.{0,2}/x": 2}),
        (["a.0/x", "a.2/x", "a.3/x", "a.9/x"], {"a.*/x": 4}),
        (["a.0/x_1", "a.1/x_2", "a.2/x_3", "b"], {"a.*/x_*": 3, "b": 1}),
        (["m.1/x", "m/1.x"], {"m.1/x": 1, "m/1.x": 1}),
        (["x", "x"], {"x": 1}),
        ([], {}),
    ],
)
def test_names_differing_only_in_numbers_are_grouped(names, together):
    assert {name: len(members) for name, members in families(names).items()} == together
