"""Checks of the source model, run when an exported graph does not match it, and outputs of its modules on a text.

Are its logits finite; does its `generate` with a cache match its `forward` without one? If not, as of a model that is
not causal, no graph with a cache can match both. Close router decisions may change with rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import transformers

from partita.dtypes import Precision
from partita.export.checkpoint.description import Checkpoint
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify.known_answer import PROMPT_TOKENS, check_memory, last_logits, load
from partita.export.weights import memory_map, to_torch
from partita.package.known_answer import KnownAnswer
from partita.process import give_back

Result = TypeVar("Result")
TOLERANCE = 1e-3
"""Relative; float32 sums in another order differ by 1e-6 to 1e-5."""


def disagreement(checkpoint: Checkpoint, answer: KnownAnswer, scratch: Path | None = None) -> str | None:
    """The self-contradiction of the model, as a sentence; None without one, or where the check fails."""

    def check(model: Any) -> str | None:
        prompt = torch.from_numpy(answer.prompt)[None]
        logits = model(input_ids=prompt[:, :PROMPT_TOKENS], use_cache=False).logits
        if bool(torch.isnan(logits).any() or (logits == math.inf).any()):  # some models exclude tokens by -infinity
            return (
                f"{type(model).__name__} computes logits that are not finite in transformers: a "
                "setting of config.json or a weight of this checkpoint is wrong"
            )
        return _not_as_generated(model, prompt, len(answer.tokens))

    return _try(check, checkpoint, scratch)


def _try(run: Callable[[Any], Result | None], checkpoint: Checkpoint, scratch: Path | None) -> Result | None:
    """The result of `run` on the source model; None where it fails: the model's own code may fail in any way."""
    try:
        with quiet(), torch.no_grad():
            return run(load(checkpoint, scratch))
    except Exception:  # noqa: BLE001 - see above
        return None
    finally:
        give_back()


def of_rounded_weights(
    checkpoint: Checkpoint, answer: KnownAnswer, computing: Precision, scratch: Path | None = None
) -> KnownAnswer | None:
    """The float32 known answer with weights rounded to 16 bits; None where it cannot be computed."""

    def compute(model: Any) -> KnownAnswer:
        for weight in model.state_dict().values():
            if weight.is_floating_point():
                weight.copy_(weight.to(to_torch(computing.dtype)))
        logits, count = _logits(model, answer), len(answer.prefill_logits)
        return replace(
            answer,
            prefill_logits=np.ascontiguousarray(logits[:count]),
            decode_logits=np.ascontiguousarray(logits[count:]),
            reference=f"{answer.reference}, weights rounded to {computing.dtype}",
        )

    return _try(compute, checkpoint, scratch)


def _logits(model: Any, answer: KnownAnswer) -> npt.NDArray[np.float32]:
    """The logits of `model` for the known answer: [K + D, vocab]."""
    sequence, prompt = torch.from_numpy(np.concatenate([answer.prompt, answer.tokens]))[None], answer.prefill_logits
    logits = last_logits(model, sequence, len(prompt) + len(answer.tokens))
    if answer.own_frequencies:
        logits[: len(prompt)] = last_logits(model, sequence[:, : len(answer.prompt)], len(prompt))
    return logits.numpy()


def _not_as_generated(model: Any, prompt: torch.Tensor, steps: int) -> str | None:
    """A message where `generate` after `prompt` [1, P] has other logits than `forward` over the generated sequence."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
        use_cache=True,
    )
    generated = torch.cat(out.logits)
    computed = last_logits(model, out.sequences, len(generated) + 1)[:-1]
    error = _relative(generated, computed)
    if error <= TOLERANCE:
        return None
    return (
        f"{type(model).__name__} of transformers is inconsistent: generate (with a cache) gives other "
        f"logits than forward (without one), by {error:.1e} of the largest, so a graph with a cache "
        "cannot be verified against it"
    )


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    scale = float(other.abs().max()) or 1.0
    return float((one - other).abs().max()) / scale


VERSIONS = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"


class SourceOutputs:
    """The source model, loaded once; each call runs it on the text and reads the requested modules."""

    def __init__(self, checkpoint: Checkpoint, tokens: Sequence[int], scratch: Path) -> None:
        """Load the model. Raises ResourceError when it does not fit, UnsupportedModelError when it cannot be loaded."""
        parameters = memory_map.resident_parameters(checkpoint.tensors, scratch)
        check_memory(parameters, 0, use="for the comparison", needed=True)
        self.model = load(checkpoint, scratch)
        self.modules = dict(self.model.named_modules())
        self.tokens = torch.tensor([list(tokens)])

    def __call__(self, wanted: Collection[tuple[str, str, int, int]]) -> dict[Any, npt.NDArray[np.float32]]:
        """Values [T, ...] by module path, `input` or `output`, index, and number of tensors (0: any)."""
        found: dict[tuple[str, str, int, int], npt.NDArray[np.float32] | None] = {}

        def keep(name: str, kind: str, values: Any) -> None:
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            for key in wanted:
                _, _, index, count = key
                if key[:2] != (name, kind) or index >= len(tensors) or count not in (0, len(tensors)):
                    continue
                array = tensors[index].detach().float().numpy().copy()
                array = array[0] if array.shape[:1] == (1,) else array
                usable = key not in found and array.shape[:1] == (self.tokens.shape[1],)
                found[key] = array if usable and tensors[index].is_floating_point() else None

        def before(name: str, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            keep(name, "input", (*args, *named.values()))

        def after(name: str, _: Any, args: Any, result: Any) -> None:
            keep(name, "output", result if isinstance(result, tuple) else (result,))

        hooks = []
        for name, kind in {key[:2] for key in wanted}:
            module = self.modules.get(name)
            if module is not None and kind == "input":
                hooks.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            elif module is not None:
                hooks.append(module.register_forward_hook(partial(after, name)))
        try:
            with quiet(), torch.no_grad(), translate_errors("running the source model"):
                self.model(input_ids=self.tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return {key: array for key, array in found.items() if array is not None}
