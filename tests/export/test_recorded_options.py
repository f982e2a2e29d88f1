"""Export options are recorded so that a damaged package can be exported again with the same options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from partita import cli
from partita.export.options import ExportOptions, asked_options


def test_every_recorded_export_option_exists_on_command_line() -> None:
    """Each recorded name is that of a flag, or of an option with values."""
    command = cast("Any", typer.main.get_command(cli.app)).get_command(None, "export")
    known = {name: parameter for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    every = ExportOptions("c", Path("o"))
    for each in fields(ExportOptions):
        if each.name in {"checkpoint", "out"}:
            continue
        value: Any = not each.default if isinstance(each.default, bool) else ("x",) if each.default == () else "x"
        if each.name in ("keep", "with_adapters", "target_options", "target_libraries"):
            value = {"x": "x"}
        changed = ExportOptions("c", Path("o"), **{each.name: value})
        for name, values in asked_options(changed).items():
            flag = getattr(known[f"--{name}"], "is_flag", False)
            assert bool(values) != flag, name
    assert asked_options(every) == {}


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"calibrate": Path("/home/me/notes.txt")}, {"calibrate": ("notes.txt",)}),
        ({"with_adapters": {"a": Path("/x/y")}}, {"with-adapters": ("a=y",)}),
        ({"target_options": {"moon": {"a": "1"}, "b": "2"}}, {"provider-option": ("b=2", "moon.a=1")}),
        ({"target_libraries": {"moon": Path("/home/me/libmoon.so")}}, {"provider-library": ("moon=libmoon.so",)}),
        ({"keep": {"lm_head": "int8", "layers.0": "fp16"}}, {"keep": ("lm_head=int8,layers.0=fp16",)}),
    ],
)
def test_files_are_recorded_by_name_and_mappings_as_on_the_command_line(
    options: dict[str, Any], recorded: dict[str, tuple[str, ...]]
) -> None:
    assert asked_options(ExportOptions("c", Path("o"), **options)) == recorded
