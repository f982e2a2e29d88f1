"""Files that a package takes over as they are, read the way `generate` will read them: what it would refuse shows here.

Reading them that way is the runtime's, which this folder may not import: the caller passes functions.
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
    """How `generate` reads a package; each raises a PartitaError for what it refuses."""

    stops: Callable[[Path], frozenset[int]]
    """Ids of the tokens that end a text."""
    chat: Callable[[Path, TokenizerKind], bool]
    """Renders a conversation with the chat template; False when there is none."""


GENERATION = "generation_config.json"


def write_generation(config: PreTrainedConfig, folder: Path) -> None:
    """Write how transformers generates with a checkpoint that has no generation_config.json: what it takes from the
    config, of the text model inside a composite one too, and from the defaults of its class; so where a text ends.
    """
    try:
        text = GenerationConfig.from_model_config(config).to_json_string(use_diff=True)
    except (ValueError, TypeError):  # settings that transformers refuses, too: what config.json says is left
        return
    (folder / GENERATION).write_text(text, encoding="utf-8")


def stop_tokens(reader: Reader | None, folder: Path) -> frozenset[int]:
    """Ids of the tokens that end a text, of the checkpoint in `folder`. Raises CheckpointError for a file that is
    damaged or may not be read.
    """
    if reader is None:
        return frozenset()
    try:
        return reader.stops(folder)
    except PackageError as error:
        raise CheckpointError(
            f"{error.problem}; generate would refuse it: correct the file, or download the checkpoint again"
        ) from error
    except OSError as error:
        raise unreadable(error, folder) from error


def stop_notes(reader: Reader | None, folder: Path, vocabulary: int) -> list[str]:
    """A note where the package in `folder` has no stop tokens, and on those that no model output can be."""
    if reader is None:
        return []
    if not (stops := reader.stops(folder)):
        return ["the checkpoint has no eos_token_id: generate will stop only at the length that is asked for"]
    odd = sorted(token for token in stops if not 0 <= token < vocabulary)
    if not odd:
        return []
    listed, all_of = ", ".join(f"{token:,}" for token in odd[:5]), len(odd) == len(stops)
    end = "so generate will stop only at the length that is asked for" if all_of else "and will never come"
    return [f"eos_token_id {listed} is not in the vocabulary of {vocabulary:,} tokens, {end}"]


def chat_notes(reader: Reader | None, folder: Path, kind: TokenizerKind) -> list[str]:
    """A note where `generate --chat` would fail over the chat template of the package in `folder`."""
    if reader is None or kind == "none":
        return []
    try:
        reader.chat(folder, kind)
    except PartitaError as error:
        # Where it is goes without saying for the folder, which has another name once it is published.
        named = "" if error.where in (None, folder) else f"{error.where.name}: "
        said = f"{named}{error.said}" + ("" if error.remedy is None else f"; {error.remedy}")
    except Exception as error:  # noqa: BLE001 - a template is a program, and fails in its own ways
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        return []
    return [f"chat will fail: {said}"]
