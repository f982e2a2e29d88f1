"""`partita chat`: a conversation at a terminal or over a pipe; the cache is kept between turns."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.commands.chat_lines import Lines, open_lines
from partita.commands.generate_options import RunGroups, argument_text, package_of
from partita.commands.generation import open_batch, open_with, print_notes
from partita.commands.outputs import print_written
from partita.commands.terminal import note, stdout_console, write_stdout
from partita.errors import INTERRUPTED, PartitaError, UsageError
from partita.files import reserve
from partita.foreign.folder import open_folder
from partita.library.chain import Target, read_chain
from partita.library.conversation import Conversation
from partita.library.engine.base import Engine, ReportRequest
from partita.library.engine.requests import Ticket
from partita.library.engine.speculation import check_speculation
from partita.library.generation import sampling_options
from partita.library.sampling import complete_sampling_for
from partita.observations.text_format import plural
from partita.options.fields import group, input_paths
from partita.options.generation import ChatCommand
from partita.package.folder import Manifest
from partita.partition_reports.outcome import FEW_STEPS, TOO_FEW
from partita.remedies import Remedy
from partita.runtime.generate.checks import check_adapter
from partita.runtime.generate.prefix_file import read_content, system_of
from partita.runtime.generate.text.chat_templates import Message
from partita.runtime.generate.text.tokens import Text, load_text, stop_token_ids
from partita.signals import PRESSED_SECONDS
from partita.untrusted_files import parsed_record, read_capped

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
ROLES = frozenset({"system", "user", "assistant"})


class ChatOptions(RunGroups, ChatCommand):
    """The options of `partita chat`."""

    if TYPE_CHECKING:
        resume: Path | None


def run(given: ChatCommand) -> int:
    """Check the options, then chat; returns the exit code."""
    options = group(given, ChatOptions)
    target = read_chain(options)
    options = replace(options, package=package_of(options.package, options), revision=None)
    manifest = open_folder(options.package, options.choice)
    check_adapter(options.package, manifest, options.adapter)
    check_speculation(options.package, manifest, options)
    longest = options.sampling.max_new_tokens or manifest.graph.max_length
    sampling, notes = complete_sampling_for(
        replace(options.sampling, max_new_tokens=longest), options.package, hints=True
    )
    system = _system(options)
    stop = tuple(argument_text(text, "--stop") for text in options.stop)
    messages = _begin(options, system)
    if sys.stdin is not None and sys.stdin.isatty():
        import prompt_toolkit  # noqa: F401 - said before a package is opened, when it is missing

    options = replace(options, **sampling.figures(), system=system, stop=stop)
    target = replace(target, notes=(*target.notes, *notes))
    return _talk(options, target, manifest, messages)


def _system(options: ChatOptions) -> str | None:
    """The system message: the option, or that of the prefix."""
    if options.prefix is None:
        return None if options.system is None else argument_text(options.system, "--system")
    if options.system is not None:
        raise UsageError("--prefix already contains the system message; omit --system")
    return system_of(read_content(options.prefix))


def _begin(options: ChatOptions, system: str | None) -> list[Message]:
    """The initial messages of a session."""
    begins = [] if system is None else [{"role": "system", "content": system}]
    if options.resume is None:
        return begins
    if options.system is not None:
        raise UsageError("--system and --resume both set the system message; keep one")
    messages = read_conversation(options.resume)
    if messages[: len(begins)] != begins:
        raise UsageError(
            f"--resume {options.resume}: the conversation does not start with the system message of "
            "--prefix; omit --prefix"
        )
    return messages


def read_conversation(file: Path) -> list[Message]:
    """The messages of a file of /save. Raises UsageError for other files."""
    try:
        record: Any = parsed_record(read_capped(file, stream=True))
        messages = [{"role": entry["role"], "content": entry["content"]} for entry in record["messages"]]
        if record["schema"] != SCHEMA or not all(
            entry["role"] in ROLES and isinstance(entry["content"], str) for entry in messages
        ):
            raise ValueError("not a conversation")
    except OSError as error:
        raise UsageError(f"--resume {file}: {error.strerror or error}; give a file written by /save") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume {file}: not a conversation; give a file written by /save") from error
    return messages


def _talk(options: ChatOptions, target: Target, manifest: Manifest, messages: Sequence[Message]) -> int:
    text = load_text(options.package, manifest.tokenizer, manifest.graph.max_length, takes_ids=False)
    _check_template(options, text, messages)
    with open_with(options, target, manifest, text) as model:
        engine = open_batch(options, model)
        conversation = Conversation(
            engine,
            text,
            options.sampling,
            messages=messages,
            stop=options.stop,
            stop_ids=sorted(stop_token_ids(options.package)),
            on_text=write_stdout,
        )
        print_notes(target, model)
        return Session(options, engine, conversation, open_lines(tuple(HELP))).run()


def _check_template(options: ChatOptions, text: Text, messages: Sequence[Message]) -> None:
    """Raise UsageError without a chat template, GenerationError if it rejects the initial messages."""
    try:
        text.encode_messages([*messages, {"role": "user", "content": "a"}])
    except UsageError as error:
        raise UsageError(
            "the tokenizer has no chat template, which chat requires",
            path=options.package,
            remedy=GENERATE.filled(package=options.package),
        ) from error


class Session:
    """A chat session: messages, completions and commands."""

    def __init__(self, options: ChatOptions, engine: Engine, conversation: Conversation, lines: Lines) -> None:
        self.options, self.engine, self.conversation, self.lines = options, engine, conversation, lines
        self.last: Ticket | None = None
        self._generated = False
        """A completion of the session has tokens."""
        self._commands: dict[str, Callable[[str], object]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/save": self._save,
            "/report": self._report,
        }

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
        if word not in self._commands:
            raise UsageError(
                f"{word} is not a command; /help lists the commands, and // sends a message that starts with /"
            )
        self._commands[word](line[len(word) :].strip())
        return 0

    def _answer(self, message: str) -> int:
        """Generate a completion and print it token by token. Ctrl-C ends it."""
        with _CtrlC() as ctrl_c:
            ticket = self.last = self.conversation.ask(message)
            ctrl_c.ends(ticket)
            try:
                self.conversation.finish()
            finally:
                self._generated = self._generated or ticket.first_token is not None
                write_stdout("\n")
        if self.lines.typed:
            note(self._figures(ticket))
        return INTERRUPTED if ticket.result.finish_reason == "interrupted" else 0

    def _figures(self, ticket: Ticket) -> str:
        """A line about a completion: duration, speed and used cache."""
        count, reason = len(ticket.result.tokens), ticket.result.finish_reason
        parts = [f"{self.conversation.read_tokens} tokens prefilled"]
        if ticket.first_token is not None and ticket.ended is not None:
            parts.append(f"first token after {(ticket.first_token - ticket.submitted) * 1e3:.0f} ms")
            seconds = ticket.ended - ticket.first_token
            few = f" ({TOO_FEW})" if count <= FEW_STEPS else ""
            speed = f"{(count - 1) / seconds:.1f} tokens/s{few}" if count > 1 and seconds > 0 else ""
            parts.append(speed or plural(count, "token"))
        parts.append(f"cache: {self.conversation.tokens} of {self.conversation.max_length} tokens")
        if reason == "interrupted":
            parts.append("interrupted by Ctrl-C")
        if reason == "cache_full":
            parts.append("cache full: /reset starts a new conversation")
        return f"[{'; '.join(parts)}]"

    # --- commands -----------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for name, help_text in HELP.items():
            note(f"{name:<9} {help_text}")
        note(KEYS)

    def _reset(self, rest: str) -> None:
        self.conversation.reset()
        note("started a new conversation")

    def _system(self, rest: str) -> None:
        self.conversation.reset(rest)
        note(f"started a new conversation {'with this' if rest else 'without a'} system message")

    def _save(self, rest: str) -> None:
        file = self._file(rest, "conversation", "/save")
        texts = {
            "schema": SCHEMA,
            "package": str(self.options.package),
            "sampling": self.options.sampling.figures(),
            "messages": self.conversation.messages,
        }
        file.write(json.dumps(texts, ensure_ascii=False, indent=1) + "\n")
        note(f"conversation: {file.path} ({len(self.conversation.messages)} messages)")

    def _report(self, rest: str) -> None:
        from partita.partition_reports import storage
        from partita.partition_reports.render.show import REPORT_VIEWS, load_view

        if self.last is None or not self._generated:
            raise UsageError("/report: nothing has been generated yet; send a message first")
        file = self._file(rest, "report", "/report") if rest else None
        report = self.engine.report(
            ReportRequest(
                finish_reason=self.last.result.finish_reason,
                options=sampling_options([self.options.sampling]),
                probe_seconds=self.options.probe_seconds,
            )
        )
        if file is not None:
            file.write(storage.to_json(report))
            print_written("report", file.path)
            return
        view = load_view("brief", REPORT_VIEWS)
        assert view.print_to is not None
        view.print_to(report, stdout_console())

    def _file(self, rest: str, kind: str, command: str) -> Any:
        if not rest:
            raise UsageError(f"{command}: give a file name after it")
        try:
            path = Path(rest).expanduser()
        except RuntimeError as error:  # ~name of nobody
            raise UsageError(f"{command} {rest}: {error}") from error
        return reserve(path, kind, input_paths(self.options), option=command)


class _CtrlC:
    """Ctrl-C ends a completion after the current step, so that the cache stays valid; pressed again, immediately.

    An ignored SIGINT stays ignored, as in the background of a shell without job control.
    """

    def __init__(self) -> None:
        self._ticket: Ticket | None = None
        self._pressed: float | None = None
        self._before: Any = None

    def ends(self, ticket: Ticket) -> None:
        """Set the completion that Ctrl-C ends; ends it immediately if Ctrl-C was pressed before."""
        self._ticket = ticket
        if self._pressed is not None:
            ticket.cancel()

    def _press(self, number: int, frame: object) -> None:
        now = time.monotonic()
        # A terminal's may come twice: from it, and passed on.
        if self._pressed is not None and now - self._pressed > PRESSED_SECONDS:
            raise KeyboardInterrupt
        self._pressed = now if self._pressed is None else self._pressed
        if self._ticket is not None:
            self._ticket.cancel()

    def __enter__(self) -> _CtrlC:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *details: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)
