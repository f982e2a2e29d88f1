"""Text in and out: whole characters only, stop strings across tokens, chat templates."""

from __future__ import annotations

import json

import pytest

from partita.errors import GenerationError, PackageError, UsageError
from partita.runtime.text import StopStrings, load_text, stop_token_ids

HARD = "naïve café — 日本語 你好，世界！ 😀👩‍👩‍👧‍👦🇨🇭 x = [1,  2]\n\tdone"

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def text(tiny_package):
    return load_text(tiny_package())


def test_encoding_and_decoding_is_the_identity(text):
    assert text.decode(text.encode(HARD)) == HARD


def test_streaming_gives_whole_characters_and_in_the_end_everything(text):
    ids = text.encode(HARD)
    assert len(ids) > 2 * len("日本語"), "the test needs characters of several tokens"
    stream = text.stream()
    pieces = [stream.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == HARD
    assert pieces.count("") > 10


def test_text_comes_as_soon_as_its_character_is_whole(text):
    stream = text.stream()
    assert [stream.push(token) for token in text.encode("😀")] == ["", "", "", "😀"]


def test_streaming_continues_the_prompt(text):
    ids = text.encode("日本語 text")
    for cut in range(1, len(ids)):
        stream = text.stream(ids[:cut])
        shown = "".join(stream.push(token) for token in ids[cut:]) + stream.finish()
        assert "日本語 text".endswith(shown)


def test_a_character_that_never_becomes_whole_shows_at_the_end_only(text):
    ids = text.encode("a😀")[:-1]
    stream = text.stream()
    assert "".join(stream.push(token) for token in ids) == "a"
    assert stream.finish() == "\ufffd"


def test_byte_fallback_tokenizers_stream_whole_characters(tmp_path):
    """Their decoder gives up on a whole run of byte tokens as long as its last character is incomplete."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(tmp_path)
    text = load_text(tmp_path)
    wanted = "a😀你好世界😀a"
    for prompt in ("", "你好世界"):
        context, ids = text.encode(prompt), text.encode(wanted)
        stream = text.stream(context)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) == wanted
        assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_not_shown(text):
    stream = text.stream()
    assert "".join(stream.push(token) for token in [1, *text.encode("hi"), 2]) + stream.finish() == "hi"


def test_a_stop_string_across_tokens_ends_the_text(text):
    stream = text.stream(stops=["wor"])
    shown = [stream.push(token) for token in text.encode("hello world and more")]
    assert stream.stopped
    assert stream.stop_string == "wor"
    assert "".join(shown) + stream.finish() == "hello "


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["END"], ["a E", "N", "D b"], ["a ", "", ""], "END"),
        (["END"], ["a E", "N", "x b"], ["a ", "", "ENx b"], None),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["b", "ab"], ["xa", "b"], ["x", ""], "ab"),
        (["long stop", "\n"], ["one\ntwo"], ["one"], "\n"),
        ([], ["any", "thing"], ["any", "thing"], None),
    ],
)
def test_stop_strings(stops, pieces, shown, found):
    holder = StopStrings(stops)
    assert [holder.push(piece) for piece in pieces] == shown
    assert holder.found == found
    assert holder.push("after") == ("" if found else "after")


def test_what_was_held_back_comes_at_the_end():
    holder = StopStrings(["END"])
    assert holder.push("the EN") == "the "
    assert holder.finish() == "EN"


def test_an_empty_stop_string_is_a_usage_error():
    with pytest.raises(UsageError, match="--stop"):
        StopStrings(["x", ""])


def test_chat_renders_system_and_user(package_copy):
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = load_text(folder)
    ids = text.encode_chat("Hello", system="Be brief.")
    assert ids[0] == 1, "the template's own special token was not read as one"
    assert text.decode(ids) == "system: Be brief.\nuser: Hello\nassistant: "
    assert text.decode(text.encode_chat("Hello")) == "user: Hello\nassistant: "


def test_chat_without_a_template_is_a_usage_error(package_copy):
    folder = package_copy()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="--chat"):
        load_text(folder).encode_chat("Hello")


def test_a_template_that_refuses_is_reported(package_copy):
    folder = package_copy()
    (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    with pytest.raises(GenerationError, match="System role not supported"):
        load_text(folder).encode_chat("Hello", system="x")


def test_a_package_without_a_tokenizer_says_that_ids_will_do(package_copy):
    folder = package_copy()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(PackageError, match="no tokenizer; give the prompt as token ids"):
        load_text(folder)


def test_a_damaged_tokenizer_is_a_package_error(package_copy):
    folder = package_copy()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(PackageError, match="tokenizer does not load"):
        load_text(folder)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 7]}, "config.json": {"eos_token_id": 9}}, {2, 7}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, {9}),
        ({}, set()),
    ],
)
def test_stop_token_ids(tmp_path, files, ids):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(tmp_path) == ids


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [2, true]}', '{"eos_token_id": 2.5}']
)
def test_a_damaged_generation_config_is_a_package_error(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(PackageError, match=r"generation_config\.json: damaged"):
        stop_token_ids(tmp_path)
