"""Chooses the library that loads a package's tokenizer at run time.

The choice is `tokenizers` where tokenizer.json gives the same ids and texts as transformers on all probes, because
`transformers` takes seconds to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.errors import PartitaError
from partita.export.checkpoint.description import of_tokenizer
from partita.export.trace.fake_model import quiet, translated
from partita.export.verify.known_answer import PROMPT_TEXT
from partita.package.folder import TokenizerKind
from partita.tokenizer_limits import load_full

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


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of probing a tokenizer."""

    kind: TokenizerKind
    loads: bool
    """Whether transformers can load it; False without a tokenizer."""


def probe_tokenizer(folder: Path, names: tuple[str, ...], notes: list[str]) -> Probed:
    """Compare `tokenizers` with transformers on the tokenizer in `folder`, whose files are `names`. Appends to `notes`.

    A tokenizer that transformers cannot load gets the kind that needs transformers.
    """
    if not of_tokenizer(names):
        notes.append("the checkpoint has no tokenizer: generate will need token ids")
        return Probed("none", loads=False)
    from tokenizers import Tokenizer

    try:
        with quiet(), translated("loading the tokenizer"):
            full, _ = load_full(folder)
            if "tokenizer.json" not in names:
                return Probed("transformers", loads=True)
            plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
            plain.no_truncation()  # as at run time
            plain.no_padding()
            return Probed("tokenizers" if _matches(full, plain) else "transformers", loads=True)
    except PartitaError as error:
        need = "token ids"
        notes.append(f"the checkpoint's tokenizer cannot be loaded ({error}): generate will need {need}")
        return Probed("transformers", loads=False)


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
