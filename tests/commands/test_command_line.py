"""The command line itself: help, aliases, unknown options and empty paths of every command, startup, completion."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import resource
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import partita
from partita.cli import CACHE_VERBS, REPORT_VERBS, VERBS, app, run
from partita.commands import terminal
from partita.commands.build import GROUPS, read_size
from partita.errors import UsageError
from partita.export.progress import stage
from partita.library.batches.rows import SAMPLED as OF_ROWS
from partita.options.export import ExportOptions
from partita.options.fields import PathText, check_fields, describe_fields, option_groups
from partita.options.generation import Sampling
from partita.options.groups import LoadOptions, ProgressOptions
from partita.options.inspection import BenchOptions, InspectOptions, PlanOptions, ProvidersOptions
from partita.options.placement import DriftOptions, PlaceOptions, SupportOptions
from tests.commands.test_cli import fails
from tests.conftest import REPOSITORY

NAMED_FILE = re.compile(r"=(PATH|FILE|FOLDER)")
"""In a metavar: an option that takes a name and a file."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb with the words that lead to it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name in inner:
        yield from commands(command.get_command(None, name), (*path, name))


EVERY = list(commands(typer.main.get_command(app)))


def path_parameters() -> Iterator[tuple[tuple[str, ...], Any, Any, str]]:
    """Verb, command, parameter and the empty value of everything that names a file or folder."""
    for path, command in EVERY:
        verb = next(verb for verb in (*VERBS, *REPORT_VERBS, *CACHE_VERBS) if verb.name == path[-1])
        paths = {
            each.name
            for each in describe_fields(verb.record())
            if each.is_path or PathText in typing.get_args(each.type)
        }
        for parameter in command.params:
            if NAMED_FILE.search(parameter.metavar or ""):
                yield path, command, parameter, "x="
            elif parameter.name in paths:
                yield path, command, parameter, ""


PATHS = list(path_parameters())


@pytest.mark.parametrize(
    ("path", "command", "parameter", "empty"), PATHS, ids=[f"{'-'.join(p)}-{q.name}" for p, _, q, _ in PATHS]
)
def test_empty_path_is_rejected(path, command, parameter, empty, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = []
    for argument in command.params:
        if argument.param_type_name == "argument" and argument.required:
            words.append(empty if argument is parameter else "x")
    if parameter.param_type_name == "option":
        words += [parameter.opts[0], empty]
        if "providers" in {other.name for other in command.params} - {parameter.name}:
            words += ["--provider", "cpu"]
    error = fails(capsys, 2, "", *path, *words)
    assert "empty" in error, error
    assert (parameter.metavar or "") in error or parameter.opts[0] in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", [(), ("report",), ("cache",)], ids=["partita", "report", "cache"])
def test_missing_command_prints_help_and_exits_2(group, capsys):
    assert run(list(group)) == 2, "nothing was done"
    out, err = capsys.readouterr()
    assert err == ""
    assert run([*group, "--help"]) == 0
    assert out == capsys.readouterr().out
    assert "Commands:" in out


@pytest.mark.parametrize(("path", "command"), EVERY, ids=["-".join(path) for path, _ in EVERY])
def test_help_lists_every_option_under_heading_and_examples(path, command, capsys):
    assert {each.group for each in describe_fields(command.options) if not each.positional} <= {*GROUPS, ""}
    names = [name for parameter in command.params for name in parameter.opts]
    assert len(names) == len(set(names))
    assert run([*path, "-h"]) == run(["help", *path]) == 0
    shown, again = capsys.readouterr().out.split("Usage: ")[1:]
    assert shown == again and shown.startswith(f"partita {' '.join(path)}")
    assert max(map(len, shown.partition("Examples:")[0].splitlines())) <= 80
    headings = re.findall(r"^(\w[\w ]*):\n", shown, re.MULTILINE)
    order = ("Arguments", *GROUPS, "Other", "Examples")
    assert headings == [name for name in order if name in headings] and "Options" not in headings
    for parameter in command.params:
        name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
        assert len(re.findall(rf"^  (?:-\w, )?{re.escape(name)}(?![\w-])", shown, re.MULTILINE)) == 1, name
    examples = shown.partition("Examples:\n")[2].splitlines()
    assert examples and all(line.startswith(f"  partita {' '.join(path)}") for line in examples)


def test_help_shows_choices_and_uses_terminal_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert run(["export", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--precision [auto|fp32|fp16|bf16|int8|int4]" in shown and "--cache [fixed|window|growing]" in shown
    assert "--quantiser, --quantizer [refit|gptq|nearest]" in shown and "--target PROVIDER" in shown
    assert 120 < max(map(len, shown.splitlines())) <= 150
    assert run(["providers", "--help"]) == 0
    assert "--view [brief|html|json|markdown|text]" in capsys.readouterr().out


def test_oversized_size_value_is_rejected():
    assert read_size("1.5 GB") == 1_500_000_000 and read_size("2KiB") == 2048
    with pytest.raises(typer.BadParameter, match="'9{40}' is too large; write e.g. 600MiB or 2GiB"):
        read_size("9" * 400)


def test_unknown_command_or_option_suggests_nearest_and_help(capsys):
    assert "Did you mean --provider? (see partita generate --help)" in fails(
        capsys, 2, "", "generate", "x", "--provder", "c"
    )
    assert "Did you mean 'export'? (see partita --help)" in fails(capsys, 2, "", "exprot")
    assert "Did you mean 'show'? (see partita report --help)" in fails(capsys, 2, "", "report", "shw")
    assert "(see partita export --help)" in fails(capsys, 2, "", "export", "a")
    assert "(see partita verify --help)" in fails(capsys, 2, "", "verify", "x", "--threads", "many")
    assert "(see partita place --help)" in fails(capsys, 2, "", "place", "x", "--zzzzzz")


def test_repeated_options_and_arguments_become_lists(monkeypatch):
    found = {}
    for function in ("place.support", "verify.bench", "generate.run"):
        monkeypatch.setattr(f"partita.commands.{function}", lambda options: found.update({type(options): options}))
    monkeypatch.setattr("partita.commands.build.check_early", lambda options: None)
    assert run(["support", "Cast", "com.microsoft:MatMulNBits", "--provider", "cpu"]) == 0
    assert run(["bench", "package", "--providers", "webgpu", "cpu", "--against", "a", "--against", "b"]) == 0
    assert run(["generate", "package", "one", "-p", "two", "--pin", "cpu:a", "--provider-option", "cpu.x=1"]) == 0
    support, bench, generate = found.values()
    assert support.operators == ["Cast", "com.microsoft:MatMulNBits"]
    assert (bench.chains, bench.more, bench.against) == (["webgpu"], ("cpu",), ("a", "b"))
    assert (generate.prompts, generate.more_prompts, generate.pins) == (("one",), ("two",), ("cpu:a",))
    assert generate.provider_options == {"cpu": {"x": "1"}}


@pytest.mark.parametrize(
    ("options", "least_seconds", "on_terminal", "lines"),
    [
        (ProgressOptions(), 0.0, False, True),
        (ProgressOptions(), 3600.0, False, False),
        (ProgressOptions(), 0.0, True, False),
        (ProgressOptions(quiet=True), 0.0, True, False),
        (ProgressOptions(verbose=True), 3600.0, True, True),
    ],
)
def test_long_stage_prints_duration_without_terminal(options, least_seconds, on_terminal, lines, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: on_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "LONG_STAGE_SECONDS", least_seconds)
    monkeypatch.setattr(terminal, "shown_progress", options)
    with terminal.Bars() as bars, stage(bars, "trace", {}, of="gqa"):
        pass
    with terminal.busy("first run (Ctrl-C: go on without it)"):
        pass
    found = re.findall(r"(trace gqa|first run): \d+\.\d s", stream.getvalue())
    assert found == (["trace gqa", "first run"] if lines else [])
    assert not options.quiet or stream.getvalue() == ""


# The dataclasses of options: what is checked, what the Python API takes, and where a sampling option is found


FUNCTIONS = {
    "load": LoadOptions,
    "export": ExportOptions,
    "place": PlaceOptions,
    "support": SupportOptions,
    "bench": BenchOptions,
    "drift": DriftOptions,
    "plan": PlanOptions,
    "inspect": InspectOptions,
    "providers": ProvidersOptions,
}
RECORDS = option_groups()
SAMPLED = [each.name for each in describe_fields(Sampling) if each.name != "source"]


@pytest.mark.parametrize(("name", "record"), FUNCTIONS.items())
def test_api_function_parameters_match_options_record(name: str, record: type[Any]) -> None:
    taken = inspect.signature(getattr(partita, name)).parameters
    assert {each.name: each.default for each in taken.values()} == {
        name: each.default for name, each in inspect.signature(record).parameters.items()
    }


@pytest.mark.parametrize("record", RECORDS)
def test_every_option_has_help_and_valid_default(record: type[Any]) -> None:
    for each in describe_fields(record):
        assert each.help
        default, limits = each.default, each.range
        if isinstance(default, (int, float)) and limits is not None:
            assert default in limits, each.name
        if each.choices and default is not None:
            assert default in each.choices


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_option_is_available_in_every_interface(name: str) -> None:
    """Adding a field to `Sampling` is enough for the command line, prompt files and the server."""
    from partita.serve.protocol import SAMPLING

    flags = [flag for each in describe_fields(Sampling) if each.name == name for flag in each.flags]
    flag = flags[0] if flags else f"--{name.replace('_', '-')}"
    group: Any = typer.main.get_command(app)
    for verb in ("generate", "chat"):
        assert any(flag in parameter.opts for parameter in group.get_command(None, verb).params)
    assert name in OF_ROWS, "rows of prompt files"
    assert name in SAMPLING or name == "max_new_tokens", "bodies of the server"
    for function in (partita.Model.generate, partita.Model.chat, partita.request):
        assert name in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (PlaceOptions("m", runs=0), "`runs` is 0; it must be between 1 and 1,000"),
        (PlaceOptions("m", runs=True), "`runs` is True; it must be an integer"),
        (PlaceOptions("m", runs=1 << 2000), "`runs` is an integer of more than 300 digits"),
        (
            PlaceOptions("m", probe_seconds=float("nan")),
            r"`probe_seconds` is nan; it must be between 0 \(no experiments\)",
        ),
        (PlaceOptions("m", run_seconds=0.0), "`run_seconds` is 0.0; it must be above 0 and at most 86,400"),
        (PlaceOptions(3), "`model` is 3; it must be a path"),  # type: ignore[arg-type]
        (PlaceOptions("m", pins="cpu:x"), "`pins` must be a list of strings, not the string 'cpu:x'"),
        (PlaceOptions("m", shapes=["x"]), r"`shapes` is \['x'\]; it must be a mapping"),  # type: ignore[arg-type]
        (PlaceOptions("m", device=1), "`device` is 1; it must be a string"),  # type: ignore[arg-type]
        (PlaceOptions("m", dry_run=1), "`dry_run` is 1; it must be True or False"),  # type: ignore[arg-type]
        (ExportOptions("c", "o", cache="round"), "`cache=round`: choose one of fixed, window, growing"),  # type: ignore[arg-type]
    ],
)
def test_invalid_value_error_names_option(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_fields(given)


def test_option_aliases_are_accepted(tmp_path, capsys):
    for command in (["generate", "p", "hi"], ["run", "p", "hi"], ["chat", "p"], ["bench", "p"]):
        assert "--max-new-tokens" in fails(capsys, 2, "", *command, "--max-tokens", "0")
    for flags in (["--quantizer", "nosuch"], ["--requantize", "--quantizer", "nosuch"]):
        assert "nosuch" in fails(capsys, 2, "", "export", "a/b", str(tmp_path / "out"), "--precision", "int4", *flags)


# Startup and shell completion: fast, and without a heavy library


HEAVY = ("torch", "onnxruntime", "transformers", "onnx", "numpy", "starlette", "uvicorn", "prometheus_client")
IMPORT_LIMIT_SECONDS = 0.06
"""CPU time, with a margin for a busy machine; on an idle one it takes 0.01 s."""
HELP_LIMIT = 2.5
"""CPU time in units of `import typer`, which takes 0.05 to 0.15 s; measured: 1.8."""


def cpu_seconds(*words: str, **variables: str) -> tuple[float, str]:
    """The least CPU time of several runs of Python, and their output. The first run, which reads files, is left out."""
    seconds = []
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds[1:]), done.stdout + done.stderr


def test_help_meets_cpu_time_limit():
    seconds, shown = cpu_seconds("-m", "partita", "--help")
    assert "export" in shown and seconds < HELP_LIMIT * cpu_seconds("-c", "import typer")[0]


def test_import_meets_cpu_time_limit():
    assert cpu_seconds("-c", "import partita")[0] < IMPORT_LIMIT_SECONDS


REFUSED = [
    *((f"{verb} missing -e cpu", "missing: no such folder") for verb in ("verify", "evaluate")),
    *(
        (f"{verb} /gone -e cpu", "/gone: no such file or folder")
        for verb in ("run", "generate", "chat", "serve", "bench")
    ),
    *((f"{verb} x -e gpu", "did you mean 'cuda' or 'webgpu'?") for verb in ("verify", "place", "bench", "support")),
    ("verify empty -e cpu", "empty: not a Partita package"),
    ("bench nowhere -e cpu --rounds 0", "--rounds is 0"),
    ("generate x prompt -e gpu", "did you mean 'cuda' or 'webgpu'?"),
    ("generate x prompt --top-p 2", "--top-p is 2.0; it must be above 0 and at most 1"),
    ("place missing.onnx -e cpu", "missing.onnx: no such file"),
    ("report show missing.json", "missing.json"),
    ("no-such-verb", "No such command"),
    ("export /missing out", "/missing: no such file or folder, and not a hub id"),
    ("export ./missing out", "./missing: no such file or folder"),
    ("export empty out", "empty: not a checkpoint: config.json is missing"),
    ("export checkpoint empty", "empty: exists already; choose another folder"),
    ("export checkpoint out --target gpu", "did you mean 'cuda' or 'webgpu'?"),
    ("export checkpoint out --precision fp5", "--precision fp5: choose one of auto, fp32"),
    ("export checkpoint out --max-length many", "integer"),
]


SHOWN = ("--help", "export --help", "generate --help", "bench --help")
RUN_ALL = f"""
import contextlib, io, json, sys
from partita.cli import run
ended = []
for line in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line.split())
    ended.append([code, err.getvalue(), [m for m in {HEAVY!r} if m in sys.modules]])
print(json.dumps(ended))
"""


def loaded_by(lines: Sequence[str], folder: Path) -> dict[str, tuple[int, str, list[str]]]:
    """Exit code, stderr and heavy modules that were loaded, by command line; all are run in one process."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(
        command, input="\n".join(lines), cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return dict(zip(lines, map(tuple, json.loads(done.stdout)), strict=True))


def test_help_and_early_errors_import_no_heavy_library(tmp_path: Path) -> None:
    """Options, providers, output paths and folders are checked before heavy imports."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"max_position_embeddings": 64}', encoding="utf-8")
    ended = loaded_by([*SHOWN, *(line for line, _ in REFUSED)], tmp_path)
    assert [ended[line] for line in SHOWN] == [(0, "", [])] * len(SHOWN)
    for line, says in REFUSED:
        code, err, loaded = ended[line]
        assert code in (1, 2) and loaded == [], line
        assert says in err and err.count("\n") == 1, (line, err)


# Completion, requested as the shells request it


LIMIT_SECONDS = 0.4
PROVIDERS = ("cpu", "cuda", "openvino", "webgpu")


def variables(shell: str, line: str) -> dict[str, str]:
    """Environment of a question about a line; a blank at the end begins a new word."""
    words = line.split(" ")
    return {"_PARTITA_COMPLETE": f"complete_{shell}", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}


Offered = Callable[[str], list[str]]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offered:
    """Words that bash is offered for a line."""

    def ask(line: str) -> list[str]:
        for name, value in variables("bash", line).items():
            monkeypatch.setenv(name, value)
        assert run([]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return str(out).split()

    return ask


def test_completion_offers_commands_and_options(offered: Offered) -> None:
    assert offered("partita ex") == ["export"]
    assert {"show", "html", "diff", "check"} <= set(offered("partita report "))
    assert set(offered("partita generate p --te")) == {"--temperature", "--temp"}


def test_completion_offers_option_values(offered: Offered) -> None:
    assert offered("partita export c o --precision ") == ["auto", "fp32", "fp16", "bf16", "int8", "int4"]
    assert offered("partita export c o --activations ") == ["fp32", "fp16", "bf16", "int8"]
    assert offered("partita export c o --prefill-precision ") == ["int8"]
    assert offered("partita export c o --attention p") == ["primitives"]
    assert set(PROVIDERS) <= set(offered("partita export c o --target "))
    assert set(PROVIDERS) <= set(offered("partita generate p --provider "))
    assert offered("partita verify p -e webg") == ["webgpu"]
    assert set(PROVIDERS) <= set(offered("partita bench p --providers webgpu "))
    assert offered("partita report show r --view ma") == ["markdown"]
    assert offered("partita report diff a b --view ma") == ["markdown"]
    assert set(offered("partita providers --view ")) == {"brief", "html", "json", "markdown", "text"}


def test_completion_offers_only_unused_providers_in_chain(offered: Offered) -> None:
    chains = offered("partita generate p --provider webgpu,")
    assert "webgpu,cpu" in chains and "webgpu,webgpu" not in chains
    assert offered("partita generate p --provider webgpu,cp") == ["webgpu,cpu"]


def test_completion_is_fast_and_imports_no_heavy_library():
    tell = (
        "import atexit, json, sys\n"
        "heavy = ('torch', 'onnxruntime', 'transformers', 'numpy')\n"
        "atexit.register(lambda: print(json.dumps([m for m in heavy if m in sys.modules]), file=sys.stderr))\n"
        "from partita.cli import main\nmain()"
    )
    seconds, printed = cpu_seconds("-c", tell, **variables("bash", "partita generate p --provider "))
    assert "webgpu" in printed.split() and printed.endswith("[]\n")
    # A slow or busy machine is as slow with an empty command line.
    assert seconds < max(LIMIT_SECONDS, 5 * cpu_seconds("-c", "import typer.main")[0])
