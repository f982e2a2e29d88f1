"""Tokenization and streaming: whole characters, stop strings across tokens, chat templates."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time

import psutil
import pytest

from partita.errors import GenerationError, PackageError
from partita.runtime.generate.text import chat_templates
from partita.runtime.generate.text.chat_templates import conversation
from partita.runtime.generate.text.stop_strings import StopStrings
from partita.runtime.generate.text.tokens import FullTokenizer, Text, TooLongError, load_text, stop_token_ids
from tests.conftest import DEMO_CHECKPOINT

HARD = "naïve café — 日本語 你好，世界！ 😀👩‍👩‍👧‍👦🇨🇭 x = [1,  2]\n\tdone"


@pytest.fixture(scope="module")
def text(tiny_package):
    return load_text(tiny_package())


def test_stream_emits_whole_characters_and_complete_text(text):
    ids = text.encode(HARD)
    assert len(ids) > 2 * len("日本語"), "the test needs characters of several tokens"
    stream = text.stream()
    pieces = [stream.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == HARD
    assert pieces.count("") > 10


@pytest.fixture
def bytes_text(tmp_path):
    """A tokenizer of a token for a and b and one for each byte, which gives up on runs of bytes that are no UTF-8."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "b": 258}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(tmp_path)
    return load_text(tmp_path)


def byte_ids(data: bytes) -> list[int]:
    letters = {ord("a"): 1, ord("b"): 258}
    return [letters.get(byte, 2 + byte) for byte in data]


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\xf0\x9f\x98\x80\xe4a", "\U0001f600\ufffda"),
        (b"\xf0\x9f\x98\x80\xe4", "\U0001f600\ufffd"),
        (b"a\xff\xfeb", "a\ufffd\ufffdb"),
        ("你好".encode() + b"\xe4\xbd" + b"b", "你好\ufffd\ufffdb"),
        ("a你b好".encode(), "a你b好"),
    ],
)
def test_invalid_bytes_become_replacement_characters(bytes_text, data, shown):
    stream = bytes_text.stream()
    pieces = [stream.push(token) for token in byte_ids(data)]
    assert "".join(pieces) + stream.finish() == shown == bytes_text.decode(byte_ids(data))


def test_stream_equals_full_decode_for_random_bytes(bytes_text):
    draw = random.Random(0)
    for _ in range(300):
        parts = [draw.choice(["a", "b", "é", "你", "😀"]).encode(), bytes([draw.randrange(128, 256)])]
        data = b"".join(draw.choice(parts[:1] * 3 + parts[1:]) for _ in range(draw.randrange(12)))
        ids = byte_ids(data)
        whole = bytes_text.decode(ids)
        for prompt in ([], byte_ids("你a".encode())):
            stream = bytes_text.stream(prompt)
            assert "".join([*(stream.push(token) for token in ids), stream.finish()]) == whole
        with contextlib.suppress(UnicodeDecodeError):
            assert whole == data.decode("utf-8") == bytes_text.decode_at_once(ids)
        assert whole.replace("\ufffd", "") in "".join(data.decode("utf-8", "ignore"))


@pytest.fixture(scope="module")
def spaced_text(tmp_path_factory):
    """A tokenizer like sentencepiece's: the space before a word is part of its token, and is dropped at the start."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["\u2581the", "\u2581", "cat", "\u2581cat", "s", ".", "é", "\u2581😀"]
    vocab = {word: place for place, word in enumerate(["<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    core.add_special_tokens([AddedToken("<s>", special=True)])
    core.add_tokens([AddedToken("<|added|>", normalized=False)])
    folder = tmp_path_factory.mktemp("spaced")
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
@pytest.mark.parametrize("family", ["byte level", "sentencepiece"])
def test_prompt_plus_stream_equals_full_decode(tiny_package, spaced_text, kind, family):
    text = load_text(tiny_package() if family == "byte level" else spaced_text, kind)
    draw, size = random.Random(5), len(text._tokenizer.core.get_vocab())
    said = [text.encode("the cat") + text.encode(part) for part in ("é😀", "the cats.", "日本語 the", "<|added|>")]
    whole_texts = 0
    for _ in range(200):
        ids = [token for _ in range(5) for token in draw.choice([draw.choice(said), [draw.randrange(size)]])]
        cut = draw.randrange(len(ids))
        whole, prompt = text.decode_at_once(ids), text.decode_at_once(ids[:cut])
        stream = text.stream(ids[:cut])
        shown = "".join([*(stream.push(token) for token in ids[cut:]), stream.finish()])
        if "\ufffd" not in whole + prompt:
            whole_texts += 1
            assert prompt + shown == whole
    assert whole_texts > 10


@pytest.mark.parametrize("cut", range(12))
def test_stream_after_long_prompt_starts_on_character_boundary(bytes_text, cut):
    """The context starts at a character boundary, also if the prompt ends inside a character."""
    ids = byte_ids("你好世界".encode() * 100)
    end = len(ids) - 24 + cut
    stream = bytes_text.stream(ids[:end])
    pieces = [stream.push(token) for token in [*ids[end:], *byte_ids(b"a")]]
    shown = "".join(pieces) + stream.finish()
    assert shown == ("你好世界" * 2)[cut // 3 :] + "a", "from the character on that the cut is in"


@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
def test_special_token_as_stop_string_ends_text(tiny_package, kind):
    """Decoded text omits special tokens, so a text search would not find it."""
    text = load_text(tiny_package(), kind)
    name = text._tokenizer.decode([2], special=True)
    stream = text.stream(stops=["never", name])
    stopped, shown = [], []
    for token in [*text.encode("hello wor"), 2]:
        shown.append(stream.push(token))
        stopped.append(stream.stopped)
    assert stopped == [*[False] * (len(stopped) - 1), True]
    assert "".join(shown) + stream.finish() == "hello wor"


def test_stop_string_search_is_independent_of_piece_boundaries() -> None:
    """Random texts of "a" and "b", whose stop strings overlap themselves."""
    draw = random.Random(3)
    for _ in range(2000):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3))]
        pieces = ["".join(draw.choices("ab", k=draw.randint(0, 4))) for _ in range(8)]
        holder, whole = StopStrings(stops), "".join(pieces)
        shown = "".join(holder.push(piece) for piece in pieces) + holder.finish()
        # It ends as soon as a stop string does, at the earliest place of those that are there by then.
        for end in itertools.accumulate(map(len, pieces)):
            places = [place for stop in stops if (place := whole[:end].find(stop)) >= 0]
            if places:
                assert shown == whole[: min(places)] and holder.found is not None
                break
        else:
            assert shown == whole and holder.found is None


def test_partial_match_of_long_stop_string_is_linear_time() -> None:
    holder = StopStrings([*("a" * 4000 + str(last) for last in range(16))])
    began = time.process_time()
    for _ in range(4_000):
        holder.push("aaaa")
    assert time.process_time() - began < 5


def test_saved_truncation_and_padding_are_ignored(package_copy):
    """Training saves the length of its examples; transformers ignores it for prompts."""
    from tokenizers import Tokenizer

    folder = package_copy()
    path = folder / "tokenizer.json"
    whole = load_text(folder).encode(HARD)
    core = Tokenizer.from_file(str(path))
    core.enable_truncation(8)
    core.enable_padding(length=200)
    core.save(str(path))
    assert load_text(folder).encode(HARD) == whole
    assert len(whole) > 8


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 7]}, "config.json": {"eos_token_id": 9}}, {2, 7}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, {9}),
        ({"genai_config.json": {"model": {"eos_token_id": [9, 32]}}, "config.json": {"eos_token_id": 9}}, {9, 32}),
        ({}, set()),
    ],
)
def test_stop_token_ids_are_read_from_config_files(tmp_path, files, ids):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(tmp_path) == ids


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [2, true]}', '{"eos_token_id": 2.5}']
)
def test_damaged_generation_config_raises_package_error(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(PackageError, match=r"generation_config\.json: damaged"):
        stop_token_ids(tmp_path)


@pytest.fixture
def decoded(monkeypatch):
    """The number of tokens of each call of the decoder."""
    counts: list[int] = []
    decode = Text.decode_at_once

    def counted(self, ids, **options):
        counts.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Text, "decode_at_once", counted)
    return counts


def test_invalid_bytes_and_special_tokens_are_decoded_in_bounded_work(text, bytes_text, decoded):
    bytes_text.stream(byte_ids(b"\x80" * 5000))
    assert sum(decoded) < 2000
    stream = text.stream(text.encode("and"))
    decoded.clear()
    assert not any(stream.push(2) for _ in range(2000)) and sum(decoded) < 100
    assert "".join(stream.push(token) for token in text.encode("more")) + stream.finish() == "more"


def test_token_text_includes_space_and_special_token_name(spaced_text):
    text = load_text(spaced_text, "tokenizers")
    ids = text._tokenizer.core.get_vocab()
    assert text.decode_at_once([ids["cat"]]) == text.decode_at_once([ids["\u2581cat"]]) == "cat"
    found = [text.token_text(ids[name]) for name in ("cat", "\u2581cat", "\u2581", "<s>")]
    assert found == ["cat", " cat", " ", "<s>"] and "\ufffd" in text.token_text(ids["<0xC3>"])


def test_text_outside_vocabulary_raises_generation_error(tmp_path):
    """The tokenizer raises a plain exception, which would end a batch run over a file."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="missing")).save(str(tmp_path / "tokenizer.json"))
    text = load_text(tmp_path, "tokenizers")
    assert text.encode("a") == [0]
    with pytest.raises(GenerationError, match="the tokenizer cannot encode this text"):
        text.encode("b")


# Chat templates: string contents, lists of content parts, and templates that are stopped


STRINGS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
QUOTED = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | tojson }}\n{% endfor %}"
USER_ONLY = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"


def said(package_copy, template, prompt="Hello", system=None):
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(template)
    text = load_text(folder)
    return text.decode(text.encode_messages(conversation(prompt, system)))


@pytest.mark.parametrize("template", [STRINGS, PARTS])
def test_message_contents_are_in_prompt(package_copy, template):
    expected = "system: Be brief.\nuser: Hello\nassistant: "
    assert said(package_copy, template, system="Be brief.") == expected


def test_template_may_escape_message_content(package_copy):
    assert said(package_copy, QUOTED, 'say "x"') == 'user: "say \\"x\\""\n'


def test_omitted_system_message_raises_generation_error(package_copy):
    with pytest.raises(GenerationError, match="omits the content of the system message"):
        said(package_copy, USER_ONLY, system="Be brief.")


@pytest.mark.parametrize("prompt", ["a", "u", "Hello"])
def test_short_message_is_not_matched_inside_role_name(package_copy, prompt):
    """A template for content parts omits string content; the "a" of a role name is no match."""
    assert said(package_copy, PARTS, prompt) == f"user: {prompt}\nassistant: "


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# system, developer #}", "developer")])
def test_developer_role_becomes_system_if_template_lacks_it(package_copy, knows, role):
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(knows + STRINGS)
    text = load_text(folder)
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert text.decode(text.encode_messages(messages)) == f"{role}: Be brief.\nuser: Hello\nassistant: "


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='aaaa') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (ENDLESS, "gave no answer within 2 s"),
        (DOUBLED, "needs more than 512 MiB of memory"),
        ("{{ 'a' * 3000000000 }}", "needs more than 512 MiB of memory"),
        ("{{ '{:>9999999999}'.format(1) }}", "needs more than 512 MiB of memory"),
        ("{{ range(99999) | list | join('b' * 1000000) }}", "needs more than 512 MiB of memory"),
        ("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ raise_exception('x' * 1000000) }}", "x" * 300),
    ],
    ids=lambda value: str(value)[:20],
)
def test_failing_template_is_stopped_and_next_render_succeeds(template, error, package_copy, monkeypatch):
    monkeypatch.setattr(chat_templates, "RENDER_SECONDS", 2.0)
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(
        "{% if 'BOMB' in messages | string %}" + template + "{% endif %}" + STRINGS
    )
    text = load_text(folder)
    with pytest.raises(GenerationError) as caught:
        text.encode_messages(conversation("BOMB"))
    assert error in str(caught.value) and len(str(caught.value)) < 1000
    assert text.decode(text.encode_messages(conversation("Hello"))) == "user: Hello\nassistant: "


def test_killed_render_process_is_restarted(package_copy):
    text = load_text(package_copy())
    before = text.encode_messages(conversation("Hello"))
    (child,) = [each for each in psutil.Process().children() if "chat_templates" in " ".join(each.cmdline())]
    child.kill()
    psutil.wait_procs([child], timeout=10)
    assert text.encode_messages(conversation("Hello")) == before


def test_template_above_1_mebibyte_raises_generation_error(package_copy):
    with pytest.raises(GenerationError, match="has more than 1,048,576 characters"):
        said(package_copy, STRINGS + "x" * (1 << 20))


def test_too_long_rendered_conversation_raises_too_long_error(package_copy, monkeypatch):
    monkeypatch.setattr("partita.runtime.generate.text.tokens.MOST_BYTES", 1 << 20)
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(STRINGS + "{{ 'a' * 1000000 }}")
    text = load_text(folder)
    for said in ("Hello " * 10_000, "a" * (1 << 20) + "b"):
        with pytest.raises(TooLongError, match=r"the text is too long: it has 1,0\d\d,\d\d\d bytes"):
            text.encode_messages(conversation(said))


def test_forked_process_has_its_own_render_process(package_copy):
    """Two processes that share a pipe would read the responses of each other."""
    text = load_text(package_copy())
    text.encode_messages(conversation("Hello"))
    mine = chat_templates.renderer(os.getpid())
    assert mine.worker is not None and chat_templates.renderer(os.getpid() + 1).worker is None


def test_plain_template_matches_transformers_without_loading_it(package_copy, monkeypatch):
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(STRINGS + "{{ bos_token }}")
    for source in (folder, DEMO_CHECKPOINT):
        full = FullTokenizer(source).native
        found = chat_templates.plain_template(source)
        assert found == (full.get_chat_template(), full.special_tokens_map) and found[1]["eos_token"]
    expected = load_text(folder).encode_messages(conversation("Hello"))
    with monkeypatch.context() as patch:
        patch.setattr("partita.runtime.generate.text.tokens.load_full", None)
        text = load_text(folder, "tokenizers")
        assert text.encode_messages(conversation("Hello")) == expected
