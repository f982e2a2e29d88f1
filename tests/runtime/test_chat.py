"""Chat templates: string contents, and lists of content parts as in processor templates."""

from __future__ import annotations

import psutil
import pytest

from partita.errors import GenerationError
from partita.runtime.generate.text import chat_templates
from partita.runtime.generate.text.chat_templates import conversation
from partita.runtime.generate.text.tokens import FullTokenizer, TooLongError, load_text
from tests.conftest import DEMO_CHECKPOINT

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
