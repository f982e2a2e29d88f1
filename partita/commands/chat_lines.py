"""The input of a chat: lines typed at a terminal, with editing and history, or lines of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from partita.errors import UsageError
from partita.files import cache_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import Output

PROMPT, CONTINUED = "> ", ". "
GOES_ON = "\\"
"""At the end of a line: the message continues on the next line."""


class Lines(Protocol):
    """A source of messages."""

    typed: bool
    """Whether messages are typed at a terminal, where errors are printed."""

    def read(self) -> str | None:
        """The next message; None at the end. Raises KeyboardInterrupt, UsageError."""


class TypedLines:
    """A prompt with editing, completion of commands, and a history in the cache folder.

    Enter sends; a backslash before it, or Alt-Enter, begins another line. Ctrl-C drops what was typed, Ctrl-D ends.
    """

    typed = True

    def __init__(self, commands: Sequence[str], source: Input | None = None, output: Output | None = None) -> None:
        """`source`, `output`: the terminal by default."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUED,
            key_bindings=_keys(),
            history=_history(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            input=source,
            output=output or create_output(always_prefer_tty=True),
        )

    def read(self) -> str | None:
        """The next message; None at Ctrl-D."""
        while True:
            try:
                return self._session.prompt()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None


class PipedLines:
    """One message per line of stdin, without a prompt."""

    typed = False

    def read(self) -> str | None:
        """The next message; None at the end."""
        if sys.stdin is None:
            return None
        message = ""
        for raw in sys.stdin.buffer:
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UsageError(f"stdin is not UTF-8 ({error.reason}); convert it first, e.g. with iconv") from error
            if not line.endswith(GOES_ON):
                return message + line
            message += line.removesuffix(GOES_ON) + "\n"
        return message or None


def open_lines(commands: Sequence[str]) -> Lines:
    """Typed lines at a terminal, else lines of a pipe. Raises ImportError without prompt_toolkit."""
    if sys.stdin is not None and sys.stdin.isatty():
        return TypedLines(commands)
    return PipedLines()


def _keys() -> KeyBindings:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    message = has_focus(DEFAULT_BUFFER)  # and not the line of a search, where Enter takes what was found

    @keys.add("enter", filter=message)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(GOES_ON):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=message)
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _history() -> History:
    """The history of messages, in a file readable only by its owner; in memory if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Stored(FileHistory):
        """A full disk does not lose the message."""

        def store_string(self, string: str) -> None:
            with suppress(OSError, UnicodeEncodeError):  # the latter: half a character, refused when it is sent
                super().store_string(string)

    folder = cache_folder("chat")
    file = None if folder is None else folder / "history"
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            return Stored(str(file))
    return InMemoryHistory()
