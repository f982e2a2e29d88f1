"""`partita generate --input FILE --output FILE --address ADDRESS`: rows on a Ray cluster, and a line per worker."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from partita.commands.batch import RowBar, defaults_of, figures_of, identity_of, say_end
from partita.commands.generate_options import GenerateOptions, argument_text, check_options
from partita.commands.outputs import claim_output
from partita.commands.results import ClusterResult
from partita.commands.rows_input import read_from, rows_file
from partita.commands.terminal import fold, note, print_record
from partita.errors import INTERRUPTED, UsageError
from partita.foreign.folder import open_folder
from partita.library.batches.cluster import Cluster, Setup, check_cluster, contents_of
from partita.library.batches.reading import look_at
from partita.library.batches.running import answer_file, check_files
from partita.library.chain import ChainOptions, read_by
from partita.library.contents import contents_hash
from partita.library.sampling import completed_for
from partita.library.speculation import check_speculation
from partita.observations.text_format import plural
from partita.runtime.adapter_names import check_adapter


def run_on_cluster(options: GenerateOptions) -> int:
    """Check the options, then have workers answer the rows; returns the exit code."""
    check_options(options)
    if options.address is None or options.input is None or options.output is None:
        raise UsageError("--address is for files of prompts; give --input and --output")
    if options.prefix or options.report or options.limits.given():
        raise UsageError("--address cannot be combined with --prefix, --report and limits of placement; leave them out")
    check_cluster(options.address, options.workers)
    manifest = open_folder(options.package, options.choice)
    check_adapter(options.package, manifest, options.adapter)
    check_speculation(options.package, manifest, options.speculation)
    asked = options.sampling
    sampling, _ = completed_for(asked, options.package, of_rows=True)
    system = None if options.system is None else argument_text(options.system, "--system")
    stop = tuple(argument_text(text, "--stop") for text in options.stop)
    options = replace(options, sampling=sampling, system=system, stop=stop)
    source, output = options.input, options.output
    assert source is not None and output is not None and options.address is not None
    draft = options.speculation.reads
    reads = read_by(options.where, options.package, *options.choice.reads, *draft, read_from(source))
    claim_output(output, "answers", reads, option="--output")
    check_files(source, output)
    defaults = defaults_of(options)
    contract = options.choice.contract
    with rows_file(source) as rows, RowBar() as bar:
        looked = look_at(rows)
        setup = Setup(
            package=str(options.package.absolute()),
            contents=contents_of(options.package, manifest),
            where=_absolute(options.where),
            choice=replace(options.choice, contract=None if contract is None else contract.absolute()),
            token_ids=options.token_ids,
            format=looked.format,
            prefill_chunk=options.prefill_chunk,
            adapter=options.adapter,
            speculation=replace(options.speculation, draft=str(draft[0].absolute()) if draft else None),
        )
        cluster = Cluster(options.address, setup, manifest.graph.batch_size, looked.rows, options.workers)
        try:
            filed = answer_file(
                looked,
                output,
                cluster,
                defaults,
                package=contents_hash(options.package, manifest),
                options=identity_of(options, asked, defaults),
                heard=bar.show,
                noted=note,
            )
        except BaseException as error:
            say_end(options, None, bar)
            if isinstance(error, KeyboardInterrupt):
                return INTERRUPTED
            raise
    say_end(options, filed, bar)
    workers = tuple(cluster.facts.values())
    for each in workers:
        what = f"{plural(each.rows, 'row')}, {plural(each.tokens, 'new token')}"
        note(fold(f"worker {each.host}:{each.pid} on {', '.join(each.chain)}: {what}", sys.stderr, 2))
    if options.as_json:
        print_record(
            ClusterResult(
                package=str(options.package),
                address=options.address,
                input=str(options.input),
                workers=workers,
                **figures_of(filed),
            )
        )
    return 0


def _absolute(where: ChainOptions) -> ChainOptions:
    """The chain with absolute paths of libraries: workers run in other folders."""
    whole = {name: str(Path(path).expanduser().absolute()) for name, path in where.provider_libraries.items()}
    return replace(where, provider_libraries=whole)
