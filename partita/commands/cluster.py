"""`partita generate --input FILE --output FILE --address ADDRESS`: the rows on a Ray cluster, and a line per worker."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from partita import __version__
from partita.commands.audience import say
from partita.commands.batch import RowBar, defaults_of, identity_of
from partita.commands.generate_options import GenerateOptions, argument_text, check_options
from partita.commands.outputs import Sink, claim_output, refuse_two_on_stdout
from partita.commands.results import ClusterResult
from partita.commands.rows_input import read_from, rows_file
from partita.commands.terminal import fold, note, print_record
from partita.errors import INTERRUPTED, UsageError
from partita.files import Output
from partita.foreign.folder import open_folder
from partita.library.batches.filing import check_files
from partita.library.batches.journal import journal_path, kept_words
from partita.library.chain import ChainOptions, read_by
from partita.library.cluster.filing import FiledByCluster, answer_file
from partita.library.cluster.options import ClusterOptions, read_cluster
from partita.library.cluster.records import WorkerFact
from partita.library.cluster.setting_up import import_ray
from partita.library.cluster.worker import Setup
from partita.library.contents import contents_hash
from partita.library.sampling import completed_for
from partita.library.speculation import Speculation, check_speculation
from partita.observations.text_format import listing, plural
from partita.runtime.adapter_names import check_adapter


def _everywhere(asked: Speculation) -> Speculation:
    """With the whole path of a draft: workers have other current folders."""
    return asked if asked.draft is None else replace(asked, draft=str(Path(asked.draft).resolve()))


def run_on_cluster(options: GenerateOptions) -> int:
    """Check everything that can be checked, then have the rows answered; returns the exit code."""
    check_options(options)
    assert options.address is not None
    source, output = options.input, options.output
    if source is None or output is None:
        raise UsageError("--address is for files of prompts; give --input and --output")
    if options.limits.given():
        raise UsageError("--max-cpu-nodes, --max-copies and --max-copy-bytes-per-token are for a run on this machine")
    if options.prefix is not None:
        raise UsageError("--prefix is for a run on this machine; rows of a cluster share what they begin with")
    cluster = read_cluster(
        options.address,
        options.workers,
        options.where.provider,
        options.kinds,
        cpus=options.worker_cpus,
        threads=options.where.threads,
    )
    manifest = open_folder(options.package, options.choice)
    check_adapter(options.package, manifest, options.adapter)
    check_speculation(options.package, manifest, options.speculation)
    asked = options.sampling
    sampling, _ = completed_for(asked, options.package, hints=True, of_rows=True)
    system = None if options.system is None else argument_text(options.system, "--system")
    stop = tuple(argument_text(text, "--stop") for text in options.stop)
    options = replace(options, sampling=sampling, system=system, stop=stop)
    reads = read_by(
        options.where, options.package, *options.choice.reads, *options.speculation.reads, read_from(source)
    )
    claim_output(output, "answers", reads, option="--output")
    check_files(source, output)
    sink: Sink | None = None
    if options.report is not None:
        refuse_two_on_stdout(options.report, as_json=options.as_json)
        sink = claim_output(options.report, "report", (*reads, output, journal_path(output)), option="--report")
    import_ray()
    setup = Setup(
        package=str(options.package.resolve()),
        contents=contents_hash(options.package, manifest),
        partita=__version__,
        where=_absolute(options.where),
        choice=options.choice.to_json(),
        defaults=defaults_of(options),
        token_ids=options.token_ids,
        prefill_chunk=options.prefill_chunk,
        adapter=options.adapter,
        speculation=_everywhere(options.speculation),
    )
    with rows_file(source) as rows, RowBar() as bar:
        try:
            done = answer_file(
                rows,
                output,
                cluster,
                setup,
                manifest,
                told=identity_of(options, asked),
                heard=bar.hear,
                noted=say,
            )
        except KeyboardInterrupt:
            _say_left(options, bar)
            return INTERRUPTED
        except BaseException:
            _say_left(options, bar)
            raise
    _say_end(done)
    try:
        if options.as_json:
            print_record(_as_record(options, cluster, done))
    finally:  # stdout may be full or closed
        if sink is not None:
            sink.write(done.report.model_dump_json(indent=1, by_alias=True) + "\n")
            if isinstance(sink, Output):
                note(f"workers: {sink.path}")
    return 0


def _absolute(where: ChainOptions) -> ChainOptions:
    """The same in another folder, which workers run in: libraries by their whole paths."""
    pairs = (text.partition("=") for text in where.provider_libraries)
    whole = (f"{name}={Path(path).expanduser().absolute()}" if path else name for name, _, path in pairs)
    return replace(where, provider_libraries=tuple(whole))


def _say_left(options: GenerateOptions, bar: RowBar) -> None:
    """How far a run came that ends early."""
    if bar.last is not None and options.output is not None:
        run, source = bar.last
        note(kept_words(journal_path(options.output), len(run.journal), source.rows))


def _say_end(done: FiledByCluster) -> None:
    """One line on stderr, and one for each worker."""
    filed, report = done.filed, done.report
    rows = filed.rows - filed.resumed
    parts = [f"{plural(rows, 'row')} and {plural(filed.new_tokens, 'new token')} in {report.seconds:.1f} s"]
    if report.tokens_per_second is not None:
        parts.append(f"{report.tokens_per_second:.1f} tokens/s on {plural(len(report.workers), 'worker')}")
    if filed.resumed:
        parts.append(f"{plural(filed.resumed, 'row')} were answered before")
    if report.again:
        parts.append(
            f"{plural(report.again, 'row')} answered twice, because a worker was lost; the first answer counts"
        )
    if filed.errors:
        parts.append(f"{plural(filed.errors, 'row')} with an error in place of an answer")
    note(fold("; ".join([*parts, f"answers: {filed.output}"]), sys.stderr, 2))
    for worker in report.workers:
        note(fold(_told(worker), sys.stderr, 2))
    if filed.unread:
        say(f"these fields of the rows were not read: {listing(filed.unread)}")


def _told(worker: WorkerFact) -> str:
    """A worker in a line."""
    speed = "" if worker.tokens_per_second is None else f" at {worker.tokens_per_second:.1f} tokens/s"
    placed = "; ".join(_placed(phase.phase, phase.nodes, phase.copies) for phase in worker.placement)
    return (
        f"worker {worker.host}:{worker.pid}, {', '.join(worker.chain)} of ONNX Runtime {worker.onnxruntime}: "
        f"{plural(worker.rows, 'row')}, {plural(worker.tokens, 'token')}{speed}; {placed}"
    )


def _placed(phase: str, nodes: dict[str, int], copies: int) -> str:
    where = [f"{count} on {provider}" for provider, count in nodes.items()]
    return f"{phase}: {listing(where)} with {plural(copies, 'copy')}" if copies else f"{phase}: {listing(where)}"


def _as_record(options: GenerateOptions, cluster: ClusterOptions, done: FiledByCluster) -> ClusterResult:
    filed = done.filed
    return ClusterResult(
        package=str(options.package),
        address=cluster.address,
        input=str(options.input),
        output=str(filed.output),
        rows=filed.rows,
        errors=filed.errors,
        resumed=filed.resumed,
        new_tokens=filed.new_tokens,
        seconds=filed.seconds,
        run=done.report,
    )
