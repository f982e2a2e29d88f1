"""The loop that anybody would write over ONNX Runtime: what Partita's tokens are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from partita.runtime.chain.cpu_settings import EXACT

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def plain_tokens(
    path: Path,
    prompt: Sequence[int],
    count: int,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    sizes: tuple[int, int] | None = None,
    adapter: Path | None = None,
) -> list[int]:
    """Greedy tokens of a model with past_key_values of optimum, and those of its other inputs that it has.

    `sizes`: KV heads and head size, where the graph leaves them open; `adapter`: a file of ONNX Runtime.
    """
    options = ort.SessionOptions()
    options.add_session_config_entry(EXACT, "1")
    session = ort.InferenceSession(path, options, providers=list(providers), enable_fallback=0)
    run, lora = ort.RunOptions(), ort.LoraAdapter()
    if adapter is not None:
        lora.Load(str(adapter))
        run.add_active_adapter(lora)
    asked = {port.name for port in session.get_inputs()}
    pasts = [port for port in session.get_inputs() if port.name.startswith("past_key_values")]
    cache = {
        port.name: np.zeros((1, heads, 0, width), TYPES[port.type])  # [B, KV heads, T, head size]
        for port in pasts
        for heads, width in [sizes or (port.shape[1], port.shape[3])]
    }
    text, new = list(prompt), list(prompt)
    for _ in range(count):
        begin = len(text) - len(new)
        feeds = {
            "input_ids": np.array([new], np.int64),
            "attention_mask": np.ones((1, len(text)), np.int64),
            "position_ids": np.arange(begin, len(text))[None],
            **cache,
        }
        feeds = {name: value for name, value in feeds.items() if name in asked}
        logits, *presents = session.run(["logits", *(_present(port.name) for port in pasts)], feeds, run)
        cache = {port.name: present for port, present in zip(pasts, presents, strict=True)}
        new = [int(logits[0, -1].argmax())]
        text += new
    return text[len(prompt) :]


def _present(past: str) -> str:
    return past.replace("past_key_values", "present")
