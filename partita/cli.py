"""The command line: which verbs there are, how a command starts, and how it ends.

Only typer is imported here. The options of a verb are in `partita.options`; the verb itself lives in
`partita.commands` and is imported when it is called, so that `--help`, a usage error and `report show` stay fast and
load neither torch nor onnxruntime nor transformers.
"""

from __future__ import annotations

import atexit
import codecs
import difflib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TextIO

import typer
from typer.exceptions import Abort, Exit, TyperException

import partita
from partita import extras, streams
from partita.commands.build import OWN_PROCESS, Verb, add
from partita.errors import INTERRUPTED, PartitaError, ProviderError, RefusedNode, ResourceError, UsageError, public_type
from partita.options import (
    BenchCommand,
    ChatCommand,
    CheckCommand,
    DiffCommand,
    EvaluateCommand,
    ExplainCommand,
    ExportCommand,
    GenerateCommand,
    HtmlCommand,
    InspectCommand,
    MarkdownCommand,
    PlaceCommand,
    ProvidersCommand,
    ServeCommand,
    ShowCommand,
    SupportCommand,
    TraceCommand,
    VerifyCommand,
)
from partita.remedies import permission, what_to_do
from partita.signals import TerminatedError, ended_by_exception, received
from partita.spelling import read_by

VERBS = (
    Verb(
        "export",
        ExportCommand,
        "export:run",
        "partita export ./my-checkpoint ./package --precision fp16 --max-length 512",
    ),
    Verb(
        "generate",
        GenerateCommand,
        "generate:run",
        'partita generate ./package "Return the" --max-new-tokens 64 --report run.json',
    ),
    Verb("chat", ChatCommand, "chat:run", "partita chat ./package --system 'You answer in one sentence.'"),
    Verb("serve", ServeCommand, "serve:run", "partita serve ./package --provider cpu --port 8000"),
    Verb("verify", VerifyCommand, "verify:run", "partita verify ./package --provider cpu"),
    Verb("evaluate", EvaluateCommand, "evaluate:run", "partita evaluate ./package-int4 --provider cpu"),
    Verb("inspect", InspectCommand, "inspect:run", "partita inspect ./package --against ./other-package"),
    Verb(
        "place",
        PlaceCommand,
        "place:run",
        "partita place model.onnx --provider cuda,cpu --dry-run --device h100 --max-cpu-nodes 0",
    ),
    Verb(
        "support",
        SupportCommand,
        "support:run",
        "partita support Resize com.microsoft:MatMulNBits --provider webgpu",
    ),
    Verb("bench", BenchCommand, "bench:run", "partita bench ./package --providers webgpu cpu"),
    Verb("providers", ProvidersCommand, "providers:run", "partita providers --json"),
)
"""In the order of the help."""
REPORT_VERBS = (
    Verb("show", ShowCommand, "report:show", "partita report show run.json"),
    Verb("html", HtmlCommand, "report:html", "partita report html run.json --out run.html"),
    Verb("markdown", MarkdownCommand, "report:markdown", "partita report markdown run.json >> $GITHUB_STEP_SUMMARY"),
    Verb("explain", ExplainCommand, "report:explain", "partita report explain run.json layers.0.mlp.up_proj/MatMul"),
    Verb("diff", DiffCommand, "report:diff", "partita report diff last-week.json today.json"),
    Verb(
        "check",
        CheckCommand,
        "report:check",
        "partita report check run.json --require 'provider=webgpu,share>=0.95' --max-copies 2",
    ),
    Verb("trace", TraceCommand, "report:trace", "partita report trace run.json --out trace.json"),
)
HELP = {"help_option_names": ["-h", "--help"]}
USAGE = 2
"""Exit code of a command line that makes no sense."""
app = typer.Typer(
    name="partita",
    help="Export a Hugging Face decoder to a static ONNX graph, run it on the execution providers you name, "
    "and see what ran where.",
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings=HELP,
)
report = typer.Typer(
    name="report",
    help="Inspect, compare and check partition reports.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
for verb in VERBS:
    add(app, verb)
for verb in REPORT_VERBS:
    add(report, verb)
app.add_typer(report)

PROGRAM = "partita"
"""However it was started: `python -m partita` is told to go on with the same commands."""
BY_SIGNAL = 128
"""Exit codes above it stand for a signal that ended the command."""


def _help_alone(context: typer.Context) -> None:
    """Without a verb, print the help, with the exit code of a usage error."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise Exit(USAGE)


@report.callback()
def common_report(context: typer.Context) -> None:
    """Inspect, compare and check partition reports."""
    _help_alone(context)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"partita {partita.__version__}")
        raise Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Export a Hugging Face decoder to a static ONNX graph, run it on the execution providers you name, "
    "and see what ran where."""
    _help_alone(context)


def main() -> None:
    """Entry point: run a verb; every error is one line on stderr and an exit code."""
    # Released builds of ONNX Runtime send usage data and keep a session id in the temporary folder (docs/Privacy.md).
    # Nobody who runs this command has agreed to that; whoever has sets the variable to 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    streams.stand_in()
    streams.own_process = True
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            _take_all_text(stream)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = arguments[:end], arguments[end:]
    with ended_by_exception():
        code = run([a for a in options if a != "--debug"] + rest, debug="--debug" in options, own_process=True)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it must not cut short what follows
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop(sys.stdout)
    except OSError as error:  # a full disk; what a verb could not write itself has been said
        code = code or _Ending("--debug" in options, as_json=False).refused(error)
        _drop(sys.stdout)
    _flush_stderr()
    supervise = sys.modules.get("partita.commands.supervise")
    in_child: bool = supervise is not None and supervise.in_child
    late = sys.modules.get("partita.runtime.in_time")
    if code <= BY_SIGNAL and not in_child and not (late is not None and late.left()):
        sys.exit(code)
    # All is said and written, and Python's own way out would wait for native code that does not end, or change the
    # exit code. Some providers crash while they
    # are unloaded (WebGPU and OpenVINO were seen to). And Python ends itself with SIGINT, whatever sys.exit was given,
    # when a KeyboardInterrupt left an exec() of text, of which importing torch has many (cpython, Modules/main.c,
    # exit_sigint).
    if supervise is not None and in_child:
        supervise.say_last_word()
    else:
        atexit._run_exitfuncs()  # temporary files go; a child's go with its folder
    os._exit(code)


def _take_all_text(stream: io.TextIOWrapper) -> None:
    """Let a stream take every character: ASCII, the encoding of the C locale, is written as UTF-8, which holds it."""
    encoding = codecs.lookup(stream.encoding).name
    if encoding == "ascii":
        stream.reconfigure(encoding="utf-8")
    elif encoding != "utf-8" and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def run(arguments: list[str], *, debug: bool = False, own_process: bool = False) -> int:
    """Run one command line without the program name and return its exit code; errors are printed, never raised.

    With `own_process` nothing else is in this process, which a verb may then fork or leave to foreign code.
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    ending = _Ending(debug, as_json="--json" in options)
    OWN_PROCESS.set(own_process)
    try:
        with read_by("shell"):
            return _run(arguments, ending)
    except Exception as error:  # noqa: BLE001 - the last resort: a user never meets a traceback unasked
        return ending.unforeseen(error)


def _is_odd(argument: str) -> bool:
    """Whether it has bytes that are no UTF-8, as names of files may."""
    return any("\ud800" <= character <= "\udfff" for character in argument)


def _run(arguments: list[str], ending: _Ending) -> int:
    """Run one command line. Raises what is no error of ours."""
    odd = next((each for each in arguments if _is_odd(each) and os.path.lexists(each)), None)
    if odd is not None:  # ONNX Runtime and JSON have no such names
        return ending.explained(UsageError(f"{odd}: the name is not UTF-8 text; give the file or folder another one"))
    try:
        result = app(arguments, standalone_mode=False, prog_name=PROGRAM)
        if result == INTERRUPTED:  # typer turns Ctrl-C into this
            return ending.interrupted()
        return result if isinstance(result, int) else 0
    except Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, Abort):
        return ending.interrupted()
    except BrokenPipeError:
        _drop(sys.stdout)
        return 0
    except TerminatedError as error:
        return ending.terminated(error)
    except SystemExit as error:
        # typer ends the process after completion, and with code 1 when the reader of a help text has gone.
        if isinstance(error.__context__, BrokenPipeError):
            _drop(sys.stdout)
        elif error.code:
            raise
        return 0
    except PartitaError as error:
        return ending.explained(error)
    except TyperException as error:
        return ending.fail("UsageError", _usage_error(error), error.exit_code)
    except OSError as error:
        return ending.refused(error)


def _system_error(error: OSError) -> str:
    """What the operating system refused, and what to do about it."""
    if streams.is_closed(error):
        return streams.CLOSED
    said = f"{error.strerror or error}"
    if isinstance(error, PermissionError):
        if not isinstance(error.filename, str):
            return said
        path = Path(error.filename)
        return f"{path}: {said}; {permission(path, write=os.access(path, os.R_OK))}"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{said}; {what_to_do(error, 'check the disk')}"


def _usage_error(error: TyperException) -> str:
    """What typer says of a command line, the nearest option instead of all that are like it, and where help is."""
    message = error.format_message()
    possible = getattr(error, "possibilities", None)
    if possible:
        name = getattr(error, "option_name", "")
        near = difflib.get_close_matches(name, possible, n=1, cutoff=0) or list(possible)
        message = f"{getattr(error, 'message', message)}. Did you mean {near[0]}?"
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path if context else PROGRAM} --help)"


def _drop(stream: TextIO) -> None:
    """Send what is still to come on a standard stream nowhere: Python writes what is left at its exit, and would
    complain, or fail with a code of its own (120), where the reader (head, less) has gone or the disk is full.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _flush_stderr() -> None:
    """Write what is left of our notes, where stderr takes them: the exit code stays the verb's."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def _table(nodes: Sequence[RefusedNode]) -> list[str]:
    """Lines of a table; none for no node."""
    if not nodes:
        return []
    from partita.commands.refusal import render_refusal

    return render_refusal(nodes).splitlines()


class _Ending:
    """How a command ends that has no result: a line on stderr, and the same as JSON where JSON was asked for."""

    def __init__(self, debug: bool, *, as_json: bool) -> None:
        self.debug, self.as_json = debug, as_json
        terminal = sys.modules.get("partita.commands.terminal")
        if terminal is not None:  # from an earlier command line of this process
            terminal.stdout_used = False  # type: ignore[attr-defined]

    def unforeseen(self, error: Exception) -> int:
        """Say what came of an exception that is none of ours; what a signal became in native code is that signal."""
        signalled = received()
        if isinstance(signalled, TerminatedError):
            return self.terminated(signalled)
        if signalled is not None:
            return self.interrupted()
        lacking = extras.explain(error, foreign=True)
        if lacking is not None:
            return self.explained(lacking)
        if isinstance(error, MemoryError):
            return self.explained(ResourceError("out of memory; close other models, or use a smaller one"))
        hint = "" if self.debug else "; this is a bug in Partita, --debug shows where"
        return self.fail("InternalError", f"internal error: {type(error).__name__}: {error}{hint}", 1)

    def refused(self, error: OSError) -> int:
        """What the operating system refused."""
        return self.fail("SystemError", _system_error(error), 1)

    def explained(self, error: PartitaError) -> int:
        """An error of ours."""
        return self.fail(public_type(error), str(error), error.exit_code, error)

    def interrupted(self) -> int:
        """Ctrl-C."""
        return self.fail("Interrupted", "interrupted", INTERRUPTED)

    def terminated(self, error: TerminatedError) -> int:
        """Another signal that ends a process."""
        return self.fail("Terminated", f"ended by {error.name}", error.exit_code)

    def fail(self, kind: str, message: str, code: int, error: PartitaError | None = None) -> int:
        """One line on stderr, then a table of the nodes of an error that has some. Control characters (from a file
        name, say) are not passed to the terminal.
        """
        if self.debug and sys.exc_info()[0] is not None:
            traceback.print_exc()
        line = " ".join(message.split())
        nodes = error.nodes if isinstance(error, ProviderError) else ()
        with suppress(OSError):  # the terminal has been closed, or the disk that stderr goes to is full
            for text in (f"partita: {line}", *_table(nodes)):
                print("".join(c if c.isprintable() else "?" for c in text), file=sys.stderr)
        if self.as_json:
            with suppress(OSError):
                self.print_json(kind, line, code, error)
        return code

    def print_json(self, kind: str, message: str, code: int, error: PartitaError | None) -> None:
        """The error on stdout, where no result is."""
        from partita.commands import terminal
        from partita.commands.results import ErrorFact, ErrorResult, fact_of

        if terminal.stdout_used:
            return
        fact = ErrorFact(kind=kind, message=message, remedy=None, exit_code=code) if error is None else fact_of(error)
        terminal.print_record(ErrorResult(error=fact))
