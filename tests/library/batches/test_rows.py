"""Rows of a file of prompts: what each asks for, and what is wrong with those that ask for nothing sensible."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.asking import conversations
from partita.library.batches import reading, writing
from partita.library.batches.reading import look_at, read_rows
from partita.library.batches.rows import (
    AND_OTHERS,
    MOST_UNREAD,
    InputRow,
    RowAnswer,
    RowDefaults,
    check_defaults,
    note_unread,
    row_seed,
    told_unread,
    work_of,
)
from partita.library.batches.writing import write_answers
from partita.library.requests import Work
from partita.library.sampling import Sampling, completed
from partita.runtime.logprobs import TokenLogprobs
from partita.runtime.prefix_file import Said
from partita.runtime.suggested import Suggestion
from partita.runtime.text import Text, load_text
from tests.conftest import require

VOCAB = 288
GREEDY = completed(Sampling(max_new_tokens=7), Suggestion())
DEFAULTS = RowDefaults(GREEDY, base_seed=100, stop=("\n",), stop_ids=(2,))


@pytest.fixture
def text(package: Path) -> Text:
    return load_text(package)


def asked(data: dict[str, Any], text: Text | None, defaults: RowDefaults = DEFAULTS, index: int = 3) -> Work:
    return work_of(InputRow(index, data), defaults, text, VOCAB)


def test_a_row_has_what_it_says_and_otherwise_what_all_have(text):
    plain = asked({"prompt": "return the"}, text)
    assert plain == Work(tuple(text.encode("return the")), GREEDY, ("\n",), (2,))
    own = {"temperature": 0.5, "top_k": 4, "max_tokens": 3, "stop": "x", "stop_token_ids": [5], "logprobs": 2}
    work = asked({"prompt": "return the", **own}, text)
    assert work.sampling == Sampling(0.5, 4, 1.0, 0.0, 1.0, 103, 3)
    assert (work.stop, work.stop_ids, work.logprobs) == (("x",), (5,), 2)
    assert asked({"tokens": [4, 5]}, None, RowDefaults(GREEDY)).prompt == (4, 5)
    assert asked({"prompt": [4, 5]}, text).prompt == (4, 5), "token ids, as other programs have them"
    floats = asked({"tokens": [4.0, 5.0], "stop_token_ids": [2.0]}, text)
    assert (floats.prompt, floats.stop_ids) == ((4, 5), (2,)), "as tables with missing values have them"
    with pytest.raises(UsageError, match="a list, and not of token ids alone"):
        asked({"tokens": [4.5]}, text)
    with pytest.raises(UsageError, match="system is a text, which goes before no token ids"):
        asked({"tokens": [4, 5], "system": "Be terse"}, text)


def test_what_every_row_would_fail_with_is_said_before_the_first(text):
    ids, words = Said((4, 5), None, None), Said((4, 5), "return", None)
    check_defaults(replace(DEFAULTS, prefix=words), text, "txt")
    check_defaults(replace(DEFAULTS, prefix=ids), None, "jsonl")
    with pytest.raises(UsageError, match="prefix is one of token ids"):
        check_defaults(replace(DEFAULTS, prefix=ids), text, "txt")
    with pytest.raises(UsageError, match="prefix is one of text"):
        check_defaults(replace(DEFAULTS, prefix=words), None, "jsonl")
    with pytest.raises(UsageError, match="no tokenizer is used"):
        check_defaults(DEFAULTS, None, "txt")


def test_messages_go_through_the_chat_template(text):
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
    with pytest.raises(UsageError, match="packages read text alone"):
        asked({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, text)


@pytest.mark.parametrize(
    ("data", "good"),
    [
        ({"max_tokens": 3, "max_new_tokens": 4}, False),
        ({"max_tokens": 3, "max_completion_tokens": 4}, False),
        ({"max_new_tokens": 3, "max_tokens": 4}, False),
        ({"max_tokens": 3, "max_new_tokens": 3, "max_completion_tokens": 3}, True),
    ],
)
def test_an_option_that_is_said_twice_is_said_alike(text, data, good):
    if good:
        assert asked({"prompt": "a", **data}, text).sampling.max_new_tokens == 3
    else:
        with pytest.raises(UsageError, match="another name of the same option"):
            asked({"prompt": "a", **data}, text)


def test_rows_that_draw_have_seeds_of_their_own(text):
    draws = RowDefaults(completed(Sampling(temperature=1.0, seed=9), Suggestion()), base_seed=9)
    seeds = [asked({"prompt": "a"}, text, draws, index).sampling.seed for index in range(3)]
    assert seeds == [row_seed(9, index) for index in range(3)] and len(set(seeds)) == 3
    assert asked({"prompt": "a", "seed": 4}, text, draws).sampling.seed == 4
    assert asked({"prompt": "a"}, text).sampling.seed is None, "nothing is drawn"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({}, "needs one of prompt, messages, tokens"),
        ({"prompt": "a", "tokens": [1]}, "has prompt and tokens"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 5}, "must be a text"),
        ({"prompt": [1, "a"]}, "not of token ids alone"),
        ({"tokens": "1 2"}, "must be token ids"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "role and content"),
        ({"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]}, "a row is one"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "a", "stop": 3}, "stop is '3'"),
        ({"prompt": "a", "temperature": 1e-9}, "temperature is 1e-09; it must be 0 .greedy. or from 0.001 to 100"),
        ({"prompt": "a", "stop": ["b", "x" * 4097]}, "stop has 4,097 characters"),
        ({"prompt": "a", "stop_token_ids": [VOCAB]}, "vocabulary"),
        ({"prompt": "a", "logprobs": 1000}, "logprobs is 1000"),
        ({"prompt": "a", "id": [1]}, "the id of a row"),
        ({"prompt": "a", "id": 1.5}, "the id of a row"),
        ({"prompt": b"a"}, "it must be a text"),
        ({"tokens": b"a"}, "it must be token ids"),
        ({"prompt": "a", "stop_token_ids": b"a"}, "it must be a list of token ids"),
        ({"messages": {"role": "user", "content": "a"}}, "messages is of type dict"),
        ({"messages": "hello"}, "messages is 'hello', a text where objects .* prompt, with --chat"),
        ({"messages": '[{"role": "user", "content": "a"}]'}, "a text where objects .* have JSON read into a list"),
        ({"messages": ['{"role": "user", "content": "a"}']}, "a text where objects with role and content"),
    ],
)
def test_what_is_wrong_with_a_row_is_its_own_error(text, data, match):
    with pytest.raises((GenerationError, UsageError), match=match):
        asked(data, text)


def test_integers_beside_missing_ones_are_floats_in_a_table(text):
    """In every field that is an integer, the name of the row too."""
    data = {"prompt": "a", "id": 7.0, "logprobs": 2.0, "top_k": 4.0, "seed": 5.0, "max_tokens": 3.0}
    work = asked(data, text)
    assert InputRow(0, data).key == 7 and isinstance(InputRow(0, data).key, int)
    assert (work.logprobs, work.sampling.top_k, work.sampling.max_new_tokens) == (2, 4, 3)


def test_a_row_that_is_no_text_keeps_its_name(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": "a", "prompt": "\\ud800"}\n{"id": "\\ud800", "key": "b", "prompt": "c"}\n["\\ud800"]\n')
    assert [row.key for row in read_rows(path)] == ["a", "b", None]
    assert all(row.error is not None and "half a character" in row.error for row in read_rows(path))


def test_a_text_without_a_tokenizer_is_an_error_of_the_row():
    with pytest.raises(UsageError, match="no tokenizer"):
        asked({"prompt": "a"}, None)


LINES = (
    b'\xef\xbb\xbf{"prompt": "a", "id": 7, "seed": null, "label": 1}\n'
    b"\n"
    b"{\n"
    b"[1]\n"
    b'{"prompt": "\xff"}\n'
    b'{"prompt": "\\ud800"}\n' + b"[" * 100_000 + b"\n"
    b'{"prompt": "last"}'
)


def test_lines_that_are_no_rows_keep_their_place(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)
    first, *bad, last = read_rows(path)
    assert (first.index, first.key, first.data) == (0, 7, {"prompt": "a", "id": 7, "label": 1})
    assert first.unread == {"label"}
    told = [row.error for row in bad]
    for said, part in zip(told, ("not JSON", "no JSON object", "not UTF-8", "half a character", "nested"), strict=True):
        assert said is not None and part in said
    assert [row.index for row in bad] == [1, 2, 3, 4, 5] and last == InputRow(6, {"prompt": "last"})
    with pytest.raises(PartitaError, match="line 3 is not JSON"):
        work_of(bad[0], DEFAULTS, None, VOCAB)


def test_a_mark_of_the_encoding_before_an_empty_line_is_no_row(tmp_path):
    path = tmp_path / "in.jsonl"
    for first in (b"", b"\r", b"  "):
        path.write_bytes(b"\xef\xbb\xbf" + first + b'\n{"prompt": "a"}\n')
        assert list(read_rows(path)) == [InputRow(0, {"prompt": "a"})]


def test_a_line_of_text_is_a_prompt_and_an_empty_one_keeps_its_place(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\r\n\n{two}\nthree")
    rows = list(read_rows(path))
    assert [row.data["prompt"] for row in rows] == ["one", "", "{two}", "three"]
    assert look_at(path).rows == 4


def test_a_table_has_the_rows_that_lines_have(tmp_path):
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    data: list[dict[str, Any]] = [
        {"id": "x", "prompt": "a", "messages": None, "temperature": 0.5, "top_k": 4.0},
        {
            "id": "y",
            "prompt": None,
            "messages": [{"role": "user", "content": "b"}],
            "temperature": None,
            "top_k": float("nan"),
        },
    ]
    path, lines = tmp_path / "in.parquet", tmp_path / "in.jsonl"
    parquet.write_table(pyarrow.Table.from_pylist(data), path)
    lines.write_text("".join(json.dumps(row) + "\n" for row in data).replace("NaN", "null"))
    rows = list(read_rows(path))
    assert rows == list(read_rows(lines)) and "top_k" not in rows[1].data
    work = work_of(InputRow(0, {**rows[0].data, "prompt": [1]}), DEFAULTS, None, VOCAB)
    assert work.sampling.top_k == 4, "integers beside missing ones are floats in a table"
    assert look_at(path).rows == look_at(lines).rows == 2


@pytest.mark.parametrize(("content", "match"), [(b"not a table", "not a Parquet file"), (None, "it has other")])
def test_what_is_no_table_of_prompts_is_said_before_the_first_row(tmp_path, content, match):
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "in.parquet"
    if content is None:
        parquet.write_table(pyarrow.table({"other": [1]}), path)
    else:
        path.write_bytes(content)
    with pytest.raises(GenerationError, match=match):
        list(read_rows(path))
    with pytest.raises(UsageError, match="has to end in one of"):
        look_at(tmp_path / "in.csv")


def test_a_text_that_is_none_is_the_error_of_one_row_of_a_table(tmp_path: Path) -> None:
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.array([b"good", b"\xff\xfe", b"also good"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "in.parquet")
    first, second, third = read_rows(tmp_path / "in.parquet")
    assert first.data == {"prompt": "good"} and third.data == {"prompt": "also good"} and third.index == 2
    assert second.index == 1 and second.error is not None and "row 1 cannot be read" in second.error


def test_what_is_null_in_a_message_is_not_there(tmp_path: Path) -> None:
    ((message,),) = conversations([{"role": "user", "content": "hello", "tool_calls": None}])
    assert message == {"role": "user", "content": "hello"}


def test_the_largest_seed_has_a_place_in_a_table_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    require("pyarrow")
    from pyarrow import parquet

    largest = (1 << 64) - 1
    work = asked({"tokens": [1], "temperature": 1.0, "seed": largest}, None)
    answer = RowAnswer(0, None, None, (1,), 1, "stop", work.sampling.seed, None)
    write_answers(tmp_path / "out.parquet", [json.dumps(answer.to_json()).encode()])
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]["seed"] == largest
    with pytest.raises(PartitaError, match="seed"):
        asked({"tokens": [1], "temperature": 1.0, "seed": largest + 1}, None)


def test_an_integer_that_no_float_holds_is_the_error_of_its_row(text):
    """It would end the run at the first draw, and again with every run that goes on."""
    for field in ("temperature", "repetition_penalty", "top_p", "top_k", "seed", "max_new_tokens"):
        with pytest.raises(UsageError, match=f"{field} is an integer of more than 300 digits"):
            asked({"prompt": "a", field: 10**400}, text)
    with pytest.raises(UsageError, match="300 digits"):
        asked({"prompt": "a", "temperature": 10**5000}, text)


def test_what_is_nested_deeper_than_other_readers_go_is_the_error_of_its_row(tmp_path: Path) -> None:
    """A worker of a cluster reads a row again, and stops at 200."""
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "a"})[:-1] + f', "x": {"[" * deep}{"]" * deep}}}\n' for deep in (99, 100, 210))
    )
    assert [row.error is None for row in read_rows(path)] == [True, False, False]
    assert "nested more than 100 deep" in str([row.error for row in read_rows(path)])


def test_columns_that_mean_nothing_are_not_read(tmp_path: Path) -> None:
    """They may have no form in Python, as a moment in the year 294247, and be larger than memory."""
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    moments = pyarrow.array([2**63 - 1, 0], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "valid_to": moments}), tmp_path / "in.parquet")
    rows = list(read_rows(tmp_path / "in.parquet"))
    assert [row.data for row in rows] == [{"prompt": "a"}, {"prompt": "b"}] and all(row.error is None for row in rows)
    assert rows[0].unread == {"valid_to"}


def test_only_so_many_fields_that_mean_nothing_are_told_of() -> None:
    seen: set[str] = set()
    for index in range(1000):
        note_unread(seen, InputRow(index, {"prompt": "a", f"field {index:04}": 1}))
    assert told_unread(seen) == (*(f"field {index:04}" for index in range(MOST_UNREAD)), AND_OTHERS)
    few: set[str] = set()
    note_unread(few, InputRow(0, {"b": 1, "a": 1}))
    note_unread(few, InputRow(1, {"b": 1, "a": 1}))
    assert told_unread(few) == ("a", "b")


def test_a_column_that_is_there_twice_is_said_and_not_chosen_from(tmp_path: Path) -> None:
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"]), tmp_path / "in.parquet")
    with pytest.raises(GenerationError, match="several columns named prompt"):
        list(read_rows(tmp_path / "in.parquet"))


@pytest.mark.parametrize("same", [False, True])
def test_large_rows_of_a_table_are_in_memory_few_at_a_time(tmp_path: Path, monkeypatch, same) -> None:
    """What is the same in all of them is in the file once, and in memory as often as it is read."""
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    rows, each = 40, 50_000
    values = pyarrow.array([7] * each * rows if same else range(each * rows), pyarrow.int64())
    offsets = pyarrow.array(range(0, each * rows + 1, each), pyarrow.int32())
    tokens = pyarrow.ListArray.from_arrays(offsets, values)
    parquet.write_table(pyarrow.table({"tokens": tokens, "other": ["x"] * rows}), tmp_path / "in.parquet")
    sizes: list[int] = []
    convert = reading._block_rows

    def counted(block: Any, first: int) -> Any:
        sizes.append(block.nbytes)
        return convert(block, first)

    monkeypatch.setattr(reading, "_block_rows", counted)
    for index, row in enumerate(read_rows(tmp_path / "in.parquet")):
        assert row.index == index and row.unread == {"other"}
        assert row.data["tokens"][:: each - 1] == ([7, 7] if same else [index * each, (index + 1) * each - 1])
    assert index == rows - 1 and max(sizes) <= reading.PARQUET_BYTES


def test_small_rows_of_a_table_are_read_many_at_a_time(tmp_path: Path, monkeypatch) -> None:
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": [f"row {n}" for n in range(600)]}), tmp_path / "in.parquet")
    sizes: list[int] = []
    convert = reading._block_rows

    def counted(block: Any, first: int) -> Any:
        sizes.append(block.num_rows)
        return convert(block, first)

    monkeypatch.setattr(reading, "_block_rows", counted)
    assert [row.data["prompt"] for row in read_rows(tmp_path / "in.parquet")] == [f"row {n}" for n in range(600)]
    assert sizes == [256, 256, 88]


@pytest.mark.heavy
def test_large_answers_are_in_memory_few_at_a_time_where_a_table_is_written(tmp_path: Path) -> None:
    """As objects of Python log-probabilities take many times what they take on disk."""
    require("pyarrow")
    from pyarrow import parquet

    likely = TokenLogprobs(1, -0.25, tuple((token, -0.125 * token) for token in range(64)))
    large = RowAnswer(0, None, None, (1,) * 300, 1, "stop", None, None, (likely,) * 300)
    lines = [json.dumps(replace(large, index=index).to_json()).encode() for index in range(30)]
    fits = -(-writing.PARQUET_BYTES // len(lines[0]))
    assert 2 <= fits <= 20
    write_answers(tmp_path / "out.parquet", lines)
    file = parquet.ParquetFile(tmp_path / "out.parquet")
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert sum(sizes) == 30 and max(sizes) <= fits
    table = file.read().to_pylist()
    assert [row["index"] for row in table] == list(range(30))
    assert table[29]["logprobs"][299]["top"][63] == {"token": 63, "logprob": -7.875}


def test_small_answers_are_written_many_at_a_time_and_none_are_a_table_too(tmp_path: Path) -> None:
    require("pyarrow")
    from pyarrow import parquet

    small = RowAnswer(0, None, "a", (1,), 1, "stop", None, None)
    lines = [json.dumps(replace(small, index=index).to_json()).encode() for index in range(2100)]
    write_answers(tmp_path / "out.parquet", lines)
    metadata = parquet.ParquetFile(tmp_path / "out.parquet").metadata
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [1024, 1024, 52]
    write_answers(tmp_path / "none.parquet", [])
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0


def test_a_message_of_the_system_in_a_row_is_the_only_one(text):
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    expected, default = tuple(text.encode_messages(said)), RowDefaults(GREEDY, system="be long")
    assert asked({"messages": said}, text, default).prompt == expected, "the row's own holds"
    assert asked({"messages": [{**said[0], "role": "developer"}, said[1]]}, text, default).prompt == expected
    assert asked({"messages": said, "system": "be brief"}, text).prompt == expected, "the same twice"
    with pytest.raises(UsageError, match="begin with a message of the system, and another one is given"):
        asked({"messages": said, "system": "be long"}, text)
    prefix = RowDefaults(GREEDY, prefix=Said((1, 2), system="be long"))
    with pytest.raises(UsageError, match="another one is given"):
        asked({"messages": said}, text, prefix)


def test_a_table_in_a_form_that_is_not_known_here_is_said(tmp_path: Path, monkeypatch) -> None:
    require("pyarrow")
    import pyarrow
    from pyarrow.parquet import ParquetFile

    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)

    def lacks(*args: object, **named: object) -> None:
        raise pyarrow.ArrowNotImplementedError("Support for codec 'lzo' not built")

    monkeypatch.setattr(ParquetFile, "iter_batches", lacks)
    with pytest.raises(GenerationError, match="codec 'lzo' not built"):
        list(read_rows(path))


@pytest.mark.parametrize("field", ["temperature", "top_k", "max_tokens", "seed"])
def test_a_number_that_is_none_is_the_error_of_a_line(field, tmp_path):
    """In a table it stands for what is missing; JSON has null for that."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"tokens": [1], name: float("nan")}) + "\n" for name in (field, "other")))
    first, second = read_rows(path)
    with pytest.raises(UsageError, match=f"{field} is nan"):
        work_of(first, DEFAULTS, None, VOCAB)
    assert work_of(second, DEFAULTS, None, VOCAB).prompt == (1,)


@pytest.mark.parametrize(
    "row", [{"prompt": "a" * 3_000_000}, {"messages": [{"role": "user", "content": "b" * 40_000_000}]}]
)
def test_a_text_that_cannot_fit_is_the_error_of_its_row(row, package):
    began = time.monotonic()
    with pytest.raises(GenerationError, match="the text is too long"):
        asked(row, load_text(package, "tokenizers", 128))
    assert time.monotonic() - began < 10, "it was tokenized whole"
