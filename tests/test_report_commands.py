"""`partita report explain|diff|check|trace` as users meet them: exit codes, one line per mistake, nothing harmful."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from partita.cli import run
from partita.partition_reports import storage
from tests.partition_reports.report_changes import HARMFUL, HOSTILE, mixed, moved, renamed
from tests.partition_reports.samples import CPU, PACKAGE, recorded_facts, report_of
from tests.test_startup import run_and_tell

QUERY = "model.layers.0.self_attn.q_proj/MatMul"
REPORTS = {
    "mixed": mixed(),
    "moved": moved(QUERY),
    "cpu": report_of(recorded_facts(), package=PACKAGE.model_copy(update={"manifest_sha256": "cd" * 32})),
    "hostile": renamed(moved(QUERY), {QUERY: HOSTILE, "Memcpy": HOSTILE + "2"}),
    "tame": renamed(mixed(), {QUERY: HOSTILE}),
}
VERBS = [
    ["explain", "F", "Memcpy"],
    ["diff", "F", "mixed.json"],
    ["diff", "mixed.json", "F"],
    ["check", "F", "--max-copies", "9"],
    ["check", "mixed.json", "--baseline", "F"],
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a report of each kind, which is the working folder."""
    for name, report in REPORTS.items():
        storage.write(report, tmp_path / f"{name}.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def call(capsys, *arguments):
    """Exit code, stdout and stderr."""
    code = run(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_line(err):
    assert err.startswith("partita: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


# what is wrong with the file -> a word of the message
def damaged(folder: Path, how: str) -> Path:
    text = (folder / "mixed.json").read_text(encoding="utf-8")
    path = folder / f"{how}.json"
    if how == "cut":
        path.write_text(text[: len(text) // 2], encoding="utf-8")
    elif how == "newer":
        path.write_text(text.replace("partita.report/1", "partita.report/2"), encoding="utf-8")
    elif how == "field":
        path.write_text(text.replace('"position": 0', '"position": "first"', 1), encoding="utf-8")
    elif how == "null":
        return Path(os.devnull)
    elif how == "folder":
        return folder
    return path


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: "-".join(verb[:2]))
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "truncated"),
        ("newer", "use the version of Partita that wrote it"),
        ("field", "position"),
        ("null", "cannot read the report: a device"),
        ("folder", "cannot read the report"),
        ("missing", "no such file"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_1(folder, capsys, verb, how, words):
    bad = damaged(folder, how)
    code, out, err = call(capsys, *(bad if part == "F" else part for part in verb))
    assert (code, out) == (1, "")
    assert words in one_line(err) and str(bad) in err


def test_explain_shows_one_node(folder, capsys):
    code, out, _ = call(capsys, "explain", "moved.json", "q_proj")
    assert code == 0 and out.startswith(f"{QUERY}: MatMul on CPU, not on WebGpu: unexplained")


def test_explain_lists_several_and_ends_with_exit_code_2(folder, capsys):
    code, out, err = call(capsys, "explain", "mixed.json", "rotary_emb")
    assert code == 2 and "model.rotary_emb/Expand" in out and "matches 4 nodes" in one_line(err)
    code, out, err = call(capsys, "explain", "mixed.json", "rotary_emb", "--json")
    assert code == 2 and len(json.loads(out)["matches"]) == 4
    code, out, err = call(capsys, "explain", "mixed.json", "lm_haed/MatMul")
    assert (code, out) == (2, "") and "did you mean lm_head/MatMul?" in one_line(err)


def test_diff_has_exit_code_0_unless_asked_as_git_does(folder, capsys):
    code, out, err = call(capsys, "diff", "mixed.json", "moved.json")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == (
        "1 node moved from WebGpu to CPU in prefill and decode; onnxruntime 1.31.1 -> 1.40.0"
    )
    assert call(capsys, "diff", "mixed.json", "moved.json", "--exit-code")[0] == 1
    assert call(capsys, "diff", "mixed.json", "mixed.json", "--exit-code")[0] == 0


def test_diff_of_unrelated_models_is_an_error_unless_forced(folder, capsys):
    code, out, err = call(capsys, "diff", "cpu.json", "mixed.json")
    assert (code, out) == (1, "") and "of different models; add --force to compare them" in one_line(err)
    code, out, err = call(capsys, "diff", "cpu.json", "mixed.json", "--force")
    assert (code, err) == (0, "") and out.startswith("not comparable: ")


def test_check_passes_with_one_line_that_says_what_was_checked(folder, capsys):
    code, out, err = call(
        capsys, "check", "mixed.json", "--max-cpu-nodes", "4", "--require", "provider=webgpu,share>=60%"
    )
    assert (code, err) == (0, "")
    assert out == (
        "mixed.json: 2 checks passed: --max-cpu-nodes 4 (4 nodes on CPUExecutionProvider in decode); "
        "--require provider=webgpu,share>=60% (share 0.6667 in prefill and decode)\n"
    )


def test_check_ends_with_exit_code_5_and_a_line_for_each_failure(folder, capsys):
    code, out, err = call(
        capsys, "check", "moved.json", "--baseline", "mixed.json", "--max-copies", "9", "--max-cpu-nodes", "4"
    )
    assert code == 5
    lines = out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["FAILED --max-cpu-nodes 4", *["FAILED --baseline"] * 2]
    assert f"5 nodes on {CPU}" in lines[0] and QUERY in lines[1]
    assert "3 of 9 checks failed" in one_line(err)


@pytest.mark.parametrize("words", [["diff", "-", "-"], ["check", "-", "--baseline", "-"]], ids=" ".join)
def test_only_one_of_two_reports_comes_from_stdin(folder, capsys, words):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "") and "both reports are read from stdin" in one_line(err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to check"),
        (["--max-copies", "-1"], "must be 0 or more"),
        (["--min-tokens-per-second", "nan"], "must be a number"),
        (["--max-slowdown", "0.1"], "needs --baseline"),
        (["--max-drift", "0.1"], "--max-drift is for results of `partita drift --json`"),
        (["--max-unexplained", "-2"], "must be 0 or more"),
        (["--require", "providr=webgpu,share>=1"], "did you mean 'provider'"),
        (["--require", "provider=webpgu,share>=1"], "did you mean 'webgpu'"),
        (["--require", "provider=gpu,share>=1"], "did you mean 'cuda' or 'webgpu'? known providers: "),
        (["--require", ""], "is not FIELD OP VALUE"),
    ],
)
def test_a_check_that_makes_no_sense_is_exit_code_2(folder, capsys, arguments, words):
    code, out, err = call(capsys, "check", "mixed.json", *arguments)
    assert (code, out) == (2, "") and words in one_line(err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "hostile.json", HOSTILE],
        ["explain", "hostile.json", "evil"],
        ["diff", "tame.json", "hostile.json"],
        ["check", "hostile.json", "--baseline", "tame.json"],
        ["check", "hostile.json", "--max-cpu-nodes", "0", "--require", "provider=cpu,nodes=0"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_hostile_names_reach_neither_terminal_nor_log(folder, capsys, arguments):
    for more in ([], ["--json"]):
        _, out, err = call(capsys, *arguments, *more)
        assert out and not HARMFUL & set(out + err), ascii(out + err)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: "-".join(verb[:2]))
def test_no_verb_loads_what_it_does_not_need(folder, verb):
    code, loaded, _ = run_and_tell("report", *("mixed.json" if part == "F" else part for part in verb), cwd=folder)
    assert (code, loaded) == (0, [])
