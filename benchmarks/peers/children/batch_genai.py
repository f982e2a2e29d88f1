"""onnxruntime-genai's batch mode: prompts begin and end together, so a batch goes on until its longest answer is there.

It takes prompts of one length: shorter ones are filled up with tokens of their own, which is what a pad would cost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.children.batching import timed_batch
from benchmarks.peers.children.serving import Open, Opened, serve


def opener() -> Open:
    """Import onnxruntime-genai."""
    import onnxruntime_genai as og  # type: ignore[import-not-found]

    class Genai:
        def __init__(self, model: Any) -> None:
            self.model = model

        def answer(self, prompts: list[list[int]], new_tokens: list[int], rows: int) -> list[list[int]]:
            found: list[list[int]] = []
            for first in range(0, len(prompts), rows):
                found += self.together(prompts[first : first + rows], new_tokens[first : first + rows])
            return found

        def together(self, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
            longest, most = max(map(len, prompts)), max(new_tokens)
            filled = [(prompt * longest)[:longest] for prompt in prompts]
            length = longest + most
            params = og.GeneratorParams(self.model)
            params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(prompts))
            generator = og.Generator(self.model, params)
            generator.append_tokens(np.array(filled, np.int32))
            tokens: list[list[int]] = [[] for _ in prompts]
            for _ in range(most):
                generator.generate_next_token()
                for row, token in zip(tokens, generator.get_next_tokens(), strict=True):
                    row.append(int(token))
            return [row[:count] for row, count in zip(tokens, new_tokens, strict=True)]

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        config = og.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        settings = {"cache": "shared buffer", "batches": "static, shorter prompts filled up"}
        genai: Any = Genai(og.Model(config))
        return Opened(genai, ("onnxruntime-genai", "onnxruntime"), settings)

    return open_engine


if __name__ == "__main__":
    serve(opener, timed_batch)
