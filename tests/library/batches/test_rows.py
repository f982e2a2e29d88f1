"""Rows of prompt files: parsing, defaults and error messages."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita.errors import GenerationError, InstallationError, PartitaError, UsageError
from partita.library.batches.batch_run import check_files
from partita.library.batches.prompt_files import read_rows, scan_file
from partita.library.batches.rows import InputRow, RowDefaults, row_seed, work_of
from partita.library.engine.requests import Work
from partita.library.sampling import Sampling, Suggestion, complete_sampling
from partita.runtime.generate.prefix_file import PrefixContent
from partita.runtime.generate.text.tokens import Text, load_text
from tests.conftest import require

VOCAB = 288
GREEDY = complete_sampling(Sampling(max_new_tokens=7), Suggestion())
DEFAULTS = RowDefaults(GREEDY, base_seed=100, stop=("\n",), stop_ids=(2,))


@pytest.fixture
def text(package: Path) -> Text:
    return load_text(package)


def asked(data: dict[str, Any], text: Text | None, defaults: RowDefaults = DEFAULTS, index: int = 3) -> Work:
    return work_of(InputRow(index, data), defaults, text, VOCAB)


def test_row_options_override_defaults(text):
    plain = asked({"prompt": "return the"}, text)
    assert plain == Work(tuple(text.encode("return the")), GREEDY, ("\n",), (2,))
    own = {"temperature": 0.5, "top_k": 4, "max_tokens": 3, "stop": "x", "stop_token_ids": [5], "logprobs": 2}
    work = asked({"prompt": "return the", **own}, text)
    assert work.sampling == replace(GREEDY, temperature=0.5, top_k=4, seed=103, max_new_tokens=3)
    assert (work.stop, work.stop_ids, work.logprobs) == (("x",), (5,), 2)
    assert asked({"tokens": [4, 5]}, None, RowDefaults(GREEDY)).prompt == (4, 5)
    assert asked({"prompt": [4, 5]}, text).prompt == (4, 5), "token ids, as other programs have them"
    floats = asked({"tokens": [4.0, 5.0], "stop_token_ids": [2.0]}, text)
    assert (floats.prompt, floats.stop_ids) == ((4, 5), (2,)), "as tables with missing values have them"


def test_messages_are_rendered_with_chat_template(text):
    said = [{"role": "user", "content": "hello"}]
    expected = tuple(text.encode_messages(said))
    assert asked({"messages": said}, text).prompt == expected
    chat = RowDefaults(GREEDY, chat=True)
    assert asked({"prompt": "hello"}, text, chat).prompt == expected
    with_system = tuple(text.encode_messages([{"role": "system", "content": "be brief"}, *said]))
    assert asked({"messages": said, "system": "be brief"}, text).prompt == with_system
    assert asked({"prompt": "hello", "system": "be brief"}, text).prompt == with_system
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert asked({"messages": parts}, text).prompt == expected
    with pytest.raises(UsageError, match="only text is supported"):
        asked({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, text)


def test_conflicting_option_aliases_are_rejected(text):
    same = {"max_tokens": 3, "max_new_tokens": 3, "max_completion_tokens": 3}
    assert asked({"prompt": "a", **same}, text).sampling.max_new_tokens == 3
    with pytest.raises(UsageError, match="an alias of it in the same row"):
        asked({"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4}, text)


def test_sampled_rows_have_distinct_seeds(text):
    draws = RowDefaults(complete_sampling(Sampling(temperature=1.0, seed=9), Suggestion()), base_seed=9)
    seeds = [asked({"prompt": "a"}, text, draws, index).sampling.seed for index in range(3)]
    assert seeds == [row_seed(9, index) for index in range(3)] and len(set(seeds)) == 3
    assert asked({"prompt": "a", "seed": 4}, text, draws).sampling.seed == 4
    assert asked({"prompt": "a"}, text).sampling.seed is None, "nothing is drawn"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({}, "needs exactly one of prompt, messages, tokens; this row has none"),
        ({"prompt": "a", "tokens": [1]}, "has prompt and tokens"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 5}, "must be a string"),
        ({"tokens": [4.5]}, "must be a list of token ids"),
        ({"tokens": [4, 5], "system": "Be terse"}, "system cannot be put before token ids"),
        ({"messages": [{"role": "user"}]}, "role and content"),
        ({"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]}, "a row has one"),
        ({"prompt": "a", "temperature": "hot"}, "`temperature` is 'hot'; it must be a number"),
        ({"prompt": "a", "stop": 3}, "stop is '3'"),
        ({"prompt": "a", "temperature": 1e-9}, "`temperature` is 1e-09; it must be 0 .greedy. or from 0.001 to 100"),
        ({"prompt": "a", "stop_token_ids": [VOCAB]}, "vocabulary"),
        ({"prompt": "a", "logprobs": 1000}, "logprobs is 1000"),
        ({"prompt": "a", "id": [1]}, "the id of a row"),
        ({"messages": "hello"}, "messages is 'hello'; it must be a list of objects"),
        ({"prompt": "a", "colour": 1, "size": 2}, "unknown field colour and size"),
    ],
)
def test_invalid_row_is_rejected_with_specific_message(text, data, match):
    with pytest.raises((GenerationError, UsageError), match=match):
        asked(data, text)


LINES = (
    b'\xef\xbb\xbf{"prompt": "a", "id": 7, "seed": null}\n'
    b"\n"
    b"{\n"
    b"[1]\n"
    b'{"prompt": "\xff"}\n'
    b'{"prompt": "\\ud800"}\n' + b"[" * 100_000 + b"\n"
    b'{"prompt": "last"}'
)


def test_invalid_lines_become_errors_at_their_index(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)
    first, *bad, last = read_rows(path)
    assert (first.index, first.key, first.data) == (0, 7, {"prompt": "a", "id": 7})
    told = [row.error for row in bad]
    parts = ("not JSON", "must be a JSON object", "not UTF-8", "lone surrogate", "nested too deeply")
    for said, part in zip(told, parts, strict=True):
        assert said is not None and part in said
    assert [row.index for row in bad] == [1, 2, 3, 4, 5] and last == InputRow(6, {"prompt": "last"})
    with pytest.raises(PartitaError, match="line 3 is not JSON"):
        work_of(bad[0], DEFAULTS, None, VOCAB)


def test_every_text_line_is_a_prompt_including_empty_lines(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\r\n\n{two}\nthree")
    rows = list(read_rows(path))
    assert [row.data["prompt"] for row in rows] == ["one", "", "{two}", "three"]
    assert scan_file(path).rows == 4


@pytest.mark.parametrize("field", ["temperature", "top_k", "seed", "max_new_tokens"])
def test_nan_and_huge_numbers_are_rejected_by_field(field, text):
    for value, said in ((10**400, "an integer of more than 300 digits"), (float("nan"), "nan")):
        with pytest.raises(UsageError, match=f"`{field}` is {said}"):
            asked({"prompt": "a", field: value}, text)


def test_row_system_message_overrides_default_and_rejects_conflicts(text):
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    expected, default = tuple(text.encode_messages(said)), RowDefaults(GREEDY, system="be long")
    assert asked({"messages": said}, text, default).prompt == expected, "the row's own holds"
    assert asked({"messages": [{**said[0], "role": "developer"}, said[1]]}, text, default).prompt == expected
    assert asked({"messages": said, "system": "be brief"}, text).prompt == expected, "the same twice"
    with pytest.raises(UsageError, match="begins with a system message, but system sets another"):
        asked({"messages": said, "system": "be long"}, text)
    prefix = RowDefaults(GREEDY, prefix=PrefixContent((1, 2), system="be long"))
    with pytest.raises(UsageError, match="system sets another"):
        asked({"messages": said}, text, prefix)


@pytest.mark.parametrize(
    "row", [{"prompt": "a" * 3_000_000}, {"messages": [{"role": "user", "content": "b" * 40_000_000}]}]
)
def test_overlong_text_is_rejected_within_10_seconds(row, package):
    began = time.monotonic()
    with pytest.raises(GenerationError, match="the text is too long"):
        asked(row, load_text(package, "tokenizers", 128))
    assert time.monotonic() - began < 10, "it was tokenized whole"


def test_duplicate_row_ids_are_rejected(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": key, "prompt": "a"}) + "\n" for key in (-1, -2, "7", 7)))
    assert scan_file(path).rows == 4
    path.write_text(path.read_text() + '{"prompt": "a"}\n{"key": "7", "prompt": "b"}\n')
    with pytest.raises(GenerationError, match=r"rows 2 and 5 have the same id '7'"):
        scan_file(path)


def tabled(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_rows_equal_jsonl_rows(tmp_path):
    said = [{"role": "user", "content": "b"}]
    data: list[dict[str, Any]] = [
        {"id": "x", "prompt": "a", "messages": None, "temperature": 0.5, "top_k": 4.0},
        {"id": "y", "prompt": None, "messages": said, "temperature": None, "top_k": float("nan")},
        *({"id": f"{n}", "prompt": f"row {n}"} for n in range(200)),
    ]
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in data).replace("NaN", "null"))
    path = tabled(tmp_path / "in.parquet", data, row_group_size=90)
    rows = list(read_rows(path))
    assert rows == list(read_rows(lines)) and "top_k" not in rows[1].data
    assert scan_file(path).rows == scan_file(lines).rows == 202


@pytest.mark.parametrize(
    ("rows", "match"), [(None, "not a Parquet file"), ([{"prompt": "a", "other": 1}], "column other is unknown")]
)
def test_invalid_parquet_or_csv_input_is_rejected(tmp_path, rows, match):
    path = tmp_path / "in.parquet"
    path.write_bytes(b"not a table")
    if rows is not None:
        tabled(path, rows)
    with pytest.raises(GenerationError, match=match):
        scan_file(path)
    with pytest.raises(UsageError, match="must end in one of"):
        scan_file(tmp_path / "in.csv")


def test_missing_pyarrow_error_includes_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(InstallationError, match=r"pyarrow is not installed.*pip install"):
        check_files(tmp_path / "in.jsonl", tmp_path / "out.parquet")
