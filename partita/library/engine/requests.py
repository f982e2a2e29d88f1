"""A request: its options and their checks, ticket, pieces and answer."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from partita.errors import PartitaError, UsageError
from partita.foreign.folder import NO_CHOICE, open_folder
from partita.library.api import LOGGER
from partita.library.sampling import CHECKPOINT, Sampling, complete_sampling_for
from partita.observations.facts import SpeculationFact
from partita.observations.text_format import plural
from partita.options.fields import MAX_SEED, check_fields
from partita.options.generation import AdapterNames, SpeculationOptions, TokenIds
from partita.package.folder import Manifest
from partita.runtime.generate.checks import check_adapter, check_budget, check_prompt
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.text.stop_strings import check_stops
from partita.runtime.generate.text.tokens import TextStream, stop_token_ids

State = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "cache_full", "interrupted", "error"]
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Work:
    """The prompt and options of one request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    """With all values set."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    stop_ids: tuple[int, ...] = ()
    """Stop tokens."""
    logprobs: int | None = None
    """Number of most likely tokens in each piece, with log-probabilities of these and the new token; None: no
    log-probabilities."""
    adapter: str | None = None
    """Name of an adapter of the package; None: the adapter of the batch (`BatchOptions.adapter`)."""
    is_warm_up: bool = False
    """A warm-up request, whose adapter reports omit."""


class RequestOutput(NamedTuple):
    """The output of one step for a request. A tuple for speed: every token makes one."""

    text: str
    """Whole characters, so often empty."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, if requested."""
    finish_reason: str | None
    """Finish reason in the last piece (`stop`, `length`, `cache_full`, `interrupted` or `error`), else None."""


NO_OUTPUT = RequestOutput("", (), (), None)


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """The answer to one prompt, complete or not."""

    text: str
    """Without special tokens, and cut at a stop string; empty for a package without a tokenizer."""
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason | None
    """None while it is running."""
    sampling: Sampling
    """With all values set, so that they reproduce the answer."""


class Ticket:
    """A submitted request and its completion. The thread that steps the engine changes it; any thread may read and
    cancel it.
    """

    def __init__(
        self,
        work: Work,
        stream: TextStream | None,
        listener: Listener | None,
        on_step: Callable[[Any], object] | None,
        on_cancel: Callable[[Ticket], object],
    ) -> None:
        """`listener` is called with its pieces; `on_step` with each `Step` of its row, after the pieces of the step;
        `on_cancel`, a method of the engine, when it is cancelled.
        """
        self.number = next(_NUMBERS)
        self.work, self.listener, self.on_step = work, listener, on_step
        self._on_cancel = weakref.WeakMethod(on_cancel)  # a ticket does not keep its engine alive
        self.row: int | None = None
        """Its row of the batch; None without one."""
        self.stream = stream
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish: str | None = None
        self.state: State = "waiting"
        self.cancelled = False
        self.error: PartitaError | None = None
        """The error that ended it with finish reason `error`."""
        self.copied_tokens = 0
        """Prompt tokens that were in the prefix cache, so they were not prefilled."""
        self.submitted = time.perf_counter()
        """Times in seconds of `time.perf_counter`."""
        self.began: float | None = None
        """When it was given a row."""
        self.first_token: float | None = None
        self.ended: float | None = None

    @property
    def text(self) -> str:
        """The text so far; empty without a tokenizer."""
        return "".join(self.pieces)

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were not in the prefix cache."""
        return len(self.work.prompt) - self.copied_tokens

    @property
    def result(self) -> CompletionResult:
        """The answer so far."""
        reason: Any = self.finish
        return CompletionResult(self.text, tuple(self.tokens), len(self.work.prompt), reason, self.work.sampling)

    def add(self, piece: RequestOutput, error: PartitaError | None = None, ended: float | None = None) -> RequestOutput:
        """Add the output of a step; with a finish reason, it has ended with this error, at this time (None: now)."""
        if piece.tokens:
            self.tokens += piece.tokens
            if self.first_token is None:
                self.first_token = time.perf_counter()
        if piece.text:
            self.pieces.append(piece.text)
        if piece.finish_reason is not None:
            self.state, self.finish, self.error = "finished", piece.finish_reason, error
            self.ended = time.perf_counter() if ended is None else ended
        return piece

    @property
    def longest(self) -> int:
        """Maximum tokens of its row."""
        return len(self.work.prompt) + (self.work.sampling.max_new_tokens or 0)

    def cancel(self) -> None:
        """End it from any thread, with `interrupted` after the next step. A finished request does not change."""
        self.cancelled = True
        on_cancel = self._on_cancel()
        if on_cancel is not None:
            on_cancel(self)


Listener = Callable[[Ticket, RequestOutput], object]


def check_work(work: object, folder: Path, manifest: Manifest, name: str = "the prompt") -> None:
    """Raise GenerationError for an invalid prompt, UsageError for an invalid option or type.

    `name`: name of the prompt in messages.
    """
    if not isinstance(work, Work):
        raise UsageError(f"submit() got a {type(work).__name__}; create a request with partita.request(model, prompt)")
    vocab_size = manifest.graph.vocab_size
    check_prompt(work.prompt, manifest.graph, name, answered=True)
    check_budget(work.sampling.max_new_tokens or 0)
    check_fields(work.sampling)
    if work.logprobs is not None and not 0 <= work.logprobs <= vocab_size:
        raise UsageError(f"`logprobs` is {work.logprobs}; it must be between 0 and the vocabulary size, {vocab_size}")
    check_adapter(folder, manifest, work.adapter)


def notify_listeners(pieces: Sequence[tuple[Ticket, RequestOutput]]) -> None:
    """Pass listeners their pieces.

    A listener that raises gets no more, and its request is cancelled; the first exception is raised at the end.
    """
    wrong: Exception | None = None
    for ticket, piece in pieces:
        if ticket.listener is None:
            continue
        try:
            ticket.listener(ticket, piece)
        except Exception as error:  # noqa: BLE001 - raised below
            wrong, ticket.listener = wrong or error, None
            ticket.cancel()
    if wrong is not None:
        raise wrong


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts of a message, as in OpenAI's clients, and their text field."""
BETWEEN_PARTS = "\n"


def prompt_rows(prompts: Any) -> list[str | tuple[int, ...]]:
    """A row for each prompt. Raises UsageError for an invalid type."""
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise UsageError(f"prompts is of type {type(prompts).__name__}; pass a string, token ids, or a list of either")
    return [_row(entry) for entry in ([prompts] if prompts and all(map(_is_id, prompts)) else prompts)]


def _row(entry: Any) -> str | tuple[int, ...]:
    if isinstance(entry, str):
        return entry
    if not is_list(entry) or not all(map(_is_id, entry)):
        raise UsageError(f"a prompt is {str(entry)[:40]!r}; it must be a string or a list of token ids")
    return tuple(int(token) for token in entry)


def is_list(value: Any) -> bool:
    """Whether a value is a list or another sequence, except strings and bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """A conversation for each row, as a chat template expects it. Raises UsageError for invalid messages."""
    several = is_list(messages) and messages and not any(isinstance(entry, Mapping) for entry in messages)
    return [_messages(entry) for entry in (messages if several else [messages])]


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as a chat template expects them. Raises UsageError for invalid messages."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not is_list(messages):
        raise UsageError(
            f"messages is of type {type(messages).__name__}; pass a string, or a list of dicts of role and content"
        )
    if not messages:
        raise UsageError("messages is empty; pass at least one dict of role and content")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """A message with its list of text parts joined. Raises UsageError for an invalid message."""
    content: Any = message.get("content") if isinstance(message, Mapping) else None
    if is_list(content):
        content = BETWEEN_PARTS.join(map(_part, content))
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise UsageError(f"a message is {str(message)[:60]!r}; it must be a dict of role and content, both strings")
    # A table column has every field for every message, but templates test whether a field exists.
    return {name: value for name, value in {**message, "content": content}.items() if value is not None}


def _part(part: Any) -> str:
    """The text of a part of a message."""
    text = part.get(TEXT_PARTS.get(str(part.get("type")), "")) if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        example = "{'type': 'text', 'text': '...'}"
        raise UsageError(f"a part of a message is {str(part)[:60]!r}; only text is supported, as in {example}")
    return text


def adapters_of(adapter: AdapterNames | None, rows: int) -> list[str | None]:
    """The adapter of each prompt; None: no adapter. Raises UsageError for a wrong number of adapters."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * rows
    if len(adapter) != rows:
        raise UsageError(
            f"`adapter` has {plural(len(adapter), 'entry')} for {plural(rows, 'prompt')}; pass a name or None "
            "for each of them, or one name for all"
        )
    return [*adapter]


def complete_samplings(
    named: Sampling, sampling: Any, rows: int, folder: Path, *, of_file: bool = False
) -> list[Sampling]:
    """Complete sampling options for each row, or one set for all.

    Options by name (first argument) apply where `sampling` sets none. `of_file`: defaults for the rows of a file, which
    may sample. Notes are logged. Raises UsageError.
    """
    if sampling is None or isinstance(sampling, (Sampling, str)):
        each = [Sampling(source=sampling) if isinstance(sampling, str) else sampling or Sampling()]
    else:
        each = list(sampling) if isinstance(sampling, Sequence) else []
        if len(each) != rows or not all(isinstance(one, Sampling) for one in each):
            raise UsageError(
                f"`sampling` must be a Sampling, {CHECKPOINT!r}, or a list with a Sampling for each prompt ({rows})"
            )
    found = [complete_sampling_for(one.with_defaults(named), folder, of_rows=of_file) for one in each]
    for line in (line for _, notes in found for line in notes):
        LOGGER.warning(line)
    return [full for full, _ in found]


def with_seeds(samplings: Sequence[Sampling], rows: int) -> list[Sampling]:
    """The options of each prompt: with a common seed, prompt i (from 0) has seed + i."""
    if len(samplings) != 1:
        return [*samplings]
    (one,) = samplings
    seed = one.seed
    if seed is None:
        return [one] * rows
    return [replace(one, seed=(seed + index) & MAX_SEED) for index in range(rows)]


def checked_stop_ids(ids: TokenIds, vocab_size: int) -> TokenIds:
    """The token ids to stop at. Raises UsageError for an id outside the vocabulary."""
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UsageError(f"stop_token_ids has {wrong}; the vocabulary has ids 0 to {vocab_size - 1}")
    return ids


def stop_conditions(
    folder: Path, stop: str | Sequence[str], ids: TokenIds | None, vocab_size: int, *, has_text: bool
) -> tuple[tuple[str, ...], TokenIds]:
    """Stop strings and stop tokens; None: those of the package in `folder`. Raises UsageError."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    check_stops(texts)
    if texts and not has_text:
        raise UsageError("`stop` is a string, but the package has no tokenizer; use stop_token_ids")
    return texts, stop_token_ids(folder) if ids is None else checked_stop_ids(ids, vocab_size)


def speculation_fact(options: SpeculationOptions) -> SpeculationFact | None:
    """The fact for a run; None without speculative decoding."""
    if options.draft is not None:
        return SpeculationFact("draft", Path(options.draft).name)
    return None if options.speculate is None else SpeculationFact(options.speculate)


def check_speculation(folder: Path, manifest: Manifest, options: SpeculationOptions) -> None:
    """Check the options without a session.

    Raises UsageError for two options and for a draft with another vocabulary size, PackageError for an invalid draft
    package.
    """
    if options.draft is None:
        return
    if options.speculate is not None:
        raise UsageError(f"`speculate={options.speculate}` and `draft`: set only one of them")
    if manifest.graph.batch_size != 1:
        raise UsageError(
            f"`draft={options.draft}` requires batch size 1, but {folder} has {manifest.graph.batch_size}; "
            "use `speculate=ngram`, or export with `batch_size=1`"
        )
    draft = open_folder(Path(options.draft), NO_CHOICE)
    if manifest.graph.vocab_size != draft.graph.vocab_size:
        raise UsageError(
            f"`draft={options.draft}`: its vocabulary differs from that of {folder}; "
            "a draft package needs the same tokenizer"
        )
