"""The command line: verbs, their options, and how errors end.

Only typer is imported here. Each verb lives in `partita.commands` and is imported when it is called, so that `--help`,
a usage error and `report show` stay fast and load neither torch nor onnxruntime nor transformers.
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
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import Abort, Exit, TyperException

import partita
from partita import extras
from partita.commands.arguments import (
    HELP,
    JsonOption,
    MaxCopiesOption,
    MaxCopyBytesOption,
    MaxCpuNodesOption,
    PackageArgument,
    PinOption,
    ProbeSecondsOption,
    ProviderLibraryOption,
    ProviderOption,
    ProviderOptionsOption,
    ThreadsOption,
    complete,
    help_alone,
    not_empty,
    read_pair,
    read_path,
)
from partita.commands.report_app import report_app
from partita.errors import INTERRUPTED, PartitaError, ProviderError, RefusedNode, public_type
from partita.export.attention import names as attention_names
from partita.remedies import permission
from partita.signals import TerminatedError, ended_by_exception, received

if TYPE_CHECKING:
    from partita.library.chain import ChainOptions

LOWERINGS = ", ".join(attention_names())
app = typer.Typer(
    name="partita",
    help="Export a Hugging Face decoder to a static ONNX graph, run it where you say, and see what ran where.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings=HELP,
)
app.add_typer(report_app, name="report")

PROGRAM = "partita"
"""However it was started: `python -m partita` is told to go on with the same commands."""
COMPLETE_VARIABLE = "_PARTITA_COMPLETE"
"""Set by a shell that asks what could be typed next."""
BY_SIGNAL = 128
"""Exit codes above it stand for a signal that ended the command."""

_OWN_PROCESS = False
"""Set by `main`: the process is ours alone."""

COMPLETION_OPTIONS = ("--install-completion", "--show-completion")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"partita {partita.__version__}")
        raise Exit


def _show_completion(shell: str | None) -> None:
    if shell is not None:
        from partita.commands import completion

        typer.echo(completion.script(shell))
        raise Exit


def _install_completion(shell: str | None) -> None:
    if shell is not None:
        from partita.commands import completion

        name, file = completion.install(shell)
        typer.echo(f"{file}: completion for {name}; a new shell has it")
        raise Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    install_completion: Annotated[
        str | None,
        typer.Option(
            "--install-completion",
            metavar="[SHELL]",
            callback=_install_completion,
            is_eager=True,
            help="Let bash, zsh or fish complete this command; by default the shell it is started from.",
        ),
    ] = None,
    show_completion: Annotated[
        str | None,
        typer.Option(
            "--show-completion",
            metavar="[SHELL]",
            callback=_show_completion,
            is_eager=True,
            help="Print the completion script, to install it yourself.",
        ),
    ] = None,
) -> None:
    """Export a Hugging Face decoder to a static ONNX graph, run it where you say, and see what ran where."""
    help_alone(context)


@app.command(epilog="Example: partita export ./my-checkpoint ./package --precision fp16 --max-length 512")
def export(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint folder, or a hub id such as owner/name.",
            show_default=False,
            parser=not_empty,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder to write the package to.", show_default=False, parser=read_path),
    ],
    precision: Annotated[
        str,
        typer.Option(
            autocompletion=complete("precisions"), help="Type of weights, cache and arithmetic: fp32, fp16 or bf16."
        ),
    ] = "fp32",
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Cache length N: most tokens of prompt and answer together. Default: the model's, up to 2048."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per run, fixed in the graph.")] = 1,
    attention: Annotated[
        str,
        typer.Option(
            autocompletion=complete("attentions"),
            help=f"How attention and cache are written: {LOWERINGS}, or auto, which asks the target.",
        ),
    ] = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PROVIDER",
            autocompletion=complete("providers"),
            help="The provider the package is for: it is asked which way of writing attention it takes whole. Default: "
            "the best usable one.",
        ),
    ] = None,
    target_default: Annotated[
        bool,
        typer.Option(
            "--target-default", help="When the target cannot be asked here, take what its documentation says."
        ),
    ] = False,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    static_shapes: Annotated[
        bool, typer.Option("--static-shapes", help="Write prefill.onnx and decode.onnx without any symbolic size.")
    ] = False,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Tokens per run of a static prefill.onnx. Default: 128.")
    ] = None,
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Do not compare with the original model; the package says it is unverified."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace a package that is there already.")] = False,
    opset: Annotated[
        int | None, typer.Option(help="ONNX operator set. Default: what the attention lowering asks for.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to a package and check it against the original model."""
    from partita.library.scratch import own_compile_cache

    context.with_resource(own_compile_cache())
    from partita.commands.terminal import Bars
    from partita.export.progress import stage

    bars = Bars()
    with bars, stage(bars, "load libraries", {}):  # torch and transformers take seconds
        from partita.commands import export as verb
        from partita.export.pipeline import ExportOptions
        from partita.library.exporting import TargetOptions

    verb.run(
        ExportOptions(
            checkpoint=checkpoint,
            out=out,
            precision=precision,
            max_length=max_length,
            batch_size=batch_size,
            attention=attention,
            static_shapes=static_shapes,
            prefill_chunk=prefill_chunk,
            verify=not no_verify,
            force=force,
            opset=opset,
        ),
        TargetOptions(
            target,
            tuple(provider_option or ()),
            tuple(provider_library or ()),
            default_allowed=target_default,
        ),
        bars,
        as_json=as_json,
    )


@app.command(epilog='Example: partita generate ./package "Return the" --max-new-tokens 64 --report run.json')
def generate(
    package: PackageArgument,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; - reads it from stdin, without a line end behind it. One per row when the batch size "
            "is above 1.",
        ),
    ] = None,
    more_prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt, after those without an option."),
    ] = None,
    provider: ProviderOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate. Default: 128.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "--temp",
            "-t",
            help="0, the default, takes the likeliest token; higher is more varied.",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k likeliest tokens; 0, the default, is off.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens that make up this probability; 1, the default, is off."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this part of the likeliest one's probability; 0, the default, is off."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, the default: tokens that were there already become less likely.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", "-s", help="Seed of the sampler: the same one gives the same text. Default: drawn, and said."
        ),
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            metavar="checkpoint",
            autocompletion=complete("samplings"),
            help="Sample as the checkpoint's generation_config.json suggests; options given beside it come first.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop when this text appears; may be given several times.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", "-c", help="Put the prompt through the tokenizer's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Prompts and output are token ids, e.g. '1,45,7'; needs no tokenizer.")
    ] = False,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt tokens per run. Default: 512.")] = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    max_cpu_nodes: MaxCpuNodesOption = None,
    max_copies: MaxCopiesOption = None,
    max_copy_bytes_per_token: MaxCopyBytesOption = None,
    threads: ThreadsOption = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", "-r", metavar="FILE", parser=read_path, help="Write the partition report of this run to a file."
        ),
    ] = None,
    probe_seconds: ProbeSecondsOption = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Generate text from a package. Text goes to stdout as it comes, timings to stderr."""
    from partita.commands import generate as verb
    from partita.commands.generate_options import GenerateOptions
    from partita.library.sampling import Sampling
    from partita.partition_reports.check.limits import Limits

    raise Exit(
        verb.run(
            GenerateOptions(
                package=package,
                prompts=(*(prompts or ()), *(more_prompts or ())),
                where=_where(provider, provider_option, provider_library, pin, threads),
                limits=Limits(max_cpu_nodes, max_copies, max_copy_bytes_per_token),
                sampling=Sampling(
                    temperature, top_k, top_p, min_p, repetition_penalty, seed, max_new_tokens, source=sampling
                ),
                stop=tuple(stop or ()),
                chat=chat or system is not None,
                system=system,
                token_ids=token_ids,
                prefill_chunk=prefill_chunk,
                report=report,
                probe_seconds=probe_seconds,
                as_json=as_json,
            )
        )
    )


@app.command(epilog="Example: partita verify ./package --provider cpu")
def verify(
    package: PackageArgument,
    provider: ProviderOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay the known answer of a package on a provider, without torch. Exit code 4 when it disagrees."""
    from partita.commands import verify as verb

    raise Exit(verb.run(package, _where(provider, provider_option, provider_library, pin, threads), as_json=as_json))


@app.command(epilog="Example: partita place model.onnx --provider cuda,cpu --dry-run --device h100 --max-cpu-nodes 0")
def place(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="An ONNX file, or a folder that `partita export` wrote.",
            show_default=False,
            parser=read_path,
        ),
    ],
    provider: ProviderOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZES", help="Sizes of an input, x=1,3,224,224, or of a dimension, batch=1."),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=FILE.npy",
            parser=read_pair,
            help="Values of an input; those of the others are made up.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Session runs per phase.")] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Place on CUDA without a GPU; needs --provider cuda or cuda,cpu.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(autocompletion=complete("devices"), help="GPU that the dry run plays, e.g. h100.")
    ] = None,
    graph_capture: Annotated[
        bool, typer.Option("--graph-capture", help="In a dry run: say whether CUDA graphs could be captured.")
    ] = False,
    probe_seconds: ProbeSecondsOption = 120.0,
    max_cpu_nodes: MaxCpuNodesOption = None,
    max_copies: MaxCopiesOption = None,
    max_copy_bytes_per_token: MaxCopyBytesOption = None,
    threads: ThreadsOption = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", "-r", metavar="FILE", parser=read_path, help="Write the partition report to a file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the nodes of any ONNX model would run, what is copied, and why; without generating."""
    from partita.commands import place as verb
    from partita.library.place_options import PlaceOptions
    from partita.partition_reports.check.limits import Limits

    raise Exit(
        verb.run(
            PlaceOptions(
                model=model,
                where=_where(provider, provider_option, provider_library, pin, threads),
                shapes=tuple(shape or ()),
                values=tuple(values or ()),
                runs=runs,
                limits=Limits(max_cpu_nodes, max_copies, max_copy_bytes_per_token),
                dry_run=dry_run,
                device=device,
                graph_capture=graph_capture,
                probe_seconds=probe_seconds,
            ),
            verb.Shown(report, as_json),
        )
    )


@app.command(epilog="Example: partita bench ./package --providers webgpu cpu")
def bench(
    package: PackageArgument,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHAIN",
            autocompletion=complete("chains"),
            help="Further chains, as words after those of --provider.",
        ),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            "--providers",
            "-e",
            metavar="CHAIN",
            autocompletion=complete("chains"),
            help="A chain to measure, e.g. cpu or webgpu,cpu; may be given several times, and further chains may "
            "follow as words: --providers webgpu cpu. Default: the best usable provider, then cpu.",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PACKAGE",
            parser=read_path,
            help="Another package of the same model, to compare with; may be given several times.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="CHAIN",
            autocompletion=complete("chains"),
            help="Ratios are against PACKAGE on this one. Default: cpu, else the first.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; - reads it from stdin. Default: made-up tokens.")
    ] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="--prompt is token ids, e.g. 1,45,7.")] = False,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a made-up prompt. Default: 64.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate, greedily; at least 2.")
    ] = 32,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt tokens per run. Default: 512.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds that count; one more, a warm-up, comes first.")] = 5,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    threads: ThreadsOption = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A provider that takes longer to load or for a turn has failed.")
    ] = 600.0,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            "-r",
            metavar="DIR",
            parser=read_path,
            help="Write the partition report of each contender to this folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            parser=read_path,
            help="Write the result as JSON, for report show and report html; - is stdout.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate the same on several providers, in turns: medians, ratios, whether the tokens are the same, and where
    the time goes. Exit code 3 when a provider could not run; the others are measured all the same.
    """
    from partita.commands import bench as verb
    from partita.commands.bench_options import BenchOptions

    raise Exit(
        verb.run(
            BenchOptions(
                package=package,
                against=tuple(against or ()),
                chains=(*(provider or ()), *(more or ())),
                baseline=baseline,
                prompt=prompt,
                token_ids=token_ids,
                prompt_tokens=prompt_tokens,
                max_new_tokens=max_new_tokens,
                prefill_chunk=prefill_chunk,
                rounds=rounds,
                provider_options=tuple(provider_option or ()),
                provider_libraries=tuple(provider_library or ()),
                threads=threads,
                timeout_seconds=timeout,
                report=report,
                out=out,
                as_json=as_json,
            )
        )
    )


@app.command(epilog="Example: partita providers --json")
def providers(provider_library: ProviderLibraryOption = None, as_json: JsonOption = False) -> None:
    """Show which execution providers run on this machine, and what keeps the others from it."""
    from partita.commands import providers as verb

    verb.run(tuple(provider_library or ()), as_json=as_json)


def _where(
    provider: str | None,
    options: list[str] | None,
    libraries: list[str] | None,
    pins: list[str] | None,
    threads: int | None,
) -> ChainOptions:
    from partita.library.chain import ChainOptions

    return ChainOptions(
        provider, tuple(options or ()), tuple(libraries or ()), tuple(pins or ()), threads, own_process=_OWN_PROCESS
    )


def main() -> None:
    """Entry point: run a verb; every error is one line on stderr and an exit code."""
    global _OWN_PROCESS
    _OWN_PROCESS = True
    # Released builds of ONNX Runtime send usage data and keep a session id in the temporary folder (docs/Privacy.md).
    # Nobody who runs this command has agreed to that; whoever has sets the variable to 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            _take_all_text(stream)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = arguments[:end], arguments[end:]
    if os.environ.get(COMPLETE_VARIABLE):
        from partita.commands import completion

        completion.begin()
    with ended_by_exception():
        code = run([a for a in options if a != "--debug"] + rest, debug="--debug" in options)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it must not cut short what follows
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    supervise = sys.modules.get("partita.commands.supervise")
    in_child: bool = supervise is not None and supervise.in_child
    if code <= BY_SIGNAL and not in_child:
        sys.exit(code)
    # All is said and written, and Python's own way out would change the exit code. Some providers crash while they
    # are unloaded (WebGPU and OpenVINO were seen to). And Python ends itself with SIGINT, whatever sys.exit was given,
    # when a KeyboardInterrupt left an exec() of text, of which importing torch has many (cpython, Modules/main.c,
    # exit_sigint).
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.flush()
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


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run one command line without the program name and return its exit code; errors are printed, never raised."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    ending = _Ending(debug, as_json="--json" in options)
    try:
        return _run(arguments, ending)
    except Exception as error:  # noqa: BLE001 - the last resort: a user never meets a traceback unasked
        return ending.unforeseen(error)


def _run(arguments: list[str], ending: _Ending) -> int:
    """Run one command line. Raises what is no error of ours."""
    try:
        result = app(_with_shell(arguments), standalone_mode=False, prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE)
        if result == INTERRUPTED:  # typer turns Ctrl-C into this
            return ending.interrupted()
        return result if isinstance(result, int) else 0
    except Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, Abort):
        return ending.interrupted()
    except BrokenPipeError:
        _drop_stdout()
        return 0
    except TerminatedError as error:
        return ending.terminated(error)
    except SystemExit as error:
        # While it prints a help text, typer ends the process with code 1 when the reader has gone.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        _drop_stdout()
        return 0
    except PartitaError as error:
        return ending.explained(error)
    except TyperException as error:
        return ending.fail("UsageError", _usage_error(error), error.exit_code)
    except OSError as error:
        return ending.fail("SystemError", _system_error(error), 1)


def _system_error(error: OSError) -> str:
    """What the operating system refused, and what to do about it."""
    said = f"{error.strerror or error}"
    if isinstance(error, PermissionError):
        if not isinstance(error.filename, str):
            return said
        path = Path(error.filename)
        return f"{path}: {said}; {permission(path, write=os.access(path, os.R_OK))}"
    return f"{error.filename}: {said}; check the disk" if error.filename else f"{said}; check the disk"


def _with_shell(arguments: list[str]) -> list[str]:
    """The arguments, with `auto` behind an option about completion that no shell follows: typer has no option whose
    value may be left out.
    """
    if len(arguments) == 1 and arguments[0] in COMPLETION_OPTIONS:
        return [*arguments, "auto"]
    return arguments


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


def _drop_stdout() -> None:
    """The reader of our output (head, less) has gone. Nothing is wrong; keep Python from complaining at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        hint = "" if self.debug else "; this is a bug in Partita, --debug shows where"
        return self.fail("InternalError", f"internal error: {type(error).__name__}: {error}{hint}", 1)

    def explained(self, error: PartitaError) -> int:
        """An error of ours."""
        remedy = None if error.remedy is None else " ".join(str(error.remedy).split())
        nodes = error.nodes if isinstance(error, ProviderError) else ()
        return self.fail(public_type(error), str(error), error.exit_code, nodes=nodes, remedy=remedy)

    def interrupted(self) -> int:
        """Ctrl-C."""
        return self.fail("Interrupted", "interrupted", INTERRUPTED)

    def terminated(self, error: TerminatedError) -> int:
        """Another signal that ends a process."""
        return self.fail("Terminated", f"ended by {error.name}", error.exit_code)

    def fail(
        self, kind: str, message: str, code: int, *, nodes: Sequence[RefusedNode] = (), remedy: str | None = None
    ) -> int:
        """One line on stderr, then a table of the nodes of an error that has some. Control characters (from a file
        name, say) are not passed to the terminal.
        """
        if self.debug and sys.exc_info()[0] is not None:
            traceback.print_exc()
        line = " ".join(message.split())
        with suppress(OSError):  # the terminal has been closed, or the disk that stderr goes to is full
            for text in (f"partita: {line}", *_table(nodes)):
                print("".join(c if c.isprintable() else "?" for c in text), file=sys.stderr)
        if self.as_json:
            with suppress(OSError):
                self.print_json(kind, line, code, nodes, remedy)
        return code

    def print_json(self, kind: str, message: str, code: int, nodes: Sequence[RefusedNode], remedy: str | None) -> None:
        """The error on stdout, where no result is."""
        from partita.commands import terminal
        from partita.commands.results import ErrorResult, error_fact

        if not terminal.stdout_used:
            terminal.print_record(ErrorResult(error=error_fact(kind, message, code, nodes, remedy)))
