"""The original model in transformers, as its users run it: `generate` with a dynamic cache, sdpa attention, float32."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.bare_loop import Speed


class Original:
    """transformers on the CPU, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def _generate(self, prompt: list[int], new_tokens: int) -> tuple[float, tuple[int, ...]]:
        ids = self.torch.tensor([prompt])
        began = time.perf_counter()
        out = self.model.generate(
            ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        return time.perf_counter() - began, tuple(out[0, len(prompt) :].tolist())

    def run(self, prompt: list[int], new_tokens: int) -> Speed:
        """Time one new token (prefill), then the whole; decode is the difference."""
        prefill, _ = self._generate(prompt, 1)
        whole, tokens = self._generate(prompt, new_tokens)
        return Speed(prefill, whole - prefill, new_tokens - 1, tokens)
