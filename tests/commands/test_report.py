"""`partita report explain|diff|check` on the command line, and the `--json` schemas of every command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from partita import errors
from partita.cli import run
from partita.partition_reports import storage
from tests.commands.test_command_line import loaded_by
from tests.conftest import REPOSITORY
from tests.partition_reports.report_changes import HARMFUL, HOSTILE, mixed, moved, renamed
from tests.partition_reports.samples import CPU, PACKAGE, recorded_facts, report_of

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


def damaged(folder: Path, how: str) -> Path:
    text = (folder / "mixed.json").read_text(encoding="utf-8")
    contents = {
        "cut": text[: len(text) // 2],
        "newer": text.replace("partita.report/1", "partita.report/2"),
        "field": text.replace('"position": 0', '"position": "first"', 1),
    }
    path = {"null": Path(os.devnull), "folder": folder}.get(how, folder / f"{how}.json")
    if how in contents:
        path.write_text(contents[how], encoding="utf-8")
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
def test_unreadable_report_exits_1_with_single_line(folder, capsys, verb, how, words):
    bad = damaged(folder, how)
    code, out, err = call(capsys, *(bad if part == "F" else part for part in verb))
    assert (code, out) == (1, "")
    assert words in one_line(err) and str(bad) in err


def test_explain_shows_one_node(folder, capsys):
    code, out, _ = call(capsys, "explain", "moved.json", "q_proj")
    assert code == 0 and out.startswith(f"{QUERY}: MatMul on CPU, not on WebGpu: unexplained")


def test_explain_lists_ambiguous_matches_and_exits_2(folder, capsys):
    code, out, err = call(capsys, "explain", "mixed.json", "rotary_emb")
    assert code == 2 and "model.rotary_emb/Expand" in out and "matches 4 nodes" in one_line(err)
    code, out, err = call(capsys, "explain", "mixed.json", "rotary_emb", "--json")
    assert code == 2 and len(json.loads(out)["matches"]) == 4
    code, out, err = call(capsys, "explain", "mixed.json", "lm_haed/MatMul")
    assert (code, out) == (2, "") and "did you mean lm_head/MatMul?" in one_line(err)


def test_diff_exits_1_for_differences_only_with_exit_code_option(folder, capsys):
    code, out, err = call(capsys, "diff", "mixed.json", "moved.json")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == (
        "1 node moved from WebGpu to CPU in prefill and decode; onnxruntime 1.31.1 -> 1.40.0"
    )
    assert call(capsys, "diff", "mixed.json", "moved.json", "--exit-code")[0] == 1
    assert call(capsys, "diff", "mixed.json", "mixed.json", "--exit-code")[0] == 0


def test_diff_of_unrelated_models_requires_force(folder, capsys):
    code, out, err = call(capsys, "diff", "cpu.json", "mixed.json")
    assert (code, out) == (1, "") and "of different models; add --force to compare them" in one_line(err)
    code, out, err = call(capsys, "diff", "cpu.json", "mixed.json", "--force")
    assert (code, err) == (0, "") and out.startswith("not comparable: ")


@pytest.mark.parametrize(("suffix", "begins"), [("html", "<!DOCTYPE html>"), ("json", "{"), ("md", "#"), ("txt", "")])
def test_suffix_of_out_chooses_the_view(folder, capsys, suffix, begins):
    for words in (["show", "mixed.json"], ["diff", "mixed.json", "moved.json"]):
        assert call(capsys, *words, "--out", f"page.{suffix}")[0] == 0
        written = (folder / f"page.{suffix}").read_text(encoding="utf-8")
        assert written.startswith(begins) and (suffix != "txt" or not written.startswith(("<", "{", "#")))
    assert call(capsys, "show", "mixed.json", "--out", "page.html", "--view", "text")[0] == 0
    assert not (folder / "page.html").read_text(encoding="utf-8").startswith("<")


def test_passing_check_prints_line_with_checked_values(folder, capsys):
    code, out, err = call(
        capsys, "check", "mixed.json", "--max-cpu-nodes", "4", "--require", "provider=webgpu,share>=60%"
    )
    assert (code, err) == (0, "")
    assert out == (
        "mixed.json: 2 checks passed: --max-cpu-nodes 4 (4 nodes on CPUExecutionProvider in prefill and decode); "
        "--require provider=webgpu,share>=60% (share 0.6667 in prefill and decode)\n"
    )


def test_failing_check_exits_5_and_lists_each_failure(folder, capsys):
    code, out, err = call(
        capsys, "check", "moved.json", "--baseline", "mixed.json", "--max-copies", "9", "--max-cpu-nodes", "4"
    )
    assert code == 5
    lines = out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["FAILED --max-cpu-nodes 4", *["FAILED --baseline"] * 2]
    assert f"5 nodes on {CPU}" in lines[0] and QUERY in lines[1]
    assert "3 of 9 checks failed" in one_line(err)


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
def test_hostile_node_names_are_escaped_in_output(folder, capsys, arguments):
    for more in ([], ["--json"]):
        _, out, err = call(capsys, *arguments, *more)
        assert out and not HARMFUL & set(out + err), ascii(out + err)


def test_report_commands_import_no_heavy_library(folder):
    lines = [" ".join(["report", *verb]).replace(" F", " mixed.json") for verb in VERBS]
    assert {(code, *loaded) for code, _, loaded in loaded_by(lines, folder).values()} == {(0,)}


# `--json` of every verb obeys the schemas in docs/, errors included


DOCS = REPOSITORY / "docs"
PROMPT = "return the value of"


def printed(capsys: pytest.CaptureFixture[str], schema: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """The one JSON object on stdout, which obeys its schema."""
    assert run([*map(str, arguments), "--json"]) == code, capsys.readouterr().err
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out)
    jsonschema.validate(found, json.loads((DOCS / f"{schema}.schema.json").read_text(encoding="utf-8")))
    return found


def test_generate_json_has_chain_times_and_options(package, capsys):
    told = printed(capsys, "generate", "generate", package, PROMPT, "-n", 5, "-t", 0.5, "-e", "cpu", "--threads", 1)
    assert told["schema"] == "partita.generate/1" and told["package"] == str(package)
    assert [(each["provider"], each["status"]) for each in told["chain"]] == [("CPUExecutionProvider", "active")]
    assert told["chain_source"] == "given" and told["threads"] == 1
    assert told["load_seconds"] > 0 and told["tokenizer_load_seconds"] > 0 and told["prefill_chunk_tokens"] > 0
    assert told["options"]["seed"] is not None and told["error"] is None


def test_report_diff_check_and_explain_json_match_schemas(package, tmp_path, capsys):
    report = tmp_path / "r.json"
    told = printed(capsys, "report", "place", package, "--provider", "cpu", "--report", report)
    node = told["phases"][0]["nodes"][0]["name"]
    assert printed(capsys, "diff", "report", "diff", report, report)["schema"] == "partita.diff/1"
    assert printed(capsys, "check", "report", "check", report, "--max-copies", 99)["schema"] == "partita.check/1"
    assert printed(capsys, "explain", "report", "explain", report, node)["schema"] == "partita.explanation/1"


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["generate", "absent", "hi", "--provider", "cpu"], "CheckpointError", 1),
        (["verify", "absent", "--provider", "cpu"], "PackageError", 1),
        (["export", "absent", "out"], "CheckpointError", 1),
        (["place", "absent.onnx", "--provider", "cpu"], "PackageError", 1),
        (["bench", "absent", "--provider", "cpu"], "CheckpointError", 1),
        (["report", "show", "absent.json"], "ReportError", 1),
        (["generate", "PACKAGE", "hi", "--provider", "cqu"], "UsageError", 2),
        (["generate", "PACKAGE", "hi", "--top-p", "9"], "UsageError", 2),
        (["generate", "PACKAGE", "hi", "--threads", "many"], "UsageError", 2),
        (["generate", "PACKAGE", "hi", "--provder", "cpu"], "UsageError", 2),
        (["generate", "PACKAGE", "x y z " * 40, "--provider", "cpu"], "GenerationError", 1),
        (["generate", "PACKAGE", "hi", "--provider", "coreml"], "ProviderError", 3),
        (["providers", "--provider-library", "x"], "UsageError", 2),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_errors_are_json_with_unchanged_stderr_line(package, capsys, tmp_path, monkeypatch, arguments, kind, code):
    monkeypatch.chdir(tmp_path)
    arguments = [argument.replace("PACKAGE", str(package)) for argument in arguments]
    assert run(arguments) == code
    plain = capsys.readouterr()
    assert plain.out == ""
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == plain.err
    told = json.loads(out)
    jsonschema.validate(told, json.loads((DOCS / "error.schema.json").read_text(encoding="utf-8")))
    error = told["error"]
    assert (told["schema"], error["kind"], error["exit_code"]) == ("partita.error/1", kind, code)
    assert f"partita: {error['message']}" == err.splitlines()[0]
    assert error["remedy"] is None or error["message"].endswith(error["remedy"])
    assert (error["remedies"] == []) == (error["remedy"] is None)
    assert all(each["text"] in error["message"] for each in error["remedies"])
    assert getattr(errors, kind).exit_code == code


def test_failed_check_prints_result_json_without_error_json(package, tmp_path, capsys):
    report = tmp_path / "r.json"
    assert run(["place", str(package), "--provider", "cpu", "--report", str(report)]) == 0
    capsys.readouterr()
    arguments = ["report", "check", str(report), "--min-tokens-per-second", "1e12", "--json"]
    assert run(arguments) == 5
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == "partita.check/1" and err.startswith("partita: ")


def test_error_that_quotes_invalid_utf_8_is_json(capsys):
    assert run(["generate", "x", "--\udcff", "--json"]) == 2
    assert "\\udcff" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_option_after_double_dash_is_not_parsed(package, capsys):
    assert run(["generate", str(package), "--provider", "cqu", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_internal_error_is_json(package, capsys, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("partita.commands.verify.open_folder", broken)
    assert run(["verify", str(package), "--provider", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "InternalError"
