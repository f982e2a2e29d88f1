"""Tokenizer of a package: text to token ids and back, chat template, streaming, stop strings."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from partita.errors import GenerationError, PackageError, UsageError
from partita.extras import explain
from partita.package.folder import TokenizerKind, refuse_absent
from partita.remedies import FROM_CHECKPOINT, Remedy
from partita.runtime.generate.text import chat_templates
from partita.runtime.generate.text.chat_templates import Message, as_named_in, plain_template
from partita.runtime.generate.text.stop_strings import StopStrings
from partita.runtime.ort.native_log import captured_output
from partita.runtime.time_limit import LateError, in_time
from partita.untrusted_files import REPEATED_GROUP, check_size, growth_of, load_full, read_capped, read_json_value

INCOMPLETE = "\ufffd"
"""The decoder's replacement for bytes of an incomplete character."""
CONTEXT_TOKENS = 6
"""Prompt tokens decoded with the first new tokens, because some tokenizers drop a space at the beginning."""
LONGEST_BYTES = 4
"""Maximum bytes of a UTF-8 character; a byte may be a token."""
AT_ONCE_BYTES, MOST_BYTES = 1 << 18, 32 << 20
"""Longer normalised texts are counted in parts, and above the second limit rejected: encoding needs 300 times their
size."""
ENCODE_SECONDS, ENCODE_BYTES = 10.0, 1 << 20
"""Time limit of a text, and again for every `MOST_BYTES`."""
MOST_BACK = 16
"""Maximum number of prompt tokens added so that the context begins at a character boundary."""
WITH_TOKENIZER = Remedy(
    "export a checkpoint that has one",
    alternative=Remedy("pass token ids to", ("partita", "generate", "{package}", "1,45,7", "--token-ids")),
)
TOKEN_IDS = Remedy("pass the prompt as token ids, or export a checkpoint that has one", options=("--token-ids",))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class TooLongError(GenerationError):
    """A text with more tokens than the cache length."""


class PlainTokenizer:
    """tokenizer.json, loaded with the `tokenizers` package alone."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        text = read_capped(folder / "tokenizer.json")
        self.growth = growth_of(text)
        self.core: Any = Tokenizer.from_str(text)
        # Truncation and padding are training settings saved in the file; transformers disables them by default, too.
        self.core.no_truncation()
        self.core.no_padding()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; `special`: with the special tokens that the tokenizer adds."""
        # Releases the GIL, which `encode` does not.
        (encoded,) = self.core.encode_batch([text], add_special_tokens=special)
        return list(encoded.ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text; `special`: including special tokens."""
        return str(self.core.decode(list(ids), skip_special_tokens=not special))

    def special(self) -> dict[str, int]:
        """Ids of the special tokens by name."""
        return {token.content: id for id, token in self.core.get_added_tokens_decoder().items() if token.special}


class FullTokenizer:
    """The tokenizer as loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        # Without torch, transformers warns on import that models are not available.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        self.native, self.growth = load_full(folder)
        self.core: Any = getattr(self.native, "backend_tokenizer", self.native)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; `special`: with the special tokens that the tokenizer adds."""
        return [int(token) for token in self.native(text, add_special_tokens=special, verbose=False)["input_ids"]]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text; `special`: including special tokens."""
        return str(self.native.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def special(self) -> dict[str, int]:
        """Ids of the special tokens by name."""
        return dict(zip(map(str, self.native.all_special_tokens), self.native.all_special_ids, strict=True)) | {
            token.content: id for id, token in self.native.added_tokens_decoder.items() if token.special
        }


class Text:
    """The tokenizer of one package."""

    def __init__(self, tokenizer: PlainTokenizer | FullTokenizer, folder: Path, max_length: int | None) -> None:
        """`max_length`: prompt plus output tokens; None: no limit."""
        self._tokenizer, self._folder, self._max_length = tokenizer, folder, max_length
        self._written: dict[int, str] = {}
        self._full = tokenizer if isinstance(tokenizer, FullTokenizer) else None
        """The tokenizer as loaded by transformers, at its first use; it has the chat template."""
        self._template: tuple[str, dict[str, str]] | None = None

    def encode(self, prompt: str, *, fits: bool = True) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds.

        Raises UsageError for invalid Unicode, GenerationError if the tokenizer fails and, with `fits`, for a text with
        more tokens than the cache length.
        """
        return self._encoded(_unicode(prompt), special=True, fits=fits)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation with the generation prompt. Message contents are strings.

        Raises UsageError when the package has no chat template, GenerationError when the template rejects the messages.
        """
        if (size := sum(len(message["content"]) for message in messages)) > MOST_BYTES:
            raise _too_long(size, self._max_length)
        chat_templates.start()  # starts in the background while the tokenizer is loaded
        try:
            template, names = self._template = self._template or self._read_template()
            whole = chat_templates.render(template, names, as_named_in(template, messages), MOST_BYTES)
        except (GenerationError, ValueError) as error:
            raise GenerationError(str(error), path=self._folder) from error
        if isinstance(whole, int):
            raise _too_long(whole, self._max_length)
        # The template includes the special tokens.
        return self._encoded(_unicode(whole), special=False)

    def _read_template(self) -> tuple[str, dict[str, str]]:
        """The chat template, and the special tokens by name. Raises UsageError without one."""
        if self._full is None and (plain := plain_template(self._folder)) is not None:
            return plain
        full = self._full = self._full or _loaded(FullTokenizer, self._folder)
        if not full.native.chat_template:
            raise UsageError(
                "`chat` needs a chat template, which the tokenizer lacks; omit `chat`",
                path=self._folder,
            )
        names = {name: str(token) for name, token in full.native.special_tokens_map.items()}
        return str(full.native.get_chat_template()), names

    def _encoded(self, text: str, *, special: bool, fits: bool = True) -> list[int]:
        size, most = len(text.encode()), self._max_length if fits else None
        if size > MOST_BYTES:
            raise _too_long(size, most)

        def encode() -> list[int]:
            if size * self._tokenizer.growth > AT_ONCE_BYTES:
                self._check_parts(text, size, most)
            return self._tokenizer.encode(text, special=special)

        seconds = ENCODE_SECONDS * (1 + size / ENCODE_BYTES)
        parts = (getattr(self._tokenizer.core, name, None) for name in ("normalizer", "pre_tokenizer"))
        may_panic = any(part is not None and REPEATED_GROUP.search(part.__getstate__().decode()) for part in parts)
        try:
            with _panics_hidden() if may_panic else nullcontext():
                return in_time(encode, lambda: None, seconds)
        except (KeyboardInterrupt, SystemExit, GenerationError):
            raise
        except LateError as error:
            raise GenerationError(f"the tokenizer needs more than {seconds:.0f} s for this text") from error
        except BaseException as error:  # e.g. no unknown token in the vocabulary, or a panic in Rust
            message = " ".join(str(error).split())[:200]
            raise GenerationError(f"the tokenizer cannot encode this text: {message}") from error

    def _check_parts(self, text: str, size: int, most_tokens: int | None) -> None:
        """Raise TooLongError for a text with far more tokens than fit, counted in parts that need little memory."""
        normalizer = getattr(self._tokenizer.core, "normalizer", None)
        step = max(1, AT_ONCE_BYTES // (LONGEST_BYTES * self._tokenizer.growth))
        normalized = tokens = 0
        for start in range(0, len(text), step):
            part = text[start : start + step]
            normalized += len(part if normalizer is None else normalizer.normalize_str(part))
            tokens += len(self._tokenizer.encode(part, special=False))
            # Factor 2: splitting into parts adds tokens at their ends.
            if normalized > MOST_BYTES or (most_tokens is not None and tokens > 2 * most_tokens):
                raise _too_long(size, most_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens, equal to the streamed text.

        Tokenizers with byte tokens decode a run of bytes with an invalid byte to U+FFFD. Here characters before the
        invalid byte are kept, because the stream has already returned them.
        """
        stream = self.stream()
        return "".join([*(stream.push(token) for token in ids), stream.finish()])

    def decode_at_once(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text as the tokenizer decodes it; `special`: with special tokens. Raises GenerationError if it fails."""
        try:
            return self._tokenizer.decode(ids, special=special)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # e.g. an id beyond its vocabulary, or a panic in Rust, which is no Exception
            raise GenerationError(f"the tokens cannot be decoded: {type(error).__name__}: {error}") from error

    def special(self, text: str) -> int | None:
        """The id of the special token `text`; None for other texts."""
        token = self._specials.get(text)
        return token if token in self.special_ids else None

    @cached_property
    def _specials(self) -> dict[str, int]:
        """Ids of special tokens by name."""
        return self._tokenizer.special()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which decoded text does not contain."""
        return frozenset(token for token in self._specials.values() if not self.decode_at_once([token]))

    def decoder(self, ids: Sequence[int]) -> Callable[[int | list[int]], str | None] | None:
        """An incremental decoder of the whole characters after token `ids`; None if the tokenizer has none.

        The decoder raises if a token changes text that it has already returned.
        """
        if not isinstance(self._tokenizer, PlainTokenizer):
            return None
        from tokenizers.decoders import DecodeStream

        return partial(DecodeStream(list(ids), skip_special_tokens=True).step, self._tokenizer.core)

    def token_text(self, token: int) -> str:
        """The text of a token after another token, with the space that some tokenizers drop at the beginning of a text.

        For a special token, its name.
        """
        if token not in self._written:
            one, two = (self.decode_at_once([token] * count) for count in (1, 2))
            after_one = two[len(one) :] if two.startswith(one) else one
            self._written[token] = after_one or self.decode_at_once([token], special=True)
        return self._written[token]

    def stream(
        self, prompt: Sequence[int] = (), stops: Sequence[str] = (), stop_ids: Collection[int] = ()
    ) -> TextStream:
        """A stream of the text after `prompt`, ending at the first of `stops`, without tokens of `stop_ids`."""
        return TextStream(self, prompt, stops, stop_ids)


@contextmanager
def _panics_hidden() -> Iterator[None]:
    """Capture stderr, and drop it if the block raises: a Rust panic writes there."""
    with captured_output((2,)) as captured:
        yield
    for line in captured.lines:
        os.write(2, f"{line}\n".encode())


def _too_long(size: int, most_tokens: int | None) -> TooLongError:
    most = (
        f"{MOST_BYTES:,} bytes" if most_tokens is None else f"{most_tokens:,} tokens for prompt and completion together"
    )
    return TooLongError(f"the text is too long: it has {size:,} bytes; the limit is {most}")


def _unicode(text: str) -> str:
    r"""The text. Raises UsageError for half of a surrogate pair, e.g. `"\ud83d"` in JSON."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text has an unpaired surrogate, {text[error.start]!a}, at position {error.start}; remove it"
        ) from error
    return text


class TextStream:
    """Text of tokens as they arrive: whole characters, up to the first stop string.

    A stop string that is the name of a special token matches that token, since decoded text does not contain its name.
    Tokens of `stop_ids` are not shown; not every tokenizer marks them as special.
    """

    def __init__(
        self, text: Text, prompt: Sequence[int] = (), stops: Sequence[str] = (), stop_ids: Collection[int] = ()
    ) -> None:
        self._text = text
        self._stops = StopStrings(stops) if stops else None
        self._ends = {text.special(stop) for stop in stops} - {None}
        self._hidden = text.special_ids.union(stop_ids, self._ends)
        self.stopped = False
        """Whether a stop string has been found; then only `finish` returns more text."""
        self._ids, self._shown = _context(text, prompt)
        """Recent tokens, which are the context of the next, and how many of them have been shown."""
        self._pushed = False
        known = self._ids[: self._shown]
        whole = not text.decode_at_once(known).endswith(INCOMPLETE)
        self._decoder = text.decoder(known) if whole else None
        """None: decoded with the context in `_fresh`."""
        if self._decoder is not None and self._shown < len(self._ids):
            self._decoder(self._ids[self._shown :])

    def push(self, token: int) -> str:
        """Add one token and return the text that can be shown now, often empty."""
        if token in self._hidden:  # otherwise a run of hidden tokens would be decoded again with each
            self.stopped = self.stopped or token in self._ends
            return ""
        ids = self._ids
        ids.append(token)
        self._pushed = True
        fresh = None
        if self._decoder is not None:
            try:
                fresh = self._decoder(token)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # noqa: BLE001 - invalid bytes change earlier text; a panic in Rust is no Exception
                self._decoder = None
        if self._decoder is None and (fresh := self._fresh()).endswith(INCOMPLETE):
            fresh = None
        if not fresh:
            return ""
        del ids[: self._shown]
        self._shown = len(ids)
        if self._stops is None:
            return fresh
        shown = self._stops.push(fresh)
        self.stopped = self.stopped or self._stops.found is not None
        return shown

    def _fresh(self) -> str:
        """Text of the tokens that have not been shown."""
        whole, known = self._text.decode_at_once(self._ids), self._text.decode_at_once(self._ids[: self._shown])
        if whole.startswith(known):
            return whole[len(known) :]
        # After invalid bytes, some decoders drop bytes that were characters before.
        return self._text.decode_at_once(self._ids[self._shown :])

    def finish(self) -> str:
        """The held-back text; call it once at the end. Incomplete characters become U+FFFD."""
        rest = self._fresh() if self._pushed and self._shown < len(self._ids) else ""
        return rest if self._stops is None else self._stops.push(rest) + self._stops.finish()


def _context(text: Text, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The last tokens of a prompt from a nearby character boundary, if any, and how many are whole characters."""
    for back in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MOST_BACK):
        tokens = list(prompt[-back:])
        for whole in range(len(tokens), max(-1, len(tokens) - LONGEST_BYTES), -1):
            known = text.decode_at_once(tokens[:whole])
            if not known.startswith(INCOMPLETE) and not known.endswith(INCOMPLETE):
                return tokens, whole
        if back >= len(prompt):
            break
    return list(prompt[-CONTEXT_TOKENS:]), min(CONTEXT_TOKENS, len(prompt))


def load_text(
    folder: Path, kind: TokenizerKind = "transformers", max_length: int | None = None, *, takes_ids: bool = True
) -> Text:
    """Load the tokenizer of the package in `folder`. Nothing is downloaded and no code of the package is run.

    `max_length`: prompt plus output tokens; None: no limit. `takes_ids`: token ids are an alternative to text. Raises
    PackageError when the package has no tokenizer, or it cannot be loaded.
    """
    remedy = TOKEN_IDS if takes_ids else WITH_TOKENIZER.filled(package=folder)
    if kind == "none" or not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise PackageError("the package has no tokenizer", path=folder, remedy=remedy)
    if kind == "tokenizers":
        return Text(_loaded(PlainTokenizer, folder, remedy), folder, max_length)
    return Text(_loaded(FullTokenizer, folder, remedy), folder, max_length)


Loaded = TypeVar("Loaded", PlainTokenizer, FullTokenizer)


def _loaded(reader: type[Loaded], folder: Path, remedy: Remedy = TOKEN_IDS) -> Loaded:
    """Load a tokenizer. Raises PackageError if that fails."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            refuse_absent(folder / name)
            try:
                check_size(folder / name)
            except ValueError as error:
                raise PackageError(f"damaged, {error}", path=folder / name, remedy=remedy) from error
    try:
        with _panics_hidden():
            return reader(folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        lacking = explain(error)
        if lacking is not None:
            raise lacking from error
        reason = " ".join(str(error).split())[:300]
        raise PackageError(f"the tokenizer cannot be loaded ({reason})", path=folder, remedy=remedy) from error


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Ids of the tokens that end a text: from genai_config.json, else generation_config.json, else config.json; may be
    empty.

    Raises PackageError when the file is damaged.
    """
    for name in ("genai_config.json", "generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            raw = read_json_value(path)
            ids = raw.get("eos_token_id", raw.get("model", {}).get("eos_token_id"))
            if ids is not None:
                listed = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
                    raise TypeError(f"eos_token_id is {ids!r}")
                return frozenset(listed)
        except (ValueError, TypeError, AttributeError) as error:
            raise PackageError(f"damaged ({error})", path=path, remedy=FROM_CHECKPOINT) from error
    return frozenset()
