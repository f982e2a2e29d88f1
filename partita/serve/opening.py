"""Packages made ready to be served: opened on their chain, with their tokenizers; refused when something is amiss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from partita.errors import GenerationError, PackageError, UsageError
from partita.library.audience import Audience
from partita.library.engine import Engine
from partita.library.loading import open_engine
from partita.library.notes import idle, inferred, not_used, unverified
from partita.library.speculation import check_speculation
from partita.observations.text_format import plural
from partita.package import Manifest, left_out
from partita.remedies import Remedy
from partita.runtime.adapter_names import check_adapter
from partita.runtime.prefix_file import read_said
from partita.runtime.suggested import suggestion
from partita.runtime.text import Text, load_text, stop_token_ids
from partita.serve.metrics import Metrics
from partita.serve.prompts import DEFAULTS, Reading
from partita.serve.served import Served, Serving

NAME_THEM = Remedy("give each package a name, in their order", options=("--name", "{first}", "--name", "{second}"))
HELLO = [{"role": "user", "content": "hello"}]


def names_of(packages: Sequence[Path], given: Sequence[str]) -> tuple[str, ...]:
    """The name of each package: as given, or that of its folder. Raises UsageError where two are the same."""
    if given and len(given) != len(packages):
        raise UsageError(
            f"`name` is given {len(given)} times, for {len(packages)} packages; give it once for each, in their order"
        )
    names = tuple(given) or tuple(package.resolve().name for package in packages)
    for name in names:
        if not name or not name.isprintable():
            raise UsageError(f"`name` {name!r}: a name has to have characters, and none that control a terminal")
        if names.count(name) > 1:
            raise UsageError(
                f"two packages are called {name}", remedy=NAME_THEM.filled(first=f"{name}-1", second=f"{name}-2")
            )
    return names


def prefixes_of(packages: Sequence[Path], given: Sequence[Path]) -> tuple[Path | None, ...]:
    """The prefix of each package, if any are given. Raises UsageError unless each has one then."""
    if given and len(given) != len(packages):
        raise UsageError(
            f"`prefix` is given {len(given)} times, for {len(packages)} packages; a prefix is of one, so "
            "give it once for each, in their order"
        )
    return tuple(given) or (None,) * len(packages)


def open_served(
    name: str,
    folder: Path,
    manifest: Manifest,
    serving: Serving,
    metrics: Metrics,
    audience: Audience,
    log: Callable[[str], object],
    prefix: Path | None = None,
) -> Served:
    """Open a package, generate a few tokens with it, and have it ready for requests.

    `log` writes lines for the operator later on. `prefix`: file of one that prompts may begin with. Raises
    PackageError, also for one without a tokenizer; ProviderError when the chain is not honoured or the limits are not
    met; GenerationError for a prefix of another package; ResourceError, UsageError.
    """
    known = 0 if prefix is None else len(read_said(prefix).tokens)  # a file that is none is said before the load
    check_adapter(folder, manifest, serving.adapter)
    check_speculation(folder, manifest, serving.speculation)
    reading = _reading(folder, manifest, serving)
    where, target, choice = serving.where, serving.target, serving.choice
    with audience.busy(f"opening {name}"):
        engine = open_engine(folder, manifest, where, target, choice, process=serving.process)
    try:
        for line in _notes(engine, manifest):
            audience.note(line)
        served = Served(name, engine, reading, serving, metrics, log, prefix)
        if known:
            audience.note(f"prompts that begin with the {plural(known, 'token')} of {prefix} are not read so far")
        with audience.busy(f"a first run of {name}"):
            served.start()
    except BaseException:
        engine.close()
        raise
    return served


def _reading(folder: Path, manifest: Manifest, serving: Serving) -> Reading:
    text = load_text(folder, manifest.tokenizer, manifest.graph.max_length, takes_ids=False)
    text.encode("hello")  # what it sets up at its first text is set up before two threads use it
    return Reading(
        text=text,
        max_length=manifest.graph.max_length,
        vocab_size=manifest.graph.vocab_size,
        stop_ids=stop_token_ids(folder),
        chats=_has_template(text),
        suggests=suggestion(folder) if serving.from_checkpoint else DEFAULTS,
    )


def _has_template(text: Text) -> bool:
    """Whether the tokenizer has a chat template; one that refuses these messages may take others."""
    try:
        text.encode_messages(HELLO)
    except GenerationError:
        return True
    except (UsageError, PackageError):
        return False
    return True


def _notes(engine: Engine, manifest: Manifest) -> list[str]:
    """Notes on an open package, for the operator."""
    opened, graph, lacks = engine.opened, manifest.graph, left_out(manifest.source.unused)
    notes = [not_used(entry.provider, entry) for entry in opened.chain if entry.status != "active"]
    notes += [*map(idle, opened.idle), *unverified(manifest.verification)]
    if lacks:
        notes.append(f"left out of the package: {lacks}")
    notes += inferred(manifest)
    if manifest.switchable and graph.batch_size > 1 and not graph.adapters_by_row:
        notes.append(
            f"the {graph.batch_size} rows have one adapter together: requests with another one wait until they are "
            "free; answers are the same"
        )
    return notes
