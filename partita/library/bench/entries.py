"""The contenders of a benchmark: every package on every chain, with the options for its providers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from partita.errors import GenerationError, ReportError, UsageError
from partita.files import refuse_same, reserve
from partita.foreign.folder import NO_CHOICE, Choice, is_foreign, open_folder
from partita.library.chain import Target, read_chain
from partita.library.engine.requests import prompt_rows
from partita.options.bench import BenchOptions
from partita.options.fields import input_paths
from partita.options.groups import ProviderChain
from partita.package.folder import Manifest, check_files
from partita.providers.base import Provider
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options
from partita.providers.resolve import all_names, parse_chain


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender: a package on a chain."""

    name: str
    subject: Subject
    target: Target
    report: Path | None = None
    """File of its partition report."""


def read_targets(options: BenchOptions) -> tuple[Target, ...]:
    """The chains that the user named, or the default chain, each with the options and libraries of its providers.

    Raises UsageError, also for options and libraries of providers outside all chains.
    """
    libraries = parse_libraries(options.provider_libraries or {}, all_names())
    chains: dict[str, tuple[Provider, ...]] = {}
    for text in _texts(options):
        chain = parse_chain(text, libraries, argument="chains")
        name = ",".join(provider.name for provider in chain)
        if name in chains:
            raise UsageError(f"`chains={text}`: {name} is listed twice; list each chain once")
        chains[name] = chain
    default = None if chains else read_chain(ProviderChain(threads=options.threads))
    if default is not None:
        chains[default.name] = default.chain
    every = tuple({provider.name: provider for chain in chains.values() for provider in chain}.values())
    parse_options(options.provider_options or {}, every)
    unused = [library.name for library in libraries if library not in every]
    if unused:
        raise UsageError(f"`provider_libraries`: {unused[0]} is in no chain; add it to `chains`")
    targets = tuple(_read_target(options, name, chain) for name, chain in chains.items())
    if default is None:
        return targets
    return (replace(targets[0], source=default.source, by_default=default.by_default, skipped=default.skipped),)


def _texts(options: BenchOptions) -> tuple[str, ...]:
    """The text of each chain. Raises UsageError for an empty list."""
    given = options.chains
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not given:
        raise UsageError("`chains` is empty; name at least one, or omit it for the best usable provider")
    return tuple(each if isinstance(each, str) else ",".join(each) for each in given)


def _read_target(options: BenchOptions, name: str, chain: Sequence[Provider]) -> Target:
    """A chain with those of the options that are for its providers."""
    names = {word.lower() for provider in chain for word in provider.names()}
    given = {word: value for word, value in (options.provider_options or {}).items() if word.lower() in names}
    libraries = {word: path for word, path in (options.provider_libraries or {}).items() if word.lower() in names}
    return read_chain(
        ProviderChain(name, provider_options=given, provider_libraries=libraries, threads=options.threads)
    )


def read_entries(options: BenchOptions, subjects: Sequence[Subject], targets: Sequence[Target]) -> tuple[Entry, ...]:
    """Every package on every chain, with the files of their reports, whose folder is created. Raises ReportError."""
    pairs = [(subject, target) for subject in subjects for target in targets]
    names = [target.name for _, target in pairs]
    stems = [name.replace(",", "-") for name in names]
    if len(subjects) > 1:
        names = [f"{subject.name} on {name}" for (subject, _), name in zip(pairs, names, strict=True)]
        stems = [f"{subject.path.resolve().name}-{stem}" for (subject, _), stem in zip(pairs, stems, strict=True)]
    entries = [Entry(name, *pair) for name, pair in zip(names, pairs, strict=True)]
    if options.reports is None:
        return tuple(entries)
    folder, reads = Path(options.reports), input_paths(options)
    for read in reads:
        refuse_same(folder, read, "`reports`")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        reason = f"cannot be created: {error.strerror}"
        raise ReportError(
            f"{folder}: {'a file; choose a folder for the reports' if folder.exists() else reason}"
        ) from error
    files = [
        folder / (f"{stem}.json" if stems.count(stem) == 1 else f"{stem}-{number}.json")
        for number, stem in enumerate(stems, start=1)
    ]
    for file in files:
        reserve(file, "report", reads, option="`reports`")
    return tuple(replace(entry, report=file) for entry, file in zip(entries, files, strict=True))


def read_baseline(options: BenchOptions, entries: Sequence[Entry]) -> str | None:
    """Name of the baseline contender, of the first package. Raises UsageError if it matches none."""
    if options.baseline is None:
        return None
    libraries = parse_libraries(options.provider_libraries or {}, all_names())
    chain = parse_chain(options.baseline, libraries, argument="baseline")
    first = [entry for entry in entries if entry.subject is entries[0].subject]
    found = next((entry.name for entry in first if entry.target.chain == chain), None)
    if found is None:
        there = " ".join(entry.target.name for entry in first)
        raise UsageError(f"`baseline={options.baseline}`: not among the measured chains: {there}")
    return found


PROMPT_TOKENS = 64
"""Default length of a generated prompt in tokens."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A package of a benchmark, read once for all its contenders."""

    path: Path
    name: str
    """Name of its folder; the path as given if two folders have the same name."""
    manifest: Manifest
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each row."""
    choice: Choice = NO_CHOICE
    """The user's choices about a foreign folder."""


def read_subjects(options: BenchOptions) -> tuple[Subject, ...]:
    """The packages, each with the prompt for its rows. Raises PackageError, UsageError and GenerationError."""
    manifests = []
    packages, choice = packages_of(options), Choice.of(options)
    foreign = [is_foreign(path) for path in packages]
    choices = [choice if theirs or not any(foreign) else NO_CHOICE for theirs in foreign]
    for path, choice in zip(packages, choices, strict=True):
        manifests.append(open_folder(path, choice))
        check_files(path, manifests[-1], hashes=False)
    sizes = {manifest.graph.vocab_size for manifest in manifests}
    if len(sizes) > 1:
        counts = ", ".join(f"{size:,}" for size in sorted(sizes))
        raise UsageError(f"`against`: vocabularies of {counts} tokens; only packages of one model can be compared")
    folders = [path.resolve().name for path in packages]
    names = folders if len(set(folders)) == len(folders) else [str(path) for path in packages]
    if len(set(names)) < len(names):
        raise UsageError("`against`: a package is listed twice; list each once")
    prompts = _read_prompt(options, manifests)
    return tuple(
        Subject(path, name, manifest, (prompts,) * manifest.graph.batch_size, choice)
        for path, name, manifest, choice in zip(packages, names, manifests, choices, strict=True)
    )


def _read_prompt(options: BenchOptions, manifests: Sequence[Manifest]) -> tuple[int, ...]:
    """The prompt as token ids, the same for every package. Raises UsageError and GenerationError."""
    longest = min(manifest.graph.max_length for manifest in manifests)
    if options.prompt is None:
        length = options.prompt_tokens or min(PROMPT_TOKENS, max(longest - options.max_new_tokens, 1))
        ids = [(7 + 31 * position) % manifests[0].graph.vocab_size for position in range(length)]
    else:
        rows = prompt_rows(options.prompt)
        if len(rows) != 1:
            raise UsageError(f"`prompt` has {len(rows)} prompts; pass one, which is used for every row of the batch")
        pairs = zip(packages_of(options), manifests, strict=True)
        ids, *others = (_encode(path, manifest, rows[0]) for path, manifest in pairs)
        if any(other != ids for other in others):
            raise UsageError("`against`: the packages tokenize `prompt` differently; pass token ids")
    if len(ids) + options.max_new_tokens > longest:
        raise GenerationError(
            f"a prompt of {len(ids)} tokens and `max_new_tokens={options.max_new_tokens}` exceed the cache length of "
            f"{longest} of this package; reduce one of them"
        )
    return tuple(ids)


def packages_of(options: BenchOptions) -> tuple[Path, ...]:
    """Every package, the reference package first."""
    return (Path(options.package), *map(Path, options.against))


def _encode(package: Path, manifest: Manifest, prompt: str | tuple[int, ...]) -> list[int]:
    """Token ids of the user's prompt, with one package's tokenizer."""
    if isinstance(prompt, str):
        from partita.runtime.generate.text.tokens import load_text

        ids = load_text(package, manifest.tokenizer, manifest.graph.max_length).encode(prompt) if prompt else []
    else:
        ids = list(prompt)
    if not ids:
        raise GenerationError("the prompt is empty; pass text or token ids, or omit `prompt`")
    wrong = [token for token in ids if not 0 <= token < manifest.graph.vocab_size]
    if wrong:
        raise GenerationError(
            f"the prompt has token id {wrong[0]}; the vocabulary has ids 0 to {manifest.graph.vocab_size - 1}"
        )
    return ids
