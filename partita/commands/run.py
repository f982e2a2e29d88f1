"""`partita run`: a prompt or a chat with any model; `partita cache`: the packages that were exported for it."""

from __future__ import annotations

from dataclasses import fields, replace

from partita.commands import chat, generate
from partita.commands.generate_options import package_of
from partita.commands.terminal import note, write_stdout
from partita.errors import UsageError
from partita.library import model_cache
from partita.library.model_cache import cached_packages
from partita.observations.text_format import human_bytes
from partita.options.generation import (
    CacheListCommand,
    CacheRemoveCommand,
    ChatCommand,
    GenerateCommand,
    RunCommand,
    RunOptions,
)
from partita.runtime.generate.text.chat_templates import has_template


def run(options: RunCommand) -> int:
    """Generate, or chat without a prompt; returns the exit code."""
    if not options.prompts:
        unused = {
            "--report": options.report,
            "--json": options.as_json,
            "--raw": options.raw,
            "--token-ids": options.token_ids,
        }
        if given := [name for name, value in unused.items() if value]:
            raise UsageError(f"{given[0]} is only for a prompt; give a prompt or omit it")
    package = package_of(options.package, options)
    options = replace(options, package=package, revision=None)
    common = {each.name: getattr(options, each.name) for each in fields(RunOptions)}
    if not options.prompts:
        return chat.run(ChatCommand(**common))
    templated = not (options.raw or options.token_ids) and has_template(package)
    return generate.run(
        GenerateCommand(
            **common,
            prompts=options.prompts,
            chat=templated,
            token_ids=options.token_ids,
            report=options.report,
            as_json=options.as_json,
        )
    )


def list_cached(options: CacheListCommand) -> None:
    """Print a line for each package of the cache."""
    found = [(each.name, each.precision, human_bytes(each.size_bytes), each.source) for each in cached_packages()]
    if not found:
        note("the cache has no packages")
    wide = [max((len(row[column]) for row in found), default=0) for column in range(3)]
    for row in found:
        write_stdout("  ".join([*(cell.ljust(width) for cell, width in zip(row, wide, strict=False)), row[3]]) + "\n")


def remove_cached(options: CacheRemoveCommand) -> None:
    """Remove a package from the cache."""
    gone = model_cache.remove_cached(options.name)
    note(f"removed {gone.path} ({human_bytes(gone.size_bytes)})")
