"""Runs the examples of README.md, of the docs pages and of --help on the demo model or its package."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import typer.main
from onnx import parser

from partita import cli
from tests.conftest import DEMO_CHECKPOINT, REPOSITORY, TinyCheckpoint, require

PAGES = (
    "README.md",
    "docs/batches.md",
    "docs/drift.md",
    "docs/exporting.md",
    "docs/precisions.md",
    "docs/reports.md",
    "docs/running.md",
)
OF_THE_PLACEMENT = {3, 5}
"""Exit codes that are right where an example asks for more than this machine has: a limit or a requirement."""
REPORTS, KEPT = ("run.json", "last-week.json", "today.json", "main.json", "now.json", "drift.json"), "kept"
"""Reports that examples read, and where they are as they were: an example before may have written its own there."""
VISION = """<ir_version: 10, opset_import: ["": 21]>
g (float[1,3,224,224] x) => (float[1,3,224,224] y) { y = Relu(x) }"""


def helped() -> Iterator[tuple[str, str]]:
    """Examples of --help, by the words of their command."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for name in getattr(command, "commands", {}):
            yield from below(command.get_command(None, name), (*words, name))
        for line in (command.epilog or "").splitlines() if words else ():
            yield f"{' '.join(words)} --help", line

    yield from below(typer.main.get_command(cli.app), ())


def written() -> Iterator[tuple[str, str]]:
    """Command lines in the code blocks of these pages."""
    for page in PAGES:
        text = (REPOSITORY / page).read_text("utf-8")
        for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in (part for whole in block.splitlines() for part in whole.split(" || ")):
                if line.startswith("partita ") or "| partita " in line:
                    yield page, line


EXAMPLES = {line: where for where, line in [*written(), *helped()]}
MAKES_THE_PACKAGE = "partita export ./my-checkpoint ./package --precision fp16 --max-length 512"
"""The example whose package the others take."""
MAKES_THE_PACKED_ONE = "partita export ./my-checkpoint ./package-int4 --precision int4"
"""The one whose package those on packed weights take."""
ELSEWHERE = {
    "partita export partita/demo/checkpoint build/for-cuda --target cuda": ("target", "cuda"),
    "partita export ./my-checkpoint ./for-cuda --target cuda": ("target", "cuda"),
    'partita run openai-community/gpt2 "Once upon a time" --raw': ("package", "openai-community/gpt2"),
    "partita push ./package me/my-model": ("repository", "me/my-model"),
    "partita push ./package me/my-model --private": ("private", True),
}
"""Examples that are only parsed, and the value of a parameter: tests/commands/test_export.py and
tests/commands/test_run.py run the same on small models.
"""


@pytest.fixture(scope="module")
def place_of_examples(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that examples name."""
    require("torch")
    folder = tmp_path_factory.mktemp("examples")
    (folder / "my-checkpoint").symlink_to(tiny_checkpoint("llama", max_position_embeddings=512))
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as inside:
        inside.chdir(folder)
        for line in (MAKES_THE_PACKAGE, MAKES_THE_PACKED_ONE):
            assert line in EXAMPLES and cli.run(shlex.split(line)[1:]) == 0
        drift = ["drift", "package", "--provider", "cpu", "--against", "original", "--view", "json"]
        assert cli.run([*drift, "--out", "drift.json"]) == 0
    (folder / "build" / "demo").mkdir(parents=True)
    package = folder / "package"
    (folder / "other-package").symlink_to(folder / "package-int4")
    (folder / "build" / "demo" / "package").symlink_to(package)
    onnx.save(parser.parse_model(VISION), folder / "model.onnx")
    (folder / "prompts.jsonl").write_text('{"prompt": "Return the"}\n')
    given = ["generate", str(package), "Return the", "--max-new-tokens", "4", "--provider", "cpu", "--report"]
    for name in REPORTS[:3]:
        assert cli.run([*given, str(folder / name)]) == 0
    given = ["place", str(folder / "model.onnx"), "--shape", "x=1,3,224,224", "--provider", "cpu", "--report"]
    for name in REPORTS[3:5]:
        assert cli.run([*given, str(folder / name)]) == 0
    shutil.copytree(folder, folder / KEPT, symlinks=True, ignore=lambda _, names: {*names} - set(REPORTS))
    return folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_documentation_example_runs(example, place_of_examples, monkeypatch, capsys):
    before, pipe, after = example.partition("| ")
    words = shlex.split((after if pipe else example).partition(" >> ")[0])
    assert words[0] == "partita", EXAMPLES[example]
    if example in (MAKES_THE_PACKAGE, MAKES_THE_PACKED_ONE):
        assert (place_of_examples / words[3] / "manifest.json").is_file()
        return
    if words[1] == "serve":  # it would not end; tests/serve/test_command.py runs it
        serve: Any = typer.main.get_command(cli.app).get_command(None, "serve")  # type: ignore[attr-defined]
        assert serve.make_context("serve", words[2:]).params["packages"]
        return
    if example in ELSEWHERE:
        group: Any = typer.main.get_command(cli.app)
        name, value = ELSEWHERE[example]
        assert group.get_command(None, words[1]).make_context(words[1], words[2:]).params[name] == value
        return
    arguments = [*words[1:], *(["--rounds", "2"] if words[1] == "bench" else [])]
    if "--dry-run" in arguments or "cuda" in arguments:
        pytest.importorskip("elftools")
    monkeypatch.chdir(place_of_examples)
    shutil.copytree(place_of_examples / KEPT, place_of_examples, dirs_exist_ok=True)
    if pipe or words[1] == "chat" or "--system" in words:  # a chat reads messages until there are no more
        text = " ".join(shlex.split(before)[1:]) if pipe else "Hello"
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code = cli.run(arguments)
    told = capsys.readouterr()
    assert code == 0 or (code in OF_THE_PLACEMENT and limited(arguments)), told.err
    assert "internal error" not in told.err


def limited(arguments: list[str]) -> bool:
    """Whether the example asks for something that a machine may not have; WebGPU is not in this environment's wheel."""
    named = {name for argument in arguments for name in argument.split(",")}
    return bool({"--max-cpu-nodes", "--require", "--providers", "--dry-run", "webgpu"} & named)


# Python examples, which run in one process and print what their comments say


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("checkpoint", ["llama", pytest.param("demo", marks=pytest.mark.heavy)])
def test_documentation_examples_print_documented_output(checkpoint, tiny_checkpoint, tmp_path, monkeypatch, capsys):
    theirs = DEMO_CHECKPOINT if checkpoint == "demo" else tiny_checkpoint(checkpoint)
    shutil.copytree(theirs, tmp_path / "my-checkpoint")
    onnx.save(parser.parse_model(VISION), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, *others = python_of("docs/python.md")  # exports the package that all others load
    for block in (first, *python_of("README.md"), *others):
        exec(compile(block, "docs/python.md", "exec"), names)
        printed = capsys.readouterr()
        assert all(text in printed.out for text in re.findall(r"# prints (.*)$", block, re.MULTILINE)), printed.out
        assert printed.err == ""
    assert "<html" in (tmp_path / "run.html").read_text("utf-8").lower()
