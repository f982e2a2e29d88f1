"""onnxruntime-genai, with a model that its own builder wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.children.serving import Open, Opened, captures, provider, serve


def opener() -> Open:
    """Import onnxruntime-genai."""
    import onnxruntime_genai as og  # type: ignore[import-not-found]

    class Genai:
        def __init__(self, model: Any) -> None:
            self.model = model

        def generate(self, prompt: list[int], new_tokens: int) -> Iterator[tuple[int, bool]]:
            length = len(prompt) + new_tokens
            params = og.GeneratorParams(self.model)
            # min_length keeps the end-of-text token from being chosen: everybody makes the same number of tokens.
            params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=1)
            generator = og.Generator(self.model, params)
            generator.append_tokens(np.array([prompt], np.int32))
            for number in range(new_tokens):
                finite = True
                if number == new_tokens - 1:  # a copy of all logits, so not for every step
                    logits = np.asarray(generator.get_logits())
                    finite = bool(np.isfinite(logits[logits > np.finfo(np.float32).min]).all())
                generator.generate_next_token()
                yield int(generator.get_next_tokens()[0]), finite

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        config = og.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        if provider() != "cpu":
            config.clear_providers()
            config.append_provider(provider())
            config.set_provider_option(provider(), "enable_cuda_graph", "1" if captures() else "0")
        versions = ("onnxruntime-genai", "onnxruntime-genai-cuda", "onnxruntime", "onnxruntime-gpu")
        return Opened(Genai(og.Model(config)), versions, {"cache": "shared buffer"})

    return open_engine


if __name__ == "__main__":
    serve(opener)
