"""What `partita bench` can be asked, and the checks that need nothing loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.commands.chain_options import ChainOptions, read_chain_options
from partita.commands.generate_options import MAX_TOKENS, read_prompts
from partita.errors import GenerationError, ReportError, UsageError
from partita.package import Manifest
from partita.partition_reports.views import json as json_view
from partita.providers.base import Provider
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options
from partita.providers.resolve import all_names, parse_chain

ROUNDS = 5
MOST_ROUNDS = 1000
NEW_TOKENS = 32
PROMPT_TOKENS = 64
LEAST_NEW_TOKENS = 2
"""The first comes from prefill."""
FLAG = "--provider"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything `partita bench` was asked."""

    package: Path
    chains: tuple[str, ...]
    """One per contender, as written."""
    baseline: str | None
    prompt: str | None
    """None for made-up tokens."""
    token_ids: bool
    prompt_tokens: int | None
    max_new_tokens: int
    prefill_chunk: int | None
    rounds: int
    provider_options: tuple[str, ...]
    provider_libraries: tuple[str, ...]
    threads: int | None
    timeout_seconds: float
    report: Path | None
    """A folder."""
    as_json: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender."""

    name: str
    chain: tuple[Provider, ...]
    where: ChainOptions
    notes: tuple[str, ...]
    """Sentences for stderr."""


def check_options(options: BenchOptions) -> None:
    """Raise UsageError for a value that makes no sense."""
    limits = {
        "--max-new-tokens": (options.max_new_tokens, LEAST_NEW_TOKENS, MAX_TOKENS),
        "--prefill-chunk": (1 if options.prefill_chunk is None else options.prefill_chunk, 1, MAX_TOKENS),
        "--prompt-tokens": (1 if options.prompt_tokens is None else options.prompt_tokens, 1, MAX_TOKENS),
        "--rounds": (options.rounds, 1, MOST_ROUNDS),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise UsageError(f"{name} is {value}; it must be between {least} and {most:,}")
    if not 0 < options.timeout_seconds <= MAX_TOKENS:
        raise UsageError(f"--timeout is {options.timeout_seconds:g}; give seconds above 0")
    if options.prompt is not None and options.prompt_tokens is not None:
        raise UsageError("--prompt and --prompt-tokens: give one of them; the second is the length of a made-up prompt")
    if options.token_ids and options.prompt is None:
        raise UsageError("--token-ids says how --prompt is written; give --prompt, e.g. --prompt 1,45,7")


def read_entries(options: BenchOptions) -> tuple[Entry, ...]:
    """The contenders, each with the options and libraries that are for its providers. Raises UsageError."""
    if not options.chains:
        raise UsageError(f"no provider to measure; name some: {FLAG} webgpu cpu, each a chain such as webgpu,cpu")
    libraries = parse_libraries(options.provider_libraries, all_names())
    chains: dict[str, tuple[str, tuple[Provider, ...]]] = {}
    for text in options.chains:
        chain = parse_chain(text, libraries)
        name = ",".join(provider.name for provider in chain)
        if name in chains:
            raise UsageError(f"{FLAG} {text}: {name} is there twice; name each chain once")
        chains[name] = (text, chain)
    every = tuple({provider.name: provider for _, chain in chains.values() for provider in chain}.values())
    parse_options(options.provider_options, every)
    unused = [library.name for library in libraries if library not in every]
    if unused:
        raise UsageError(f"--provider-library {unused[0]}: in no chain; add it to {FLAG}")
    return tuple(read_entry(options, name, text, chain) for name, (text, chain) in chains.items())


def read_baseline(asked: str | None, entries: Sequence[Entry], libraries: Sequence[str]) -> str | None:
    """Name of the contender that --baseline means. Raises UsageError when it means none."""
    if asked is None:
        return None
    chain = parse_chain(asked, parse_libraries(libraries, all_names()))
    name = ",".join(provider.name for provider in chain)
    if name not in {entry.name for entry in entries}:
        there = " ".join(entry.name for entry in entries)
        raise UsageError(f"--baseline {asked}: not among the chains to measure, which are: {there}")
    return name


def read_entry(options: BenchOptions, name: str, text: str, chain: tuple[Provider, ...]) -> Entry:
    """One contender, with what the options say about its providers."""
    names = {word.lower() for provider in chain for word in provider.names()}
    of_chain = concerning(names)
    where = ChainOptions(
        provider=text,
        provider_options=tuple(filter(of_chain("."), options.provider_options)),
        provider_libraries=tuple(filter(of_chain("="), options.provider_libraries)),
        threads=options.threads,
    )
    return Entry(name, chain, where, read_chain_options(where).notes)


def concerning(names: set[str]) -> Callable[[str], Callable[[str], bool]]:
    """A test of whether what stands before a mark is one of these names."""
    return lambda mark: lambda text: text.partition(mark)[0].strip().lower() in names


def read_tokens(options: BenchOptions, manifest: Manifest) -> tuple[tuple[int, ...], ...]:
    """The prompt as token ids, the same for every row of the batch. Raises UsageError and GenerationError."""
    graph = manifest.graph
    if options.prompt is None:
        wanted = options.prompt_tokens or min(PROMPT_TOKENS, max(graph.max_length - options.max_new_tokens, 1))
        ids = [(7 + 31 * position) % graph.vocab_size for position in range(wanted)]
    else:
        ids = encode(options, manifest, options.prompt)
    if len(ids) + options.max_new_tokens > graph.max_length:
        raise GenerationError(
            f"a prompt of {len(ids)} tokens and --max-new-tokens {options.max_new_tokens} are more than the "
            f"{graph.max_length} that the cache of this package holds; give less of one of them"
        )
    return (tuple(ids),) * graph.batch_size


def encode(options: BenchOptions, manifest: Manifest, prompt: str) -> list[int]:
    """Token ids of a prompt that the user gave."""
    (text,) = read_prompts([prompt])
    if options.token_ids:
        try:
            ids = [int(word) for word in text.replace(",", " ").split()]
        except ValueError as error:
            raise UsageError(f"--token-ids: {text[:40]!r} is not a list of token ids such as 1,45,7") from error
    else:
        from partita.runtime.text import load_text

        ids = load_text(options.package, manifest.tokenizer).encode(text) if text else []
    if not ids:
        raise GenerationError("the prompt is empty; give some text or token ids, or leave out --prompt")
    wrong = [token for token in ids if not 0 <= token < manifest.graph.vocab_size]
    if wrong:
        raise GenerationError(
            f"the prompt has token id {wrong[0]}; the vocabulary has ids 0 to {manifest.graph.vocab_size - 1}"
        )
    return ids


def report_files(options: BenchOptions, entries: Sequence[Entry]) -> dict[str, Path]:
    """Where the report of each contender goes, by its name; the folder is made. Raises ReportError."""
    folder = options.report
    if folder is None:
        return {}
    if options.package.is_dir() and folder.resolve().is_relative_to(options.package.resolve()):
        raise ReportError(f"{folder}: inside the package {options.package}, which a report must not change")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        why = "a file; give a folder for the reports" if folder.exists() else f"cannot be made: {error.strerror}"
        raise ReportError(f"{folder}: {why}") from error
    files = {entry.name: folder / f"{entry.name.replace(',', '-')}.json" for entry in entries}
    for file in files.values():
        json_view.check_writable(file)
    return files
