"""Quality of a package: its losses and divergence from the source model on the same text, token by token.

Both run the text in windows. Perplexity is exp of the mean loss; the divergence is that of the package's distribution
from the source model's. The package stores the source model's likeliest tokens of each distribution, up to
`LIKELY_BYTES`, and the total of the others, so that any provider can be measured later without torch. The divergence
over those is a lower bound of the full one; both are measured here.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save as serialised

from partita.export.checkpoint.description import Checkpoint
from partita.export.options import ExportOptions
from partita.export.progress import Stage
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify import texts
from partita.export.verify.known_answer import clear_for, load
from partita.export.verify.texts import NO_TEXT, WINDOW_TOKENS, Text
from partita.package.folder import QUALITY, Manifest
from partita.package.records import LikelyDivergence, PhaseQuality, Quality, Verification

MOST_LIKELY, LIKELY_BYTES = 64, 2 << 20
"""Maximum number of likeliest tokens stored per position, and size in bytes of all of them."""
LARGEST_LOSS = 709.0
"""In nats: exp of a larger number overflows."""
LEAST_REST = 1e-12
"""Smaller probabilities of the other tokens, computed as one minus a sum, count as 0."""


SCHEMA = "partita.quality/1"
MEASURED_TOKENS = 512
"""Default number of tokens of the text."""
MOST_JUDGED_TOKENS, FEWEST_JUDGED_TOKENS, TOKENS_TIMES_PARAMETERS = 8192, 1024, 1e12
"""Number of tokens where the ratio decides on publication: fewer for larger models, which run on the CPU."""
SHORTEST_TEXT = 256
"""Minimum tokens of a text, unless fewer are requested: the change of the loss is a few thousandths."""

BLOCK_ELEMENTS = 1 << 18
"""Logits compared at once, to stay in the CPU cache."""

Logits = npt.NDArray[np.float32]


class Measured:
    """Losses and divergence per position; NaN for positions not measured. Positions are compared in blocks."""

    def __init__(self, windows: npt.NDArray[np.int64], vocab_size: int) -> None:
        """`windows`: tokens [W, L]."""
        self.tokens = windows
        shape = len(windows), windows.shape[1] - 1
        kept = (*shape, kept_tokens(math.prod(shape), vocab_size))
        self.losses, self.original = np.full(shape, np.nan), np.full(shape, np.nan)
        """[W, L - 1] nats, of the package and of the source model."""
        self.divergence, self.likely_divergence = np.full(shape, np.nan), np.full(shape, np.nan)
        """In full, and over the likeliest tokens and the rest."""
        self.best, self.agrees = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        """The source model's likeliest token, and whether it is the package's."""
        self.likely, self.likely_logprobs = np.zeros(kept, np.int32), np.full(kept, np.nan, np.float32)
        """[W, L - 1, K]: the source model's likeliest tokens, and its log-probabilities of them."""
        self.rest_logprobs = np.full(shape, np.nan, np.float32)
        """Its log-probability of all others; minus infinity for none."""
        self._block = torch.empty(3, max(1, BLOCK_ELEMENTS // vocab_size), vocab_size, dtype=torch.float64)
        """Logits of the package, of the source model, and a scratch buffer, each [R, vocab] in float64: the error of a
        float32 sum exceeds the loss of 16-bit rounding."""
        self._places: list[tuple[int, int]] = []
        """Windows and positions of the block."""

    def note(self, window: int, position: int, ours: Logits, theirs: torch.Tensor) -> None:
        """Record the logits [vocab] of both for the token after a position, at the latest at the next `flush`."""
        count = len(self._places)
        best = theirs.numpy().argmax()  # several times faster than torch's
        self.best[window, position], self.agrees[window, position] = best, ours.argmax() == best
        np.copyto(self._block[0, count].numpy(), ours)
        self._block[1, count] = theirs
        self._places.append((window, position))
        if count + 1 == self._block.shape[1]:
            self.flush()

    def flush(self) -> None:
        """Record the block."""
        if not self._places:
            return
        windows, places = np.array(self._places).T
        ours, theirs, scratch = self._block[:, : len(self._places)]
        self._places = []
        token = torch.from_numpy(self.tokens[windows, places + 1]).unsqueeze(-1)
        torch.log_softmax(ours, -1, out=scratch)
        mine, other = scratch, torch.log_softmax(theirs, -1, out=ours)
        self.losses[windows, places] = -mine.gather(-1, token)[:, 0].numpy()
        self.original[windows, places] = -other.gather(-1, token)[:, 0].numpy()
        self._note_likely(windows, places, mine, other)
        shares = torch.exp(other, out=theirs)
        further = other.sub_(mine).mul_(shares).masked_fill_(shares == 0, 0.0)
        self.divergence[windows, places] = further.sum(-1).clamp_(min=0.0).numpy()

    def _note_likely(
        self, windows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], mine: torch.Tensor, other: torch.Tensor
    ) -> None:
        """Record the source model's likeliest tokens."""
        known, tokens = other.topk(self.likely.shape[-1], dim=-1, sorted=False)
        whole = tokens.shape[-1] == other.shape[-1]
        shares, ours = torch.exp(known), mine.gather(-1, tokens)
        rest = torch.zeros(len(shares), dtype=shares.dtype) if whole else 1.0 - shares.sum(-1)
        rest = torch.where(rest < LEAST_REST, torch.zeros_like(rest), rest)
        our_rest = (1.0 - torch.exp(ours).sum(-1)).clamp_(min=LEAST_REST)
        further = ((known - ours) * shares).masked_fill_(shares == 0, 0.0).sum(-1)
        further += ((rest.log() - our_rest.log()) * rest).masked_fill_(rest == 0, 0.0)
        self.likely[windows, places] = tokens.numpy()
        self.likely_logprobs[windows, places] = known.numpy()
        self.rest_logprobs[windows, places] = rest.log().numpy()
        self.likely_divergence[windows, places] = further.clamp_(min=0.0).numpy()


def kept_tokens(positions: int, vocab_size: int) -> int:
    """The number of likeliest tokens stored per position."""
    size = np.dtype(id_type(vocab_size)).itemsize + np.dtype(np.float32).itemsize
    return max(1, min(MOST_LIKELY, vocab_size, LIKELY_BYTES // (max(1, positions) * size)))


def id_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest integer type for token ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def perplexity(loss: float) -> float:
    """exp of a loss or of a difference of losses; the largest float where that overflows."""
    return math.exp(min(loss, LARGEST_LOSS))


def quality_of(text: Text, found: Measured, provider: str) -> Quality:
    """The quality record."""
    measured = ~np.isnan(found.losses)
    return Quality(
        text=text.name,
        text_sha256=text.sha256,
        window_tokens=text.windows.shape[1],
        provider=provider,
        original_perplexity=perplexity(float(found.original[measured].mean())),
        perplexity=perplexity(float(found.losses[measured].mean())),
        **_figures(found, measured),
        kl_p99=float(np.quantile(found.divergence[measured], 0.99)),
        likely=LikelyDivergence(
            tokens=found.likely.shape[-1],
            share=float(1.0 - np.exp(found.rest_logprobs[measured].astype(np.float64)).mean()),
            kl_mean=float(found.likely_divergence[measured].mean()),
            kl_p99=float(np.quantile(found.likely_divergence[measured], 0.99)),
        ),
    )


def phases_of(found: Measured, goes_on: int | None) -> tuple[PhaseQuality, ...]:
    """The figures of the two halves of the windows, where they are run by different graphs."""
    if goes_on is None:
        return ()
    measured, prompt = ~np.isnan(found.losses), np.arange(found.losses.shape[1]) < goes_on
    phases = (("prefill", measured & prompt), ("decode", measured & ~prompt))
    return tuple(PhaseQuality(phase=phase, **_figures(found, part)) for phase, part in phases if part.any())


def _figures(found: Measured, measured: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """The figures of the record over some positions."""
    ours, theirs = (float(losses[measured].mean()) for losses in (found.losses, found.original))
    return {
        "tokens": int(measured.sum()),
        "perplexity_ratio": perplexity(ours - theirs),
        "top1_agreement": float(found.agrees[measured].mean()),
        "kl_mean": float(found.divergence[measured].mean()),
    }


class Scorer(Protocol):
    """An open package that runs windows of tokens."""

    @property
    def rows(self) -> int:
        """Windows in one batch."""

    @property
    def provider(self) -> str:
        """The execution provider."""

    def continues_at(self, length: int) -> int | None:
        """The prefill graph's tokens of a window, where another graph runs the rest; None otherwise."""

    def replay(self, manifest: Manifest) -> Verification:
        """Replay the known answer in the package's folder."""

    def score(self, windows: Sequence[Sequence[int]], hear: Callable[[int, int, Logits], object]) -> None:
        """Run windows of one length; `hear` gets the row, the position, and the logits [vocab] of the next token."""

    def cached(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Cached keys and values of the last windows: past input and [rows, KV heads, tokens, head size]."""


OpenScorer = Callable[[Path, Manifest], AbstractContextManager[Scorer]]
"""Opens an unpublished package on the CPU provider."""


def read_text(
    path: Path,
    checkpoint: Checkpoint,
    vocab_size: int,
    max_length: int,
    count: int,
    note: Callable[[str], object] = len,
    *,
    chosen: bool = True,
) -> Text:
    """The first `count` tokens of a text in windows; `note` gets a note on random ones. Raises UsageError."""
    length, fewest = min(WINDOW_TOKENS, max_length), min(SHORTEST_TEXT, count)
    found = texts.read_windows(path, "quality_text", checkpoint, vocab_size, length, count, fewest, chosen=chosen)
    if found.sha256 == NO_TEXT:
        note(
            "the checkpoint's tokenizer cannot be loaded, or has no tokens for the text: the quality of the package is "
            "measured on random tokens"
        )
    return found


def measured_tokens(options: ExportOptions, parameters: int) -> int:
    """The number of tokens on which the quality of a model of this size is measured."""
    if options.quality_tokens is not None:
        return options.quality_tokens
    if options.max_perplexity_ratio is None:
        return MEASURED_TOKENS
    return int(min(MOST_JUDGED_TOKENS, max(FEWEST_JUDGED_TOKENS, TOKENS_TIMES_PARAMETERS / max(1, parameters))))


def measure(
    checkpoint: Checkpoint,
    text: Text,
    folder: Path,
    manifest: Manifest,
    open_scorer: OpenScorer,
    stage: Stage,
    source: SourceLogits,
    scratch: Path | None = None,
    variant: str | None = None,
) -> Quality:
    """Run the source model and the package over the text; `source`: stored logits; `variant`: the scored copy."""
    vocab_size = manifest.graph.vocab_size
    found = Measured(text.windows, vocab_size)
    if not source.is_complete:
        source.fill(load(checkpoint, scratch), stage)
    clear_for(checkpoint)  # the package is opened when the source model is gone
    with open_scorer(folder, manifest) as scorer:
        _compare(scorer, source, found, stage)
        provider, goes_on = scorer.provider, scorer.continues_at(text.windows.shape[1] - 1)
    _save(text, found, folder, vocab_size)
    return quality_of(text, found, provider).model_copy(
        update={"phases": phases_of(found, goes_on), "converted_copy": variant}
    )


def _compare(scorer: Scorer, source: SourceLogits, found: Measured, stage: Stage) -> None:
    """Run the package over the windows, and compare with the stored logits."""
    for first in range(0, len(source.windows), scorer.rows):
        taken = source.windows[first : first + scorer.rows]

        def hear(row: int, position: int, logits: Logits, first: int = first) -> None:
            found.note(first + row, position, logits, source.at(first + row, position))
            stage.advance(1)

        # The last token has no successor and is not run.
        scorer.score(taken[:, :-1].tolist(), hear)
        found.flush()


class SourceLogits:
    """Logits of the source model in an unnamed file, which `fill` writes."""

    def __init__(self, text: Text, vocab_size: int, scratch: Path | None) -> None:
        """`scratch`: the folder of the file."""
        self.windows, self._vocab_size = text.windows, vocab_size
        self._length = int(text.windows.shape[1]) - 1
        """Tokens of a window with a successor."""
        self.is_complete = False
        """Whether the file holds the logits."""
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed by `close`
        self._read = np.empty(vocab_size, np.float32)

    @property
    def tokens(self) -> int:
        """Number of tokens with a successor."""
        return len(self.windows) * self._length

    @property
    def size_bytes(self) -> int:
        """Size of the complete file."""
        return self.tokens * self._vocab_size * 4

    def fill(self, model: Any, stage: Stage) -> None:
        """Store the logits of `model`. Raises OSError when the disk is full."""
        self._file.seek(0)
        for window in self.windows:
            with quiet(), torch.no_grad(), translate_errors("running the source model"):
                logits = model(input_ids=torch.from_numpy(window[None, :-1]), use_cache=False).logits[0].float()
            self._file.write(logits.contiguous().numpy().data.cast("B"))
            del logits  # before the next ones are made
            stage.advance(self._length)
        self.is_complete = True

    def at(self, window: int, position: int) -> torch.Tensor:
        """Logits [vocab] of the token after a position of a window, valid until the next call."""
        self._file.seek((window * self._length + position) * self._vocab_size * 4)
        self._file.readinto(self._read.data.cast("B"))  # type: ignore[attr-defined]  # a file of bytes has it
        return torch.from_numpy(self._read)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


def _save(text: Text, found: Measured, folder: Path, vocab_size: int) -> None:
    """Write quality.safetensors: the text and the source model's data, for evaluations on other providers."""
    tensors = {
        "windows": text.windows.astype(np.int32),
        "losses": found.original.astype(np.float32),
        "best": found.best.astype(np.int32),
        "likely": found.likely.astype(id_type(vocab_size)),
        "likely_logprobs": found.likely_logprobs,
        "rest_logprobs": found.rest_logprobs,
    }
    (folder / QUALITY).write_bytes(serialised(tensors, metadata={"schema": SCHEMA}))
