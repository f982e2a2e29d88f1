"""`partita run`: any model, exported once where needed, then `generate` or `chat`; `partita cache`: its exports."""

from __future__ import annotations

import os
from dataclasses import fields

from partita.commands import chat, generate
from partita.commands.audience import TERMINAL
from partita.commands.generate_options import argument_text
from partita.commands.terminal import Bars, note, write_stdout
from partita.errors import UsageError
from partita.library import models
from partita.library.models import cached_packages, folder_of
from partita.observations.text_format import human_bytes
from partita.options.generation import (
    CacheListCommand,
    CacheRemoveCommand,
    ChatCommand,
    GenerateCommand,
    RunCommand,
    TextOptions,
)
from partita.providers.resolve import parse_chain
from partita.runtime.generate.text.chat_templates import has_template


def run(options: RunCommand) -> int:
    """Export the model where it is no package, then generate, or chat without a prompt; returns the exit code."""
    if not options.prompts:
        unused = {"--report": options.report, "--json": options.as_json, "--raw": options.raw}
        if given := [name for name, value in unused.items() if value]:
            raise UsageError(f"{given[0]} is for a prompt; give one")
    target = None
    if isinstance(options.providers, str) and not options.provider_libraries:
        target = parse_chain(options.providers)[0].name
    source = argument_text(os.fspath(options.model_source), "MODEL")
    with Bars() as bars:
        package = folder_of(source, options.precision, target, bars, TERMINAL)
    common = {each.name: getattr(options, each.name) for each in fields(TextOptions)}
    if not options.prompts:
        return chat.run(ChatCommand(package, **common))
    templated = not options.raw and has_template(package)
    asked = GenerateCommand(
        package, prompts=options.prompts, chat=templated, report=options.report, as_json=options.as_json, **common
    )
    return generate.run(asked)


def list_cached(options: CacheListCommand) -> None:
    """Print a line for each package of the cache."""
    found = [(each.name, each.precision, human_bytes(each.size_bytes), each.source) for each in cached_packages()]
    if not found:
        note("no package is in the cache")
    wide = [max((len(row[column]) for row in found), default=0) for column in range(3)]
    for row in found:
        write_stdout("  ".join([*(cell.ljust(width) for cell, width in zip(row, wide, strict=False)), row[3]]) + "\n")


def remove_cached(options: CacheRemoveCommand) -> None:
    """Remove one of them."""
    gone = models.remove_cached(options.name)
    note(f"removed {gone.path} ({human_bytes(gone.size_bytes)})")
