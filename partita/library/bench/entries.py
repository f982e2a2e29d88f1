"""The contenders of a benchmark: every package on every chain, with the options for its providers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from partita.errors import GenerationError, ReportError, UsageError
from partita.files import refuse_same, reserve
from partita.foreign.folder import AS_IT_IS, Choice, is_foreign, open_folder
from partita.library.chain import Target, read_chain
from partita.library.engine.requests import prompt_rows
from partita.options.bench import BenchOptions
from partita.options.fields import PathText, input_paths
from partita.options.groups import ProviderChain
from partita.package.folder import Manifest, check_files
from partita.providers.base import Provider
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options
from partita.providers.resolve import all_names, parse_chain

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender: a package on a chain."""

    name: str
    subject: Subject
    target: Target
    notes: tuple[str, ...]
    """Notes for the user."""
    stem: str
    """Name of its report file."""


@dataclass(frozen=True, slots=True)
class Lineup:
    """A chain to measure, as the user wrote it, or the default."""

    text: str
    chain: tuple[Provider, ...]
    default: Target | None = None
    """The default chain; None if the user named it."""

    @property
    def name(self) -> str:
        """Names of its providers."""
        return ",".join(provider.name for provider in self.chain)


def named_chains(options: BenchOptions) -> tuple[Lineup, ...]:
    """The chains that the user named. Raises UsageError."""
    libraries = parse_libraries(options.provider_libraries or {}, all_names())
    chains: dict[str, Lineup] = {}
    for text in _texts(options):
        found = Lineup(text, parse_chain(text, libraries, argument="chains"))
        if found.name in chains:
            raise UsageError(f"`chains={text}`: {found.name} is listed twice; list each chain once")
        chains[found.name] = found
    return tuple(chains.values())


def _texts(options: BenchOptions) -> tuple[str, ...]:
    """The text of each chain. Raises UsageError for an empty list."""
    given = options.chains
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not given:
        raise UsageError("`chains` is empty; name at least one, or omit it for the best usable provider")
    return tuple(each if isinstance(each, str) else ",".join(each) for each in given)


def check_providers(options: BenchOptions, chains: Sequence[Lineup]) -> None:
    """Raise UsageError for options and libraries of providers outside all chains."""
    libraries = parse_libraries(options.provider_libraries or {}, all_names())
    every = tuple({provider.name: provider for lineup in chains for provider in lineup.chain}.values())
    parse_options(options.provider_options or {}, every)
    unused = [library.name for library in libraries if library not in every]
    if unused:
        raise UsageError(f"`provider_libraries`: {unused[0]} is in no chain; add it to `chains`")


def default_chain(options: BenchOptions) -> Lineup:
    """The default chain and the reason for it."""
    target = read_chain(ProviderChain(threads=options.threads))
    return Lineup(",".join(provider.name for provider in target.chain), target.chain, target)


def read_entries(options: BenchOptions, subjects: Sequence[Subject], chains: Sequence[Lineup]) -> tuple[Entry, ...]:
    """Every package on every chain, with the options and libraries of its providers. Raises UsageError."""
    several = len(subjects) > 1
    return tuple(_read_entry(options, subject, lineup, several=several) for subject in subjects for lineup in chains)


def read_baseline(asked: str | None, entries: Sequence[Entry], libraries: Mapping[str, PathText]) -> str | None:
    """Name of the baseline contender, of the first package. Raises UsageError if it matches none."""
    if asked is None:
        return None
    chain = parse_chain(asked, parse_libraries(libraries, all_names()), argument="baseline")
    first = [entry for entry in entries if entry.subject is entries[0].subject]
    found = next((entry.name for entry in first if entry.target.chain == chain), None)
    if found is None:
        there = " ".join(",".join(provider.name for provider in entry.target.chain) for entry in first)
        raise UsageError(f"`baseline={asked}`: not among the measured chains: {there}")
    return found


def _read_entry(options: BenchOptions, subject: Subject, lineup: Lineup, *, several: bool) -> Entry:
    """One contender with its providers' options. `several`: there are other packages."""
    names = {word.lower() for provider in lineup.chain for word in provider.names()}
    target = read_chain(
        ProviderChain(
            lineup.text,
            provider_options=_of_chain(options.provider_options, names),
            provider_libraries=_of_chain(options.provider_libraries, names),
            threads=options.threads,
        )
    )
    notes = target.notes
    if lineup.default is not None:
        notes = (f"provider {lineup.name}, by default: {lineup.default.by_default}", *notes)
        target = replace(target, skipped=lineup.default.skipped)
    stem = lineup.name.replace(",", "-")
    if not several:
        return Entry(lineup.name, subject, target, notes, stem)
    name = f"{subject.name} on {lineup.name}"
    return Entry(name, subject, target, notes, f"{subject.path.resolve().name}-{stem}")


def _of_chain(given: Mapping[str, T] | None, names: set[str]) -> dict[str, T]:
    """The entries of a mapping whose keys are names of these providers."""
    return {word: value for word, value in (given or {}).items() if word.lower() in names}


def report_files(options: BenchOptions, entries: Sequence[Entry]) -> dict[str, Path]:
    """The report path of each contender, by name; creates the folder. Raises ReportError."""
    if options.reports is None:
        return {}
    folder = Path(options.reports)
    reads = input_paths(options)
    for read in reads:
        refuse_same(folder, read, "`reports`")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        reason = (
            "a file; choose a folder for the reports" if folder.exists() else f"cannot be created: {error.strerror}"
        )
        raise ReportError(f"{folder}: {reason}") from error
    stems = [entry.stem for entry in entries]
    files = {
        entry.name: folder / (f"{entry.stem}.json" if stems.count(entry.stem) == 1 else f"{entry.stem}-{number}.json")
        for number, entry in enumerate(entries, start=1)
    }
    for file in files.values():
        reserve(file, "report", reads, option="`reports`")
    return files


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
    choice: Choice = AS_IT_IS
    """The user's choices about a foreign folder."""


def read_subjects(options: BenchOptions) -> tuple[Subject, ...]:
    """The packages, each with the prompt for its rows. Raises PackageError, UsageError and GenerationError."""
    manifests = []
    packages, choice = packages_of(options), Choice.of(options)
    foreign = [is_foreign(path) for path in packages]
    choices = [choice if theirs or not any(foreign) else AS_IT_IS for theirs in foreign]
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
        wanted = options.prompt_tokens or min(PROMPT_TOKENS, max(longest - options.max_new_tokens, 1))
        ids = [(7 + 31 * position) % manifests[0].graph.vocab_size for position in range(wanted)]
    else:
        prompt = _one_prompt(options.prompt)
        pairs = zip(packages_of(options), manifests, strict=True)
        ids, *others = (_encode(path, manifest, prompt) for path, manifest in pairs)
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


def _one_prompt(given: str | Sequence[int]) -> str | tuple[int, ...]:
    """The prompt of every row. Raises UsageError for several."""
    rows = prompt_rows(given)
    if len(rows) != 1:
        raise UsageError(f"`prompt` has {len(rows)} prompts; pass one, which is used for every row of the batch")
    return rows[0]


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
