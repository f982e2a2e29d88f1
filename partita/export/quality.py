"""What a precision costs: the package that was written beside the original model, token by token, on the same text.

Both read the text in windows, each from the beginning. Perplexity is exp of the mean loss; the divergence is that of
the package's distribution from the original's. What the original made of the text is kept in the package, so that any
provider can be measured against it later without torch: of each distribution the likeliest tokens, as many as fit into
`LIKELY_BYTES`, and what all others have together. The divergence over those, which is a lower bound of that over the
whole vocabulary, is measured here as well, beside the whole one.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save as serialised

from partita.errors import ParityError
from partita.export import texts
from partita.export.checkpoint import Checkpoint
from partita.export.fake_model import quiet, translated
from partita.export.known_answer import clear_for, load
from partita.export.progress import Stage
from partita.export.quality_figures import Measured, id_type, phases_of, quality_of
from partita.export.texts import WINDOW_TOKENS, Text, Tokens
from partita.package import QUALITY, Manifest
from partita.package_records import Quality

SCHEMA = "partita.quality/1"
MOST_TOKENS, FEWEST_TOKENS = 8192, 1024
TOKENS_TIMES_PARAMETERS, JUDGED_TOKENS_TIMES_PARAMETERS = 2.5e11, 1e12
"""Tokens are fewer the larger the model is, between those limits: the original is run over all of them on the CPU. More
are read where the ratio decides whether the package is published.
"""
NARROW_TOKENS_TIMES_PARAMETERS = 1.25e11
MOST_NARROW_TOKENS, MOST_NARROW_WINDOWS = 512, 16
"""Of a package that is rounded to 16 bits, and to no integers: its losses are off by a hundredth of what those of int4
are, so a few hundred tokens say as much of it.
"""
SHORTEST_TEXT = 256
"""Tokens. What a precision costs is a few thousandths of a loss: fewer tokens would say nothing."""

BLOCK_ELEMENTS = 1 << 18
"""Logits that are compared at once: few enough to stay in the processor's cache."""

KEPT_BYTES = 2 << 30
"""Logits of the original that are on disk at a time."""

RANDOM = "random tokens"
"""What stands for the name of a text where there is none."""

Logits = npt.NDArray[np.float32]


class MissedRatioError(ParityError):
    """The package is further from the original than was allowed."""

    def __init__(self, message: str, ratio: float, weight_bytes: int) -> None:
        super().__init__(message)
        self.ratio, self.weight_bytes = ratio, weight_bytes


class Scorer(Protocol):
    """A package that is open, and reads windows of tokens."""

    @property
    def rows(self) -> int:
        """Windows that are read side by side."""

    @property
    def provider(self) -> str:
        """What it runs on."""

    def continues_at(self, length: int) -> int | None:
        """Tokens of a window that the graph for prompts reads, where another one reads the rest; None otherwise."""

    def score(self, windows: Sequence[Sequence[int]], hear: Callable[[int, int, Logits], object]) -> None:
        """Read windows of one length; `hear` gets the row, a position, and the logits [vocab] of what follows."""

    def cached(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Keys and values of what was read last: past input and [rows, KV heads, tokens, head size]."""


OpenScorer = Callable[[Path, Manifest], AbstractContextManager[Scorer]]
"""Opens an unpublished package on the CPU provider."""


def read_text(
    path: Path,
    checkpoint: Checkpoint,
    vocab_size: int,
    max_length: int,
    parameters: int,
    told: Callable[[str], object] = len,
    *,
    judged: bool = False,
    integers: bool = True,
    chosen: bool = True,
) -> Text:
    """The beginning of the text in `path`, as windows. Raises UsageError when it cannot be read or is too short.

    A checkpoint without a tokenizer that loads is given fixed random tokens, and `told` so, as is one whose tokenizer
    makes too few tokens of a text that nobody has `chosen`. `judged`: the ratio decides what is published. `integers`:
    it is such that weights or the cache are rounded to; else few tokens are taken.
    """
    text, sha256 = texts.read(path, "quality_text")
    wanted = measured_tokens(parameters, judged=judged, integers=integers)
    name, found = path.name, texts.tokens(text, checkpoint, vocab_size)
    useless = found is not None and texts.says_nothing(found.part(0, wanted), SHORTEST_TEXT)
    if found is None or (useless and not chosen):
        why = "the checkpoint's tokenizer has no tokens for it" if useless else "no tokenizer of the checkpoint loads"
        told(f"{why}: the quality of the package is measured on random tokens")
        name, sha256 = RANDOM, hashlib.sha256(b"").hexdigest()
        found = Tokens([], np.random.Generator(np.random.PCG64(0)).integers(0, vocab_size, wanted).tolist())
    taken = found.part(0, wanted)
    texts.refuse_useless(taken, SHORTEST_TEXT, path, "quality_text")
    windows = taken.windows(min(WINDOW_TOKENS, max_length))
    return Text(name, sha256, windows if integers else windows[:MOST_NARROW_WINDOWS])


def measured_tokens(parameters: int, *, judged: bool = False, integers: bool = True) -> int:
    """How many tokens of a text are taken for a model of so many parameters, rounded to `integers` or to 16 bits."""
    if not integers:
        wanted = NARROW_TOKENS_TIMES_PARAMETERS / max(1, parameters)
        return int(min(MOST_NARROW_TOKENS, max(SHORTEST_TEXT, wanted)))
    product = JUDGED_TOKENS_TIMES_PARAMETERS if judged else TOKENS_TIMES_PARAMETERS
    return int(min(MOST_TOKENS, max(FEWEST_TOKENS, product / max(1, parameters))))


class _Blocks:
    """Positions that are compared together: in memory that is there already, torch needs little for each."""

    def __init__(self, found: Measured, vocab_size: int) -> None:
        self.found = found
        self.kept = torch.empty(3, max(1, BLOCK_ELEMENTS // vocab_size), vocab_size, dtype=torch.float64)
        """Logits of the package, those of the original, and room: each [R, vocab]. Wide, because what rounding to 16
        bits costs is less than the error of a sum in float32.
        """
        self.at: tuple[list[int], list[int]] = ([], [])

    def hear(self, window: int, position: int, ours: Logits, theirs: torch.Tensor) -> None:
        """Keep what both, logits [vocab], say of what follows a position."""
        count = len(self.at[0])
        np.copyto(self.kept[0, count].numpy(), ours)
        self.kept[1, count] = theirs
        self.at[0].append(window)
        self.at[1].append(position)
        if count + 1 == self.kept.shape[1]:
            self.flush()

    def flush(self) -> None:
        """Note all that is kept."""
        if self.at[0]:
            self.found.note(self.at, *self.kept[:, : len(self.at[0])])
            self.at = ([], [])


def measure(
    checkpoint: Checkpoint,
    text: Text,
    folder: Path,
    manifest: Manifest,
    open_scorer: OpenScorer,
    stage: Stage,
    scratch: Path | None = None,
    twin: str | None = None,
) -> Quality:
    """Run the original and the package in `folder` over the text, and keep what the original made of it there.

    `twin`: what `open_scorer` opens in the package's place. Raises what loading or running either does.
    """
    windows, vocab_size = text.windows, manifest.graph.vocab_size
    found = Measured.of(windows, vocab_size)
    blocks = _Blocks(found, vocab_size)
    model = load(checkpoint, scratch)
    with ExitStack() as opened:
        kept = opened.enter_context(_kept(scratch, windows.shape[1] - 1, vocab_size))
        scorer: Scorer | None = None
        for start in range(0, len(windows), kept.windows):
            part = windows[start : start + kept.windows]
            kept.fill(model, part)
            if start + len(part) == len(windows):  # the package is opened when the original is gone, mostly
                del model
                clear_for(checkpoint)
            scorer = scorer or opened.enter_context(open_scorer(folder, manifest))
            _compare(scorer, part, start, kept, blocks, stage)
        assert scorer is not None
        provider, goes_on = scorer.provider, scorer.continues_at(windows.shape[1] - 1)
    _save(text, found, folder, vocab_size)
    return quality_of(text, found, provider).model_copy(update={"phases": phases_of(found, goes_on), "twin": twin})


def opens_beside(text: Text, vocab_size: int) -> bool:
    """Whether the package is open while the original still is in memory: not all of its logits fit on disk at once."""
    return len(text.windows) > _windows_kept(text.windows.shape[1] - 1, vocab_size)


def _windows_kept(length: int, vocab_size: int) -> int:
    """Of how many windows with so many positions the logits of the original are kept at a time."""
    return max(1, KEPT_BYTES // (length * vocab_size * 4))


def _compare(
    scorer: Scorer, windows: npt.NDArray[np.int64], start: int, kept: _Kept, blocks: _Blocks, stage: Stage
) -> None:
    """Have the package read windows, the first of which has the number `start`, beside what is kept of them."""
    for first in range(0, len(windows), scorer.rows):
        taken = windows[first : first + scorer.rows]

        def hear(row: int, position: int, logits: Logits, first: int = first) -> None:
            blocks.hear(start + first + row, position, logits, kept.at(first + row, position))

        # The last token has nothing after it: neither of the two is given it.
        scorer.score(taken[:, :-1].tolist(), hear)
        blocks.flush()
        stage.advance(len(taken))


@dataclass(slots=True)
class _Kept:
    """Logits of the original of some windows, in a file: the two are not in memory at the same time."""

    file: IO[bytes]
    length: int
    """Tokens of a window that have one after them."""
    vocab_size: int
    _read: npt.NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        self._read = np.empty(self.vocab_size, np.float32)

    @property
    def windows(self) -> int:
        """Of how many there is room at a time."""
        return _windows_kept(self.length, self.vocab_size)

    def fill(self, model: Any, windows: npt.NDArray[np.int64]) -> None:
        """Keep what `model` says of `windows`. Raises OSError when the disk is full."""
        self.file.seek(0)
        for window in windows:
            with quiet(), torch.no_grad(), translated("running the original model"):
                logits = model(input_ids=torch.from_numpy(window[None, :-1]), use_cache=False).logits[0].float()
            self.file.write(logits.contiguous().numpy().data.cast("B"))
            del logits  # before the next ones are made

    def at(self, window: int, position: int) -> torch.Tensor:
        """Logits [vocab] of what follows a position of a window, until those of another one are asked for."""
        self.file.seek((window * self.length + position) * self.vocab_size * 4)
        self.file.readinto(self._read.data.cast("B"))  # type: ignore[attr-defined]  # a file of bytes has it
        return torch.from_numpy(self._read)


@contextmanager
def _kept(scratch: Path | None, length: int, vocab_size: int) -> Iterator[_Kept]:
    """A file in `scratch` without a name, for windows of `length` tokens."""
    with tempfile.TemporaryFile(dir=scratch) as file:
        yield _Kept(file, length, vocab_size)


def _save(text: Text, found: Measured, folder: Path, vocab_size: int) -> None:
    """Write quality.safetensors: what an evaluation on another provider needs of text and original."""
    tensors = {
        "windows": text.windows.astype(np.int32),
        "losses": found.original.astype(np.float32),
        "best": found.best.astype(np.int32),
        "likely": found.likely.astype(id_type(vocab_size)),
        "likely_logprobs": found.likely_logprobs,
        "rest_logprobs": found.rest_logprobs,
    }
    (folder / QUALITY).write_bytes(serialised(tensors, metadata={"schema": SCHEMA}))
