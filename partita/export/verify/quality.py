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
from partita.export.checkpoint.description import Checkpoint
from partita.export.options import ExportOptions
from partita.export.progress import Stage
from partita.export.trace.fake_model import quiet, translated
from partita.export.verify import texts
from partita.export.verify.known_answer import clear_for, load
from partita.export.verify.quality_figures import Measured, id_type, phases_of, quality_of
from partita.export.verify.texts import WINDOW_TOKENS, Text, Tokens
from partita.package.folder import QUALITY, Manifest
from partita.package.records import Quality

SCHEMA = "partita.quality/1"
MEASURED_TOKENS = 512
"""Tokens of the text that are read by default."""
MOST_JUDGED_TOKENS, FEWEST_JUDGED_TOKENS, TOKENS_TIMES_PARAMETERS = 8192, 1024, 1e12
"""Tokens where the ratio decides whether the package is published: fewer the larger the model is, which runs on the CPU
over all of them.
"""
SHORTEST_TEXT = 256
"""Fewest tokens of a text, unless fewer are asked for: the change of the loss is a few thousandths."""

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
    wanted: int,
    told: Callable[[str], object] = len,
    *,
    chosen: bool = True,
) -> Text:
    """The first `wanted` tokens of the text in `path`, as windows. Raises UsageError when it cannot be read or is too
    short.

    Fixed random tokens replace the text where no tokenizer of the checkpoint loads, and where the tokenizer makes too
    few tokens of a text that the user has not `chosen`; `told` receives a note about it.
    """
    text, sha256 = texts.read(path, "quality_text")
    fewest = min(SHORTEST_TEXT, wanted)
    name, found = path.name, texts.tokens(text, checkpoint, vocab_size)
    useless = found is not None and texts.says_nothing(found.part(0, wanted), fewest)
    if found is None or (useless and not chosen):
        why = "the checkpoint's tokenizer has no tokens for it" if useless else "no tokenizer of the checkpoint loads"
        told(f"{why}: the quality of the package is measured on random tokens")
        name, sha256 = RANDOM, hashlib.sha256(b"").hexdigest()
        found = Tokens([], np.random.Generator(np.random.PCG64(0)).integers(0, vocab_size, wanted).tolist())
    taken = found.part(0, wanted)
    texts.refuse_useless(taken, fewest, path, "quality_text")
    return Text(name, sha256, taken.windows(min(WINDOW_TOKENS, max_length)))


def measured_tokens(options: ExportOptions, parameters: int) -> int:
    """How many tokens of a text the quality of a model with so many parameters is measured on."""
    if options.quality_tokens is not None:
        return options.quality_tokens
    if options.max_perplexity_ratio is None:
        return MEASURED_TOKENS
    return int(min(MOST_JUDGED_TOKENS, max(FEWEST_JUDGED_TOKENS, TOKENS_TIMES_PARAMETERS / max(1, parameters))))


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
            kept.fill(model, part, stage)
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
            stage.advance(1)

        # The last token has nothing after it: neither of the two is given it.
        scorer.score(taken[:, :-1].tolist(), hear)
        blocks.flush()


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

    def fill(self, model: Any, windows: npt.NDArray[np.int64], stage: Stage) -> None:
        """Keep what `model` says of `windows`. Raises OSError when the disk is full."""
        self.file.seek(0)
        for window in windows:
            with quiet(), torch.no_grad(), translated("running the original model"):
                logits = model(input_ids=torch.from_numpy(window[None, :-1]), use_cache=False).logits[0].float()
            self.file.write(logits.contiguous().numpy().data.cast("B"))
            del logits  # before the next ones are made
            stage.advance(self.length)

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
