"""A row of a file of prompts, and the row of answers that it becomes.

A row is an object of plain values, whatever file it comes from. It has one of `prompt` (a text, or token ids),
`messages` (role and content) and `tokens`, and may have an `id` and options of its own. Nothing here opens a file or a
package, so that rows can be read in one process and answered in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.asking import conversations, is_list, stops_in
from partita.library.generation import Answer
from partita.library.prefixes import ids_after, prompt_after, system_of
from partita.library.requests import Work
from partita.library.sampling import SEED_BITS, Sampling
from partita.options import GREEDY, checked, described
from partita.runtime.chat import OTHER_NAMES, Message
from partita.runtime.logprobs import TokenLogprobs
from partita.runtime.prefix_file import Said
from partita.runtime.stop_strings import check_stops
from partita.runtime.text import Text
from partita.spelling import read_as_fields, spelled

PROMPTS = ("prompt", "messages", "tokens")
"""What a row can have to begin with: one of them."""
IDS = ("id", "custom_id", "key")
"""What a row can be called by; the first that it has."""
SAMPLED = tuple(GREEDY.figures())
WHOLE = tuple(each.name for each in described(Sampling) if each.type is int)
"""Options that are integers."""
ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""What other programs call it."""
OTHERS = ("stop", "stop_token_ids", "logprobs", "system", "adapter")
READ = frozenset({*PROMPTS, *IDS, *SAMPLED, *ALIASES, *OTHERS})
"""Every field that means something."""
MOST_LOGPROBS = 64
MOST_UNREAD, AND_OTHERS = 20, "..."
"""So many fields that mean nothing here are told of, and then that there are others."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row as a file has it."""

    index: int
    """0-based, over the file."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Fields without those that are null."""
    error: str | None = None
    """Why it is no row."""
    others: frozenset[str] = frozenset()
    """Fields of the file that were not read into `data`."""

    @property
    def key(self) -> str | int | None:
        """What it is called by; None where it does not say, or not by a text or a number."""
        found = _as_whole(next((self.data[name] for name in IDS if name in self.data), None))
        return found if isinstance(found, (str, int)) and not isinstance(found, bool) else None

    @property
    def fields(self) -> dict[str, str]:
        """What this row says of arguments: by the name of the argument, that of its field."""
        return {ALIASES.get(name, name): name for name in self.data if name in READ}

    @property
    def unread(self) -> frozenset[str]:
        """Fields that mean nothing here."""
        return (frozenset(self.data) - READ) | self.others


@dataclass(frozen=True, slots=True)
class RowDefaults:
    """What rows get that do not say otherwise."""

    sampling: Sampling
    """Completed. Where a row draws and no seed is its own, its seed is `base_seed` and its index together."""
    base_seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    chat: bool = False
    """A prompt is the user's message."""
    system: str | None = None
    prefix: Said | None = None
    """What every row goes on with."""


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What became of a row, as files of answers have it."""

    index: int
    id: str | int | None
    text: str | None
    """None without a tokenizer, and for a row that failed before it began."""
    tokens: tuple[int, ...]
    prompt_tokens: int | None
    finish_reason: str
    """stop, length, cache_full, or error."""
    seed: int | None
    """None where nothing was drawn."""
    error: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """None where the row did not ask."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON has them; `logprobs` only where they were asked for."""
        fields = asdict(self)
        if self.logprobs is None:
            del fields["logprobs"]
        return fields


def note_unread(seen: set[str], row: InputRow) -> None:
    """Add the fields of a row that mean nothing here to those that were seen, until there are enough to tell of."""
    if len(seen) <= MOST_UNREAD and (new := row.unread - seen):
        left = MOST_UNREAD - len(seen)
        seen.update(sorted(new)[: max(left, 0)], [AND_OTHERS] if len(new) > left else [])


def told_unread(seen: set[str]) -> tuple[str, ...]:
    """What `note_unread` has gathered, in order."""
    return tuple(sorted(seen, key=lambda name: (name == AND_OTHERS, name)))


def check_defaults(defaults: RowDefaults, text: Text | None, form: str) -> None:
    """Raise what every row would fail with that has no settings of its own: UsageError without a chat template, without
    a tokenizer for a file of texts (`form`: txt), or for a prefix of another kind, GenerationError for a message of the
    system that the template refuses.
    """
    if form == "txt":
        _tokens({"prompt": "1"}, "prompt", defaults, text)
    elif text is None:
        ids_after(defaults.prefix, ())
    if text is None or not (defaults.chat or defaults.system is not None):
        return
    system = defaults.system if defaults.prefix is None else system_of(defaults.prefix)
    text.encode_chat("1", system)


def work_of(row: InputRow, defaults: RowDefaults, text: Text | None, vocab_size: int) -> Work:
    """What a row asks the scheduler for. Raises GenerationError and UsageError: the row's own errors, which name its
    fields.
    """
    with read_as_fields(row.fields):
        return _work_of(row, defaults, text, vocab_size)


def _work_of(row: InputRow, defaults: RowDefaults, text: Text | None, vocab_size: int) -> Work:
    if row.error is not None:
        raise GenerationError(row.error)
    data = row.data
    if row.key is None and any(name in data for name in IDS):
        raise UsageError("the id of a row has to be a text or an integer")
    given = [name for name in PROMPTS if name in data]
    if len(given) != 1:
        said = f"has {' and '.join(given)}" if given else "has none of them"
        raise UsageError(f"a row needs one of {', '.join(PROMPTS)}, and this one {said}")
    logprobs = _as_whole(data.get("logprobs"))
    if logprobs is not None and (not _is_whole(logprobs) or not 0 <= logprobs <= MOST_LOGPROBS):
        raise UsageError(f"logprobs is {logprobs!r}; it must be an integer from 0 to {MOST_LOGPROBS}")
    return Work(
        prompt=_tokens(data, given[0], defaults, text),
        sampling=_sampling(row, defaults),
        stop=_stops(data, defaults),
        stop_ids=_stop_ids(data, defaults, vocab_size),
        logprobs=logprobs,
        adapter=_adapter(data),
    )


def answered(row: InputRow, answer: Answer, logprobs: Sequence[TokenLogprobs] | None, *, with_text: bool) -> RowAnswer:
    """The row of an answer. `with_text`: the package has a tokenizer."""
    return RowAnswer(
        row.index,
        row.key,
        answer.text if with_text else None,
        answer.tokens,
        answer.prompt_tokens,
        answer.finish_reason or "interrupted",
        answer.sampling.seed if answer.sampling.temperature else None,
        None,
        None if logprobs is None else tuple(logprobs),
    )


def failed(row: InputRow, error: PartitaError) -> RowAnswer:
    """The row of one that has no answer."""
    return RowAnswer(row.index, row.key, None, (), None, "error", None, " ".join(str(error).split()))


def _tokens(data: Mapping[str, Any], given: str, defaults: RowDefaults, text: Text | None) -> tuple[int, ...]:
    """The prompt as token ids."""
    value = data[given]
    if given != "messages" and is_list(value):
        ids = [_as_whole(token) for token in value]
        if not all(map(_is_whole, ids)):
            raise UsageError(f"{given} is a list, and not of token ids alone")
        if data.get("system") is not None:
            raise UsageError(f"system is a text, which goes before no token ids; give {given} as text, or leave it out")
        return ids_after(defaults.prefix, ids)
    if given == "messages" and any(isinstance(each, str) for each in (value if is_list(value) else [value])):
        raise UsageError(  # JSON in a column of texts, more often than what a user says
            f"messages is {str(value)[:40]!r}, a text where objects with role and content belong; have JSON read into "
            f"a list of them, or give what a user says as prompt, with {spelled('chat', True)}"
        )
    if given == "tokens" or (given == "prompt" and not isinstance(value, str)):
        raise UsageError(f"{given} is {str(value)[:40]!r}; it must be {'token ids' if given == 'tokens' else 'a text'}")
    if text is None:
        raise UsageError(f"{given} is text, and no tokenizer is used; give token ids in the field tokens")
    system = data.get("system", defaults.system)
    if system is not None and not isinstance(system, str):
        raise UsageError(f"system is {str(system)[:40]!r}; it must be a text")
    said = defaults.prefix
    if said is not None and system is not None:
        raise UsageError("the prefix has the message of the system, if there is one; leave out system")
    if said is not None and given != "messages":
        return prompt_after(said, value, text, chat=defaults.chat)
    if said is not None:
        system = system_of(said)
    if given == "messages" or defaults.chat or system is not None:
        return tuple(text.encode_messages(_conversation(value, system, given=said is not None or "system" in data)))
    if not value:
        raise GenerationError("the prompt is empty; give some text to continue")
    return tuple(text.encode(value))


def _conversation(value: Any, system: str | None, *, given: bool) -> list[Message]:
    """The messages of a row, with the message of the system before them unless they begin with one of their own.

    `given`: it is no default that the row may differ from. Raises UsageError where the row does.
    """
    several = conversations(value)
    if len(several) != 1:
        raise UsageError("messages is several conversations; a row is one")
    (messages,) = several
    role = messages[0]["role"]
    own = messages[0]["content"] if OTHER_NAMES.get(role, role) == "system" else None
    if own is not None and given and own != system:
        raise UsageError("messages begin with a message of the system, and another one is given; leave one out")
    return messages if own is not None or system is None else [{"role": "system", "content": system}, *messages]


def _sampling(row: InputRow, defaults: RowDefaults) -> Sampling:
    """The row's options over the others, with a seed of its own where it draws."""
    named = {ALIASES.get(name, name): value for name, value in row.data.items()}
    for name in (*ALIASES, *ALIASES.values()):
        last = named.get(ALIASES.get(name, name))
        if row.data.get(name, last) != last:
            raise UsageError(f"{name} is {row.data[name]}, and another name of the same option has {last}")
    named |= {name: _as_whole(named[name]) for name in WHOLE if name in named}
    asked = checked(Sampling(**{name: named[name] for name in SAMPLED if name in named}))
    full = asked.over(defaults.sampling)
    if not full.temperature:
        return full
    return full if asked.seed is not None else replace(full, seed=row_seed(defaults.base_seed, row.index))


def row_seed(base: int, index: int) -> int:
    """The seed of a row that draws and has none of its own: the run's and its place, so that neither the rows beside it
    nor when it comes make a difference.
    """
    return (base + index) % (1 << SEED_BITS)


def _stops(data: Mapping[str, Any], defaults: RowDefaults) -> tuple[str, ...]:
    value = data.get("stop", defaults.stop)
    listed = (value,) if isinstance(value, str) else value
    if not is_list(listed) or not all(isinstance(text, str) for text in listed):
        raise UsageError(f"stop is {str(value)[:40]!r}; it must be a text or a list of them")
    check_stops(listed)
    return tuple(listed)


def _adapter(data: Mapping[str, Any]) -> str | None:
    name = data.get("adapter")
    if name is not None and not isinstance(name, str):
        raise UsageError(f"adapter is {str(name)[:40]!r}; it must be the name of one")
    return name


def _stop_ids(data: Mapping[str, Any], defaults: RowDefaults, vocab_size: int) -> tuple[int, ...]:
    value = data.get("stop_token_ids")
    if value is None:  # a checkpoint may name one that its vocabulary lacks, which never comes
        return defaults.stop_ids
    ids = [_as_whole(token) for token in value] if is_list(value) else []
    if not is_list(value) or not all(map(_is_whole, ids)):
        raise UsageError(f"stop_token_ids is {str(value)[:40]!r}; it must be a list of token ids")
    return tuple(stops_in(ids, vocab_size))


def _as_whole(value: Any) -> Any:
    """A number without a fraction as an integer: a column of integers in which some are missing is one of floats in
    many a table.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
