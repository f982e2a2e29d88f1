"""`partita generate --save-prefix`: read a text and save the state of the cache after it in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.commands.audience import say, say_target, unused
from partita.commands.generate_options import GenerateOptions, parse_ids
from partita.commands.generation import open_model
from partita.commands.terminal import note
from partita.errors import GenerationError
from partita.library.chain import Target
from partita.observations.text_format import human_bytes
from partita.options.flags import option_flags
from partita.package import Manifest
from partita.remedies import shell


def save_prefix(options: GenerateOptions, target: Target, prompts: Sequence[str], manifest: Manifest) -> int:
    """Read the prompt or the system message, and save the prefix; returns the exit code."""
    file = options.save_prefix
    assert file is not None
    given = None if options.system is not None else parse_ids(prompts[0]) if options.token_ids else prompts[0]
    if given == "":
        raise GenerationError("the prompt is empty; give some text to keep")
    with open_model(options, target, manifest, observe=False) as model:
        say_target(target)
        for line in unused(target, model.chain):
            say(line)
        saved = model.save_prefix(
            file, given, system=options.system, prefill_chunk=options.prefill_chunk, adapter=options.adapter
        )
    go_on = shell(("partita", "generate", str(options.package), "PROMPT", "--prefix", str(file), *_as_read(options)))
    read = f"{saved.tokens} tokens, read in {saved.seconds:.2f} s"
    note(f"prefix: {file} ({read}; {human_bytes(saved.size_bytes)}; go on with it: {go_on})")
    return 0


def _as_read(options: GenerateOptions) -> Iterator[str]:
    """Words without which a command does not go on with the prefix: how the folder is opened, what it was read as."""
    for name in options.choice.given:
        yield from (option_flags()[name], str(getattr(options.choice, name)))
    if options.token_ids:
        yield "--token-ids"
    if options.adapter is not None:
        yield from ("--adapter", options.adapter)
