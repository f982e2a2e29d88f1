"""`partita generate`: checks what was asked before anything is loaded, then hands over to `generation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.check.limits import check_limits
from partita.commands.generate_options import GenerateOptions, argument_text, check_options, read_prompts
from partita.commands.outputs import Sink, claim_output, refuse_two_on_stdout
from partita.files import claim
from partita.foreign.folder import open_folder
from partita.library.chain import Target, read_chain_options
from partita.library.sampling import Sampling, completed_for
from partita.library.speculation import check_speculation
from partita.options.fields import group
from partita.options.generation import GenerateCommand
from partita.package import Manifest
from partita.runtime.adapter_names import check_adapter


def run(given: GenerateCommand) -> int:
    """Check everything that can be checked, then generate; returns the exit code."""
    prompts_given = (*given.prompts, *given.more_prompts)
    options = replace(group(given, GenerateOptions), prompts=prompts_given, more_prompts=())
    check_options(options)
    if options.address is not None:
        from partita.commands.batch import check_cluster_options

        check_cluster_options(options)
    target = read_chain_options(options.where)
    check_limits(options.limits, target.asked_names)
    without = options.input is not None or (options.save_prefix is not None and options.system is not None)
    prompts = [] if without else read_prompts(prompts_given)
    manifest = open_folder(options.package, options.choice)
    check_adapter(options.package, manifest, options.adapter)
    check_speculation(options.package, manifest, options.speculation)
    asked = options.sampling
    sampling, notes = completed_for(asked, options.package, hints=True, of_rows=options.input is not None)
    system = None if options.system is None else argument_text(options.system, "--system")
    stop = tuple(argument_text(text, "--stop") for text in options.stop)
    options = replace(options, **sampling.figures(), system=system, stop=stop)
    reads = options.reads
    _check_files(options, reads)
    sink: Sink | None = None
    if options.save_prefix is not None:
        claim(options.save_prefix, "prefix", reads, option="--save-prefix")
    if options.report is not None:
        refuse_two_on_stdout(options.report, as_json=options.as_json)
        from partita.library.batches.journal import journal_path

        files = (options.input, options.output, options.prefix, options.save_prefix)
        journal = () if options.output is None else (journal_path(options.output),)
        known = (*reads, *(path for path in files if path is not None), *journal)
        sink = claim_output(options.report, "report", known, option="--report")
    target = replace(target, notes=(*target.notes, *notes))
    if options.input is not None:
        from partita.commands.rows_input import rows_file

        with rows_file(options.input) as source:
            return _answer_file(options, asked, target, manifest, sink, source)
    return _generate(options, target, prompts, manifest, sink)


def _check_files(options: GenerateOptions, reads: Sequence[Path]) -> None:
    """Check the files of a batch before anything is loaded."""
    if options.input is None or options.output is None:
        return
    from partita.commands.rows_input import read_from
    from partita.library.batches.running import check_files

    prefix = () if options.prefix is None else (options.prefix,)
    claim_output(options.output, "answers", (*reads, read_from(options.input), *prefix), option="--output")
    check_files(options.input, options.output)


def _answer_file(
    options: GenerateOptions, asked: Sampling, target: Target, manifest: Manifest, sink: Sink | None, source: Path
) -> int:
    from partita.commands.batch import run_batch, run_on_cluster

    if options.address is not None:
        return run_on_cluster(options, asked, manifest, source)
    return run_batch(options, asked, target, manifest, sink, source)


def _generate(
    options: GenerateOptions, target: Target, prompts: Sequence[str], manifest: Manifest, sink: Sink | None
) -> int:
    if options.save_prefix is not None:
        from partita.commands.prefix import save_prefix

        return save_prefix(options, target, prompts, manifest)
    from partita.commands.generation import run_generation

    return run_generation(options, target, prompts, manifest, sink)
