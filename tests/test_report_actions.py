"""Suggested actions of a report: valid commands that resolve the reported problem."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from partita import cli
from partita.diagnosis.reasons import steps_of
from partita.diagnosis.records import VariantRecord
from partita.diagnosis.steps import CHECKPOINT, steps_for
from partita.partition_reports.records import Report
from partita.partition_reports.sections.fallbacks import actions_for, situation_of, top_actions
from partita.partition_reports.sections.model import Command
from partita.partition_reports.sections.report import remedies
from tests.foreign.conftest import SAMPLES
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.reports import REPORTS, recorded
from tests.partition_reports.samples import CPU


def with_package(report: Report, **changes: Any) -> Report:
    assert report.package is not None
    return report.model_copy(update={"package": report.package.model_copy(update=changes)})


def commands(report: Report, code: str = "no_kernel_op", **changes: Any) -> list[tuple[str, ...]]:
    """The commands for one reason, given the fallbacks of the report with changes."""
    entries = [entry.model_copy(update=changes) for entry in report.fallbacks]
    return [action.remedy.command for action in actions_for(report, code, entries[0].preferred_provider, entries)]


def test_command_paths_are_quoted_and_unknown_checkpoint_is_placeholder() -> None:
    report = with_package(mixed(), name="my 'model'", checkpoint="folder")
    first = commands(report)[0]
    assert first[2:] == (CHECKPOINT, "my 'model'-for-webgpu", "--target", "webgpu")
    line = next(line for line in remedies(report) if isinstance(line, Command))
    assert shlex.split(line.text) == list(line.arguments)
    hub = with_package(report, checkpoint="owner/name")
    assert commands(hub)[0][2] == "owner/name"


def trials(**outcomes: str) -> tuple[VariantRecord, ...]:
    """Experiments in which one thing was changed: factor, what took its place (after __), and the outcome."""
    parts = ((name.partition("__"), outcome) for name, outcome in outcomes.items())
    return tuple(
        VariantRecord.model_validate(
            {"factor": factor, "change": now, "outcome": outcome, "message": "", "cached": False, "after": now}
        )
        for (factor, _, now), outcome in parts
    )


def told(report: Report, code: str, *found: VariantRecord) -> dict[str, str]:
    """Title of each step for one reason, and its effect, after these experiments on every node."""
    entries = [entry.model_copy(update={"variants": found}) for entry in report.fallbacks]
    return {
        action.title: action.remedy.text for action in actions_for(report, code, entries[0].preferred_provider, entries)
    }


def test_action_shows_probe_outcome_and_is_omitted_if_rejected() -> None:
    report = with_package(mixed(), precision="fp32", target="")
    half = "Export in float16"
    assert "experiment" not in told(report, "no_kernel_type")[half]
    shown = told(report, "no_kernel_type", *trials(type__float16="supported"))[half]
    assert shown.endswith("in an experiment webgpu then supports the node")
    assert "experiment" not in told(report, "no_kernel_type", *trials(type__float64="supported"))[half]
    assert half not in told(report, "no_kernel_type", *trials(type__float16="rejected"))


def test_command_repeats_provider_options_and_dry_run_of_the_run() -> None:
    report = mixed()
    asked = {"webgpu.enableInt64": "0", "webgpu.preferredLayout": "NCHW", "temperature": "0"}
    report = report.model_copy(update={"request": report.request.model_copy(update={"options": asked})})
    found = trials(**{"option__webgpu.enableInt64=1": "supported"})
    (command,) = commands(report, "option_needed", variants=found)
    kept = ("--provider-option", "webgpu.preferredLayout=NCHW", "--provider-option", "webgpu.enableInt64=1")
    assert command[-4:] == kept and "webgpu.enableInt64=0" not in command
    assert commands(report, "option_needed") == [], "no experiment found one"
    played = recorded("cuda_dry_run")
    again = commands(played, "unexplained", missing_probes="the time was up")
    assert again and all("--dry-run" in words and "--device" in words for words in again if words[1] == "place")


def asked(report: Report, **options: str) -> Report:
    """The report of a run with these options."""
    given = {name.replace("_", "-"): value for name, value in options.items()}
    return report.model_copy(update={"request": report.request.model_copy(update={"options": given})})


def test_command_repeats_options_required_to_open_the_model() -> None:
    """ONNX file: sizes and inputs; foreign folder: variant, contract, length; both: libraries and pins."""
    libraries = 'WebGpuExecutionProvider="/my libs/ep.so" Other=/ep.so'
    brought = ("--provider-library", "WebGpuExecutionProvider=/my libs/ep.so", "--provider-library", "Other=/ep.so")
    file = asked(REPORTS["many inputs"](), shape="n=2 x=1,3", input='"y=/my files/y.npy"', provider_library=libraries)
    (probe,) = commands(file, "unexplained", missing_probes="the time was up")
    fed = ("--shape", "n=2", "--shape", "x=1,3", "--input", "y=/my files/y.npy")
    assert probe[5:] == (*brought, *fed, "--probe-seconds", "600", "--report", "again.json")
    package = with_package(mixed(), precision="fp32", target="")
    folder = asked(package, variant="q4", contract="my own.toml", max_length="64", pin="cpu:a cpu:b", shape="n=2")
    (placed,) = commands(folder, "unexplained", missing_probes="the time was up")
    assert placed[5:11] == ("--variant", "q4", "--contract", "my own.toml", "--max-length", "64")
    assert placed[11:15] == ("--pin", "cpu:a", "--pin", "cpu:b") and "--shape" not in placed
    (free,) = commands(folder, "pinned_by_user")
    assert free[5:] == placed[5:11], "the pins are what it leaves out"
    exports = commands(asked(package, provider_library=libraries))
    assert exports[0][4:] == ("--target", "webgpu", *brought[:2]), "export takes the library of its target alone"


@pytest.mark.parametrize("verb", ["place", "generate"])
def test_action_on_foreign_model_folder_runs(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(SAMPLES / "optimum", tmp_path / "my folder")
    words = ["--token-ids", "-n", "2"] if verb == "generate" else []
    given = [verb, str(folder), *(["5,6"] if words else []), *words, "--provider", "cpu", "--max-length", "32"]
    assert cli.run([*given, "--report", "report.json"]) == 0
    report = Report.model_validate_json(Path("report.json").read_text(encoding="utf-8"))
    (step,) = steps_for(situation_of(report), steps_of("unexplained"), CPU, unprobed=True)
    assert step.remedy.command[2:7] == (str(folder), "--provider", "cpu", "--max-length", "32")
    assert cli.run(list(step.remedy.command[1:])) == 0


def test_action_never_exports_package_with_its_current_options() -> None:
    report = mixed()
    assert [words[-2:] for words in commands(report)] == [("--target", "webgpu"), ("--attention", "primitives")]
    assert [words[-2:] for words in commands(with_package(report, target="webgpu"))] == [("--attention", "primitives")]
    assert commands(with_package(report, target="webgpu", attention="primitives")) == []
    assert [words[-1] for words in commands(with_package(report, target="webgpu"), "no_kernel_type")] == ["fp16"]
    half = commands(with_package(report, target="webgpu", precision="fp16"), "no_kernel_type")
    assert [words[-1] for words in half] == ["fp32"]


@pytest.mark.usefixtures("stand_ins")
def test_suggested_export_removes_fallbacks(tiny_checkpoint, exported, tmp_path, monkeypatch) -> None:
    """GroupQueryAttention has no float32 kernel on CUDA; the suggested package has no fallback."""
    checkpoint = tiny_checkpoint("llama")
    package = exported(checkpoint, attention="gqa")
    monkeypatch.chdir(tmp_path)

    def placed(path: Path) -> Report:
        words = ["place", str(path), "--provider", "cuda,cpu", "--dry-run", "--report", "now.json", "--json"]
        assert cli.run([*words, "--probe-seconds", "30"]) == 0
        return Report.model_validate(json.loads(Path("now.json").read_text(encoding="utf-8")))

    before = placed(package)
    assert {entry.op_type for entry in before.fallbacks} == {"GroupQueryAttention"}
    action = next(top_actions(before))
    words = [str(checkpoint) if word == CHECKPOINT else word for word in action.remedy.command]
    assert cli.run([*words[1:], "--max-length", "64"]) == 0
    assert placed(Path(words[3])).fallbacks == ()
