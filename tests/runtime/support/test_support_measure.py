"""Reading what the child of a support table wrote, and whom a crash is laid to."""

from __future__ import annotations

import json

from partita.runtime.process.children import ChildOutcome
from partita.runtime.support.child import read_lines
from partita.runtime.support.measure import answered, blame, read_measured

CRASH = ChildOutcome(None, "start", ("Assertion failed",), "was killed by SIGABRT", 1.0)
PLAN = {
    "domain": "",
    "operator": "Cast",
    "since": 13,
    "until": 18,
    "kind": "types",
    "types": [["T1", "tensor(float)"]],
    "what": "",
    "factors": ["a"],
}


def lines_of(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return read_lines(path)


def test_a_crash_is_laid_to_the_only_variant_of_a_fresh_process(tmp_path):
    path = tmp_path / "answers"
    lines_of(path, {"plan": PLAN, "id": "x"})
    blame({"begun": ["x"], "fresh": True}, set(), CRASH, path)
    measured = read_measured(read_lines(path), 1.0, "", interrupted=False)
    assert [answer.outcome for answer in measured.answers] == ["crashed"]
    assert measured.crashes == 1
    assert "SIGABRT" in measured.answers[0].said and "Assertion failed" in measured.answers[0].said


def test_a_crash_of_the_cpu_provider_is_not_laid_to_the_one_that_is_asked(tmp_path):
    path = tmp_path / "answers"
    lines_of(path, {"plan": PLAN, "id": "x"})
    blame({"begun": ["x"], "fresh": True, "judge": True}, set(), CRASH, path)
    measured = read_measured(read_lines(path), 1.0, "", interrupted=False)
    assert [answer.outcome for answer in measured.answers] == ["invalid"]
    assert "on the CPU provider alone" in measured.answers[0].said


def test_nobody_is_blamed_among_several_or_after_others(tmp_path):
    path = tmp_path / "answers"
    lines_of(path, {"plan": PLAN, "id": "x"})
    blame({"begun": ["x", "y"], "fresh": True}, set(), CRASH, path)
    blame({"begun": ["x"], "fresh": False}, set(), CRASH, path)
    assert answered(read_lines(path)) == set()


def test_what_was_planned_and_not_answered_is_untried(tmp_path):
    path = tmp_path / "answers"
    lines = lines_of(
        path,
        {"opset": 26, "needs": []},
        {"without_example": ["Scale-1"]},
        {"plan": PLAN, "id": "x"},
        {"plan": {**PLAN, "since": 19}, "id": "y"},
        {"id": "x", "outcome": "taken", "said": ""},
        {"late": True},
        {"left_out": 5, "operator": ["", "Cast", 13]},
        {"done": True, "sessions": 4},
    )
    measured = read_measured(lines, 1.0, "", interrupted=False)
    assert [answer.outcome for answer in measured.answers] == ["taken", "untried"]
    assert (measured.complete, measured.sessions, measured.newest_opset) == (False, 4, 26)
    assert measured.without_example == ("Scale-1",)
    assert measured.beyond == ((("", "Cast", 13), 5),)


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    path = tmp_path / "answers"
    path.write_text('{"id": "x", "outcome": "taken"}\n{"id": "y", "outc', encoding="utf-8")
    assert answered(read_lines(path)) == {"x"}
