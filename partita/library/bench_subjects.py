"""The packages of a bench, and the prompt that all of them get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.errors import GenerationError, UsageError
from partita.foreign.folder import AS_IT_IS, Choice, is_foreign, open_folder
from partita.library.requests import prompt_rows
from partita.options.bench import BenchOptions
from partita.package import Manifest, check_files

PROMPT_TOKENS = 64
"""Default length of a generated prompt."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A package that a bench compares, read once for all its contenders."""

    path: Path
    name: str
    """The name of its folder; as it was given where two folders have one name."""
    manifest: Manifest
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, a row each."""
    choice: Choice = AS_IT_IS
    """What was said of it, where Partita did not write it."""


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
        raise UsageError(f"`against`: vocabularies of {counts} tokens; packages of one model can be compared")
    folders = [path.resolve().name for path in packages]
    names = folders if len(set(folders)) == len(folders) else [str(path) for path in packages]
    if len(set(names)) < len(names):
        raise UsageError("`against`: a package is listed twice; name each one once")
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
            raise UsageError("`against`: the packages read `prompt` as different tokens; give token ids")
    if len(ids) + options.max_new_tokens > longest:
        raise GenerationError(
            f"a prompt of {len(ids)} tokens and `max_new_tokens={options.max_new_tokens}` are more than the "
            f"{longest} that the cache of this package holds; reduce one of them"
        )
    return tuple(ids)


def packages_of(options: BenchOptions) -> tuple[Path, ...]:
    """Every package, the one that the others are compared with first."""
    return (Path(options.package), *map(Path, options.against))


def _one_prompt(given: str | Sequence[int]) -> str | tuple[int, ...]:
    """The one prompt, which every row gets. Raises UsageError."""
    rows = prompt_rows(given)
    if len(rows) != 1:
        raise UsageError(f"`prompt` has {len(rows)} of them; give one, which every row of the batch gets")
    return rows[0]


def _encode(package: Path, manifest: Manifest, prompt: str | tuple[int, ...]) -> list[int]:
    """Token ids of a prompt that the user gave, as one package reads it."""
    if isinstance(prompt, str):
        from partita.runtime.text import load_text

        ids = load_text(package, manifest.tokenizer, manifest.graph.max_length).encode(prompt) if prompt else []
    else:
        ids = list(prompt)
    if not ids:
        raise GenerationError("the prompt is empty; give some text or token ids, or leave out `prompt`")
    wrong = [token for token in ids if not 0 <= token < manifest.graph.vocab_size]
    if wrong:
        raise GenerationError(
            f"the prompt has token id {wrong[0]}; the vocabulary has ids 0 to {manifest.graph.vocab_size - 1}"
        )
    return ids
