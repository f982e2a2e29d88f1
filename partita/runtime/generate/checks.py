"""Validation of requests against the limits of a package, and remedies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.errors import GenerationError, UsageError
from partita.package.contract import Contract
from partita.package.folder import Manifest
from partita.remedies import Remedy

_ANEW = ("partita", "export", "{checkpoint}", "{out}")
PLACEHOLDERS = {"checkpoint": "CHECKPOINT", "out": "PACKAGE"}
"""Value of an option that only the user knows."""
SHORTEN = Remedy("shorten the prompt")
SHORTEN_OR_ANEW = replace(
    SHORTEN, alternative=Remedy("export the checkpoint with a longer cache", (*_ANEW, "--max-length", "{max_length}"))
)
SHORTEN_OR_ALLOW = replace(
    SHORTEN, alternative=Remedy("open the folder with a longer cache", options=("--max-length", "{max_length}"))
)
SHORTEN_TO_MODEL = Remedy("shorten the prompt: the model supports at most {positions} positions")
BEGIN_WITH_ONE = Remedy("pass one or more tokens")
BEGIN = Remedy("pass at least one token")


def check_budget(max_new_tokens: int) -> None:
    """Raise UsageError for a number of new tokens below 1."""
    if max_new_tokens < 1:
        raise UsageError(f"`max_new_tokens` is {max_new_tokens}; it must be at least 1")


def check_prompt(prompt: Sequence[int], contract: Contract, subject: str, *, answered: bool = False) -> None:
    """Raise GenerationError for token ids that a row cannot hold. `subject`: of the message.

    `answered`: require room for at least one completion token.
    """
    if not len(prompt):
        raise GenerationError(f"{subject} is empty", remedy=BEGIN)
    if len(prompt) + answered > contract.max_length:
        full = ", which leaves no room for new tokens" if len(prompt) == contract.max_length else ""
        raise GenerationError(
            f"{subject} has {len(prompt)} tokens, but the cache length is {contract.max_length}{full}",
            remedy=length_remedy(len(prompt), contract),
        )
    if not (min(prompt) >= 0 and max(prompt) < contract.vocab_size):
        position = next(index for index, token in enumerate(prompt) if not 0 <= token < contract.vocab_size)
        raise GenerationError(
            f"{subject} has token id {prompt[position]} at position {position}; the vocabulary has ids 0 to "
            f"{contract.vocab_size - 1}",
        )


def length_remedy(tokens: int, contract: Contract) -> Remedy:
    """Remedy for a text of this number of tokens that leaves no room for a completion."""
    most = contract.model_positions if contract.max_length_limit is None else contract.max_length_limit
    if most is not None and tokens >= most:
        return SHORTEN_TO_MODEL.filled(positions=most)
    wanted = min(1 << tokens.bit_length(), most or sys.maxsize)
    if contract.max_length_limit is None:
        return SHORTEN_OR_ANEW.filled(max_length=wanted, **PLACEHOLDERS)
    return SHORTEN_OR_ALLOW.filled(max_length=wanted)


def check_adapter(folder: Path, manifest: Manifest, name: str | None) -> None:
    """Raise UsageError, with the available names, if the package has no adapter `name`."""
    names = [record.name for record in manifest.switchable]
    if name is None or name in names:
        return
    merged = [record.name for record in manifest.adapters if record.merged]
    if names:
        hint = f"choose one of {', '.join(names)}, or omit it"
    elif merged:
        hint = f"{', '.join(merged)} is merged into its weights; omit it"
    elif manifest.foreign is not None:
        takes = manifest.foreign.adapter_inputs
        hint = "it contains no *.onnx_adapter file" if takes else "its graph has no inputs for adapter values"
    else:
        hint = "it has none; export it with `with_adapters`"
    raise UsageError(f"`adapter={name}`: {folder} has no adapter of this name; {hint}")
