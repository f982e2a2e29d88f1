"""Checks of companion files (tokenizer, generation config) with the reader that `generate` uses.

The caller passes the reader, because this folder may not import the runtime. A package's tokenizer is loaded by
`tokenizers` where tokenizer.json gives the same ids and texts as transformers, which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedConfig

from partita.errors import CheckpointError, PackageError, PartitaError
from partita.export.checkpoint.description import of_tokenizer
from partita.export.checkpoint.weight_files import few, unreadable
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify.known_answer import PROMPT_TEXT
from partita.package.folder import TokenizerKind
from partita.untrusted_files import load_full

Reader = Callable[[Path], frozenset[int]]
"""Returns the stop token ids of a folder, as `generate` does. Raises PackageError."""
GENERATION = "generation_config.json"


def write_generation(config: PreTrainedConfig, folder: Path) -> None:
    """Write generation_config.json for a checkpoint without one, from transformers' defaults for `config`."""
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
        return reader(folder)
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
    if not (stops := reader(folder)):
        return ["the checkpoint has no eos_token_id: generate will stop only at the maximum length"]
    odd = sorted(f"{token:,}" for token in stops if not 0 <= token < vocabulary)
    note = f"eos_token_id {few(odd)} is outside the vocabulary of {vocabulary:,} tokens: generate will not stop there"
    return [note] if odd else []


TEXTS = (
    PROMPT_TEXT,
    "",
    " ",
    "  two  spaces  and a trailing one ",
    "def f(x):\n\treturn x ** 2  # power\n\n\n    indented\r\n",
    "naïve café — “quotes”… 3.14159 1,000,000 e\u0301",
    "漢字とかな 한국어 العربية हिन्दी 🙂👩‍👩‍👧‍👦",
    "\x00\x07\ufeff\u200b\ud7ff",
    "Don't we'll it's I'd I'M they've",
)
RANDOM_SEQUENCES, SEQUENCE_TOKENS = 64, 24


def probe_tokenizer(folder: Path, names: tuple[str, ...], notes: list[str]) -> TokenizerKind:
    """The library that reads the tokenizer in `folder` of files `names`; adds `notes` where there is none."""
    if not of_tokenizer(names):
        notes.append("the checkpoint has no tokenizer: generate will need token ids")
        return "none"
    from tokenizers import Tokenizer

    try:
        with quiet(), translate_errors("loading the tokenizer"):
            full, _ = load_full(folder)
            if "tokenizer.json" not in names:
                return "transformers"
            plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
            plain.no_truncation()  # as at run time
            plain.no_padding()
            return "tokenizers" if _matches(full, plain) else "transformers"
    except PartitaError as error:
        notes.append(f"the checkpoint's tokenizer cannot be loaded ({error}): generate will need token ids")
        return "transformers"


def _matches(full: Any, plain: Any) -> bool:
    """Whether ids are equal for every text, and texts for every id and for sequences of random ids."""
    special = " and ".join(full.all_special_tokens)
    for text in (*TEXTS, special, f"a{special}b"):
        for add in (True, False):
            if list(full(text, add_special_tokens=add)["input_ids"]) != plain.encode(text, add_special_tokens=add).ids:
                return False
    count = len(full)
    random = np.random.Generator(np.random.PCG64(0)).integers(0, count, (RANDOM_SEQUENCES, SEQUENCE_TOKENS)).tolist()
    singles = [[token] for token in (*range(min(count, 1024)), *range(max(0, count - 256), count))]
    return all(
        full.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        == plain.decode(ids, skip_special_tokens=True)
        for ids in (*random, *singles)
    )
