"""What transformers computes for a prompt: its default attention in float32, whole sequences, no cache.

The cached path of transformers is run beside it. Where the two differ, a type that is refused or differs has a reason
outside of Partita, so that is recorded and shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
NEW_TOKENS = 25
"""The first follows the prompt, so that 24 decode steps are compared."""
AGREES = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    """One prompt and its greedy continuation."""

    prompt: list[int]
    tokens: list[int]
    """[NEW_TOKENS] greedy tokens."""
    logits: Logits
    """[NEW_TOKENS, vocab]: what each of the tokens was chosen from."""
    disagreements: str
    """Where transformers differs from itself; empty when it does not."""


def load(folder: Path) -> Any:
    """The original model, with the attention implementation that transformers uses by default.

    Raises ValueError when transformers finds no weights for a part of it.
    """
    import torch
    from transformers import AutoConfig

    from partita.export.checkpoint import auto_class, of_text

    config = of_text(AutoConfig.from_pretrained(folder))
    loaded: Any = auto_class(config).from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation=None,
        local_files_only=True,
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(f"transformers finds no weights for {sorted(info['missing_keys'])[:3]}")
    return model


def reference(model: Any, prompt: list[int]) -> Reference:
    """Run the model on the prompt and then on one token more at a time, always from the beginning."""
    import torch

    sequence = torch.tensor([prompt])
    steps = []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            last = model(input_ids=sequence, use_cache=False).logits[0, -1].float()
            steps.append(last)
            sequence = torch.cat([sequence, last.argmax().reshape(1, 1)], dim=1)
        whole = model(input_ids=sequence, use_cache=False).logits[0].float().numpy()
    logits = torch.stack(steps).numpy()
    tokens = [int(token) for token in sequence[0, len(prompt) :]]
    found = [_causal(logits, whole[len(prompt) - 1 : -1]), _cached(model, prompt, tokens, logits)]
    return Reference(prompt, tokens, logits, "; ".join(text for text in found if text))


def relative_error(ours: Logits, wanted: Logits) -> float:
    """Largest difference relative to the largest magnitude of `wanted`; infinite where ours is not finite."""
    ruled_out = wanted < -1e30  # tokens that a model must not write have the lowest float
    if not (ours[ruled_out] < -1e30).all():
        return float("inf")
    error = float(np.abs(ours[~ruled_out] - wanted[~ruled_out]).max(initial=0.0))
    return error / scale(wanted) if np.isfinite(error) else float("inf")


def scale(wanted: Logits) -> float:
    """The largest magnitude, without tokens that the model must not write."""
    return float(np.abs(wanted[wanted >= -1e30]).max(initial=0.0)) or 1.0


def _causal(steps: Logits, whole: Logits) -> str:
    """Whether tokens that follow change the logits of a position."""
    error = relative_error(whole, steps)
    return "" if error <= AGREES else f"later tokens change earlier logits by {error:.1e}"


def _cached(model: Any, prompt: list[int], tokens: list[int], logits: Logits) -> str:
    """Whether transformers' generate, which uses the cache, gives the same logits and tokens."""
    import torch

    try:
        with torch.no_grad():
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
    except Exception as error:  # noqa: BLE001 - whatever the model raises is what is recorded
        return f"generate fails: {type(error).__name__}: {first_line(error)}"
    for index, (token, scores) in enumerate(zip(tokens, made.logits, strict=True)):
        apart = relative_error(scores[0].float().numpy(), logits[index])
        chosen = int(made.sequences[0, len(prompt) + index])
        if apart > AGREES or chosen != token:
            return f"generate differs from a run without a cache by {apart:.1e} at new token {index + 1}"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of a message, cut to what fits into a table."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
