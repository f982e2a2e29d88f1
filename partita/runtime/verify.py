"""Replays a package's known answer on a provider chain, without torch.

Knows the known answer's tensors and how to feed the same tokens that the original model was fed. Tolerances come from
`package`; what to do about a difference is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.errors import PackageError
from partita.package import KNOWN_ANSWER, TOLERANCES, Manifest, StepError, Verification
from partita.providers.base import Provider
from partita.providers.resolve import Resolution
from partita.runtime.chain import idle_providers
from partita.runtime.feed import Feed
from partita.runtime.generate import generate
from partita.runtime.pins import Pin
from partita.runtime.runner import Runner, load_runner, port_by_role

REPLAY_CHUNK_TOKENS = 5
"""Small and odd, so that even a short prompt takes several chunks and the last one is short."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What the original model computed."""

    prompt: npt.NDArray[np.int64]
    """[P]."""
    tokens: npt.NDArray[np.int64]
    """[D] greedy tokens; the first follows the prompt."""
    prefill_logits: Logits
    """[P, vocab]."""
    decode_logits: Logits
    """[D, vocab]; row i is what came after feeding token i."""
    reference: str

    @property
    def length(self) -> int:
        """Tokens that the original model ran over, all at once: rotary frequencies are those of this length."""
        return len(self.prompt) + len(self.tokens)


@dataclass(slots=True)
class Comparison:
    """Our logits of one step against the reference's, position by position."""

    step: str
    output: str
    reference: Logits
    """[n, vocab]."""
    tolerance: float
    max_abs: float = 0.0
    tokens_equal: bool = True
    near_ties: int = 0

    def compare(self, position: int, ours: list[Logits]) -> None:
        """Compare the logits [vocab] of every row of the batch with the reference at `position`."""
        wanted = self.reference[position]
        second, first = np.partition(wanted, -2)[-2:]
        tie = first - second <= 2 * self.tolerance * self.scale
        self.near_ties += int(tie)
        best = int(wanted.argmax())
        for logits in ours:
            error = float(np.abs(logits - wanted).max())
            self.max_abs = max(self.max_abs, error) if np.isfinite(error) else float("inf")
            self.tokens_equal = self.tokens_equal and bool(tie or int(logits.argmax()) == best)

    @property
    def scale(self) -> float:
        """Largest magnitude of the reference."""
        return float(np.abs(self.reference).max()) or 1.0

    def result(self) -> StepError:
        """The step as a record."""
        relative = self.max_abs / self.scale
        return StepError(
            step=self.step, output=self.output, max_abs_error=self.max_abs, max_rel_error=relative,
            tokens_equal=self.tokens_equal,
        )  # fmt: skip


def replay(
    folder: Path,
    chain: tuple[Provider, ...],
    *,
    threads: int | None = None,
    tolerance: float | None = None,
    manifest: Manifest | None = None,
    options: Mapping[str, Mapping[str, str]] | None = None,
    pins: Sequence[Pin] = (),
    told: Callable[[Sequence[Resolution]], object] = len,
) -> Verification:
    """Replay the known answer of the package in `folder` on the providers of `chain`.

    Every row of the batch gets the same prompt and every row is compared: the prompt as a whole, the prompt in chunks
    into a fresh cache, then one token at a time. `tolerance`: largest relative error that passes, None for that of the
    package's precision; `manifest`: that of a package whose manifest is not written yet; `options`: those of each
    provider, by its name; `told` hears what became of the chain. The result is `unverified`,
    with the first difference as its detail, when something differs.
    Raises PackageError, ProviderError, ResourceError, or GenerationError when a run fails.
    """
    answer = read_known_answer(folder)
    with load_runner(folder, chain, threads=threads, manifest=manifest, options=options, pins=pins) as runner:
        told(runner.resolutions)
        check_answer(folder, answer, runner)
        limit = TOLERANCES[runner.manifest.graph.precision] if tolerance is None else tolerance
        compared = [
            *compare_prompt(runner, answer, limit),
            *compare_decode(runner, answer, limit),
            *compare_rows(runner, answer, limit),
        ]
        missed = unreached(runner, answer)
        idle = {name for entry in runner.graphs for name in idle_providers(entry.session, entry.model)}
        active = [
            r.provider.ort_name for r in runner.resolutions if r.status == "active" and r.provider.name not in idle
        ]
    provider = ", ".join(active)
    verification = Verification(
        status="verified",
        detail=f"known answer replayed on {provider}: {len(compared)} steps agree{missed}",
        provider=provider,
        reference=answer.reference,
        tolerance=limit,
        near_ties=sum(entry.near_ties for entry in compared if entry.step != "chunked prefill"),
        steps=tuple(entry.result() for entry in compared),
    )
    difference = first_difference(verification)
    if difference is None:
        return verification
    return verification.model_copy(update={"status": "unverified", "detail": difference})


def first_difference(verification: Verification) -> str | None:
    """The first step that is not as the reference has it, as a sentence; None when all agree."""
    limit = verification.tolerance or 0.0
    for entry in verification.steps:
        where = f"first difference in {entry.step}, output {entry.output}"
        if not entry.max_rel_error <= limit:
            return f"{where}: max relative error {entry.max_rel_error:.2e}, allowed {limit:.0e}"
        if not entry.tokens_equal:
            return f"{where}: another greedy token, although the error {entry.max_rel_error:.2e} is within {limit:.0e}"
    return None


def compare_prompt(runner: Runner, answer: KnownAnswer, tolerance: float) -> Iterator[Comparison]:
    """Read the prompt as a whole, then in chunks; each time into a fresh cache. The second is left in the cache.

    A fully static pair has one chunk size, so its chunked reading is token by token through the decode graph. The rest
    of a prompt that is shorter than a chunk goes that way too, where padding would spoil a state.
    """
    whole = runner.chunk_fixed or len(answer.prompt)
    for name, size in (("prefill", whole), ("chunked prefill", REPLAY_CHUNK_TOKENS)):
        comparison = Comparison(name, output_name(runner), answer.prefill_logits, tolerance)
        runner.cache.clear()
        start = 0
        while start < len(answer.prompt):
            left = len(answer.prompt) - start
            feed = pick_feed(runner, start, min(size, left), by_token=name != "prefill")
            start += feed_known(runner, feed, start, answer, comparison)
        yield comparison


def pick_feed(runner: Runner, start: int, size: int, *, by_token: bool) -> Feed:
    """The graph that can take the prompt's next tokens.

    `by_token`: a static pair begins with a single token, and goes on so where no padding may fill its chunks.
    """
    fixed = runner.chunk_fixed
    if start and not runner.can_append_chunks:
        return runner.decode_feed()
    if fixed is None:
        return runner.prefill_feed(size, size)
    padding = runner.cache.padding_is_safe
    if by_token and (start == 0 or not padding):
        return runner.decode_feed()  # so that the chunk after it begins somewhere else than at 0
    usable = start + fixed <= runner.max_length and (padding or size >= fixed)
    return runner.prefill_feed(fixed, runner.prefill_rows or fixed) if usable else runner.decode_feed()


def feed_known(runner: Runner, feed: Feed, start: int, answer: KnownAnswer, comparison: Comparison) -> int:
    """Feed the prompt from `start` on and compare the last positions, as many as the graph gives logits for."""
    prompt = answer.prompt
    count = min(feed.new_tokens, len(prompt) - start)
    positions = range(max(count - feed.rows, 0), count)
    feed.tokens.fill(0)
    feed.tokens[:, :count] = prompt[start : start + count]
    feed.choose(positions)
    feed.place(np.full(runner.batch, start, np.int64), answer.length)
    feed.run()
    for position in positions:
        comparison.compare(start + position, [feed.logits(row, position) for row in range(runner.batch)])
    return count


def compare_decode(runner: Runner, answer: KnownAnswer, tolerance: float) -> Iterator[Comparison]:
    """Feed the reference's tokens one by one after the prompt, whatever ours would have been."""
    feed = runner.decode_feed()
    feed.choose((0,))
    for index, token in enumerate(answer.tokens):
        comparison = Comparison(
            f"decode {index + 1}", output_name(runner), answer.decode_logits[index : index + 1], tolerance
        )
        feed.tokens.fill(token)
        feed.place(np.full(runner.batch, len(answer.prompt) + index, np.int64), answer.length)
        feed.run()
        comparison.compare(0, [feed.logits(row, 0) for row in range(runner.batch)])
        yield comparison


def compare_rows(runner: Runner, answer: KnownAnswer, tolerance: float) -> Iterator[Comparison]:
    """Read prompts of different lengths in the rows of a batch, each a beginning of the reference's text.

    Left out where rotary frequencies depend on the length of the text: the reference has those of the whole.
    """
    sequence = np.concatenate([answer.prompt, answer.tokens])
    lengths = [max(1, len(answer.prompt) - 3 * row) for row in range(runner.batch)]
    if len(set(lengths)) < 2 or port_by_role(runner.loaded("decode").graph, "rope_length") is not None:
        return
    reference = np.concatenate([answer.prefill_logits, answer.decode_logits])
    comparison = Comparison("rows of different length", output_name(runner), reference, tolerance)

    def known(logits: Logits, history: npt.NDArray[np.int64]) -> int:
        position = len(history) - 1
        comparison.compare(position, [logits])
        return int(sequence[min(position + 1, len(sequence) - 1)])

    prompts = [sequence[:length].tolist() for length in lengths]
    for _ in generate(runner, prompts, max_new_tokens=len(answer.tokens), sampler=known):
        pass
    yield comparison


def unreached(runner: Runner, answer: KnownAnswer) -> str:
    """What of a package the known answer cannot have shown, as the end of a sentence."""
    tokens = len(answer.prompt) + len(answer.tokens)
    windows = sorted({state.window or 0 for state in runner.manifest.graph.states if (state.window or 0) >= tokens})
    parts = [f"windows of {', '.join(map(str, windows))} tokens not reached"] if windows else []
    fixed = runner.chunk_fixed
    if fixed is not None and not runner.cache.padding_is_safe and fixed > len(answer.prompt):
        parts.append(f"not run: {runner.loaded('prefill').graph.file}, whose chunk is longer than the prompt")
    return "".join(f"; {part}" for part in parts)


def output_name(runner: Runner) -> str:
    """Name of the logits output."""
    return next(port.name for port in runner.loaded("decode").graph.outputs if port.role == "logits")


def read_known_answer(folder: Path) -> KnownAnswer:
    """Read known_answer.safetensors. Raises PackageError when the package has none or it is damaged."""
    from safetensors import SafetensorError, safe_open

    path = folder / KNOWN_ANSWER
    if not path.is_file():
        raise PackageError(f"{folder}: the package has no {KNOWN_ANSWER}; export the checkpoint without --no-verify")
    try:
        with safe_open(path, framework="numpy") as file:
            return KnownAnswer(
                prompt=file.get_tensor("prompt"),
                tokens=file.get_tensor("tokens"),
                prefill_logits=file.get_tensor("prefill_logits"),
                decode_logits=file.get_tensor("decode_logits"),
                reference=(file.metadata() or {}).get("reference", "unknown"),
            )
    except (SafetensorError, OSError) as error:
        raise PackageError(f"{path}: damaged ({error}); export the checkpoint again") from error


def check_answer(folder: Path, answer: KnownAnswer, runner: Runner) -> None:
    """Raise PackageError when the known answer does not belong to this package."""
    count, steps, vocab = len(answer.prompt), len(answer.tokens), runner.vocab_size
    shapes = answer.prefill_logits.shape == (count, vocab) and answer.decode_logits.shape == (steps, vocab)
    if not shapes or not count or count + steps > runner.max_length:
        raise PackageError(f"{folder / KNOWN_ANSWER}: not of this package, its shapes do not fit; export it again")
