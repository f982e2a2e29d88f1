"""Exit codes and the exception tree."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita import errors
from partita.errors import PartitaError
from partita.options.fields import with_flags
from partita.remedies import Remedy
from tests.conftest import REPOSITORY

ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.PartitaError)
}

# What scripts around Partita test for: changing a row breaks them.
EXIT_CODES = {
    "PartitaError": 1,
    "UsageError": 2,
    "CheckpointError": 1,
    "UnsupportedModelError": 1,
    "PackageError": 1,
    "ReportError": 1,
    "ResourceError": 1,
    "InstallationError": 1,
    "GenerationError": 1,
    "ProviderError": 3,
    "ParityError": 4,
    "ReportCheckError": 5,
}


def test_exit_codes() -> None:
    assert {name: error.exit_code for name, error in ERRORS.items()} == EXIT_CODES
    assert issubclass(errors.UnsupportedModelError, errors.CheckpointError)


def test_long_message_is_truncated_but_keeps_remedy():
    error = errors.PackageError("x" * 1_500_000, remedy=Remedy("export it again"))
    assert len(str(error)) < 5000 and str(error).endswith("(1,496,000 more characters); export it again")


# Messages name an option by its Python argument in backticks; the command line and prompt files rename it


FLAG = re.compile(r"(?:^|(?<=[\s(`'\"/]))--[a-z]")
WORD = re.compile(r"--[a-z-]+")
COMMAND_LINE_ONLY = ("messages.py", "options", "cli.py", "commands", "bench", "demo", "views")
"""Files and folders whose texts only the command line prints."""
STORED = (
    "partita/diagnosis",
    "partita/check/requirements.py",
    "partita/library/place/target.py",
    "partita/runtime/lab/laboratory.py",
)
"""Texts of a report or check, which name options as the command line takes them."""


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("`max_length` is 0; it must be at least 1", "--max-length is 0; it must be at least 1"),
        ("`max_length=5`: too long", "--max-length 5: too long"),
        ("`force=True` or `verify=False`", "--force or --no-verify"),
        ("`cache_in_place=True`", "--require-cache-in-place"),
        ("`providers=cuda,cpu` and `pins=cpu:lm_head`", "--provider cuda,cpu and --pin cpu:lm_head"),
        ("`target_options=qnn.a=b`", "--provider-option qnn.a=b"),
        ("`shapes=x=1,3`", "--shape x=1,3"),
        ("`input_ids` and `partita export` are no options", "`input_ids` and `partita export` are no options"),
        ("an open ` and `seed", "an open ` and `seed"),
    ],
)
def test_command_line_messages_show_options_as_flags(message: str, printed: str) -> None:
    assert with_flags(message) == printed


def test_error_message_ends_with_remedy() -> None:
    remedy = Remedy("try it", options=("--provider", "cpu"), alternative=Remedy("", ("partita", "providers", "--json")))
    error = PartitaError("no", remedy=remedy)
    assert str(error) == "no; try it: --provider cpu, or partita providers --json"
    assert error.remedy == remedy


def sources() -> Iterator[Path]:
    """Files with messages that a Python program may read."""
    for path in sorted((REPOSITORY / "partita").rglob("*.py")):
        where = path.relative_to(REPOSITORY).as_posix()
        parts = path.relative_to(REPOSITORY / "partita").parts
        if not set(parts) & set(COMMAND_LINE_ONLY) and not where.startswith(STORED):
            yield path


def flags_in_texts(tree: ast.AST) -> Iterator[int]:
    """Lines with a text that names a flag of the command line. Words of a command, in a tuple or list, are allowed."""
    allowed: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(elts=words) | ast.List(elts=words) | ast.Set(elts=words):
                plain = (word for word in words if isinstance(word, ast.Constant))
                allowed |= {id(word) for word in plain if WORD.fullmatch(str(word.value))}
            case ast.Expr(value=ast.Constant() as docstring):
                allowed.add(id(docstring))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in allowed:
            continue
        if FLAG.search(node.value):
            yield node.lineno


def test_source_messages_name_options_in_backticks() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in sources()
        for line in flags_in_texts(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, f"write `max_length` in place of --max-length: {found}"
