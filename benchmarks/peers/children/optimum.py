"""optimum's ORTModelForCausalLM on the CPU provider, called step by step as its `generate` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.children.serving import Open, Opened, best, serve


def opener() -> Open:
    """Import optimum, torch, transformers and ONNX Runtime."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM  # type: ignore[import-not-found]

    class Optimum:
        def __init__(self, model: Any) -> None:
            self.model = model

        def generate(self, prompt: list[int], new_tokens: int) -> Iterator[tuple[int, bool]]:
            ids, cache, length = torch.tensor([prompt]), None, len(prompt)
            for _ in range(new_tokens):
                out = self.model(
                    input_ids=ids,
                    attention_mask=torch.ones(1, length, dtype=torch.int64),
                    position_ids=torch.arange(length - ids.shape[1], length)[None],
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = out.past_key_values
                token, finite = best(out.logits[0, -1].float().numpy())
                ids, length = torch.tensor([[token]]), length + 1
                yield token, finite

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        torch.set_num_threads(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        loaded = ORTModelForCausalLM.from_pretrained(
            model, provider="CPUExecutionProvider", session_options=options, use_cache=True
        )
        settings = {"io binding": str(loaded.use_io_binding)}
        return Opened(Optimum(loaded), ("optimum-onnx", "optimum", "onnxruntime", "transformers", "torch"), settings)

    return open_engine


if __name__ == "__main__":
    serve(opener)
