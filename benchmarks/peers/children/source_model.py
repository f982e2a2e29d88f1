"""transformers: sdpa attention, a dynamic cache, the head for the last position only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.children.serving import Open, Opened, best, provider, serve

PRECISION = "PARTITA_BENCH_DTYPE"


def opener() -> Open:
    """Import torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    class Original:
        def __init__(self, model: Any) -> None:
            self.model = model

        def generate(self, prompt: list[int], new_tokens: int) -> Iterator[tuple[int, bool]]:
            ids, cache = torch.tensor([prompt], device=self.model.device), None
            for _ in range(new_tokens):
                with torch.inference_mode():
                    out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                token, finite = best(out.logits[0, -1].float().cpu().numpy())
                ids = torch.tensor([[token]], device=self.model.device)
                yield token, finite

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        torch.set_num_threads(threads)
        dtype = getattr(torch, os.environ.get(PRECISION, "float32"))
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(provider())
        return Opened(Original(loaded), ("transformers", "torch"), {"attention": "sdpa", "cache": "dynamic"})

    return open_engine


if __name__ == "__main__":
    serve(opener)
