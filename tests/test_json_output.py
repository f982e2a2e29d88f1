"""`--json` of every verb: what is printed obeys the schemas in docs/, errors included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from partita import errors
from partita.cli import run
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint

DOCS = REPOSITORY / "docs"
PROMPT = "return the value of"


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


def printed(capsys: pytest.CaptureFixture[str], schema: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """The one JSON object on stdout, which obeys its schema."""
    assert run([*map(str, arguments), "--json"]) == code, capsys.readouterr().err
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out)
    jsonschema.validate(found, json.loads((DOCS / f"{schema}.schema.json").read_text(encoding="utf-8")))
    return found


def test_generate_says_all_that_repeats_it(package, capsys):
    told = printed(capsys, "generate", "generate", package, PROMPT, "-n", 5, "-t", 0.5, "-e", "cpu", "--threads", 1)
    assert told["schema"] == "partita.generate/1" and told["package"] == str(package)
    assert [(each["provider"], each["status"]) for each in told["chain"]] == [("CPUExecutionProvider", "active")]
    assert told["chain_source"] == "given" and told["threads"] == 1
    assert told["load_seconds"] > 0 and told["tokenizer_load_seconds"] > 0 and told["prefill_chunk_tokens"] > 0
    options = told["options"]
    again = printed(
        capsys,
        "generate",
        "generate",
        package,
        PROMPT,
        "-n",
        options["max_new_tokens"],
        "-t",
        options["temperature"],
        "--seed",
        options["seed"],
        "-e",
        "cpu",
    )
    assert again["rows"] == told["rows"] and again["error"] is None


def test_verify_names_the_package_and_the_provider(package, capsys):
    told = printed(capsys, "verify", "verify", package, "--provider", "cpu")
    assert (told["schema"], told["package"], told["status"]) == ("partita.verify/1", str(package), "verified")
    assert told["provider"] == "CPUExecutionProvider" and told["steps"]


def test_a_report_and_what_is_made_of_it(package, tmp_path, capsys):
    report = tmp_path / "r.json"
    told = printed(capsys, "report", "place", package, "--provider", "cpu", "--report", report)
    node = told["phases"][0]["nodes"][0]["name"]
    assert printed(capsys, "diff", "report", "diff", report, report)["schema"] == "partita.diff/1"
    assert printed(capsys, "check", "report", "check", report, "--max-copies", 99)["schema"] == "partita.check/1"
    assert printed(capsys, "explain", "report", "explain", report, node)["schema"] == "partita.explanation/1"


def test_a_bench_obeys_its_schema(package, capsys):
    told = printed(capsys, "bench", "bench", package, "--provider", "cpu", "--rounds", 1, "-n", 2)
    assert told["schema"] == "partita.bench/1"


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
def test_an_error_is_json_as_well_and_the_line_on_stderr_is_the_same(
    package, capsys, tmp_path, monkeypatch, arguments, kind, code
):
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


def test_a_result_is_not_followed_by_an_error(package, tmp_path, capsys):
    report = tmp_path / "r.json"
    assert run(["place", str(package), "--provider", "cpu", "--report", str(report)]) == 0
    capsys.readouterr()
    arguments = ["report", "check", str(report), "--min-tokens-per-second", "1e12", "--json"]
    assert run(arguments) == 5
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == "partita.check/1" and err.startswith("partita: ")


def test_an_option_behind_two_dashes_is_a_prompt(package, capsys):
    assert run(["generate", str(package), "--provider", "cqu", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_bug_is_json_too(package, capsys, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("partita.commands.verify.open_folder", broken)
    assert run(["verify", str(package), "--provider", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "InternalError"
