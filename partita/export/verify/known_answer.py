"""The known answer: outputs of the source model for a fixed prompt, stored in the package.

The source model runs in float32 with transformers' default attention for its type. Tokens are generated greedily with
transformers' cache; their logits come from one forward pass over the whole sequence. Only for a separate prefill graph,
the logits after the prompt are computed with the cache. The sequence exceeds every window, attention chunk and original
context of up to `CROSSED_TOKENS` tokens. Any execution provider can replay the answer without torch.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import transformers

from partita.errors import PartitaError, ResourceError, UnsupportedModelError
from partita.export.checkpoint import auto_class, of_text
from partita.export.checkpoint.config_values import read_config
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.weight_files import OpenFiles, read_json
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.trace.hooks import MaskFunction, first_hidden, mask_functions
from partita.export.trace.replacements import is_table, static_up_to
from partita.export.trace.state import CACHE_ARGUMENTS, cache_argument, text_config
from partita.export.weights import memory_map
from partita.export.weights.origins import TensorInfo
from partita.observations.text_format import human_bytes
from partita.package.folder import Manifest
from partita.package.known_answer import KnownAnswer
from partita.process import free_bytes, give_back
from partita.signals import received_signal
from partita.untrusted_files import load_full

Result = TypeVar("Result")
Prefilled = tuple[torch.Tensor, dict[str, Any]]
"""Logits [K, vocab], and the cache as an argument by name."""
DECODE_STEPS = 8
PROMPT_TOKENS = 24
CROSSED_TOKENS = 1024
"""The longest window, attention chunk or original context that the sequence exceeds by default."""
TOKENS_PAST = 8
"""Prompt tokens after the first that does not see the beginning."""
PROMPT_TEXT = (
    "Return the number of items in the list. If the list is empty, raise ValueError: the caller has to make sure "
    "that there is at least one item to count."
)
MEMORY_MARGIN = 1.15
"""Activations and loading, as a factor on the size of the float32 weights."""
CLEARED_PARAMETERS = 4 << 20
"""Source models with fewer parameters are smaller than the other memory of an export."""
PACKED_COPIES = 3
"""Peak memory of loading a session, as a multiple of the size of quantised weights."""


def check_memory(
    parameters: int,
    cache_bytes: int,
    beside_bytes: int = 0,
    *,
    use: str = "to verify the package",
    needed: bool = False,
) -> None:
    """Raise ResourceError when the source model, or the cache of the replay, does not fit into memory.

    `parameters`: those in memory (`memory_map.resident_parameters`), in float32. The cache is not allocated at the same
    time; `beside_bytes` are. `use`: the purpose, for the message; `needed`: the package cannot be written without.
    """
    later = "" if needed else ", or export with `verify=False` and verify on a machine with more memory"
    takes, model = int(parameters * 4 * MEMORY_MARGIN) + beside_bytes, f"the source model needs about {{}} {use}"
    _check_free(takes, model, f"; free memory, or make space for its float32 weights on the disk of `out`{later}")
    smaller = "; export with a smaller `max_length` or `batch_size`" + ("" if needed else ", or with `verify=False`")
    _check_free(cache_bytes, "the cache takes {}", smaller)


def check_run_memory(manifest: Manifest) -> None:
    """Raise ResourceError when running a package does not fit into memory, with the copies of the CPU provider."""
    graph = manifest.graph
    weights = manifest.source.parameters * 4 if manifest.packed is None else PACKED_COPIES * graph.weight_bytes
    _check_free(weights + graph.cache_bytes, "running the package needs about {} of memory")


def _check_free(needed: int, what: str, remedy: str = "") -> None:
    """Raise ResourceError when less memory is free. `what`: the message, with a place for the size."""
    if needed > (free := free_bytes()):
        raise ResourceError(f"{what.format(human_bytes(needed))}, but {human_bytes(int(free))} are free{remedy}")


def clear_for(checkpoint: Checkpoint) -> None:
    """Release unused memory where the model of `checkpoint` is large; each attempt takes a quarter of a second."""
    if sum(math.prod(info.shape) for info in checkpoint.tensors.values()) >= CLEARED_PARAMETERS:
        give_back()


READING = threading.Lock()
"""transformers loads in several threads, and `OpenFiles` is for one."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """A lazy tensor of the checkpoint, which transformers reads with `tensor[...]`."""

    info: TensorInfo
    files: OpenFiles

    def __getitem__(self, index: Any) -> torch.Tensor:
        with READING:
            whole = self.files.read(self.info, tuple((0, size) for size in self.info.shape))
        taken = whole if index is Ellipsis else whole[index]
        return taken.contiguous()  # parameters keep the strides of their input


def load(checkpoint: Checkpoint, scratch: Path | None = None) -> Any:
    """The source model: float32, dequantised, adapters merged; `scratch`: on disk. Raises UnsupportedModelError."""
    clear_for(checkpoint)  # earlier data, sessions included
    config = of_text(read_config(checkpoint.folder, read_json(checkpoint.folder / "config.json")))
    with (
        quiet(),
        translate_errors("loading the source model"),
        memory_map.spilling(checkpoint.tensors, scratch),
        OpenFiles() as files,
    ):
        with torch.device("meta"):
            kind = type(auto_class(config).from_config(config))
        if isinstance(text := config.get_text_config(decoder=True), kind.config_class):
            config = text  # a class of the text part, as of llama4
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: _Unread(info, files) for name, info in checkpoint.tensors.items()},
            dtype=torch.float32,
            attn_implementation=None,  # the default of its type
            output_loading_info=True,
        )
    if info.get("missing_keys"):
        raise UnsupportedModelError(
            f"{checkpoint.location} has no weights for {sorted(info['missing_keys'])[:5]}; "
            "download the checkpoint again"
        )
    memory_map.watch(model)
    return model


def compute(
    checkpoint: Checkpoint,
    vocab_size: int,
    max_length: int,
    tokens: int = PROMPT_TOKENS,
    *,
    crossed: int = CROSSED_TOKENS,
    first: Callable[[Any], object] | None = None,
    prepare: Callable[[Any], object] | None = None,
    afterwards: Callable[[Any], object] | None = None,
    weights: str = "",
    scratch: Path | None = None,
) -> KnownAnswer:
    """Run the source model on a fixed prompt and `DECODE_STEPS` more tokens (fewer where `max_length` is short).

    `tokens`: prompt length, as far as the cache allows. It grows to exceed windows, attention chunks and original
    contexts of up to `crossed` tokens; then fixed tokens follow, else greedy ones. `first` gets the loaded model, to
    run it; `prepare` gets it after that, to replace its weights; `afterwards` gets it after the prompt, to replace them
    again; `weights` describes them, as the end of a sentence. `scratch`: a folder for the parameters of a large model.
    Raises UnsupportedModelError when transformers cannot load or run the checkpoint.
    """
    steps = min(DECODE_STEPS, max(1, max_length // 4))
    count = keep = max(1, min(tokens, max_length - steps))
    sequence = torch.from_numpy(_prompt(checkpoint, vocab_size, count))[None]
    model = load(checkpoint, scratch)
    if first is not None:
        first(model)
    if prepare is not None:
        prepare(model)
        memory_map.let_go(model)
    with quiet(), torch.no_grad(), translate_errors("running the source model"):
        prefilled, reaches = _read_prompt(model, sequence, max_length)
        context = min(static_up_to(model) or max_length, max_length)  # where rotary frequencies change
        past = [reach for reach in reaches if count + steps <= reach <= crossed]
        count = max([count, *(min(reach + TOKENS_PAST, max_length - steps) for reach in past)])
        if context < max_length and context <= crossed and (count <= context or not past):
            count = min(context, max_length - steps)  # the later tokens exceed the context
        own, keep = context < max_length and count <= context < count + steps, min(keep, count)
        if count != sequence.shape[1]:
            sequence = torch.from_numpy(_prompt(checkpoint, vocab_size, count + steps))[None]
        alone = None
        if own:
            last_logits(model, sequence[:, :1], 1)  # resets dynamic frequencies
            alone = last_logits(model, sequence[:, :count], keep)
        if afterwards is not None:
            read = _prefill(model, sequence[:, :count], keep)
            afterwards(model)
            sequence, logits = _continue(model, sequence[:, :count], steps, *read)
        else:
            if sequence.shape[1] < count + steps:
                sequence = _with_greedy_tokens(model, sequence, steps, prefilled)
            logits = last_logits(model, sequence, keep + steps)
        name = text_config(model)._attn_implementation
    del model
    clear_for(checkpoint)
    missed = [name for reach, name in sorted(reaches.items()) if reach >= count + steps]
    if context < max_length and not own:
        missed.append(f"rotary frequencies {'beyond' if context >= count else 'up to'} {context} tokens")
    return KnownAnswer(
        prompt=sequence[0, :count].numpy(),
        tokens=sequence[0, count:].numpy(),
        prefill_logits=np.ascontiguousarray((logits[:keep] if alone is None else alone).numpy()),
        decode_logits=np.ascontiguousarray(logits[keep:].numpy()),
        reference=f"transformers {transformers.__version__}, torch {torch.__version__}: {name} attention, float32"
        + weights,
        own_frequencies=own,
        not_exercised=tuple(missed),
    )


def last_logits(model: Any, sequence: torch.Tensor, count: int) -> torch.Tensor:
    """Float32 logits [count, V] of the last tokens of `sequence` [1, T], in one forward pass."""
    logits: torch.Tensor = _read(model, sequence, count, use_cache=False).logits[0, -count:].float()
    return logits


def _try(run: Callable[[], Result]) -> Result | None:
    """The result of `run`; None where it fails: many models cannot run with a cache, in any way."""
    try:
        return run()
    except Exception as error:
        if (signalled := received_signal()) is not None:
            raise signalled from error
        return None


def _with_greedy_tokens(model: Any, sequence: torch.Tensor, steps: int, prefilled: Prefilled | None) -> torch.Tensor:
    """`sequence` [1, T] followed by `steps` greedy tokens."""
    found = prefilled and _try(partial(_continue, model, sequence, steps, *prefilled))
    if found is not None:
        return found[0]
    for _ in range(steps):
        last = last_logits(model, sequence, 1)
        sequence = torch.cat([sequence, last[-1].argmax().reshape(1, 1)], dim=1)
    return sequence


def _read(model: Any, sequence: torch.Tensor, count: int, *, use_cache: bool) -> Any:
    """The output of a model, limited to the last `count` logits where it supports that."""
    known = inspect.signature(model.forward).parameters
    return model(
        input_ids=sequence, use_cache=use_cache, **{"logits_to_keep": count} if "logits_to_keep" in known else {}
    )


def _reaches(model: Any, masks: Iterable[MaskFunction], max_length: int) -> dict[int, str]:
    """Number of tokens -> name, for the windows and chunks of the masks that a model created or has as buffers."""

    def looked_up(table: torch.Tensor, _batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return table[0, 0, query, key]

    tables: list[MaskFunction] = [partial(looked_up, table) for table in model.buffers() if is_table(table)]
    found = [first_hidden(mask, max_length - 1) for mask in (*masks, *tables)]  # the last token is never an input
    names = {True: "attention chunk", False: "sliding window"}
    return {tokens: f"{names[chunk]} of {tokens} tokens" for tokens, chunk in filter(None, found)}


def _read_prompt(model: Any, sequence: torch.Tensor, max_length: int) -> tuple[Prefilled | None, dict[int, str]]:
    """The prompt read with a cache, if the model can, and the windows and chunks of its masks; see `_reaches`."""
    with mask_functions() as masks:
        prefilled = _try(partial(_prefill, model, sequence, 1))
        if prefilled is None:
            last_logits(model, sequence, 1)
    return prefilled, _reaches(model, masks, max_length)


def _prefill(model: Any, sequence: torch.Tensor, keep: int) -> Prefilled:
    """The last `keep` logits of `sequence` [1, T], and the cache as an argument by name."""
    name = cache_argument(model) or CACHE_ARGUMENTS[0]
    result = _read(model, sequence, keep, use_cache=True)
    if (cache := getattr(result, name)) is None:
        raise UnsupportedModelError(f"{type(model).__name__} does not return a cache")
    return result.logits[0, -keep:], {name: cache}


def _continue(
    model: Any, sequence: torch.Tensor, steps: int, logits: torch.Tensor, cache: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sequence` [1, T] with `steps` more greedy tokens, and the logits before and of these."""
    parts = [logits]
    for _ in range(steps):
        token = parts[-1][-1].argmax().reshape(1, 1)
        sequence = torch.cat([sequence, token], dim=1)
        parts.append(model(input_ids=token, **cache, use_cache=True).logits[0])
    return sequence, torch.cat(parts).float()


def _prompt(checkpoint: Checkpoint, vocab_size: int, length: int) -> npt.NDArray[np.int64]:
    """A fixed text in the checkpoint's tokens; without a tokenizer, fixed ids spread over the vocabulary."""
    ids: list[int] = []
    if checkpoint.tokenizes:
        # The tokenizer probe reports loading errors.
        with suppress(PartitaError), quiet(), translate_errors("loading the tokenizer"):
            tokenizer, _ = load_full(checkpoint.folder)
            ids = [i for i in tokenizer(PROMPT_TEXT)["input_ids"] if 0 <= i < vocab_size][:length]
    if len(ids) < length:
        spread = np.random.Generator(np.random.PCG64(0)).integers(0, vocab_size, length - len(ids))
        ids = [*ids, *spread.tolist()]
    return np.array(ids, np.int64)
