"""Chat templates: those that take strings, and those of processors, which take lists of parts."""

from __future__ import annotations

import json
import time

import pytest

from partita.errors import GenerationError, PackageError
from partita.runtime.text import load_text

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
    return text.decode(text.encode_chat(prompt, system))


@pytest.mark.parametrize("template", [STRINGS, PARTS])
def test_what_the_messages_say_is_in_the_prompt(package_copy, template):
    expected = "system: Be brief.\nuser: Hello\nassistant: "
    assert said(package_copy, template, system="Be brief.") == expected


def test_a_template_may_write_a_message_in_another_form(package_copy):
    assert said(package_copy, QUOTED, 'say "x"') == 'user: "say \\"x\\""\n'


def test_a_message_that_would_get_lost_is_an_error(package_copy):
    with pytest.raises(GenerationError, match="leaves out what the system message says"):
        said(package_copy, USER_ONLY, system="Be brief.")


def test_the_template_of_a_processor_is_read(package_copy):
    folder = package_copy()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    text = load_text(folder)
    assert text.decode(text.encode_chat("Hello")) == "user: Hello\nassistant: "


def test_a_damaged_template_of_a_processor_is_reported(package_copy):
    folder = package_copy()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(PackageError, match=r"chat_template.json: damaged"):
        load_text(folder).encode_chat("Hello")


@pytest.mark.parametrize("prompt", ["a", "u", "Hello"])
def test_a_short_message_is_not_taken_for_said_by_chance(package_copy, prompt):
    """The name of a role has an "a": a template of parts got the message as a string, and left it out."""
    assert said(package_copy, PARTS, prompt) == f"user: {prompt}\nassistant: "


@pytest.mark.parametrize("change", ["content | upper", "content[:4]"])
def test_a_template_may_change_what_a_short_message_says(package_copy, change):
    """Words that stand for it while it is looked for are changed as well."""
    template = "{% for m in messages %}{% set content = m['content'] %}{{ " + change + " }}\n{% endfor %}"
    assert said(package_copy, template, "HI") == "HI\n"


def test_a_conversation_of_thousands_of_short_messages_is_read_in_a_moment(package_copy):
    """Each is looked for behind the last; once, each was looked for from the beginning, in a text made anew."""
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(STRINGS)
    text = load_text(folder)
    messages = [{"role": ("user", "assistant")[index % 2], "content": "ok"} for index in range(20_001)]
    began = time.monotonic()
    assert text.decode_at_once(text.encode_messages(messages)).count("ok") == len(messages)
    assert time.monotonic() - began < 10, "160 s before"


def test_messages_that_a_template_leaves_out_are_said_in_a_moment_however_many(package_copy):
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(USER_ONLY)
    messages = [{"role": ("user", "tool")[index % 2], "content": "ok"} for index in range(4_001)]
    began = time.monotonic()
    with pytest.raises(GenerationError, match="leaves out what the tool message says"):
        load_text(folder).encode_messages(messages)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# system, developer #}", "developer")])
def test_a_role_has_the_name_that_the_template_knows(package_copy, knows, role):
    folder = package_copy()
    (folder / "chat_template.jinja").write_text(knows + STRINGS)
    text = load_text(folder)
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert text.decode(text.encode_messages(messages)) == f"{role}: Be brief.\nuser: Hello\nassistant: "
