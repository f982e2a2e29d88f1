"""A conversation as the text that a chat template makes of it.

Templates take the content of a message as a string, or as a list of parts, as those of models that also see or hear do:
`[{"type": "text", "text": ...}]`. Which of them a template takes shows in what it makes of them: one that takes parts
leaves out a string without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from partita.capped import read_json_value
from partita.errors import GenerationError, PackageError
from partita.remedies import FROM_CHECKPOINT

Message = dict[str, Any]
"""role and content."""
Render = Callable[[Sequence[Message]], str]
OTHER_NAMES = {"developer": "system", "function": "tool"}
"""Newer and older names of roles, for which most templates have one."""
CHANCE = 24
"""Characters of a message that no template has by itself."""
OTHER = "other words"
"""What nobody quotes or trims: it shows whether a template takes what a message says, whatever it makes of it."""
MOST_ALONE = 16
"""Messages that are changed one by one, each for another run of the template; a template treats more of them alike."""
MOST_MISSES = 64
MOST_SAID = 400
"""Characters of a template's own error message."""
OF_PROCESSORS = "chat_template.json"
"""Where processors kept their template before chat_template.jinja; tokenizers do not look there."""


def conversation(prompt: str, system: str | None) -> list[Message]:
    """One user message, after one of the system where there is one."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def as_named_in(template: str, messages: Sequence[Message]) -> list[Message]:
    """The messages with roles by names that a template knows: most take one that they do not know for any other."""
    named = {role: other for role, other in OTHER_NAMES.items() if role not in template}
    return [{**message, "role": named.get(message["role"], message["role"])} for message in messages]


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    """The same messages, each with a list of one part of text."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def rendered(render: Render, messages: Sequence[Message]) -> str:
    """What `render` makes of the messages, whose contents are strings.

    Raises GenerationError when the template refuses them, or leaves out what one of them says.
    """
    from jinja2 import TemplateError

    refusal: Exception | None = None
    lost = ""
    for form in (list, _in_parts):
        try:
            text = render(form(messages))
            left_out = _left_out(render, form, messages, text)
        except Exception as error:  # noqa: BLE001 - a template is the checkpoint's code, and raises what it likes
            refusal = refusal or error
            continue
        if left_out is None:
            return text
        lost = lost or left_out
    if refusal is not None:
        why = f"{refusal}" if isinstance(refusal, TemplateError) else f"{type(refusal).__name__}: {refusal}"
        raise GenerationError(f"the chat template rejects these messages: {why[:MOST_SAID]}") from refusal
    raise GenerationError(f"the chat template leaves out what the {lost} message says")


def _left_out(
    render: Render, form: Callable[[Sequence[Message]], list[Message]], messages: Sequence[Message], text: str
) -> str | None:
    """Role of the first message of which `text` has nothing: neither what it says, nor a form of it that changes with
    it. None where there is none. A conversation may have thousands of messages: each is looked for behind the last.
    """
    contents = [message["content"].strip() for message in messages]
    # A short one may be in the text by chance: "a" is in the name of a role.
    has = _looking_in(text)
    unsure = [i for i, said in enumerate(contents) if said and (len(said) < CHANCE or not has(said))]
    if not unsure:
        return None
    others = {i: f"{OTHER}-{i}-" for i in unsure}

    def alone(index: int) -> bool:
        """Whether what is in the text changes with the message: a template may cut it, and what stands for it."""
        other = [{**m, "content": others[index]} if i == index else m for i, m in enumerate(messages)]
        return contents[index] in text and render(form(other)) != text

    try:
        changed = render(form([{**m, "content": others.get(i, m["content"])} for i, m in enumerate(messages)]))
    except Exception:
        has = _looking_in(text)
        if not all(has(contents[i]) for i in unsure):
            raise
        return None  # it takes these messages, and has what they say
    has = _looking_in(changed.casefold())
    missing = (i for i in unsure if not has(others[i]))
    return next((messages[i]["role"] for i in islice(missing, MOST_ALONE) if not alone(i)), None)


def _looking_in(text: str) -> Callable[[str], bool]:
    """Whether a text has a part, asked for one part after the other: they mostly are in their order. After many that
    it has not, it is not gone through for any more.
    """
    place, misses = 0, 0

    def has(part: str) -> bool:
        nonlocal place, misses
        found = text.find(part, place)
        if found < 0 and misses < MOST_MISSES:
            found = text.find(part, 0, place + len(part))
            misses += found < 0
        place = max(found, place)
        return found >= 0

    return has


def template_of_processor(folder: Path) -> str | None:
    """The template in `OF_PROCESSORS`; None when there is no such file. Raises PackageError when it is damaged."""
    path = folder / OF_PROCESSORS
    if not path.is_file():
        return None
    try:
        template = read_json_value(path)["chat_template"]
        if not isinstance(template, str):
            raise TypeError("chat_template is not a text")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PackageError(f"damaged ({error})", where=path, remedy=FROM_CHECKPOINT) from error
    return template
