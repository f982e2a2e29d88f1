"""`partita generate --save-prefix`: a text is read, and what the cache has of it is kept in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.commands.audience import TERMINAL, say_chain
from partita.commands.generate_options import GenerateOptions, parse_ids
from partita.commands.terminal import note
from partita.errors import GenerationError
from partita.library.chain import Target
from partita.library.engine import PrefixRequest
from partita.library.local import LocalEngine
from partita.library.prefixes import said_by_system, said_by_text
from partita.observations.text_format import human_bytes
from partita.package import Manifest
from partita.remedies import shell
from partita.runtime.prefix_file import Said
from partita.runtime.text import load_text
from partita.spelling import flag_of


def save_prefix(options: GenerateOptions, target: Target, prompts: Sequence[str], manifest: Manifest) -> int:
    """Read the prompt or the system message, and write the prefix; returns the exit code."""
    said = _said(options, prompts, manifest)
    file = options.save_prefix
    assert file is not None
    with LocalEngine(
        options.package,
        manifest,
        target,
        threads=options.where.threads,
        observe=False,
        refusal_seconds=options.probe_seconds,
        audience=TERMINAL,
    ) as engine:
        say_chain(target, engine.runner.resolutions)
        saved = engine.save_prefix(
            PrefixRequest(said.tokens, str(file), said.text, said.system, options.prefill_chunk, options.adapter)
        )
    go_on = shell(("partita", "generate", str(options.package), "PROMPT", "--prefix", str(file), *_as_read(options)))
    read = f"{len(said.tokens)} tokens, read in {saved.seconds:.2f} s"
    note(f"prefix: {file} ({read}; {human_bytes(saved.size_bytes)}; go on with it: {go_on})")
    return 0


def _as_read(options: GenerateOptions) -> Iterator[str]:
    """Words without which a command does not go on with the prefix: how the folder is opened, what it was read as."""
    for name in options.choice.given:
        yield from (flag_of(name), str(getattr(options.choice, name)))
    if options.token_ids:
        yield "--token-ids"
    if options.adapter is not None:
        yield from ("--adapter", options.adapter)


def _said(options: GenerateOptions, prompts: Sequence[str], manifest: Manifest) -> Said:
    """What the prefix says. Raises GenerationError for an empty one."""
    if options.token_ids:
        return Said(tuple(parse_ids(prompts[0])), adapter=options.adapter)
    text = load_text(options.package, manifest.tokenizer, manifest.graph.max_length, takes_ids=options.system is None)
    if options.system is not None:
        return said_by_system(text, options.system, options.adapter)
    if not prompts[0]:
        raise GenerationError("the prompt is empty; give some text to keep")
    return said_by_text(text, prompts[0], options.adapter)
