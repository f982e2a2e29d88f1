"""`partita generate`: checks what was asked before anything is loaded, then hands over to `generation`."""

from __future__ import annotations

from collections.abc import Sequence

from partita.commands.chain_options import Target, read_chain_options
from partita.commands.generate_options import GenerateOptions, check_options, read_prompts
from partita.commands.report_file import check_target
from partita.commands.supervise import supervised
from partita.package import Manifest, read_manifest
from partita.partition_reports.limits import check_limits
from partita.runtime.sampling import Sampler


def run(options: GenerateOptions) -> int:
    """Check everything that can be checked, then generate; returns the exit code."""
    sampler = check_options(options)
    target = read_chain_options(options.where)
    check_limits(options.limits, target.asked_names)
    prompts = read_prompts(options.prompts)
    manifest = read_manifest(options.package)
    if options.report is not None:
        check_target(options.report, options.package)
    return supervised(lambda: _generate(options, target, prompts, manifest, sampler), target)


def _generate(
    options: GenerateOptions, target: Target, prompts: Sequence[str], manifest: Manifest, sampler: Sampler
) -> int:
    from partita.commands.generation import run_generation

    return run_generation(options, target, prompts, manifest, sampler)
