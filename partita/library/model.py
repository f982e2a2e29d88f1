"""A loaded package in the Python API."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from partita.errors import GenerationError, ParityError, ReportError, UsageError
from partita.files import reserve
from partita.library.api import LOGGER, method_from_fields, public
from partita.library.engine.base import Engine, PrefixSaved, ReportRequest
from partita.library.engine.jobs import run_job
from partita.library.engine.requests import (
    Work,
    adapters_of,
    check_speculation,
    check_work,
    complete_samplings,
    conversations,
    prompt_rows,
    stop_conditions,
    with_seeds,
)
from partita.library.generation import Generation, Progress, sampling_options
from partita.library.report import Report
from partita.observations.records import ChainEntry
from partita.options.fields import check_value
from partita.options.generation import (
    BatchOptions,
    ChatOptions,
    GenerateOptions,
    GenerationOptions,
    Prompts,
    RequestOptions,
    Sampling,
)
from partita.options.inspection import BenchOptions
from partita.options.placement import PlaceOptions
from partita.package.folder import check_files
from partita.package.records import Evaluation, Verification
from partita.runtime.generate.checks import BEGIN_WITH_ONE, check_adapter, check_prompt
from partita.runtime.generate.prefix_file import (
    PrefixContent,
    ids_after,
    prompt_after,
    read_content,
    system_prefix,
    text_prefix,
)
from partita.runtime.generate.text.tokens import Text, load_text


class VerificationError(ParityError):
    """The package's logits differ from those of its model. `verification` has the error of every step."""

    def __init__(self, message: str, verification: Verification) -> None:
        super().__init__(message)
        self.verification = verification


class Model:
    """A loaded package: generates, chats, verifies itself, and reports where it ran.

    Calls may come from any thread. Prompts of all calls share the batch, first come, first served. Close it, or use it
    as a context manager. Warnings go to the logger `partita`.
    """

    def __init__(
        self, engine: Engine, *, text: Text | None = None, with_text: bool = True, text_seconds: float = 0.0
    ) -> None:
        """`text`: its tokenizer, loaded in `text_seconds`; None: loaded at first use. `with_text`: False for token ids
        only."""
        self.folder, self.manifest = engine.folder, engine.manifest
        self.engine, self._with_text = engine, with_text
        self._text, self.text_seconds = text, text_seconds
        self._last: Progress | None = None
        """The last generation; None after requests of `scheduler` or a saved prefix."""
        self._beginning = threading.Lock()
        """Held while a batch is opened and its requests are queued."""

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def chain(self) -> tuple[ChainEntry, ...]:
        """State of each requested provider: whether it is used, and if not, why."""
        return self.engine.opened.chain

    @property
    def providers(self) -> tuple[str, ...]:
        """ONNX Runtime's names of the providers that nodes may run on, in order."""
        return tuple(entry.provider for entry in self.chain if entry.status == "active")

    @property
    def batch_size(self) -> int:
        """Number of prompts that run at once, fixed at export."""
        return self.manifest.graph.batch_size

    @property
    def max_length(self) -> int:
        """Maximum of prompt plus output tokens."""
        return self.manifest.graph.max_length

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; token ids are 0 to `vocab_size` - 1."""
        return self.manifest.graph.vocab_size

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters for `generate`."""
        return tuple(record.name for record in self.manifest.switchable)

    @property
    def load_seconds(self) -> float:
        """Seconds that opening the sessions took."""
        return self.engine.opened.load_seconds

    @public
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens. Raises PackageError without a tokenizer."""
        return self._tokenizer().encode(text, fits=False)

    @public
    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids without special tokens. Raises ArgumentError for an invalid token id."""
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"tokens has {wrong}; the vocabulary has ids 0 to {self.vocab_size - 1}")
        return self._tokenizer().decode(tokens)

    # --- what it does -------------------------------------------------------------------------------------------------

    @method_from_fields(GenerateOptions)
    def generate(self, options: GenerateOptions) -> Generation:
        """Generate after one prompt or several, at most `batch_size` at once: an iterator of steps.

        `prompts`: texts or token ids. The default is greedy decoding. `sampling`: one set of options for all prompts or
        one for each, or "checkpoint" for the checkpoint's settings; options by name apply where it sets none. `seed`:
        of the first prompt; prompt i (from 0) has seed + i, for every batch size. `stop`: stop strings.
        `stop_token_ids`: None for those of the package. `prefill_chunk`: prompt tokens per run. `adapter`: the name of
        an adapter of the package, or a list with a name or None for each prompt. `speculate`: "ngram" for speculative
        decoding by n-gram lookup, `draft` for speculative decoding with a package of the same tokenizer; the output
        does not change. `prefix`: a file of `save_prefix` that the prompts continue. Raises ArgumentError,
        GenerationError for invalid prompts, PackageError without a tokenizer for text; the iterator raises
        GenerationError, ProviderError and ResourceError.
        """
        text, ids = self.encode_prompts(
            options.prompts, None if options.prefix is None else read_content(Path(options.prefix))
        )
        return self._begin(text, ids, options)

    @method_from_fields(ChatOptions)
    def chat(self, options: ChatOptions) -> Generation:
        """Generate the assistant's next message: `generate` with the package's chat template.

        `messages`: dicts of role and content, both strings; a single string is the user's message. A list of such lists
        has a conversation for each row. `prefix`: a file of `save_prefix` whose system message the conversations begin
        with; include that message in `messages`. Raises ArgumentError for invalid messages, or without a chat template.
        """
        tokenizer = self._tokenizer()
        ids = [tuple(tokenizer.encode_messages(each)) for each in conversations(options.messages)]
        return self._begin(tokenizer, ids, options)

    @property
    def tokenizer(self) -> Text | None:
        """The tokenizer of the package; None without one. Raises PackageError if it cannot be loaded."""
        return self._tokenizer() if self._with_text and self.manifest.tokenizer != "none" else None

    @method_from_fields(BatchOptions)
    def scheduler(self, options: BatchOptions) -> Engine:
        """Open the batch for requests of `partita.request`; see `Engine` for `submit` and `step`.

        The arguments are those of `generate`, except that `prefix` adds nothing to a prompt: it is reused by prompts
        that begin with its tokens. Raises ArgumentError; GenerationError for a prefix of another package, and while
        requests with other options are running.
        """
        engine = self._open()
        check_adapter(self.folder, self.manifest, options.adapter)
        batch = self._batch(options, options.adapter)
        if self.tokenizer is not None:
            engine.use_text(self.tokenizer)
        with self._beginning:
            engine.open(batch)
            self._last = None
        return engine

    @public
    def save_prefix(
        self,
        file: str | os.PathLike[str],
        text: str | Sequence[int] | None = None,
        *,
        system: str | None = None,
        prefill_chunk: int | None = None,
        adapter: str | None = None,
    ) -> PrefixSaved:
        """Prefill a text, token ids, or a system message, and save the cache state to a file for `prefix` of other
        calls.

        No request may be running. Raises ArgumentError unless exactly one is given, GenerationError if it cannot be
        computed or saved, ReportError when the file cannot be written.
        """
        engine = self._open()
        if (text is None) == (system is None):
            raise UsageError("a prefix contains one text: set text or system")
        check_value(BenchOptions, "prefill_chunk", prefill_chunk)
        check_adapter(self.folder, self.manifest, adapter)
        if system is not None:
            content = system_prefix(self._tokenizer(), system)
        elif isinstance(text, str):
            content = text_prefix(self._tokenizer(), text)
        else:
            content = PrefixContent(tuple(text or ()))
        path = Path(file).absolute()
        reserve(path, "prefix", (self.folder,), option="file")
        with self._beginning:
            self._last = None
            return engine.save_prefix(replace(content, adapter=adapter), str(path), prefill_chunk)

    @public
    def verify(self, reference: str | os.PathLike[str] | None = None) -> Verification:
        """Check the package's hashes and replay its reference logits on this chain, in separate sessions.

        `reference`: for a foreign folder, the checkpoint to compare with (a folder or a hub id); packages contain their
        reference logits. Quantised weights are compared without a tolerance. Raises VerificationError, a ParityError,
        when the logits differ.
        """
        given = None if reference is None else os.fspath(reference)
        if given is not None and os.path.exists(given):  # noqa: PTH110 - it may be any text
            given = os.path.abspath(given)  # noqa: PTH100 - the worker process may be in another folder
        found: Verification = self._separately("verify_with", given)
        if found.status != "verified" and found.tolerance is not None:
            raise VerificationError(
                f"{self.folder}: its logits differ from the source model's on {found.provider}: {found.detail}", found
            )
        return found

    @public
    def evaluate(self) -> Evaluation:
        """Measure the quality of the package on its evaluation text, on this chain, in a separate session.

        Raises PackageError without a text, e.g. for fp32 packages, which `verify` covers.
        """
        found: Evaluation = self._separately("evaluate")
        return found

    def _separately(self, function: str, *arguments: Any) -> Any:
        """Check the package's hashes, and call a function of `library.verifying` on its chain."""
        engine = self._open()
        check_files(self.folder, self.manifest, hashes=True)
        return run_job(
            f"partita.library.verifying:{function}",
            *(self.folder, self.manifest, engine.target, *arguments),
            chain=engine.target.chain,
            in_worker=engine.in_worker,
        )

    @public
    def report(self, *, probe_seconds: float = 120.0) -> Report:
        """The partition report of the last generation, or of the requests since `scheduler`, finished or not.

        If prompts of several calls shared the batch, it covers all of them. `probe_seconds`: time limit for experiments
        on nodes that fell back; 0: no new ones. Raises ReportError when nothing was generated, and KeyboardInterrupt
        when Ctrl-C ended the experiments.
        """
        check_value(PlaceOptions, "probe_seconds", probe_seconds)
        last = self._last
        if last is None:
            request = ReportRequest("stop", complete=False, probe_seconds=probe_seconds)
        elif not last.steps:
            raise ReportError("nothing to report: nothing has been generated yet; call generate first, or place")
        else:
            request = self.report_request(last, probe_seconds)
        report = self._open().report(request)
        if report.interruptions:
            raise KeyboardInterrupt
        return Report.of(report)

    def report_request(self, last: Progress, probe_seconds: float) -> ReportRequest:
        """Report fields of a generation besides the facts of the run."""
        reason = last.finish_reason
        return ReportRequest(
            finish_reason=reason,
            finish_detail="" if last.error is None else str(last.error),
            complete=reason not in (None, "error", "interrupted"),
            tokenizer_load_seconds=self.text_seconds,
            options=sampling_options(last.samplings),
            probe_seconds=probe_seconds,
        )

    def close(self) -> None:
        """End all requests and free the sessions, or end the worker process. May be called repeatedly."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.engine.closed else ", ".join(self.providers)
        return f"<partita.Model {self.folder} on {state}>"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> Engine:
        self.engine.check_open()
        return self.engine

    def _batch(self, given: BatchOptions, adapter: str | None) -> BatchOptions:
        """The checked options with absolute paths, because a worker process may be in another folder."""
        check_speculation(self.folder, self.manifest, given)
        return BatchOptions(
            speculate=given.speculate,
            draft=None if given.draft is None else Path(given.draft).absolute(),
            prefill_chunk=given.prefill_chunk,
            adapter=adapter,
            prefix=None if given.prefix is None else Path(given.prefix).absolute(),
        )

    def _tokenizer(self) -> Text:
        if self._text is None:
            began = time.perf_counter()
            self._text = load_text(self.folder, self.manifest.tokenizer, self.max_length)
            self.text_seconds = time.perf_counter() - began
        return self._text

    def encode_prompts(
        self, prompts: Prompts, content: PrefixContent | None
    ) -> tuple[Text | None, list[tuple[int, ...]]]:
        """The tokenizer, if there is one or text needs it, and token ids of each row, after a prefix if any."""
        rows = prompt_rows(prompts)
        tokenizer = self._tokenizer() if any(isinstance(row, str) for row in rows) else self.tokenizer
        ids = []
        for row in rows:
            if isinstance(row, str):
                if not row and content is None:
                    raise GenerationError("the prompt is empty; pass text to continue")
                assert tokenizer is not None
                ids.append(tuple(tokenizer.encode(row)) if content is None else prompt_after(content, row, tokenizer))
            else:
                ids.append(ids_after(content, row))
        return tokenizer, ids

    def _begin(self, tokenizer: Text | None, ids: Sequence[tuple[int, ...]], given: GenerationOptions) -> Generation:
        engine = self._open()
        adapters = adapters_of(given.adapter, len(ids))
        common = adapters[0] if len(set(adapters)) == 1 else None
        batch = self._batch(given, common)
        if given.prefix is not None and len(set(adapters)) > 1:
            raise UsageError(
                "the prefix was saved with one adapter or none, but the prompts use several; use its adapter for all"
            )
        texts, tokens = stop_conditions(
            self.folder, given.stop, given.stop_token_ids, self.vocab_size, has_text=tokenizer is not None
        )
        samplings = complete_samplings(Sampling(**given.figures()), given.sampling, len(ids), self.folder)
        works = [
            Work(prompt, one, texts, tuple(sorted(tokens)), adapter=None if common == name else name)
            for prompt, one, name in zip(ids, with_seeds(samplings, len(ids)), adapters, strict=True)
        ]
        if not works:
            raise GenerationError("no prompt was given", remedy=BEGIN_WITH_ONE)
        for number, work in enumerate(works, start=1):
            check_work(work, self.folder, self.manifest, f"prompt {number}" if len(works) > 1 else "the prompt")
        if tokenizer is not None:
            engine.use_text(tokenizer)
        with self._beginning:
            chunk = engine.open(batch)
            generation = Generation(engine, works, chunk, samplings=samplings, speculation=batch)
            self._last = generation.progress
        for line in chunk_ignored(given.prefill_chunk, chunk):
            LOGGER.warning(line)
        return generation


@method_from_fields(RequestOptions)
def request(model: Model, given: RequestOptions) -> Work:
    """One request for `submit` of `model.scheduler()`. Nothing is run.

    The arguments are those of `Model.generate`, for one prompt. `logprobs`: return log-probabilities of each new token
    and of this many most likely tokens; `adapter`: None for the scheduler's. Raises ArgumentError, GenerationError for
    an empty prompt, PackageError without a tokenizer for text.
    """
    full = complete_samplings(Sampling(**given.figures()), given.sampling, 1, model.folder)[0]
    text, prompts = model.encode_prompts(given.prompt, None)
    if len(prompts) != 1:
        raise UsageError(f"`prompt` has {len(prompts)} prompts; make one request for each")
    check_prompt(prompts[0], model.manifest.graph, "the prompt", answered=True)
    texts, ids = stop_conditions(
        model.folder, given.stop, given.stop_token_ids, model.vocab_size, has_text=text is not None
    )
    return Work(prompts[0], full, texts, tuple(sorted(ids)), given.logprobs, given.adapter)


def chunk_ignored(requested: int | None, chunk: int) -> tuple[str, ...]:
    """A note if the package does not support the requested prefill chunk. `chunk`: the supported one."""
    if requested is None or requested == chunk:
        return ()
    return (f"`prefill_chunk={requested}` is ignored: this package prefills {chunk} prompt tokens per run",)
