"""The command line: its verbs, and the start and end of a command.

Only typer is imported here. The options of a verb are in `partita.options`, the verb itself in `partita.commands`; both
are imported when it is called, so that `--help`, a usage error and `report show` stay fast and
load neither torch nor onnxruntime nor transformers.
"""

from __future__ import annotations

import atexit
import codecs
import difflib
import gc
import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, Exit, TyperException

import partita
from partita import process
from partita.commands.build import Verb, group_of, read_verbs
from partita.errors import INTERRUPTED, PartitaError, ProviderError, public_type
from partita.signals import TerminatedError, ended_by_exception, received_signal

VERBS = read_verbs("""
export | export:ExportCommand | export:run | Export a checkpoint and check the package against the model.
    export ./my-checkpoint ./package --precision fp16 --max-length 512
    export ./my-checkpoint ./package-int4 --precision int4
    export ./my-checkpoint ./for-cuda --target cuda
run | generation:RunCommand | generate:run_any | Generate or chat with any model, exported once where needed.
    run ./my-checkpoint "Return the" --max-new-tokens 64
    run ./package --system 'You answer in one sentence.'
    run openai-community/gpt2 "Once upon a time" --raw
generate | generation:GenerateCommand | generate:run | Generate text with a model; the prompt as it is.
    generate ./package "Return the" --max-new-tokens 64 --report run.json
    generate ./package "Return the" --temperature 0.8 --top-p 0.95 --seed 1
    generate ./package --input prompts.jsonl --output completions.jsonl
chat | generation:ChatCommand | chat:run | Talk to a model whose tokenizer has a chat template.
    chat ./package --system 'You answer in one sentence.'
    chat ./package --temperature 0.7 --provider cpu
serve | generation:ServeCommand | serve:run | Serve models over HTTP with OpenAI's API.
    serve ./package --provider cpu --port 8000
    serve ./package ./package-int4 --name large --name small --api-key secret
verify | inspection:VerifyCommand | verify:run | Replay the known answer of a package on a provider.
    verify ./package --provider cpu
    verify ./package-int4 --json
evaluate | inspection:EvaluateCommand | verify:evaluate | Measure the perplexity of a package and its source model.
    evaluate ./package-int4 --provider cpu
    evaluate ./package --json
inspect | inspection:InspectCommand | place:inspect | Show the contents of a package, without running it.
    inspect ./package --against ./other-package
    inspect model.onnx --view markdown
plan | inspection:PlanCommand | place:plan | Show whether a model fits a device, and how fast it is there.
    plan ./my-checkpoint --precision int4 --batch 4
    plan ./my-checkpoint --device h100 --batch 8 --json
push | export:PushCommand | export:push | Upload a package to the Hugging Face hub.
    push ./package me/my-model
    push ./package me/my-model --private
place | placement:PlaceCommand | place:run | Show where the nodes of any ONNX model would run, and why.
    place model.onnx --provider cuda,cpu --dry-run --device h100 --max-cpu-nodes 0
    place model.onnx --shape x=1,3,224,224 --provider cpu --report now.json
drift | placement:DriftCommand | place:drift | Find the layer and node whose output on a provider is wrong.
    drift ./package --provider webgpu
    drift model.onnx --shape x=1,3,224,224 --provider webgpu,cpu --out drift.html
support | placement:SupportCommand | place:support | Measure which operators a provider supports.
    support Resize com.microsoft:MatMulNBits --provider webgpu
    support --model model.onnx --provider cpu --out support.json
bench | inspection:BenchCommand | verify:bench | Benchmark one prompt on several providers.
    bench ./package --providers webgpu cpu
    bench ./package --against ./package-int4 --provider cpu
providers | inspection:ProvidersCommand | place:providers | Show which execution providers run on this machine.
    providers --json
    providers --view markdown
doctor | inspection:DoctorCommand | place:doctor | Show versions, hardware and providers, for a bug report.
    doctor
    doctor --json
""")
"""In the order of the help."""
REPORT_VERBS = read_verbs("""
show | reports:ShowCommand | report:show | Show a report: what happened, what to do, the tables.
    show run.json
    show run.json --full
html | reports:HtmlCommand | report:html | Write a report as one HTML page.
    html run.json --out run.html
markdown | reports:MarkdownCommand | report:markdown | Write a report as Markdown, for CI job summaries.
    markdown run.json >> $GITHUB_STEP_SUMMARY
    markdown run.json --out run.md
explain | reports:ExplainCommand | report:explain | Show everything known about one node.
    explain run.json layers.0.mlp.up_proj/MatMul
    explain run.json layers.0.mlp.up_proj/MatMul --json
diff | reports:DiffCommand | report:diff | Show what changed between two reports.
    diff last-week.json today.json
    diff last-week.json today.json --view markdown
check | reports:CheckCommand | report:check | Check a report against limits, for CI.
    check run.json --require 'provider=webgpu,share>=0.95' --max-copies 2
    check today.json --baseline last-week.json
""")
CACHE_VERBS = read_verbs("""
list | generation:CacheListCommand | generate:list_cached | List the exported packages.
    list
remove | generation:CacheRemoveCommand | generate:remove_cached | Remove an exported package.
    remove my-checkpoint
""")
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 1000}
"""Width of the help: that of the terminal, or 80 columns."""
USAGE = 2
"""Exit code of a usage error."""
PROGRAM = "partita"
"""Name in usage lines, also of `python -m partita`."""
KNOWN = (PartitaError, TyperException, Abort, OSError)
"""Exceptions with a message of their own."""


def _help_alone(context: typer.Context) -> None:
    """Without a verb, print the help and exit with the code of a usage error."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise Exit(USAGE)


def _group(name: str, verbs: tuple[Verb, ...], help_text: str, prefix: str = "", **settings: Any) -> typer.Typer:
    """A group of verbs, whose names follow `prefix` in examples."""
    found = typer.Typer(
        name=name,
        cls=group_of(verbs, prefix),
        help=help_text,
        invoke_without_command=True,
        rich_markup_mode=None,
        **settings,
    )
    found.callback()(_help_alone)
    return found


ABOUT = (
    "Export a Hugging Face decoder to a static ONNX graph, run it on the execution providers you name, and see what "
    "ran where."
)
EPILOG = "`partita help VERB` shows the options and examples of a command."
app = _group(PROGRAM, VERBS, ABOUT, epilog=EPILOG, context_settings=HELP)
app.add_typer(_group("report", REPORT_VERBS, "Inspect, compare and check partition reports.", "report "))
app.add_typer(_group("cache", CACHE_VERBS, "List or remove packages that were exported once for `run`.", "cache "))


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
    """The options before a verb."""
    _help_alone(context)


def main() -> None:
    """Entry point: run a verb; every error is one line on stderr and an exit code."""
    # Released builds of ONNX Runtime send usage data unless this is set (docs/Privacy.md); users opt in with 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    gc.set_threshold(1_000_000)  # at the default, collections are a fifth of the time that importing torch takes
    process.open_null_device()
    process.own_process = True
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            _accept_all_text(stream)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    with ended_by_exception():
        code = run([a for a in arguments[:end] if a != "--debug"] + arguments[end:], debug=debug)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the flush
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        process.drop_output(1)
    except OSError as error:  # a full disk; verbs report their own failed writes
        code = code or _fail(error, debug=debug)
        process.drop_output(1)
    try:
        sys.stderr.flush()
    except OSError:
        process.drop_output(2)
    _leave(code)


def _leave(code: int) -> None:
    """End the process with this exit code, as it is: to free all objects takes a second after an export."""
    atexit._run_exitfuncs()
    os._exit(code)


def _accept_all_text(stream: io.TextIOWrapper) -> None:
    """Write ASCII, the encoding of the C locale, as UTF-8; other encodings replace the characters that they lack."""
    if codecs.lookup(stream.encoding).name == "ascii":
        stream.reconfigure(encoding="utf-8")
    elif stream.errors == "strict":
        stream.reconfigure(errors="replace")


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run one command line without the program name and return its exit code; errors are printed, never raised."""
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    terminal = sys.modules.get("partita.commands.terminal")
    if terminal is not None:  # from an earlier command line of this process
        terminal.stdout_used = False  # type: ignore[attr-defined]
    if arguments[:1] == ["help"]:
        arguments = [*(word for word in arguments[1:] if word != "help"), "--help"]
    try:
        result = app(arguments, standalone_mode=False, prog_name=PROGRAM)
        if result == INTERRUPTED:  # typer turns Ctrl-C into this
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except Exit as error:
        return error.exit_code
    except BrokenPipeError:
        process.drop_output(1)
        return 0
    except (Exception, KeyboardInterrupt, TerminatedError) as error:  # noqa: BLE001 - a user never meets a traceback
        return _fail(error, debug=debug, as_json=as_json)
    except SystemExit as error:
        # typer ends the process after completion, and with code 1 when the reader of a help text has gone.
        if isinstance(error.__context__, BrokenPipeError):
            process.drop_output(1)
        elif error.code:
            raise
        return 0


def _explain_exception(error: BaseException, debug: bool) -> tuple[str, str, int, PartitaError | None]:
    """Kind, message and exit code of an exception, and its PartitaError, if any."""
    signalled = received_signal() if isinstance(error, Exception) and not isinstance(error, KNOWN) else None
    error = signalled or error  # native code may replace the exception of a signal
    if isinstance(error, KeyboardInterrupt | Abort):
        return "Interrupted", "interrupted", INTERRUPTED, None
    if isinstance(error, TerminatedError):
        return "Terminated", f"ended by {error.name}", error.exit_code, None
    if isinstance(error, TyperException):
        return "UsageError", _usage_error(error), error.exit_code, None
    from partita.library.api import public_error

    ours = public_error(error) if isinstance(error, Exception) else error
    if isinstance(ours, PartitaError):
        from partita.options.fields import with_flags

        return public_type(ours), with_flags(str(ours)), ours.exit_code, ours
    hint = "" if debug else "; this is a bug in Partita, --debug shows where"
    return "InternalError", f"internal error: {type(error).__name__}: {error}{hint}", 1, None


def _fail(error: BaseException, *, debug: bool, as_json: bool = False) -> int:
    """Print an error and return its exit code: one line and its nodes on stderr, with --json also a record."""
    if debug:
        traceback.print_exception(error)
    kind, message, code, ours = _explain_exception(error, debug)
    line, table = " ".join(message.split()), list[str]()
    if isinstance(ours, ProviderError) and ours.nodes:
        from partita.commands.results import render_refusal

        table = render_refusal(ours.nodes).splitlines()
    with suppress(OSError):  # the terminal has been closed, or the disk that stderr goes to is full
        for text in (f"partita: {line}", *table):
            print("".join(c if c.isprintable() else "?" for c in text), file=sys.stderr)
    if as_json:
        from partita.commands import results, terminal

        fact = results.ErrorFact(kind=kind, message=line, remedy=None, exit_code=code)
        with suppress(OSError):
            if not terminal.stdout_used:  # otherwise by a result
                terminal.print_record(results.ErrorResult(error=fact if ours is None else results.fact_of(ours)))
    return code


def _usage_error(error: TyperException) -> str:
    """Typer's message about a command line, with the nearest option only and the command that prints the help."""
    message = error.format_message()
    possible = getattr(error, "possibilities", None)
    if possible:
        name = getattr(error, "option_name", "")
        near = difflib.get_close_matches(name, possible, n=1, cutoff=0) or list(possible)
        message = f"{getattr(error, 'message', message)}. Did you mean {near[0]}?"
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path if context else PROGRAM} --help)"
