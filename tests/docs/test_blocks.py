"""Every fenced block of every page is made from code, run, or compared with what is printed; a new one cannot slip in.

A block is accounted for when its page is generated as a whole, when it is Python that is run, when it holds only
command lines that `tests/test_examples.py` runs, when it begins with `$ partita`, or when the comment above it,
`<!-- block: NAME -->`, names what it is compared with: an output, or a check of this file. `python -m
tests.docs.update` writes outputs again.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, require
from tests.docs import recordings
from tests.docs.blocks import Block, agrees, all_blocks, pages, renewed
from tests.docs.outputs import OUTPUTS, SERVE_CLIENT, copy_tutorial_models, place_of_examples, served
from tests.docs.update import printed
from tests.test_examples import EXAMPLES
from tests.test_imports import MAY_IMPORT

GENERATED = {"docs/reasons.md": "tools/published.py", "docs/models.md": "tests/export/test_breadth.py"}
"""Pages that are written from code, and the module that names them: its test compares what it writes."""
RUN_AS_PYTHON = {
    "docs/batches.md": "tests/library/batches/test_cluster.py",
    "docs/python.md": "tests/test_examples.py",
    "README.md": "tests/test_examples.py",
}
"""Pages whose Python is run, and the test that runs it."""
BLOCKS = all_blocks()


def check_development(block: Block) -> None:
    """Targets and variables of the Makefile, and modules and files that are there."""
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    for line in block.lines:
        words = shlex.split(line, comments=True)
        for name, given, _ in (word.partition("=") for word in words[1:] if words[0] == "make"):
            pattern = rf"^{name}\s*\?=" if given else rf"^{name}:"
            assert re.search(pattern, makefile, re.MULTILINE), f"{line}: the Makefile has no {name}"
        files = [word for word in words if word.endswith((".py", ".sh"))]
        files += [f"{word.replace('.', '/')}.py" for word in words if word.startswith(("tools.", "tests."))]
        assert all((REPOSITORY / file).is_file() for file in files), line


def check_fragment(block: Block) -> None:
    """Parts of programs that show a rule and do nothing by themselves: valid Python, but for the missing try."""
    handlers = re.sub(r"^(except )", r"try: pass\n\1", block.text, flags=re.MULTILINE)
    inside = "".join(f"    {line}\n" for line in handlers.splitlines())
    ast.parse(f"def f():\n{inside}")


def check_rooms(block: Block) -> None:
    """Every room of the drawing exists, and the rooms that an arrow joins may import one another."""
    assert set(re.findall(r"\w+", block.text)) <= set(MAY_IMPORT)
    for one, way, other in re.findall(r"(?=\b(\w+) (──>|<──) (\w+))", block.text):
        room, imported = (one, other) if way == "──>" else (other, one)
        assert imported in MAY_IMPORT[room], f"{room} does not import {imported}"


def check_requirements(block: Block) -> None:
    """Options that `report check` takes."""
    from tests.docs.outputs import run

    for line in block.lines:
        words = shlex.split(line.replace("main.json", "webgpu.json"), comments=True)
        said = run(shlex.join(["partita", "report", "check", "run.json", *words]))
        assert "checks" in said or "check " in said, said
        assert "FAILED" in said or "passed" in said, said


def check_manifest(block: Block) -> None:
    """The manifest of the embedded checkpoint's package, with lists and hashes cut short."""
    text = re.sub(r",?\s*\.\.\.(?=[\s\]}])", "", block.text)
    assert_part(json.loads(text), recordings.raw("export_demo")["manifest"], "manifest")


def assert_part(shown: Any, real: Any, where: str) -> None:
    """What is shown is in the real one: all of a value, the beginning of a list or of a string that ends with dots."""
    if isinstance(shown, dict):
        for name, value in shown.items():
            assert name in real, f"{where}.{name}"
            assert_part(value, real[name], f"{where}.{name}")
    elif isinstance(shown, list):
        assert len(shown) <= len(real), where
        for number, value in enumerate(shown):
            assert_part(value, real[number], f"{where}[{number}]")
    elif isinstance(shown, str) and shown.endswith("..."):
        assert real.startswith(shown.removesuffix("...")), where
    else:
        assert shown == real, where


def check_options(block: Block) -> None:
    """Command lines whose verbs and options there are; what they do is tested elsewhere, as it takes minutes."""
    import typer.main

    from partita import cli

    for line in block.lines:
        command: Any = typer.main.get_command(cli.app)
        words = shlex.split(line, comments=True)[1:]
        while words[0] in getattr(command, "commands", {}):
            command = command.get_command(None, words.pop(0))
        assert command.make_context("partita", words), line


def check_contract(block: Block) -> None:
    """A contract file that `--contract` takes, with every field that there is."""
    import tomllib

    from partita.foreign.evidence import Written, WrittenFile, WrittenStates

    written = Written.model_validate(tomllib.loads(block.text))
    assert written.model_fields_set == set(Written.model_fields)
    for entry, kind in ((written.files[0], WrittenFile), (written.states[0], WrittenStates)):
        assert entry.model_fields_set == set(kind.model_fields)


def check_copies(block: Block) -> None:
    """Copies of folders that are there."""
    for line in block.lines:
        command, _, source, _ = shlex.split(line)
        assert command == "cp" and (REPOSITORY / source / "model.onnx").is_file(), line


def check_client(block: Block) -> None:
    """The program that `served` runs; it prints what its comment has."""
    assert block.text.strip() == SERVE_CLIENT.strip()
    (line,) = re.findall(r"# prints (.*)", block.text)
    assert line in served()["serve-client"]


def check_session(block: Block) -> None:
    """A script that opens a model on CUDA and the CPU; its own check ends it where CUDA does not start."""
    names: dict[str, Any] = {}
    with place_of_examples() as folder:
        copy_tutorial_models(folder)
        try:
            exec(block.text, names)
        except SystemExit:
            assert names["session"].get_providers() == ["CPUExecutionProvider"]
        else:
            started = names["session"].get_providers()[0] == "CUDAExecutionProvider"
            assert started or "SystemExit" not in block.text


CHECKS: dict[str, Callable[[Block], None]] = {
    "make": check_development,
    "pytest": check_development,
    "schemas": check_development,
    "fragment": check_fragment,
    "rooms": check_rooms,
    "requirements": check_requirements,
    "manifest": check_manifest,
    "update": check_development,
    "options": check_options,
    "foreign-contract": check_contract,
    "silent-files": check_copies,
    "silent-script": check_session,
    "silent-changed": check_session,
    "serve-client": check_client,
}


def commands(block: Block) -> list[str]:
    """Command lines of a block that has nothing else; empty for another one."""
    lines = [part for line in block.lines for part in line.split(" || ")]
    return lines if all(line.startswith("partita ") or "| partita " in line for line in lines) else []


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_generated_run_or_compared(block: Block) -> None:
    if block.page in GENERATED or (block.language == "python" and block.page in RUN_AS_PYTHON):
        where = GENERATED.get(block.page) or RUN_AS_PYTHON[block.page]
        assert block.page.rpartition("/")[2] in (REPOSITORY / where).read_text("utf-8")
    elif block.name in CHECKS:
        CHECKS[block.name](block)
    elif block.name in OUTPUTS or block.text.startswith("$ "):
        if block.name.startswith("export"):
            require("torch")  # whose module the summary of an export is in
        lines = printed(block)
        assert lines is not None
        wanted = renewed(block.lines, lines)
        again = f"{block} is not what is printed; write it again with: python -m tests.docs.update"
        assert agrees(block.lines, lines), "\n".join([again, *wanted])
    else:
        assert commands(block), f"{block}: nothing generates, runs or checks this block; see {__name__}"
        assert set(commands(block)) <= set(EXAMPLES), f"{block}: a command that tests/test_examples.py does not run"


def test_every_block_name_and_recording_is_used() -> None:
    used = {block.name for block in BLOCKS} - {""}
    assert used == {*OUTPUTS, *CHECKS}
    assert {path.name.removesuffix(".json.gz") for path in recordings.RECORDED.iterdir()} == recordings.NAMES


# Files and links of the pages


PYTHON = re.compile(r"`([\w/]+\.py)(?::[\w.]+)?`")
PATH = re.compile(r"`((?:partita|tests|tools|docs|benchmarks)/[\w/.-]+)`")


def absent(text: str) -> list[str]:
    """Paths that a text has in backquotes and the repository has not; those of modules may lack their first folders."""
    files = {f"/{path.relative_to(REPOSITORY).as_posix()}" for path in modules()}
    lost = [name for name in PYTHON.findall(text) if not any(file.endswith(f"/{name}") for file in files)]
    return lost + [name for name in PATH.findall(text) if not (REPOSITORY / name).exists()]


def modules() -> list[Path]:
    """Every module of the repository."""
    return [
        path for folder in ("partita", "tests", "tools", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_files_named_in_a_page_exist(page: Path):
    assert absent(page.read_text(encoding="utf-8")) == []


def test_index_lists_every_page():
    folder = REPOSITORY / "docs"
    listed = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\)", (folder / "index.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_of_a_page_point_to_existing_files(page: Path):
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
