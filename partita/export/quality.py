"""What a precision costs: the package that was written beside the original model, token by token, on the same text.

Both read the text in windows, each from the beginning. Perplexity is exp of the mean loss; the divergence is that of
the package's distribution from the original's. What the original made of the text is kept in the package, so that any
provider can be measured against it later without torch.
"""

from __future__ import annotations

import hashlib
import math
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
from partita.export.known_answer import load
from partita.export.progress import Stage
from partita.export.texts import WINDOW_TOKENS, Text, Tokens
from partita.package import QUALITY, Manifest
from partita.package_records import PhaseQuality, Quality
from partita.process import give_back

SCHEMA = "partita.quality/1"
MOST_TOKENS, FEWEST_TOKENS = 8192, 1024
TOKENS_TIMES_PARAMETERS, JUDGED_TOKENS_TIMES_PARAMETERS = 2.5e11, 1e12
"""Tokens are fewer the larger the model is, between those limits: the original is run over all of them on the CPU. More
are read where the ratio decides whether the package is published.
"""
SHORTEST_TEXT = 256
"""Tokens. What a precision costs is a few thousandths of a loss: fewer tokens would say nothing."""

BLOCK_ELEMENTS = 1 << 19
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
) -> Text:
    """The beginning of the text in `path`, as windows. Raises UsageError when it cannot be read or is too short.

    A checkpoint without a tokenizer that loads is given fixed random tokens, and `told` so. `judged`: the ratio decides
    what is published.
    """
    text, sha256 = texts.read(path, "quality_text")
    wanted = measured_tokens(parameters, judged=judged)
    name, found = path.name, texts.tokens(text, checkpoint, vocab_size)
    if found is None:
        told("no tokenizer of the checkpoint loads: the quality of its packed weights is measured on random tokens")
        name, sha256 = RANDOM, hashlib.sha256(b"").hexdigest()
        found = Tokens([], np.random.Generator(np.random.PCG64(0)).integers(0, vocab_size, wanted).tolist())
    taken = found.part(0, wanted)
    texts.refuse_useless(taken, SHORTEST_TEXT, path, "quality_text")
    return Text(name, sha256, taken.windows(min(WINDOW_TOKENS, max_length)))


def measured_tokens(parameters: int, *, judged: bool = False) -> int:
    """How many tokens of a text are taken for a model of so many parameters."""
    product = JUDGED_TOKENS_TIMES_PARAMETERS if judged else TOKENS_TIMES_PARAMETERS
    return int(min(MOST_TOKENS, max(FEWEST_TOKENS, product / max(1, parameters))))


@dataclass(slots=True)
class _Measured:
    """What both made of the text; positions that were not heard are NaN."""

    tokens: npt.NDArray[np.int64]
    """[W, L]."""
    losses: npt.NDArray[np.float64]
    """[W, L - 1] nats."""
    original: npt.NDArray[np.float64]
    best: npt.NDArray[np.int64]
    divergence: npt.NDArray[np.float64]
    agrees: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, windows: npt.NDArray[np.int64]) -> _Measured:
        shape = len(windows), windows.shape[1] - 1
        return cls(
            windows,
            np.full(shape, np.nan),
            np.full(shape, np.nan),
            np.zeros(shape, np.int64),
            np.full(shape, np.nan),
            np.zeros(shape, np.bool_),
        )

    def note(
        self, at: tuple[list[int], list[int]], ours: torch.Tensor, theirs: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Note what `ours` and `theirs`, logits [R, vocab], say of what follows R positions `at` windows and places.

        Both are overwritten, as `scratch` [R, vocab] is.
        """
        windows, places = np.array(at[0]), np.array(at[1])
        token = torch.from_numpy(self.tokens[windows, places + 1]).unsqueeze(-1)
        torch.log_softmax(ours, -1, out=scratch)
        mine, other = scratch, torch.log_softmax(theirs, -1, out=ours)
        self.losses[windows, places] = -mine.gather(-1, token)[:, 0].numpy()
        self.original[windows, places] = -other.gather(-1, token)[:, 0].numpy()
        best = other.argmax(-1)
        self.best[windows, places] = best.numpy()
        self.agrees[windows, places] = (mine.argmax(-1) == best).numpy()
        shares = torch.exp(other, out=theirs)
        further = other.sub_(mine).mul_(shares).masked_fill_(shares == 0, 0.0)
        self.divergence[windows, places] = further.sum(-1).numpy()


class _Blocks:
    """Positions that are compared together: in memory that is there already, torch needs little for each."""

    def __init__(self, found: _Measured, vocab_size: int) -> None:
        self.found = found
        self.kept = torch.empty(3, max(1, BLOCK_ELEMENTS // vocab_size), vocab_size)
        """Logits of the package, those of the original, and room: each [R, vocab]."""
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
) -> Quality:
    """Run the original and the package in `folder` over the text, and keep what the original made of it there.

    Raises what loading or running either does.
    """
    windows, vocab_size = text.windows, manifest.graph.vocab_size
    found = _Measured.of(windows)
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
                give_back()
            scorer = scorer or opened.enter_context(open_scorer(folder, manifest))
            _compare(scorer, part, start, kept, blocks, stage)
        assert scorer is not None
        provider, goes_on = scorer.provider, scorer.continues_at(windows.shape[1] - 1)
    _save(text, found, folder)
    return _quality(text, found, provider).model_copy(update={"phases": _phases(found, goes_on)})


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
        return max(1, KEPT_BYTES // (self.length * self.vocab_size * 4))

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


def _quality(text: Text, found: _Measured, provider: str) -> Quality:
    """The figures."""
    heard = ~np.isnan(found.losses)
    ours, theirs = (math.exp(losses[heard].mean()) for losses in (found.losses, found.original))
    return Quality(
        text=text.name,
        text_sha256=text.sha256,
        tokens=int(heard.sum()),
        window_tokens=text.windows.shape[1],
        provider=provider,
        original_perplexity=theirs,
        perplexity=ours,
        perplexity_ratio=ours / theirs,
        top1_agreement=float(found.agrees[heard].mean()),
        kl_mean=float(found.divergence[heard].mean()),
        kl_p99=float(np.quantile(found.divergence[heard], 0.99)),
    )


def _phases(found: _Measured, goes_on: int | None) -> tuple[PhaseQuality, ...]:
    """The figures of each half of the windows, where they are read by different graphs."""
    if goes_on is None:
        return ()
    phases = []
    for phase, part in (("prefill", slice(None, goes_on)), ("decode", slice(goes_on, None))):
        heard = ~np.isnan(found.losses[:, part])
        if heard.any():
            ours, theirs = (losses[:, part][heard].mean() for losses in (found.losses, found.original))
            phases.append(
                PhaseQuality(
                    phase=phase,
                    tokens=int(heard.sum()),
                    perplexity_ratio=math.exp(ours - theirs),
                    top1_agreement=float(found.agrees[:, part][heard].mean()),
                    kl_mean=float(found.divergence[:, part][heard].mean()),
                )
            )
    return tuple(phases)


def _save(text: Text, found: _Measured, folder: Path) -> None:
    """Write quality.safetensors: what an evaluation on another provider needs of text and original."""
    tensors = {
        "windows": text.windows.astype(np.int32),
        "losses": found.original.astype(np.float32),
        "best": found.best.astype(np.int32),
    }
    (folder / QUALITY).write_bytes(serialised(tensors, metadata={"schema": SCHEMA}))
