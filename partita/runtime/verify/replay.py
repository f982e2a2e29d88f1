"""Replays a package's reference logits on a provider chain, without torch; and the smoke run of a new package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError, PackageError, ProviderError
from partita.observations.text_format import plural
from partita.package.folder import KNOWN_ANSWER, Manifest, read_manifest
from partita.package.known_answer import KnownAnswer, read_known_answer
from partita.package.records import SmokeRecord, Verification
from partita.providers.base import Provider
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.chain.open_chain import idle_providers
from partita.runtime.generate.feeds import port_by_role
from partita.runtime.generate.loop import serve
from partita.runtime.generate.planner import Policy, one_row_first, one_token_first, prompts_first
from partita.runtime.generate.request import Listener, Request
from partita.runtime.generate.runner import Runner, load_runner
from partita.runtime.verify.comparison import Comparison, Logits, but_for, set_aside

REPLAY_CHUNK_TOKENS = 5
"""Small and odd, so that even a short prompt has several chunks, of which the last is shorter."""
SMOKE_TOKENS = 5
CHOOSING = frozenset({"TopK", "ArgMax", "MoE", "QMoE"})
"""Operators whose result jumps for small changes of the input."""


def open_briefly(folder: Path, chain: Sequence[Provider], **opening: Any) -> Runner:
    """Open a package for a few runs, which do not repay the move of its weights into huge pages; see `load_runner`."""
    runner = load_runner(folder, tuple(chain), **opening)
    for entry in runner.graphs:
        entry.session.later = None
    return runner


def replay(
    folder: Path,
    chain: tuple[Provider, ...],
    *,
    tolerance: float | None = None,
    manifest: Manifest | None = None,
    **opening: Any,
) -> Verification:
    """Replay the reference logits of the package in `folder` on the providers of `chain`.

    Every row of the batch is compared: with the whole prompt, in chunks, then token by token; in a batch also with
    prompts of different lengths, and single rows if the graphs support fewer rows. `tolerance`: maximum relative error;
    None: that of the package's precision. `manifest`: of a package without a manifest file yet. `opening`: see
    `load_runner`. The result is `unverified`, with the first difference as its detail, if something differs. Raises
    PackageError, ProviderError, ResourceError, or GenerationError when a run fails.
    """
    answer = read_known_answer(folder)
    manifest = manifest or read_manifest(folder)
    with open_briefly(folder, chain, manifest=manifest, **opening) as runner:
        return replay_opened(manifest, runner, answer, tolerance)


def replay_opened(
    manifest: Manifest, runner: Runner, answer: KnownAnswer, tolerance: float | None = None
) -> Verification:
    """Replay the reference logits on an opened package; see `replay`."""
    _check_answer(answer, runner)
    limit = manifest.tolerance if tolerance is None else tolerance
    replaying = _Replay(runner, answer, limit)
    compared = replaying.compare()
    for record in manifest.switchable:
        if record.known_answer is not None:
            adapted = read_known_answer(runner.folder, record.known_answer)
            _check_answer(adapted, runner, record.known_answer)
            runner.use_adapters(record.name)
            try:
                compared += _Replay(runner, adapted, limit, replaying.ran).compare(record.name)
            finally:
                runner.use_adapters(None)
    nodes = (node for entry in runner.graphs for node in (*entry.model.nodes, *entry.model.subgraph_nodes))
    if tolerance is None and manifest.is_rounded and any(node.op_type in CHOOSING for node in nodes):
        set_aside(compared)
    not_run = tuple(file.file for file in runner.contract.files if file.file not in replaying.ran)
    not_exercised = (*answer.not_exercised, *(f"{file}, whose chunk is longer than the prompt" for file in not_run))
    missed = f"; not exercised: {'; '.join(not_exercised)}" if not_exercised else ""
    if len(set(replaying.row_lengths)) > 1 and replaying.rope_length:
        missed += "; rows of different length not compared: the rotary frequencies depend on the length of the text"
    provider = used_providers(runner)
    verification = Verification(
        status="verified",
        detail=f"known answer replayed on {provider}: {len(compared)} steps match{but_for(compared)}{missed}",
        provider=provider,
        reference=answer.reference,
        tolerance=limit,
        proof=manifest.verification.proof,
        near_ties=sum(len(entry.ties) for entry in compared if not entry.is_repeated),
        rerouted=sum(len(entry.excluded) for entry in compared if not entry.is_repeated),
        not_run=not_run,
        not_exercised=not_exercised,
        steps=tuple(entry.result() for entry in compared),
    )
    difference = first_difference(verification)
    wrong = {} if difference is None else {"status": "unverified", "detail": difference}
    return verification.model_copy(update=wrong)


def used_providers(runner: Runner) -> str:
    """The active providers with nodes, by ONNX Runtime's names."""
    idle = {name for entry in runner.graphs for name in idle_providers(entry.session, entry.model)}
    active = [entry.provider for entry in runner.resolutions if entry.status == "active"]
    return ", ".join(provider.ort_name for provider in active if provider.name not in idle)


def first_difference(verification: Verification) -> str | None:
    """The first step that differs from the reference, as a sentence; None if all match."""
    limit = verification.tolerance or 0.0
    for entry in verification.steps:
        where = f"first difference in {entry.step}, output {entry.output}"
        if not entry.max_rel_error <= limit:
            return f"{where}: max relative error {entry.max_rel_error:.2e}, tolerance {limit:.0e}"
        if not entry.tokens_equal:
            return (
                f"{where}: a different greedy token, although the error {entry.max_rel_error:.2e} is within {limit:.0e}"
            )
    return None


@dataclass(slots=True)
class _Replay:
    """The reference logits and the package that replays them."""

    runner: Runner
    answer: KnownAnswer
    tolerance: float
    ran: set[str] = field(default_factory=set)
    """Graph files that ran a step."""

    @property
    def rope_length(self) -> int:
        """Text length for the rotary frequencies of the logits after the prompt; 0 if the graph has no such input."""
        decode = self.runner.graph("decode").graph
        return 0 if port_by_role(decode, "rope_length") is None else self.answer.length

    @property
    def chunk(self) -> int:
        """Prompt tokens per chunk: five chunks of a long prompt, the last one shorter."""
        return max(REPLAY_CHUNK_TOKENS, len(self.answer.prompt) // 5 + 1)

    @property
    def row_lengths(self) -> list[int]:
        """[B]: prompt tokens of each row for rows of different lengths."""
        return [max(1, len(self.answer.prompt) - 3 * row) for row in range(self.runner.rows)]

    @property
    def all_logits(self) -> Logits:
        """[K + D, vocab]: logits of prompt and continuation."""
        return np.concatenate([self.answer.prefill_logits, self.answer.decode_logits])

    def compare(self, adapter: str = "") -> list[Comparison]:
        """All comparisons with the reference logits. `adapter`: name of the adapter in use."""
        compared = [
            *self.compare_prompt(),
            *self.compare_generation(),
            *self.compare_rows(),
            *self.compare_rows_alone(),
        ]
        for entry in compared if adapter else ():
            entry.step, entry.kind = f"{adapter}: {entry.step}", f"{adapter}: {entry.kind}"
        return compared

    def comparison(self, step: str, reference: Logits, kind: str, *, again: bool = False) -> Comparison:
        """An empty comparison with `reference` [n, vocab]."""
        output = next(port.name for port in self.runner.graph("decode").graph.outputs if port.role == "logits")
        return Comparison(step, output, reference, self.tolerance, kind=kind, is_repeated=again)

    def listener(self, comparison: Comparison, most: int | None = None) -> Listener:
        """Compares the logits of every position, or of the first `most`."""

        def compare(position: int, logits: Logits) -> None:
            if most is None or position < most:
                comparison.compare(position - self.answer.first, logits)

        return compare

    def request(self, listener: Listener, max_new_tokens: int, *, after_prompt: bool = False) -> Request:
        """A request that prefills the prompt and continues with the reference's tokens.

        `after_prompt`: whether only logits after the prompt are compared. Logits that are not finite count as a
        difference, not an error.
        """
        return Request(
            self.answer.prompt.tolist(),
            self.answer.pick,
            max_new_tokens,
            listener=listener,
            listens_from=len(self.answer.prompt) if after_prompt else self.answer.first,
            any_logits=True,
            rope_length=self.rope_length,
        )

    def serve(self, requests: Sequence[Request], *, prefill_chunk: int, policy: Policy = prompts_first) -> None:
        """Run one request per row, or a single request in every row, with a zeroed cache."""
        self.runner.cache.clear()
        every = [*requests] * (self.runner.rows if len(requests) == 1 else 1)
        for step in serve(self.runner, every, prefill_chunk=prefill_chunk, policy=policy):
            self.ran.add(step.file)

    def compare_prompt(self) -> Iterator[Comparison]:
        """Compare every position of the prompt, prefilled in as few steps as the package supports."""
        comparison = self.comparison("prefill", self.answer.prefill_logits, "prefill")
        request = self.request(self.listener(comparison), 1)
        if self.answer.own_frequencies:
            request = replace(request, rope_length=0)
        self.serve([request], prefill_chunk=len(self.answer.prompt))
        yield comparison

    def compare_generation(self) -> Iterator[Comparison]:
        """Prefill the prompt in chunks, then feed the reference's tokens one by one.

        A static pair has one chunk size; its prompt begins with a single token, so that no chunk begins at position 0.
        """
        runner, answer, count = self.runner, self.answer, len(self.answer.prompt)
        chunked = self.comparison("chunked prefill", answer.prefill_logits, "chunked", again=True)
        full = answer.length >= runner.contract.max_length  # then the last token is not fed
        decoded = [
            self.comparison(f"decode {index + 1}", answer.decode_logits[index : index + 1], "decode")
            for index in range(len(answer.tokens) - full)
        ]

        def compare(position: int, logits: Logits) -> None:
            if position < count:
                chunked.compare(position - answer.first, logits)
            else:
                decoded[position - count].compare(0, logits)

        request = self.request(compare, len(answer.tokens) + 1, after_prompt=answer.own_frequencies)
        policy = prompts_first if runner.capacity.chunk is None else one_token_first
        self.serve([request], prefill_chunk=self.chunk, policy=policy)
        yield from decoded if answer.own_frequencies else (chunked, *decoded)

    def compare_rows(self) -> Iterator[Comparison]:
        """Prefill prompts of different lengths in the rows of a batch, each a prefix of the reference's text.

        Skipped if rotary frequencies depend on the text length. If the prefill graph has other weights, only prompts
        are compared, because the reference's continuation follows its own whole prompt.
        """
        answer, lengths = self.answer, self.row_lengths
        if len(set(lengths)) < 2 or self.rope_length:
            return
        sequence = np.concatenate([answer.prompt, answer.tokens])
        comparison = self.comparison("rows of different length", self.all_logits, "rows")

        def pick(logits: Logits, history: npt.NDArray[np.int64]) -> int:
            return int(sequence[min(len(history), len(sequence) - 1)])

        requests = []
        for length in lengths:
            listener = self.listener(comparison, length if self.runner.capacity.decode_any_length else None)
            request = self.request(listener, len(answer.tokens))
            requests.append(replace(request, prompt=sequence[:length].tolist(), sampler=pick))
        self.serve(requests, prefill_chunk=max(lengths))
        yield comparison

    def compare_rows_alone(self) -> Iterator[Comparison]:
        """Prefill the prompt in each row alone, in chunks, and continue with fewer rows from step to step."""
        if not self.runner.capacity.symbolic_batch:
            return
        comparison = self.comparison("rows by themselves", self.all_logits, "alone", again=True)
        listener, alone = self.listener(comparison), self.answer.own_frequencies
        counts = (max(1, len(self.answer.tokens) - row) for row in range(self.runner.rows))
        requests = [self.request(listener, count, after_prompt=alone) for count in counts]
        self.serve(requests, prefill_chunk=self.chunk, policy=one_row_first)
        yield comparison


def _check_answer(answer: KnownAnswer, runner: Runner, name: str = KNOWN_ANSWER) -> None:
    """Raise PackageError when the reference logits do not belong to this package."""
    count, steps, vocab = len(answer.prompt), len(answer.tokens), runner.contract.vocab_size
    shapes = answer.prefill_logits.shape[1:] == (vocab,) and answer.decode_logits.shape == (steps, vocab)
    if not shapes or not 0 < len(answer.prefill_logits) <= count or count + steps > runner.contract.max_length:
        raise PackageError(
            f"{runner.folder / name}: does not belong to this package: its shapes do not match", remedy=FROM_CHECKPOINT
        )


def smoke(folder: Path, chain: Sequence[Provider], **opening: Any) -> SmokeRecord:
    """Open a package on `chain` (see `load_runner`), run a prefill step and a decode step, and check the logits.

    Raises ProviderError when the first provider of the chain has no nodes, PackageError, ResourceError, or
    GenerationError when a run fails or a logit is not finite.
    """
    with open_briefly(folder, chain, **opening) as runner:
        first = runner.resolutions[0]
        idle = [idle_providers(entry.session, entry.model) for entry in runner.graphs]
        if first.status != "active" or all(first.provider.name in names for names in idle):
            raise ProviderError(f"{folder}: no node runs on {first.provider.name}")
        size = runner.capacity.chunk or max(1, min(SMOKE_TOKENS, runner.contract.max_length - 1))
        vocab_size = runner.contract.vocab_size

        def pick(logits: Logits, history: npt.NDArray[np.int64]) -> int:
            if logits.shape != (vocab_size,):
                raise GenerationError(f"logits have the shape {list(logits.shape)}, expected [{vocab_size}]")
            return int(logits.argmax())

        spread = np.linspace(0, vocab_size - 1, runner.rows * size, dtype=np.int64).reshape(runner.rows, size)
        requests = [Request(prompt.tolist(), pick, max_new_tokens=2) for prompt in spread]
        for rows in (requests, requests[:1] if runner.capacity.symbolic_batch else ()):
            for _ in serve(runner, rows) if rows else ():
                pass
        names = ",".join(entry.provider.name for entry in runner.resolutions if entry.status == "active")
    detail = f"opened; prefill of {plural(size, 'token')} and one decode step have finite logits"
    return SmokeRecord(chain=names, status="ran", detail=detail)
