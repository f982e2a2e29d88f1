"""`partita generate`: checks the options, then generates, runs a prompt file or saves a prefix; `run` and `cache`."""

from __future__ import annotations

from dataclasses import fields, replace

from partita.check.requirements import check_limits
from partita.commands.generate_options import GenerateOptions, package_of, parse_ids, read_prompts
from partita.commands.outputs import refuse_two_on_stdout, reserve_output
from partita.commands.terminal import note, write_stdout
from partita.errors import UsageError
from partita.files import reserve
from partita.foreign.folder import open_folder
from partita.library import model_cache
from partita.library.chain import read_chain
from partita.library.engine.requests import check_speculation
from partita.library.sampling import Sampling, complete_sampling_for
from partita.observations.text_format import human_bytes, listing
from partita.options.fields import describe_fields, group, input_paths
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
    prompts_given = (*given.prompts, *given.more_prompts)
    options = replace(group(given, GenerateOptions), prompts=prompts_given, more_prompts=())
    _check_options(options)
    if options.address is not None:
        from partita.commands.batch import check_cluster_options

        check_cluster_options(options)
    target = read_chain(options, graph_capture=options.graph_capture)
    check_limits(options.limits, target.requested_names)
    without = options.input is not None or (options.save_prefix is not None and options.system is not None)
    prompts = [] if without else read_prompts(prompts_given)
    if options.token_ids:
        for prompt in prompts:
            parse_ids(prompt)
    options = replace(options, package=package_of(options.package, options), revision=None)
    manifest = open_folder(options.package, options.choice)
    check_adapter(options.package, manifest, options.adapter)
    check_speculation(options.package, manifest, options)
    requested = options.sampling
    sampling, notes = complete_sampling_for(requested, options.package, hints=True, of_rows=options.input is not None)
    options = replace(options, **sampling.figures())
    reads, sink = input_paths(options), None
    if options.input is not None and options.output is not None:
        from partita.library.batches.batch_run import check_files

        reserve_output(options.output, "answers", reads, option="--output")
        check_files(options.input, options.output)
    if options.save_prefix is not None:
        reserve(options.save_prefix, "prefix", reads, option="--save-prefix")
    if options.report is not None:
        refuse_two_on_stdout(options.report, as_json=options.as_json)
        from partita.library.batches.journal import journal_path

        saved = () if options.save_prefix is None else (options.save_prefix,)
        written = saved if options.output is None else (*saved, options.output, journal_path(options.output))
        sink = reserve_output(options.report, "report", (*reads, *written), option="--report")
    target = replace(target, notes=(*target.notes, *notes))
    if options.input is not None:
        from partita.commands.batch import rows_file, run_batch, run_on_cluster

        with rows_file(options.input) as source:
            if options.address is not None:
                return run_on_cluster(options, requested, manifest, source)
            return run_batch(options, requested, target, manifest, sink, source)
    from partita.commands.generation import run_generation, save_prefix

    if options.save_prefix is not None:
        return save_prefix(options, target, prompts, manifest)
    return run_generation(options, target, prompts, manifest, sink)


def _check_options(options: GenerateOptions) -> None:
    """Check the options of the generation loop. Raises UsageError."""
    if options.token_ids and (options.is_chat or options.stop):
        raise UsageError("--token-ids uses no tokenizer, so --chat, --system and --stop are not available; omit them")
    if options.save_prefix is not None:
        _check_saving(options)
    if options.prefix is not None and options.system is not None:
        raise UsageError("--prefix already contains the system message; omit --system")
    if "" in options.stop:
        raise UsageError("--stop is empty; give the text that stops the generation")
    if (options.input is None) != (options.output is None):
        raise UsageError("--input and --output belong together: a file of prompts, and one for their completions")
    if options.address is None and options.workers is not None:
        raise UsageError("--workers is only for a cluster; give its address with --address")
    if options.input is not None and options.prompts:
        raise UsageError("prompts come from --input or from the command line; use one of them")


def _check_saving(options: GenerateOptions) -> None:
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
    if not options.prompts:
        unused = {
            "--report": options.report,
            "--json": options.as_json,
            "--raw": options.raw,
            "--token-ids": options.token_ids,
        }
        if given := [name for name, value in unused.items() if value]:
            raise UsageError(f"{given[0]} is only for a prompt; give a prompt or omit it")
    package = package_of(options.package, options)
    options = replace(options, package=package, revision=None)
    common = {each.name: getattr(options, each.name) for each in fields(RunOptions)}
    if not options.prompts:
        from partita.commands import chat

        return chat.run(ChatCommand(**common))
    templated = not (options.raw or options.token_ids) and has_template(package)
    return run(
        GenerateCommand(
            **common,
            prompts=options.prompts,
            chat=templated,
            token_ids=options.token_ids,
            report=options.report,
            as_json=options.as_json,
        )
    )


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
