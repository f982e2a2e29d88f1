"""`partita chat`: a conversation at a terminal or over a pipe; the cache is kept between turns."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.commands.arguments import Showing, Stdout, print_written
from partita.commands.generation import open_batch, open_model, prepare_run, print_notes
from partita.commands.terminal import note, write_stdout
from partita.errors import INTERRUPTED, PartitaError, UsageError
from partita.files import Output, cache_folder, reserve
from partita.library.chain import read_chain
from partita.library.engine.base import Engine, ReportRequest
from partita.library.engine.requests import Ticket, Work
from partita.library.generation import sampling_options
from partita.options.fields import MAX_SEED, input_paths, path_of
from partita.options.generation import ChatCommand
from partita.partition_reports.phase_records import FEW_STEPS, TOO_FEW
from partita.remedies import Remedy
from partita.runtime.generate.prefix_file import read_content, system_of
from partita.runtime.generate.text.chat_templates import Message, has_template
from partita.runtime.generate.text.tokens import Text, stop_token_ids
from partita.signals import PRESSED_SECONDS
from partita.untrusted_files import parsed_record, read_capped

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import Output as Screen

SCHEMA = "partita.chat/1"
"""Schema of a file of /save."""
HELP = {
    "/help": "show these commands",
    "/reset": "start a new conversation with the same system message",
    "/system": "TEXT: start a new conversation with this system message",
    "/save": "FILE: write the conversation, for chat --resume",
    "/report": "[FILE]: summary of the placement in this session; with FILE, write the partition report",
    "/exit": "end the session (or Ctrl-D)",
}
KEYS = "Enter sends; Alt-Enter, or a backslash at the end of a line, adds a line; // sends a message that starts with /"
GENERATE = Remedy("use it without one", ("partita", "generate", "{package}", "PROMPT"))
PROMPT, CONTINUED = "> ", ". "
GOES_ON = "\\"
"""At the end of a line: the message continues on the next line."""
ROLES = frozenset({"system", "user", "assistant"})


def run(given: ChatCommand) -> int:
    """Check the options, then chat; returns the exit code."""
    options, target, manifest = prepare_run(given, read_chain(given), whole_cache=True)
    package = Path(options.package)
    if not has_template(package):
        remedy = GENERATE.filled(package=package)
        raise UsageError("the tokenizer has no chat template, which chat requires", path=package, remedy=remedy)
    messages = _begin(given)
    if sys.stdin is not None and sys.stdin.isatty():
        import prompt_toolkit  # noqa: F401 - said before a package is opened, when it is missing

    with open_model(options, target, manifest) as model:
        text = model.tokenizer
        assert text is not None
        text.encode_messages([*messages, {"role": "user", "content": "a"}])  # rejected before the first message
        session = Session(options, open_batch(options, model), text, messages, open_lines())
        print_notes(target, model)
        return session.run()


def _begin(options: ChatCommand) -> list[Message]:
    """The initial messages of a session."""
    system, prefix, resume = options.system, path_of(options.prefix), path_of(options.resume)
    if system is not None and (prefix is not None or resume is not None):
        other = "--resume" if prefix is None else "--prefix"
        raise UsageError(f"{other} already contains the system message; omit --system")
    if prefix is not None:
        system = system_of(read_content(prefix))
    begins = [] if system is None else [{"role": "system", "content": system}]
    if resume is None:
        return begins
    messages = read_conversation(resume)
    if messages[: len(begins)] != begins:
        message = "the conversation does not start with the system message of --prefix; omit --prefix"
        raise UsageError(f"--resume {resume}: {message}")
    return messages


def read_conversation(file: Path) -> list[Message]:
    """The messages of a file of /save. Raises UsageError for other files."""
    try:
        record: Any = parsed_record(read_capped(file, stream=True))
        messages = [{"role": entry["role"], "content": entry["content"]} for entry in record["messages"]]
        good = all(entry["role"] in ROLES and isinstance(entry["content"], str) for entry in messages)
        if record["schema"] != SCHEMA or not good:
            raise ValueError("not a conversation")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a conversation"
        raise UsageError(f"--resume {file}: {reason}; give a file written by /save") from error
    return messages


class Session:
    """A chat session: messages, completions and commands.

    The template renders all messages in every turn; the prefix cache has most of their tokens.
    """

    def __init__(
        self, options: ChatCommand, engine: Engine, text: Text, messages: list[Message], lines: TypedLines | PipedLines
    ) -> None:
        """`messages`: earlier messages. Each turn has its own seed, derived from that of `options`."""
        self.options, self.engine, self.text, self.messages, self.lines = options, engine, text, messages, lines
        self.turns = 0
        self.last: Ticket | None = None
        self._generated = False
        """A completion of the session has tokens."""
        self._stop_ids = tuple(sorted(stop_token_ids(Path(options.package))))

    def run(self) -> int:
        """Answer messages until the input ends, and return the exit code. On a terminal an error is printed and the
        session continues; otherwise it is raised.
        """
        if self.lines.typed:
            note(f"{KEYS}\n/help shows the commands; Ctrl-C stops the reply, Ctrl-D ends the session")
        while (line := self.lines.read()) is not None:
            word = line.split(maxsplit=1)[0] if line.strip() else ""
            if word == "/exit" and line.startswith("/"):
                break
            try:
                if self._turn(line, word) == INTERRUPTED and not self.lines.typed:
                    return INTERRUPTED
            except PartitaError as error:
                if not self.lines.typed:
                    raise
                note(f"partita: {error}")
            except KeyboardInterrupt:
                if not self.lines.typed:
                    raise
                note("interrupted; the next reply prefills the whole conversation again")
        return 0

    def _turn(self, line: str, word: str) -> int:
        """Run the command or answer the message of a line; `word` is its first word."""
        if not word:
            return 0
        if not line.startswith("/") or line.startswith("//"):
            return self._answer(line.removeprefix("/") if line.startswith("//") else line)
        self._command(word, line[len(word) :].strip())
        return 0

    def _answer(self, message: str) -> int:
        """Generate a completion and print it token by token. Ctrl-C ends it.

        Raises GenerationError, without a change, for a message that the template rejects and for a conversation longer
        than the cache. A message without any answer is removed.
        """
        messages, sampling = [*self.messages, {"role": "user", "content": message}], self.options.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + self.turns) & MAX_SEED)
        tokens = tuple(self.text.encode_messages(messages))
        work = Work(tokens, sampling, tuple(self.options.stop), self._stop_ids)
        ticket = self.last = self.engine.submit(work, lambda _, piece: write_stdout(piece.text))
        self.turns += 1
        with ctrl_c_ends(ticket):
            try:
                while ticket.state != "finished":
                    self.engine.step()
            finally:
                answer = ticket.result
                if answer.text or answer.finish_reason in ("stop", "length", "cache_full"):
                    self.messages = [*messages, {"role": "assistant", "content": answer.text}]
                if ticket.state != "finished":  # interrupted before it had a row, so nothing will finish it
                    ticket.cancel()
                self._generated = self._generated or ticket.first_token is not None
                write_stdout("\n")
        if ticket.error is not None:
            raise ticket.error
        if self.lines.typed:
            note(self._figures(ticket))
        return INTERRUPTED if answer.finish_reason == "interrupted" else 0

    def _figures(self, ticket: Ticket) -> str:
        """A line about a completion: duration, speed and used cache."""
        count, reason = len(ticket.result.tokens), ticket.result.finish_reason
        parts = [f"{ticket.prefilled_tokens} tokens prefilled"]
        if ticket.first_token is not None and ticket.ended is not None:
            parts.append(f"first token after {(ticket.first_token - ticket.submitted) * 1e3:.0f} ms")
            few, seconds = f" ({TOO_FEW})" if count <= FEW_STEPS else "", ticket.ended - ticket.first_token
            parts.append(f"{(count - 1) / seconds:.1f} tokens/s{few}" if count > 1 and seconds else "1 token")
        length = self.engine.manifest.graph.max_length
        parts.append(f"cache: {len(ticket.work.prompt) + count} of {length} tokens")
        if reason == "interrupted":
            parts.append("interrupted by Ctrl-C")
        if reason == "cache_full":
            parts.append("cache full: /reset starts a new conversation")
        return f"[{'; '.join(parts)}]"

    def _command(self, word: str, rest: str) -> None:
        """Carry out a command, except /exit."""
        match word:
            case "/help":
                for name, help_text in HELP.items():
                    note(f"{name:<9} {help_text}")
                note(KEYS)
            case "/reset":
                self._reset()
                note("started a new conversation")
            case "/system":
                self._reset(rest)
                note(f"started a new conversation {'with this' if rest else 'without a'} system message")
            case "/save":
                self._save(rest)
            case "/report":
                self._report(rest)
            case _:
                raise UsageError(
                    f"{word} is not a command; /help lists the commands, and // sends a message that starts with /"
                )

    def _reset(self, system: str | None = None) -> None:
        """Begin again: with this system message, with the current one (None), or without one (empty).

        Raises GenerationError, without a change, if the template rejects it.
        """
        messages = [message for message in self.messages[:1] if message["role"] == "system"]
        if system is not None:
            messages = [{"role": "system", "content": system}] if system else []
        if system:
            self.text.encode_messages([*messages, {"role": "user", "content": "1"}])
        self.messages = messages

    def _save(self, rest: str) -> None:
        file = self._file(rest, "conversation", "/save")
        texts = {
            "schema": SCHEMA,
            "package": str(self.options.package),
            "sampling": self.options.sampling.figures(),
            "messages": self.messages,
        }
        file.write(json.dumps(texts, ensure_ascii=False, indent=1) + "\n")
        note(f"conversation: {file.path} ({len(self.messages)} messages)")

    def _report(self, rest: str) -> None:
        from partita.partition_reports import storage
        from partita.partition_reports.render.show import REPORT_VIEWS, load_view

        if self.last is None or not self._generated:
            raise UsageError("/report: nothing has been generated yet; send a message first")
        file = self._file(rest, "report", "/report") if rest else None
        reason, sampling = self.last.result.finish_reason, sampling_options([self.options.sampling])
        report = self.engine.report(ReportRequest(reason, options=sampling, probe_seconds=self.options.probe_seconds))
        if file is not None:
            file.write(storage.to_json(report))
            print_written("report", file.path)
        else:
            Showing(load_view("brief", REPORT_VIEWS), Stdout()).show(report)

    def _file(self, rest: str, kind: str, command: str) -> Output:
        if not rest:
            raise UsageError(f"{command}: give a file name after it")
        try:
            path = Path(rest).expanduser()
        except RuntimeError as error:  # ~name of nobody
            raise UsageError(f"{command} {rest}: {error}") from error
        return reserve(path, kind, input_paths(self.options), option=command)


@contextmanager
def ctrl_c_ends(ticket: Ticket) -> Iterator[None]:
    """In this block Ctrl-C ends a completion after the current step, so that the cache stays valid; pressed again,
    immediately. An ignored SIGINT stays ignored, as in the background of a shell without job control.
    """
    before, pressed = signal.getsignal(signal.SIGINT), list[float]()

    def press(number: int, frame: object) -> None:
        pressed.append(time.monotonic())
        if pressed[-1] - pressed[0] > PRESSED_SECONDS:  # a terminal's may come twice: from it, and passed on
            raise KeyboardInterrupt
        ticket.cancel()

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- lines of input --------------------------------------------------------------------------------------------------


class TypedLines:
    """A prompt with editing, completion of commands, and a history in the cache folder.

    Enter sends; a backslash before it, or Alt-Enter, begins another line. Ctrl-C drops what was typed, Ctrl-D ends.
    """

    typed = True
    """Messages are typed at a terminal, where errors are printed."""

    def __init__(self, commands: Sequence[str], source: Input | None = None, output: Screen | None = None) -> None:
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


def open_lines() -> TypedLines | PipedLines:
    """Typed lines at a terminal, else lines of a pipe. Raises ImportError without prompt_toolkit."""
    return TypedLines(tuple(HELP)) if sys.stdin is not None and sys.stdin.isatty() else PipedLines()


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
    if folder is not None:
        file = folder / "history"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            return Stored(str(file))
    return InMemoryHistory()
