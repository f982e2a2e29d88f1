"""What a program asks of a generation: prompts, messages and sampling options, in the forms that programs have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.errors import UsageError
from partita.library.audience import LOGGER
from partita.library.sampling import CHECKPOINT, Sampling, completed_for
from partita.observations.text_format import plural
from partita.options.fields import MAX_SEED
from partita.options.generation import AdapterNames, TokenIds
from partita.runtime.stop_strings import check_stops
from partita.runtime.text import stop_token_ids

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts of a message that are text, as OpenAI's clients write them, and the field that has it."""
BETWEEN_PARTS = "\n"


def prompt_rows(prompts: Any) -> list[str | tuple[int, ...]]:
    """A row for each prompt. Raises UsageError for what is none."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _listed(prompts)
    if not is_list(listed):
        raise UsageError(f"prompts is of type {type(prompts).__name__}; give a string, token ids, or a list of either")
    if listed and all(_is_id(entry) for entry in listed):
        return [tuple(int(entry) for entry in listed)]
    return [_row(entry) for entry in listed]


def _row(entry: Any) -> str | tuple[int, ...]:
    if isinstance(entry, str):
        return entry
    listed = _listed(entry)
    if not is_list(listed) or not all(_is_id(token) for token in listed):
        raise UsageError(f"a prompt is {str(entry)[:40]!r}; it must be a string or a list of token ids")
    return tuple(int(token) for token in listed)


def _listed(value: Any) -> Any:
    """An array as a list, and anything else as it is; bytes by whatever name are none."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value


def is_list(value: Any) -> bool:
    """Whether a value is a list, or what will do for one. Bytes have integers in them, and are a text that was not
    decoded; read as token ids they would be answered without a word.
    """
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """A conversation for each row of the batch, as a chat template takes it. Raises UsageError for what is none."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return [_messages(messages)]
    apart = bool(messages) and not any(isinstance(entry, Mapping) for entry in messages)
    return [_messages(entry) for entry in messages] if apart else [_messages(messages)]


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as a chat template takes them. Raises UsageError for what is none."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not is_list(messages):
        raise UsageError(
            f"messages is of type {type(messages).__name__}; give a text, or a list of dicts of role and content"
        )
    listed = [_with_text(message) for message in messages]
    for message in listed:
        good = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not good:
            raise UsageError(f"a message is {str(message)[:60]!r}; it must be a dict of role and content, both texts")
    if not listed:
        raise UsageError("messages is empty; give at least one dict of role and content")
    # A column of a table has every field for every message; templates ask whether one is there.
    return [{name: value for name, value in message.items() if value is not None} for message in listed]


def _with_text(message: Any) -> Any:
    """A message whose content is a text, where it was a list of parts. Raises UsageError for parts that are no text."""
    content: Any = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": BETWEEN_PARTS.join(map(_part, content))} if is_list(content) else message


def _part(part: Any) -> str:
    """The text of a part of a message."""
    text = part.get(TEXT_PARTS.get(str(part.get("type")), "")) if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        said = f"a part of a message is {str(part)[:60]!r}; packages read text alone, as in "
        raise UsageError(said + "{'type': 'text', 'text': '...'}")
    return text


def adapters_of(adapter: AdapterNames | None, rows: int) -> list[str | None]:
    """The adapter of each prompt; None: without. Raises UsageError for another number of them."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * rows
    if len(adapter) != rows:
        raise UsageError(
            f"`adapter` has {plural(len(adapter), 'entry')} for {plural(rows, 'prompt')}; give a name or None "
            "for each of them, or one name for all"
        )
    return [*adapter]


def options(asked: Sampling, sampling: Any, rows: int, folder: Path, *, of_file: bool = False) -> list[Sampling]:
    """One set of options for each row, or a single one for all of them, with a value for everything.

    `sampling`: what programs give as such; `asked`: options by name, which hold where it says nothing. `of_file`: they
    are what rows of a file begin with, which may draw where these do not. Raises UsageError.
    """
    if sampling is None or isinstance(sampling, (Sampling, str)):
        one = Sampling(source=sampling) if isinstance(sampling, str) else sampling or Sampling()
        return [_completed_for(folder, one.over(asked), of_rows=of_file)]
    each = list(sampling) if isinstance(sampling, Sequence) else []
    if len(each) != rows or not all(isinstance(one, Sampling) for one in each):
        raise UsageError(
            f"`sampling` has to be a Sampling, {CHECKPOINT!r}, or a list with a Sampling for each prompt ({rows})"
        )
    return [_completed_for(folder, one.over(asked)) for one in each]


def seeded(samplings: Sequence[Sampling], rows: int) -> list[Sampling]:
    """The options of each prompt. Of a seed that was given for all, prompt i, counted from 0, has seed + i."""
    if len(samplings) != 1:
        return [*samplings]
    (one,) = samplings
    seed = one.seed
    if seed is None:
        return [one] * rows
    return [replace(one, seed=(seed + index) & MAX_SEED) for index in range(rows)]


def _completed_for(folder: Path, wanted: Sampling, *, of_rows: bool = False) -> Sampling:
    """The options with a value for everything; what was not asked is off, or as the package in `folder` suggests."""
    full, notes = completed_for(wanted, folder, of_rows=of_rows)
    for line in notes:
        LOGGER.warning(line)
    return full


def stops_in(ids: TokenIds, vocab_size: int) -> TokenIds:
    """The token ids to stop at. Raises UsageError for one that no token has."""
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UsageError(f"stop_token_ids has {wrong}; the vocabulary has ids 0 to {vocab_size - 1}")
    return ids


def stops(
    folder: Path, stop: str | Sequence[str], ids: TokenIds | None, *, vocab_size: int, has_text: bool
) -> tuple[tuple[str, ...], TokenIds]:
    """Texts and tokens to stop at; None: those of the package in `folder`. Raises UsageError."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    check_stops(texts)
    if texts and not has_text:
        raise UsageError("`stop` is a string, and the package has no tokenizer; give stop_token_ids")
    return texts, stop_token_ids(folder) if ids is None else stops_in(ids, vocab_size)
