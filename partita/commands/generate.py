"""`partita generate`: checks the options, then generates, runs a prompt file or saves a prefix."""

from __future__ import annotations

from dataclasses import replace

from partita.check.requirements import check_limits
from partita.commands.generate_options import (
    GenerateOptions,
    argument_text,
    check_options,
    package_of,
    parse_ids,
    read_prompts,
)
from partita.commands.outputs import refuse_two_on_stdout, reserve_output
from partita.files import reserve
from partita.foreign.folder import open_folder
from partita.library.chain import read_chain
from partita.library.engine.speculation import check_speculation
from partita.library.sampling import complete_sampling_for
from partita.options.fields import group, input_paths
from partita.options.generation import GenerateCommand
from partita.runtime.generate.checks import check_adapter


def run(given: GenerateCommand) -> int:
    """Check the options, then generate; returns the exit code."""
    prompts_given = (*given.prompts, *given.more_prompts)
    options = replace(group(given, GenerateOptions), prompts=prompts_given, more_prompts=())
    check_options(options)
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
    system = None if options.system is None else argument_text(options.system, "--system")
    stop = tuple(argument_text(text, "--stop") for text in options.stop)
    options = replace(options, **sampling.figures(), system=system, stop=stop)
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
