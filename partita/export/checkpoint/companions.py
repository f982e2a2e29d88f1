"""Checks of companion files (tokenizer, template, generation config) with the readers that `generate` uses.

The caller passes the readers, because this folder may not import the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig

from partita.errors import CheckpointError, PackageError, PartitaError
from partita.export.checkpoint.weight_files import unreadable
from partita.package.folder import TokenizerKind


@dataclass(frozen=True, slots=True)
class Reader:
    """The functions with which `generate` reads a package. Each raises a PartitaError."""

    stops: Callable[[Path], frozenset[int]]
    """Stop token ids of a folder."""
    chat: Callable[[Path, TokenizerKind], bool]
    """Renders a conversation with the chat template; False where there is none."""


GENERATION = "generation_config.json"


def write_generation(config: PreTrainedConfig, folder: Path) -> None:
    """Write generation_config.json for a checkpoint without one, from transformers' defaults for `config`.

    For a composite model the settings of its text model count.
    """
    try:
        text = GenerationConfig.from_model_config(config).to_json_string(use_diff=True)
    except (ValueError, TypeError):  # settings that transformers refuses: config.json is used
        return
    (folder / GENERATION).write_text(text, encoding="utf-8")


def stop_tokens(reader: Reader | None, folder: Path) -> frozenset[int]:
    """Stop token ids of the checkpoint in `folder`. Raises CheckpointError for a damaged or unreadable file."""
    if reader is None:
        return frozenset()
    try:
        return reader.stops(folder)
    except PackageError as error:
        raise CheckpointError(
            f"{error.problem}; generate would reject it: correct the file, or download the checkpoint again"
        ) from error
    except OSError as error:
        raise unreadable(error, folder) from error


def stop_notes(reader: Reader | None, folder: Path, vocabulary: int) -> list[str]:
    """Notes on a package in `folder` without stop tokens, or with stop tokens outside the vocabulary."""
    if reader is None:
        return []
    if not (stops := reader.stops(folder)):
        return ["the checkpoint has no eos_token_id: generate will stop only at the maximum length"]
    odd = sorted(token for token in stops if not 0 <= token < vocabulary)
    if not odd:
        return []
    listed, all_of = ", ".join(f"{token:,}" for token in odd[:5]), len(odd) == len(stops)
    end = "so generate will stop only at the maximum length" if all_of else "and will never be generated"
    return [f"eos_token_id {listed} is outside the vocabulary of {vocabulary:,} tokens, {end}"]


def chat_notes(reader: Reader | None, folder: Path, kind: TokenizerKind) -> list[str]:
    """A note where `generate --chat` would fail with the chat template of the package in `folder`."""
    if reader is None or kind == "none":
        return []
    try:
        reader.chat(folder, kind)
    except PartitaError as error:
        # A temporary folder is not named: it is renamed when the package is published.
        named = "" if error.where in (None, folder) else f"{error.where.name}: "
        said = f"{named}{error.said}" + ("" if error.remedy is None else f"; {error.remedy}")
    except Exception as error:  # noqa: BLE001 - a template is a program, and fails in its own ways
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        return []
    return [f"chat will fail: {said}"]
