"""Replays a package's known answer on a provider chain, without torch.

Knows the known answer's tensors and how to feed the same tokens that the original model was fed. Tolerances come from
`package`; what to do about a difference is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.errors import PackageError
from partita.package import KNOWN_ANSWER, Manifest, inside, read_manifest
from partita.package_records import Verification
from partita.providers.base import Provider
from partita.providers.resolve import Resolution
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.chain import idle_providers
from partita.runtime.comparison import Comparison, Logits, but_for, set_aside
from partita.runtime.engine.feeds import port_by_role
from partita.runtime.engine.request import Listener, Request
from partita.runtime.engine.running import serve
from partita.runtime.engine.scheduler import Policy, one_row_first, one_token_first, prompts_first
from partita.runtime.pins import Pin
from partita.runtime.runner import Runner, load_runner
from partita.runtime.sampling import Sampler
from partita.spelling import spelled

REPLAY_CHUNK_TOKENS = 5
"""Small and odd, so that even a short prompt takes several chunks and the last one is short."""

CHOOSING = frozenset({"TopK", "ArgMax", "MoE", "QMoE"})
"""Operators whose result jumps when what they are given changes a little."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What the original model computed."""

    prompt: npt.NDArray[np.int64]
    """[P]."""
    tokens: npt.NDArray[np.int64]
    """[D] greedy tokens; the first follows the prompt."""
    prefill_logits: Logits
    """[K, vocab]: of the last K tokens of the prompt."""
    decode_logits: Logits
    """[D, vocab]; row i is what came after feeding token i."""
    reference: str
    own_frequencies: bool = False
    """The prompt's logits have the rotary frequencies of a text of P tokens; all others those of `length` tokens."""
    not_exercised: tuple[str, ...] = ()
    """Windows, attention chunks and rotary frequencies that the text does not reach."""

    @property
    def length(self) -> int:
        """Tokens that the original model ran over, all at once."""
        return len(self.prompt) + len(self.tokens)

    @property
    def first(self) -> int:
        """The first position with logits."""
        return len(self.prompt) - len(self.prefill_logits)


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
    answers: Path | None = None,
) -> Verification:
    """Replay the known answer of the package in `folder` on the providers of `chain`.

    Every row of the batch gets the same prompt and every row is compared: the prompt as a whole, the prompt in chunks
    into a fresh cache, then one token at a time; in a batch also prompts of different lengths, and rows by themselves
    where the graphs take fewer. `tolerance`: largest relative error that passes, None for that of the package's
    precision; `manifest`: that of a package whose manifest is not written yet; `options`: those of each
    provider, by its name; `told` hears what became of the chain; `answers`: where the known answer is, if not in the
    package. The result is `unverified`,
    with the first difference as its detail, when something differs.
    Raises PackageError, ProviderError, ResourceError, or GenerationError when a run fails.
    """
    answer = _read_known_answer(answers or folder, KNOWN_ANSWER)
    manifest = manifest or read_manifest(folder)
    with load_runner(folder, chain, threads=threads, manifest=manifest, options=options, pins=pins) as runner:
        told(runner.resolutions)
        _check_answer(folder, answer, runner)
        limit = manifest.tolerance if tolerance is None else tolerance
        replaying = _Replay(runner, answer, limit)
        compared = _compare(replaying)
        for record in manifest.switchable:
            if record.known_answer is not None:
                compared += _compare_adapter(folder, replaying, record.name, record.known_answer)
        if tolerance is None and manifest.rounds and _chooses(runner):
            set_aside(compared)
        not_run = tuple(file.file for file in runner.contract.files if file.file not in replaying.ran)
        not_exercised = (*answer.not_exercised, *(f"{file}, whose chunk is longer than the prompt" for file in not_run))
        missed = f"; not exercised: {'; '.join(not_exercised)}" if not_exercised else ""
        missed += _unreached(runner, answer)
        idle = {name for entry in runner.graphs for name in idle_providers(entry.session, entry.model)}
        active = [
            r.provider.ort_name for r in runner.resolutions if r.status == "active" and r.provider.name not in idle
        ]
    provider = ", ".join(active)
    verification = Verification(
        status="verified",
        detail=f"known answer replayed on {provider}: {len(compared)} steps agree{but_for(compared)}{missed}",
        provider=provider,
        reference=answer.reference,
        tolerance=limit,
        proof=manifest.verification.proof,
        near_ties=sum(len(entry.ties) for entry in compared if not entry.again),
        rerouted=sum(len(entry.set_aside) for entry in compared if not entry.again),
        not_run=not_run,
        not_exercised=not_exercised,
        steps=tuple(entry.result() for entry in compared),
    )
    difference = first_difference(verification)
    if difference is None:
        return verification
    return verification.model_copy(update={"status": "unverified", "detail": difference})


def _compare(replaying: _Replay) -> list[Comparison]:
    """Everything that a known answer is compared in."""
    return [
        *_compare_prompt(replaying),
        *_compare_generation(replaying),
        *_compare_rows(replaying),
        *_compare_rows_alone(replaying),
    ]


def _compare_adapter(folder: Path, replaying: _Replay, name: str, file: str) -> list[Comparison]:
    """The same with an adapter switched on, against what the original computes with it."""
    runner = replaying.runner
    answer = _read_known_answer(folder, file)
    _check_answer(folder, answer, runner, file)
    runner.use_adapter(name)
    try:
        compared = _compare(_Replay(runner, answer, replaying.tolerance, replaying.ran))
    finally:
        runner.use_adapter(None)
    for entry in compared:
        entry.step, entry.kind = f"{name}: {entry.step}", f"{name}: {entry.kind}"
    return compared


def _chooses(runner: Runner) -> bool:
    """Whether a graph takes the best of some numbers, as a router does of its experts."""
    return any(node.op_type in CHOOSING for entry in runner.graphs for node in (*entry.model.nodes, *entry.model.inner))


def first_difference(verification: Verification) -> str | None:
    """The first step that is not as the reference has it, as a sentence; None when all agree."""
    limit = verification.tolerance or 0.0
    for entry in verification.steps:
        where = f"first difference in {entry.step}, output {entry.output}"
        if not entry.max_rel_error <= limit:
            return f"{where}: max relative error {entry.max_rel_error:.2e}, allowed {limit:.0e}"
        if not entry.tokens_equal:
            return (
                f"{where}: a different greedy token, although the error {entry.max_rel_error:.2e} is within {limit:.0e}"
            )
    return None


@dataclass(slots=True)
class _Replay:
    """A known answer on the package that it is replayed on."""

    runner: Runner
    answer: KnownAnswer
    tolerance: float
    ran: set[str] = field(default_factory=set)
    """Graph files that made a step."""

    @property
    def rope_length(self) -> int:
        """The length of text whose rotary frequencies the logits after the prompt have; 0 where it is no input."""
        decode = self.runner.loaded("decode").graph
        return 0 if port_by_role(decode, "rope_length") is None else self.answer.length

    @property
    def chunk(self) -> int:
        """Tokens of the chunks that a prompt is read in: a long one is read in five, the last of which is shorter."""
        return max(REPLAY_CHUNK_TOKENS, len(self.answer.prompt) // 5 + 1)

    def run_all(self, request: Request, *, prefill_chunk: int, policy: Policy = prompts_first) -> None:
        """Run the same request in every row of the batch."""
        self.serve_all([request] * self.runner.executor.rows, prefill_chunk=prefill_chunk, policy=policy)

    def serve_all(self, requests: Sequence[Request], *, prefill_chunk: int, policy: Policy = prompts_first) -> None:
        """Run a request per row of the batch, in a cache that is all zero: what the run before left may not be finite.

        Every request listens and takes any logits, so logits that are not finite are a difference, and no error.
        """
        self.runner.cache.clear()
        for step in serve(self.runner.executor, requests, prefill_chunk=prefill_chunk, policy=policy):
            self.ran.add(step.file)


def _compare_prompt(replaying: _Replay) -> Iterator[Comparison]:
    """Read the prompt in as few steps as the package can, and look at every position."""
    runner, answer, tolerance = replaying.runner, replaying.answer, replaying.tolerance
    comparison = Comparison("prefill", _output_name(runner), answer.prefill_logits, tolerance, kind="prefill")
    request = Request(
        answer.prompt.tolist(),
        _forced(answer),
        1,
        listener=lambda position, logits: comparison.compare(position - answer.first, logits),
        listens_from=answer.first,
        any_logits=True,
        rope_length=0 if answer.own_frequencies else replaying.rope_length,
    )
    replaying.run_all(request, prefill_chunk=len(answer.prompt))
    yield comparison


def _compare_generation(replaying: _Replay) -> Iterator[Comparison]:
    """Read the prompt in chunks, then feed the reference's tokens one by one, whatever ours would have been.

    A fully static pair has one chunk size; it begins with a single token, so that a chunk begins elsewhere than at 0.
    """
    runner, answer, tolerance = replaying.runner, replaying.answer, replaying.tolerance
    name, count = _output_name(runner), len(answer.prompt)
    chunked = Comparison("chunked prefill", name, answer.prefill_logits, tolerance, kind="chunked", again=True)
    full = count + len(answer.tokens) >= runner.contract.max_length  # nothing is read after the last token then
    decoded = [
        Comparison(f"decode {index + 1}", name, answer.decode_logits[index : index + 1], tolerance, kind="decode")
        for index in range(len(answer.tokens) - full)
    ]

    def hear(position: int, logits: Logits) -> None:
        if position < count:
            chunked.compare(position - answer.first, logits)
        else:
            decoded[position - count].compare(0, logits)

    request = Request(
        answer.prompt.tolist(),
        _forced(answer),
        len(answer.tokens) + 1,
        listener=hear,
        listens_from=count if answer.own_frequencies else answer.first,
        any_logits=True,
        rope_length=replaying.rope_length,
    )
    static = runner.executor.graphs.chunk is not None
    policy = one_token_first if static else prompts_first
    replaying.run_all(request, prefill_chunk=replaying.chunk, policy=policy)
    yield from decoded if answer.own_frequencies else (chunked, *decoded)


def _compare_rows(replaying: _Replay) -> Iterator[Comparison]:
    """Read prompts of different lengths in the rows of a batch, each a beginning of the reference's text.

    Left out where rotary frequencies depend on the length of the text, as the reference has those of the whole. Where
    prompts have a graph with weights of its own, only prompts are compared: what the reference has after them was
    computed after the whole of its own.
    """
    runner, answer, tolerance = replaying.runner, replaying.answer, replaying.tolerance
    lengths = _row_lengths(runner, answer)
    if len(set(lengths)) < 2 or _why_together(runner):
        return
    sequence = np.concatenate([answer.prompt, answer.tokens])
    reference = np.concatenate([answer.prefill_logits, answer.decode_logits])
    comparison = Comparison("rows of different length", _output_name(runner), reference, tolerance, kind="rows")
    apart = runner.executor.graphs.decode_takes_several

    def heard(length: int) -> Listener:
        def hear(position: int, logits: Logits) -> None:
            if not apart or position < length:
                comparison.compare(position - answer.first, logits)

        return hear

    def known(logits: Logits, history: npt.NDArray[np.int64]) -> int:
        return int(sequence[min(len(history), len(sequence) - 1)])

    replaying.serve_all(
        [
            Request(
                sequence[:length].tolist(),
                known,
                len(answer.tokens),
                listener=heard(length),
                listens_from=answer.first,
                any_logits=True,
            )
            for length in lengths
        ],
        prefill_chunk=max(lengths),
    )
    yield comparison


def _compare_rows_alone(replaying: _Replay) -> Iterator[Comparison]:
    """Read the prompt in each row by itself, in chunks, and go on with fewer rows from step to step."""
    runner, answer = replaying.runner, replaying.answer
    if not runner.executor.graphs.takes_fewer_rows:
        return
    reference = np.concatenate([answer.prefill_logits, answer.decode_logits])
    comparison = Comparison(
        "rows by themselves", _output_name(runner), reference, replaying.tolerance, kind="alone", again=True
    )
    requests = [
        Request(
            answer.prompt.tolist(),
            _forced(answer),
            max(1, len(answer.tokens) - row),
            listener=lambda position, logits: comparison.compare(position - answer.first, logits),
            listens_from=len(answer.prompt) if answer.own_frequencies else answer.first,
            any_logits=True,
            rope_length=replaying.rope_length,
        )
        for row in range(runner.executor.rows)
    ]
    replaying.serve_all(requests, prefill_chunk=replaying.chunk, policy=one_row_first)
    yield comparison


def _row_lengths(runner: Runner, answer: KnownAnswer) -> list[int]:
    """[B]: prompt tokens of each row where rows get prompts of different lengths; a short prompt has not enough."""
    return [max(1, len(answer.prompt) - 3 * row) for row in range(runner.executor.rows)]


def _why_together(runner: Runner) -> str:
    """Why rows of different length cannot be compared; empty where they can."""
    if port_by_role(runner.loaded("decode").graph, "rope_length") is not None:
        return "the rotary frequencies depend on the length of the text"
    return ""


def _forced(answer: KnownAnswer) -> Sampler:
    """Goes on with the reference's tokens, whatever the logits are."""
    count = len(answer.prompt)

    def pick(logits: Logits, history: npt.NDArray[np.int64]) -> int:
        return int(answer.tokens[min(len(history) - count, len(answer.tokens) - 1)])

    return pick


def _unreached(runner: Runner, answer: KnownAnswer) -> str:
    """Why rows of different length were not compared, as the end of a sentence; empty where they were."""
    together = _why_together(runner) if len(set(_row_lengths(runner, answer))) > 1 else ""
    return f"; rows of different length not compared: {together}" if together else ""


def _output_name(runner: Runner) -> str:
    return next(port.name for port in runner.loaded("decode").graph.outputs if port.role == "logits")


def _read_known_answer(folder: Path, name: str) -> KnownAnswer:
    """Read known_answer.safetensors, or that of an adapter.

    Raises PackageError when the package has none or it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = inside(folder, name)
    if not path.is_file():
        raise PackageError(
            f"{folder}: the package has no {name}; export the checkpoint without {spelled('verify', False)}"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return KnownAnswer(
                prompt=file.get_tensor("prompt"),
                tokens=file.get_tensor("tokens"),
                prefill_logits=file.get_tensor("prefill_logits"),
                decode_logits=file.get_tensor("decode_logits"),
                reference=metadata.get("reference", "unknown"),
                own_frequencies=metadata.get("prompt_frequencies") == "own",
                not_exercised=tuple(filter(None, metadata.get("not_exercised", "").split("; "))),
            )
    except (SafetensorError, OSError) as error:
        raise PackageError(f"{path}: damaged ({error})", remedy=FROM_CHECKPOINT) from error


def _check_answer(folder: Path, answer: KnownAnswer, runner: Runner, name: str = KNOWN_ANSWER) -> None:
    """Raise PackageError when the known answer does not belong to this package."""
    count, steps, vocab = len(answer.prompt), len(answer.tokens), runner.contract.vocab_size
    shapes = answer.prefill_logits.shape[1:] == (vocab,) and answer.decode_logits.shape == (steps, vocab)
    if not shapes or not 0 < len(answer.prefill_logits) <= count or count + steps > runner.contract.max_length:
        raise PackageError(
            f"{folder / name}: does not belong to this package, its shapes do not fit", remedy=FROM_CHECKPOINT
        )
