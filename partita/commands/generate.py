"""`partita generate`: checks the options, then generates, runs a prompt file or saves a prefix; `run` and `cache`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from partita.check.requirements import Limits, check_limits
from partita.commands.arguments import package_of, parse_ids, read_prompts
from partita.commands.outputs import refuse_two_on_stdout, reserve_output
from partita.commands.terminal import note, write_stdout
from partita.errors import UsageError
from partita.files import reserve
from partita.foreign.folder import Choice, open_folder
from partita.library import model_cache
from partita.library.chain import read_chain
from partita.library.engine.requests import check_speculation
from partita.library.sampling import Sampling, complete_sampling_for
from partita.observations.text_format import human_bytes, listing
from partita.options.fields import describe_fields, input_paths, path_of
from partita.options.generation import (
    CacheListCommand,
    CacheRemoveCommand,
    ChatCommand,
    GenerateCommand,
    RunCommand,
    RunOptions,
    SpeculationOptions,
)
from partita.options.groups import PlacementLimits
from partita.runtime.generate.checks import check_adapter
from partita.runtime.generate.text.chat_templates import has_template


def run(given: GenerateCommand) -> int:
    """Check the options, then generate; returns the exit code."""
    options = replace(given, prompts=(*given.prompts, *given.more_prompts), more_prompts=())
    _check_options(options)
    target = read_chain(options, graph_capture=options.graph_capture)
    check_limits(Limits.of(options), target.requested_names)
    without = options.input is not None or (options.save_prefix is not None and options.system is not None)
    prompts = [] if without else read_prompts(options.prompts)
    if options.token_ids:
        for prompt in prompts:
            parse_ids(prompt)
    package = package_of(options.package, options)
    manifest = open_folder(package, Choice.of(options))
    check_adapter(package, manifest, options.adapter)
    check_speculation(package, manifest, options)
    requested = options.sampling
    sampling, notes = complete_sampling_for(requested, package, hints=True, of_rows=options.input is not None)
    options = replace(options, package=package, revision=None, **sampling.figures())
    target = replace(target, notes=(*target.notes, *notes))
    reads, written = input_paths(options), list[Path]()
    source, output, saved = path_of(options.input), path_of(options.output), path_of(options.save_prefix)
    if source is not None and output is not None:
        from partita.library.batches.batch_run import check_files
        from partita.library.batches.journal import journal_path

        reserve_output(output, "answers", reads, option="--output")
        check_files(source, output)
        written += (output, journal_path(output))
    if saved is not None:
        reserve(saved, "prefix", reads, option="--save-prefix")
    sink = None
    if options.report is not None:
        refuse_two_on_stdout(Path(options.report), as_json=options.as_json)
        sink = reserve_output(Path(options.report), "report", (*reads, *written), option="--report")
    if source is not None and output is not None:
        from partita.commands.batch import run_batch

        return run_batch(options, requested, target, manifest, sink, source, output)
    from partita.commands.generation import run_generation, save_prefix

    if saved is not None:
        return save_prefix(options, target, prompts, manifest)
    return run_generation(options, target, prompts, manifest, sink)


def _check_options(options: GenerateCommand) -> None:
    """Check the options of the generation loop. Raises UsageError, InstallationError without Ray."""
    if options.token_ids and (options.is_chat or options.stop):
        raise UsageError("--token-ids uses no tokenizer, so --chat, --system and --stop are not available; omit them")
    if options.token_ids and options.input is not None and Path(options.input).suffix == ".txt":
        raise UsageError("--token-ids: --input is a file of texts; give a .jsonl or .parquet file with `tokens`")
    if options.save_prefix is not None:
        _check_saving(options)
    if options.prefix is not None and options.system is not None:
        raise UsageError("--prefix already contains the system message; omit --system")
    if "" in options.stop:
        raise UsageError("--stop is empty; give the text that stops the generation")
    if (options.input is None) != (options.output is None):
        raise UsageError("--input and --output belong together: a file of prompts, and one for their completions")
    if options.input is not None and options.prompts:
        raise UsageError("prompts come from --input or from the command line; use one of them")
    if options.address is None and options.workers is not None:
        raise UsageError("--workers is only for a cluster; give its address with --address")
    if options.address is not None:
        from partita.library.batches.cluster import check_address

        if options.input is None:
            raise UsageError("--address is for prompt files; give --input and --output")
        if options.prefix or options.report or Limits.of(options).as_dict():
            raise UsageError("--address cannot be combined with --prefix, --report or placement limits; omit them")
        check_address(options.address)


def _check_saving(options: GenerateCommand) -> None:
    """Raise UsageError for options that do not apply to saving a prefix."""
    unused = {each.name for cls in (SpeculationOptions, Sampling, PlacementLimits) for each in describe_fields(cls)}
    unused |= {"prefix", "stop", "input", "report", "as_json"} | ({"chat"} if options.system is None else set())
    every = describe_fields(GenerateCommand)
    given = [each.flag for each in every if each.name in unused and getattr(options, each.name) != each.field.default]
    if given:
        raise UsageError(f"--save-prefix generates nothing; omit {listing(given)}")
    if len(options.prompts) != (options.system is None):
        raise UsageError("--save-prefix stores one text; give one prompt, or --system and no prompt")


def run_any(options: RunCommand) -> int:
    """`partita run`: generate, or chat without a prompt; returns the exit code."""
    if not options.prompts and (options.report or options.as_json or options.raw or options.token_ids):
        raise UsageError("--report, --json, --raw and --token-ids are only for a prompt; give a prompt or omit them")
    package = package_of(options.package, options)
    common = {each.name: getattr(options, each.name) for each in fields(RunOptions)}
    common |= {"package": package, "revision": None}
    if not options.prompts:
        from partita.commands import chat

        return chat.run(ChatCommand(**common))
    templated = not (options.raw or options.token_ids) and has_template(package)
    of_prompt = {name: getattr(options, name) for name in ("prompts", "token_ids", "report", "as_json")}
    return run(GenerateCommand(**common, **of_prompt, chat=templated))


def list_cached(options: CacheListCommand) -> None:
    """Print a line for each package of the cache."""
    found = list(model_cache.cached_packages())
    rows = [(each.name, each.precision, human_bytes(each.size_bytes), each.source) for each in found]
    if not rows:
        note("the cache has no packages")
    wide = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        write_stdout("  ".join([*(cell.ljust(width) for cell, width in zip(row, wide, strict=False)), row[3]]) + "\n")


def remove_cached(options: CacheRemoveCommand) -> None:
    """Remove a package from the cache."""
    gone = model_cache.remove_cached(options.name)
    note(f"removed {gone.path} ({human_bytes(gone.size_bytes)})")
