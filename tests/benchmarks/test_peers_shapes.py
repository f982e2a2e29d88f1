"""Which shapes are raced in which widths, and what there is to say where nobody takes part."""

from __future__ import annotations

import sys

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.shapes import DEFAULT_SHAPES, SHAPES


def test_all_widths_are_raced_somewhere_and_every_shape_in_some():
    widths = [SHAPES[name].widths for name in DEFAULT_SHAPES]
    assert all(widths) and {bits for each in widths for bits in each} == {32, 16, 8, 4}


def test_peers_that_have_no_form_in_a_width_are_told_so(monkeypatch, capsys, tmp_path):
    """One of them alone ended a run of hours with a traceback."""
    monkeypatch.setattr(command, "measured", lambda threads, provider: type("Machine", (), {"load_average": 0.0})())
    monkeypatch.setattr(command, "environments_missing", lambda entries, places: [])
    monkeypatch.setattr(
        sys, "argv", ["peers", "--shapes", "1b", "--peers", "optimum", "--work", str(tmp_path), "--wait", "0"]
    )
    assert command.main() == 2
    assert "no contender is left" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", DEFAULT_SHAPES)
def test_shapes_are_known_by_their_names(name):
    assert SHAPES[name].name == name
