"""The known answer: what the original model computes for a fixed prompt, stored in the package.

The source model runs in float32 with the attention implementation that transformers uses by default for its type.
Greedy tokens are generated over transformers' cache; their logits come from one pass over the whole sequence without a
cache. Only where prompts have a graph with weights of its own, the logits after the prompt are computed over that
cache. The text is longer than every window, attention chunk and original context of up to `CROSSED_TOKENS` tokens. Any
execution provider can replay the answer later without torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
import transformers
from safetensors.numpy import save as serialised
from transformers import modeling_utils

from partita.errors import PartitaError, ResourceError, UnsupportedModelError
from partita.export.checkpoint import dequantised
from partita.export.checkpoint.config_values import read_config
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.original import auto_class, of_text
from partita.export.checkpoint.weight_files import read_json
from partita.export.trace.calling import CACHE_ARGUMENTS, cache_argument
from partita.export.trace.causal_buffers import is_table
from partita.export.trace.fake_model import quiet, translated
from partita.export.trace.hooks import MaskFunction, first_hidden, mask_functions
from partita.export.trace.rope import static_up_to
from partita.export.trace.state import text_config
from partita.export.weights import spilled
from partita.observations.text_format import human_bytes
from partita.package.folder import KNOWN_ANSWER, Manifest
from partita.process import address_space_left, give_back
from partita.signals import received
from partita.tokenizer_limits import load_full

SCHEMA = "partita.known_answer/1"
DECODE_STEPS = 8
PROMPT_TOKENS = 24
CROSSED_TOKENS = 1024
"""The longest window, attention chunk or original context that the text exceeds by default."""
TOKENS_PAST = 8
"""Tokens of the prompt after the first that does not see the beginning."""
DIFFERENT = 1e-3
"""Relative difference of two attention implementations; rounding of float32 makes 1e-6 to 1e-4."""
PROMPT_TEXT = (
    "Return the number of items in the list. If the list is empty, raise ValueError: the caller has to make sure "
    "that there is "
    "at least one item to count."
)
MEMORY_MARGIN = 1.15
"""Activations and the loader's own needs, as a factor on the float32 weights."""
CLEARED_PARAMETERS = 4 << 20
"""The original of fewer is smaller than what else an export holds."""
PACKED_COPIES = 3
"""What a session takes at most while it is opened, as a multiple of packed weights: the file, and what it makes of it.
"""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """prompt [P] int64; tokens [D] int64; prefill_logits [K, V] float32 of the prompt's last K tokens; decode_logits
    [D, V] float32.
    """

    prompt: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    prefill_logits: npt.NDArray[np.float32]
    decode_logits: npt.NDArray[np.float32]
    reference: str
    own_frequencies: bool = False
    """The prompt's logits have the rotary frequencies of a text of P tokens, decode_logits those of one of P + D."""
    not_exercised: tuple[str, ...] = ()
    """Windows, attention chunks and rotary frequencies that the text does not reach."""
    caution: str = ""
    """How far transformers' eager attention is from the reference; empty where they agree."""


def check_memory(
    parameters: int,
    cache_bytes: int,
    beside_bytes: int = 0,
    *,
    use: str = "for its known answer",
    needed: bool = False,
) -> None:
    """Raise ResourceError when the original model, or the cache of the replay, will not fit into memory.

    `parameters` are those that it has in memory (`spilled.resident_parameters`), in float32; the cache is not there at
    the same time, and `beside_bytes` are. `use`: what it is there for; `needed`: the package is not written without.
    """
    free = free_bytes()
    takes = int(parameters * 4 * MEMORY_MARGIN) + beside_bytes
    without = "`verify=False`"
    if takes > free:
        otherwise = "" if needed else f", or export with {without} and verify on a machine with more memory"
        raise ResourceError(
            f"the original model needs about {human_bytes(takes)} {use}, and {human_bytes(int(free))} are free; free "
            f"more, or have room for its weights in float32 on the disk of `out`{otherwise}"
        )
    if cache_bytes > free:
        otherwise = "" if needed else f", or with {without}"
        raise ResourceError(
            f"the cache takes {human_bytes(cache_bytes)} and {human_bytes(int(free))} are free; export with a smaller "
            f"`max_length` or `batch_size`{otherwise}"
        )


def check_run_memory(manifest: Manifest) -> None:
    """Raise ResourceError when running a package will not fit into memory.

    The CPU provider computes in float32 where it has no narrower kernel, and then has a second copy of the weights;
    integers it packs anew.
    """
    graph = manifest.graph
    weights = manifest.source.parameters * 4 if manifest.packed is None else PACKED_COPIES * graph.weight_bytes
    free, needed = free_bytes(), weights + graph.cache_bytes
    if needed > free:
        raise ResourceError(f"running it takes about {human_bytes(needed)} and {human_bytes(int(free))} are free")


def free_bytes() -> float:
    """Memory that can be had, in this container where there is one, within the limit of this process (ulimit -v)."""
    return min(psutil.virtual_memory().available, _cgroup_bytes_left(), address_space_left())


def _cgroup_bytes_left() -> float:
    """What a container's memory limit leaves (Linux cgroup v2); infinite without a limit.

    Cached files count as used, the weights among them that were written a moment ago, and are given up when needed.
    """
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return float("inf")
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return int(limit) - int((root / "memory.current").read_text()) + cached
    except (OSError, ValueError):
        return float("inf")


def clear_for(checkpoint: Checkpoint) -> None:
    """Give memory back that nothing uses, where the model of `checkpoint` is large enough to need it: to look for it
    takes a quarter of a second each time.
    """
    if sum(math.prod(info.shape) for info in checkpoint.tensors.values()) >= CLEARED_PARAMETERS:
        give_back()


def load(checkpoint: Checkpoint, scratch: Path | None = None) -> Any:
    """The original model, in float32 with the default attention of its type.

    Raises UnsupportedModelError when transformers cannot load it.

    Of a quantised checkpoint it is the model of the numbers that its weights stand for, and with a merged adapter that
    of the merged weights. `scratch`: a folder on a disk, where a large one keeps its parameters while it is there.
    """
    clear_for(checkpoint)  # of what was done before, sessions too, which is most of what an export holds beside it
    config = of_text(read_config(checkpoint.folder, read_json(checkpoint.folder / "config.json")))
    with (
        quiet(),
        translated("loading the original model"),
        _read_and_not_mapped(),
        spilled.spilling(checkpoint.tensors, scratch),
    ):
        if any(info.decoder is not None for info in checkpoint.tensors.values()):
            loaded = dequantised.load(checkpoint, config)
        else:
            loaded = auto_class(checkpoint.config).from_pretrained(
                str(checkpoint.folder),
                config=config,
                dtype=torch.float32,
                attn_implementation=None,  # the default of its type
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    model, info = loaded
    if info.get("missing_keys"):
        raise UnsupportedModelError(
            f"transformers finds no weights for {sorted(info['missing_keys'])[:5]} in {checkpoint.where}"
        )
    spilled.watch(model)
    return model


@contextmanager
def _read_and_not_mapped() -> Iterator[None]:
    """Have transformers read weights one by one, as it does on Windows, for the length of a `with` block.

    It maps their files elsewhere, and what has been read of a mapped file is memory of this process until the last
    weight is loaded: half as much again as the model in float32, for a checkpoint of 16 bits.
    """
    module: Any = modeling_utils
    opener = getattr(module, "safe_open", None)
    if opener is None:
        yield
        return

    def reading(*args: Any, **kwargs: Any) -> Any:
        try:
            return opener(*args, **{**kwargs, "backend": "pread"})
        except TypeError:  # of a safetensors before 0.8
            return opener(*args, **kwargs)

    module.safe_open = reading
    try:
        yield
    finally:
        module.safe_open = opener


def compute(
    checkpoint: Checkpoint,
    vocab_size: int,
    max_length: int,
    tokens: int = PROMPT_TOKENS,
    *,
    crossed: int = CROSSED_TOKENS,
    prepare: Callable[[Any], object] | None = None,
    afterwards: Callable[[Any], object] | None = None,
    weights: str = "",
    scratch: Path | None = None,
) -> KnownAnswer:
    """Run the original model on a fixed prompt and `DECODE_STEPS` tokens more (fewer when `max_length` has no room).

    `tokens`: how long the prompt is to be, where the cache has room for it. It is longer where that crosses a window,
    an attention chunk or an original context of up to `crossed` tokens; then fixed tokens follow it, else greedy ones.
    `prepare` is given the loaded model, to put rounded weights into it; `afterwards`, once it has read the prompt, to
    put others into it; `weights` says which, as the end of a sentence. `scratch`: where a large model keeps its
    parameters.
    Raises UnsupportedModelError when transformers cannot load or run the checkpoint.
    """
    steps = min(DECODE_STEPS, max(1, max_length // 4))
    count = keep = max(1, min(tokens, max_length - steps))
    sequence = torch.from_numpy(_prompt(checkpoint, vocab_size, count))[None]
    model = load(checkpoint, scratch)
    if prepare is not None:
        prepare(model)
        spilled.let_go(model)
    with quiet(), torch.no_grad(), translated("running the original model"):
        with mask_functions() as masks:
            last = last_logits(model, sequence, 1)
        caution = _unlike_eager(model, sequence, last)
        reaches = _reaches(model, masks, max_length)
        context = min(static_up_to(model) or max_length, max_length)  # where rotary frequencies change
        past = [reach for reach in reaches if count + steps <= reach <= crossed]
        count = max([count, *(min(reach + TOKENS_PAST, max_length - steps) for reach in past)])
        if context < max_length and context <= crossed and (count <= context or not past):
            count = min(context, max_length - steps)  # so that the prompt has the one, and what follows the other
        own, keep = context < max_length and count <= context < count + steps, min(keep, count)
        if count != sequence.shape[1]:
            sequence = torch.from_numpy(_prompt(checkpoint, vocab_size, count + steps))[None]
        alone = None
        if own:
            last_logits(model, sequence[:, :1], 1)  # transformers keeps dynamic frequencies until a text is shorter
            alone = last_logits(model, sequence[:, :count], keep)
        if afterwards is not None:
            sequence, logits = _changed_between(model, sequence[:, :count], steps, keep, afterwards)
        else:
            if sequence.shape[1] < count + steps:
                sequence = _with_greedy_tokens(model, sequence, steps, last)
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
        caution=caution,
    )


def last_logits(model: Any, sequence: torch.Tensor, count: int) -> torch.Tensor:
    """Float32 logits [count, V] of the last tokens of `sequence` [1, T], which the model reads as a whole."""
    logits: torch.Tensor = _read(model, sequence, count, use_cache=False).logits[0, -count:].float()
    return logits


def _with_greedy_tokens(model: Any, sequence: torch.Tensor, steps: int, last: torch.Tensor) -> torch.Tensor:
    """`sequence` [1, T] with `steps` greedy tokens after it; `last` [1, V]: the logits after its last token.

    The tokens are generated over transformers' own cache. A model that cannot use one reads the whole sequence again
    for every token.
    """
    try:
        return _changed_between(model, sequence, steps, 1, lambda _: None)[0]
    except Exception as error:
        signalled = received()
        if signalled is not None:
            raise signalled from error
    for _ in range(steps):
        sequence = torch.cat([sequence, last[-1].argmax().reshape(1, 1)], dim=1)
        last = last_logits(model, sequence, 1)
    return sequence


def _read(model: Any, sequence: torch.Tensor, count: int, *, use_cache: bool) -> Any:
    """The result of a model, with no more logits than the last `count` where it can leave others out."""
    known = inspect.signature(model.forward).parameters
    return model(
        input_ids=sequence, use_cache=use_cache, **{"logits_to_keep": count} if "logits_to_keep" in known else {}
    )


def _unlike_eager(model: Any, sequence: torch.Tensor, wanted: torch.Tensor) -> str:
    """How the logits `wanted` [1, V] after `sequence` [1, T] differ from those with eager attention; empty where they
    do not, or where the model has chosen its attention when it was built.
    """
    own = text_config(model)._attn_implementation
    if own == "eager":
        return ""
    model.config._attn_implementation = "eager"
    try:
        apart = float((last_logits(model, sequence, 1) - wanted).abs().max()) / (float(wanted.abs().max()) or 1.0)
    finally:
        model.config._attn_implementation = own
    return (
        ""
        if apart <= DIFFERENT
        else (
            f"eager attention of transformers gives other logits than {own}, its default for {model.config.model_type} "
            f"(by {apart:.1e} of the largest); {own} is the reference"
        )
    )


def _reaches(model: Any, masks: Iterable[MaskFunction], max_length: int) -> dict[int, str]:
    """Tokens in the windows and chunks of the masks that a model asked for, or has as buffers, and their names."""

    def looked_up(table: torch.Tensor, _batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return table[0, 0, query, key]

    tables: list[MaskFunction] = [partial(looked_up, table) for table in model.buffers() if is_table(table)]
    found = [first_hidden(mask, max_length - 1) for mask in (*masks, *tables)]  # the last token is never fed
    names = {True: "attention chunk", False: "sliding window"}
    return {tokens: f"{names[chunk]} of {tokens} tokens" for tokens, chunk in filter(None, found)}


def _changed_between(
    model: Any, sequence: torch.Tensor, steps: int, keep: int, change: Callable[[Any], object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence with `steps` greedy tokens more, and the logits of these and the `keep` tokens before, of a model
    that is changed after the prompt, over transformers' own cache of what it read.
    """
    name = cache_argument(model) or CACHE_ARGUMENTS[0]
    result = _read(model, sequence, keep, use_cache=True)
    logits, cache = [result.logits[0, -keep:]], {name: getattr(result, name)}
    if cache[name] is None:
        raise UnsupportedModelError(f"{type(model).__name__} returns no cache")
    change(model)
    for _ in range(steps):
        token = logits[-1][-1].argmax().reshape(1, 1)
        sequence = torch.cat([sequence, token], dim=1)
        logits.append(model(input_ids=token, **cache, use_cache=True).logits[0])
    return sequence, torch.cat(logits).float()


def save(answer: KnownAnswer, folder: Path, name: str = KNOWN_ANSWER) -> None:
    """Write known_answer.safetensors, or the file called `name`."""
    tensors: dict[str, npt.NDArray[Any]] = {
        "prompt": answer.prompt,
        "tokens": answer.tokens,
        "prefill_logits": answer.prefill_logits,
        "decode_logits": answer.decode_logits,
    }
    # Not with save_file: it makes files that only their owner can read, and hides a full disk behind its own exception.
    metadata = {"schema": SCHEMA, "reference": answer.reference, "not_exercised": "; ".join(answer.not_exercised)}
    if answer.own_frequencies:
        metadata["prompt_frequencies"] = "own"
    content = serialised(tensors, metadata=metadata)
    (folder / name).write_bytes(content)


def _prompt(checkpoint: Checkpoint, vocab_size: int, length: int) -> npt.NDArray[np.int64]:
    """A fixed text in the checkpoint's own tokens; without a tokenizer that loads, fixed ids spread over the
    vocabulary.
    """
    ids: list[int] = []
    if checkpoint.tokenizes:
        # What cannot be loaded is told where the tokenizer is probed.
        with suppress(PartitaError), quiet(), translated("loading the tokenizer"):
            tokenizer, _ = load_full(checkpoint.folder)
            ids = [i for i in tokenizer(PROMPT_TEXT)["input_ids"] if 0 <= i < vocab_size][:length]
    if len(ids) < length:
        spread = np.random.Generator(np.random.PCG64(0)).integers(0, vocab_size, length - len(ids))
        ids = [*ids, *spread.tolist()]
    return np.array(ids, np.int64)
