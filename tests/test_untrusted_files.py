"""Text and JSON that somebody else wrote: what is absurd is refused as damaged, by every reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.commands.chat import read_conversation
from partita.errors import PackageError, PartitaError, UsageError
from partita.foreign.evidence import read_json
from partita.library.sampling import FILE, suggestion
from partita.package.folder import read_manifest
from partita.runtime.generate.text.chat_templates import OF_PROCESSORS, template_of_processor
from partita.runtime.generate.text.tokens import stop_token_ids
from partita.untrusted_files import is_number, parse_json, read_json_value

DEEP = "[" * 100_000


def test_a_value_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"a": [1, None, "ä"]}, ensure_ascii=False), encoding="utf-8")
    assert read_json_value(file) == {"a": [1, None, "ä"]}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0, True),
        (-1.5, True),
        (10**300, True),
        (10**400, False),
        (float("inf"), False),
        (float("nan"), False),
        (True, False),
    ],
)
def test_a_number_is_one_to_compute_with(value: object, number: bool) -> None:
    assert is_number(value) is number and not is_number(str(value))


@pytest.mark.parametrize("text", [DEEP, "", "{", '{"a": 1} b', "﻿{}"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ("name", "read", "kind"),
    [
        ("manifest.json", lambda file: read_manifest(file.parent), PackageError),
        ("generation_config.json", lambda file: stop_token_ids(file.parent), PackageError),
        ("config.json", lambda file: stop_token_ids(file.parent), PackageError),
        (FILE, lambda file: suggestion(file.parent), PackageError),
        (OF_PROCESSORS, lambda file: template_of_processor(file.parent), PackageError),
        ("config.json", read_json, PackageError),
        ("talk.json", read_conversation, UsageError),
    ],
)
def test_brackets_without_end_are_told_with_the_file(
    tmp_path: Path, name: str, read: Callable[[Path], object], kind: type[PartitaError]
) -> None:
    file = tmp_path / name
    file.write_text(DEEP, encoding="utf-8")
    with pytest.raises(kind) as raised:
        read(file)
    assert name in str(raised.value)


def test_a_temperature_of_hundreds_of_digits_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"do_sample": True, "temperature": 10**400}))
    with pytest.raises(PackageError, match="temperature is 1000"):
        suggestion(tmp_path)
