"""A conversation as the text that a chat template makes of it.

Templates take the content of a message as a string, or as a list of parts, as those of models that also see or hear do:
`[{"type": "text", "text": ...}]`. Which of them a template takes shows in what it makes of them: one that takes parts
leaves out a string without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from partita.capped import read_json_value
from partita.errors import GenerationError, PackageError
from partita.remedies import FROM_CHECKPOINT

Message = dict[str, Any]
"""role and content."""
Render = Callable[[Sequence[Message]], str]
CHANCE = 24
"""Characters of a message that no template has by itself."""
OTHER = "other words"
"""What nobody quotes or trims: it shows whether a template takes what a message says, whatever it makes of it."""
OF_PROCESSORS = "chat_template.json"
"""Where processors kept their template before chat_template.jinja; tokenizers do not look there."""


def conversation(prompt: str, system: str | None) -> list[Message]:
    """One user message, after one of the system where there is one."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    """The same messages, each with a list of one part of text."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def rendered(render: Render, messages: Sequence[Message], where: Path) -> str:
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
        if not left_out:
            return text
        lost = lost or left_out[0]
    if refusal is not None:
        why = f"{refusal}" if isinstance(refusal, TemplateError) else f"{type(refusal).__name__}: {refusal}"
        raise GenerationError(f"the chat template rejects these messages: {why}", where=where) from refusal
    raise GenerationError(f"the chat template leaves out what the {lost} message says", where=where)


def _left_out(
    render: Render, form: Callable[[Sequence[Message]], list[Message]], messages: Sequence[Message], text: str
) -> list[str]:
    """Roles of messages of which `text` has nothing: neither what they say, nor a form of it that changes with it."""
    contents = [message["content"].strip() for message in messages]
    # A short one may be in the text by chance: "a" is in the name of a role.
    unsure = [i for i, said in enumerate(contents) if said and (len(said) < CHANCE or said not in text)]
    if not unsure:
        return []
    others = {i: f"{OTHER}-{i}-" for i in unsure}

    def alone(index: int) -> bool:
        """Whether what is in the text changes with the message: a template may cut it, and what stands for it."""
        other = [{**m, "content": others[index]} if i == index else m for i, m in enumerate(messages)]
        return contents[index] in text and render(form(other)) != text

    try:
        changed = render(form([{**m, "content": others.get(i, m["content"])} for i, m in enumerate(messages)]))
    except Exception:
        if any(contents[i] not in text for i in unsure):
            raise
        return []  # it takes these messages, and has what they say
    return [messages[i]["role"] for i in unsure if others[i].casefold() not in changed.casefold() and not alone(i)]


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
