"""Messages name options to a shell's user and arguments to a program: by one function, and never by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from partita.spelling import called, read_as_fields, read_by, reader, spelled

from partita.errors import PartitaError
from partita.remedies import Remedy, command_line
from tests.conftest import REPOSITORY

OPTION = re.compile(r"(?:^|(?<=[\s(`'\"/]))--[a-z]")
WORD = re.compile(r"--[a-z-]+")
ROOMS_OF_THE_SHELL = ("options.py", "cli.py", "commands", "bench", "demo", "spelling.py")
"""Who only ever speaks to a shell's user, as nothing but a verb uses them; and who spells."""
VIEWS = "views"
"""Drawn for a terminal, or as a page for people."""
STORED = {
    "partita/diagnosis": "reasons and steps of a report, which is read with the command line, whoever wrote it",
    "partita/runtime/lab/laboratory.py": "what an experiment says in a report",
    "partita/library/target.py": "where the target comes from, in a manifest",
    "partita/export/writing.py": "what a manifest says of an export",
}


@pytest.mark.parametrize(
    ("name", "value", "shell", "python"),
    [
        ("max_length", 5, "--max-length 5", "max_length=5"),
        ("precision", "fp8", "--precision fp8", "precision='fp8'"),
        ("max_slowdown", 0.5, "--max-slowdown 0.5", "max_slowdown=0.5"),
        ("force", True, "--force", "force=True"),
        ("verify", False, "--no-verify", "verify=False"),
        ("cache_in_place", True, "--require-cache-in-place", "cache_in_place=True"),
        ("providers", "cuda,cpu", "--provider cuda,cpu", "providers='cuda,cpu'"),
        ("pins", "cpu:lm_head", "--pin cpu:lm_head", "pins=['cpu:lm_head']"),
        (
            "provider_options",
            "cuda.device_id=1",
            "--provider-option cuda.device_id=1",
            "provider_options={'cuda': {'device_id': '1'}}",
        ),
        ("target_options", "qnn.a=b", "--provider-option qnn.a=b", "target_options={'a': 'b'}"),
        ("provider_libraries", "a=/x", "--provider-library a=/x", "provider_libraries={'a': '/x'}"),
        ("keep", "lm_head=int8", "--keep lm_head=int8", "keep={'lm_head': 'int8'}"),
        ("shapes", "x=1,3", "--shape x=1,3", "shapes={'x': (1, 3)}"),
        ("shapes", "b=1", "--shape b=1", "shapes={'b': 1}"),
        ("shapes", "x=", "--shape x=", "shapes={'x': ''}"),
        ("shapes", "nonsense", "--shape nonsense", "shapes='nonsense'"),
        ("requirements", "share>=2", "--require share>=2", "requirement 'share>=2'"),
    ],
)
def test_an_argument_as_its_reader_writes_it(name: str, value: object, shell: str, python: str) -> None:
    assert spelled(name, value) == shell
    with read_by("python"):
        assert spelled(name, value) == python
        assert spelled(name) == name
    assert spelled(name, value) == shell


def test_fields_of_an_object_are_named_as_they_are_there() -> None:
    with read_by("shell"), read_as_fields({"max_new_tokens": "max_tokens", "adapter": "adapter"}):
        assert spelled("max_new_tokens", 0) == "field max_tokens 0" and called("max_new_tokens") == "max_tokens"
        assert spelled("adapter", "é") == 'field adapter "é"' and spelled("adapter") == "field adapter"
        assert spelled("seed", 3) == "--seed 3" and called("seed") == "seed", "it comes from the command line"
    assert spelled("adapter", "é") == "--adapter é"


def test_who_called_first_is_spoken_to() -> None:
    with read_by("shell"), read_by("python"):
        assert reader() == "shell"
    with read_by("python"):
        with read_by("shell"):
            assert reader() == "python"
        assert reader() == "python"
    assert reader() == "shell"


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (("partita", "providers", "--json"), "partita.providers()"),
        (("partita", "export", "CHECKPOINT", "OUT", "--force"), "partita.export('CHECKPOINT', 'OUT', force=True)"),
        (
            ("partita", "export", "C", "O", "--target", "qnn", "--static-shapes", "--max-length", "512"),
            "partita.export('C', 'O', target='qnn', static_shapes=True, max_length=512)",
        ),
        (
            ("partita", "place", "m.onnx", "--provider", "cuda,cpu", "--dry-run", "--shape", "x=1,2", "--shape", "n=1"),
            "partita.place('m.onnx', providers='cuda,cpu', dry_run=True, shapes={'x': (1, 2), 'n': 1})",
        ),
        (("pip", "install", "--force-reinstall", "numpy"), "pip install --force-reinstall numpy"),
        (("partita", "report", "show", "my run.json"), 'partita report show "my run.json"'),
    ],
)
def test_a_command_is_a_call_where_there_is_one(words: tuple[str, ...], call: str) -> None:
    with read_by("python"):
        assert command_line(words) == call
    assert command_line(words).startswith(" ".join(words[:2]))


def test_a_remedy_stays_written_for_whom_the_error_was_raised() -> None:
    remedy = Remedy("try it", options=("--provider", "cpu"), otherwise=Remedy("", ("partita", "providers", "--json")))
    with read_by("python"):
        error = PartitaError("no", remedy=remedy)
    assert str(error) == "no; try it: providers='cpu', or partita.providers()"
    assert str(error).endswith(str(error.remedy)) and error.remedy == remedy
    assert str(PartitaError("no", remedy=remedy)) == "no; try it: --provider cpu, or partita providers --json"


def sources() -> Iterator[Path]:
    """Files that speak to both."""
    for path in sorted((REPOSITORY / "partita").rglob("*.py")):
        parts = path.relative_to(REPOSITORY / "partita").parts
        where = path.relative_to(REPOSITORY).as_posix()
        if parts[0] in ROOMS_OF_THE_SHELL or VIEWS in parts or any(where.startswith(stored) for stored in STORED):
            continue
        yield path


def by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines with a text that names an option of the command line; words of a command, in a tuple or list, do not."""
    allowed: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(elts=words) | ast.List(elts=words) | ast.Set(elts=words):
                plain = (word for word in words if isinstance(word, ast.Constant))
                allowed |= {id(word) for word in plain if WORD.fullmatch(str(word.value))}
            case ast.Call(func=ast.Name(id="either"), args=[shell, *_]):
                allowed |= {id(part) for part in ast.walk(shell)}
            case ast.Expr(value=ast.Constant() as docstring):
                allowed.add(id(docstring))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in allowed:
            continue
        if OPTION.search(node.value):
            yield node.lineno


def test_nothing_that_a_program_can_reach_names_an_option_by_hand() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in sources()
        for line in by_hand(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, f"write spelled('max_length') in place of --max-length: {found}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""About --provider."""\nx = f"{y}: add --provider"', [2]),
        ('FLAG = "--provider"', [1]),
        ('Remedy("try it", options=("--provider", "cpu"))', []),
        ('Remedy("try --provider")', [1]),
        ('either("--chat", "chat")', []),
        ('either("chat", "--chat")', [1]),
        ('("-Wl,--version-script=x", "a--b")', []),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str, lines: list[int]) -> None:
    assert list(by_hand(ast.parse(source))) == lines
