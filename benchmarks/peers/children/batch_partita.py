"""Partita's scheduler, behind batches of files and the server: a prompt is given a row as soon as one is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.children.batching import timed_batch
from benchmarks.peers.children.serving import Open, Opened, serve


def opener() -> Open:
    """Import Partita and ONNX Runtime."""
    import onnx  # noqa: F401, RUF100 - imports are not to count as loading a model
    import onnxruntime  # noqa: F401, RUF100

    from partita.library.chain import read_chain
    from partita.library.engine.base import BatchOptions
    from partita.library.engine.local import LocalEngine
    from partita.library.engine.requests import Work
    from partita.library.sampling import Sampling
    from partita.options.groups import ProviderChain
    from partita.package.folder import read_manifest

    class Ours:
        def __init__(self, engine: LocalEngine) -> None:
            self.engine = engine

        def answer(self, prompts: list[list[int]], new_tokens: list[int], rows: int) -> list[list[int]]:
            scheduler = self.engine
            scheduler.open(BatchOptions())
            if scheduler.slots != rows:
                raise ValueError(f"the package has {scheduler.slots} rows, not {rows}")
            tickets = [
                scheduler.submit(Work(tuple(prompt), Sampling(temperature=0.0, max_new_tokens=count)))
                for prompt, count in zip(prompts, new_tokens, strict=True)
            ]
            while scheduler.step():
                pass
            for ticket in tickets:
                if ticket.error is not None:
                    raise ticket.error
            return [list(ticket.result.tokens) for ticket in tickets]

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        manifest, target = read_manifest(model), read_chain(ProviderChain(providers="cpu", threads=threads))
        engine = LocalEngine(model, manifest, target, observe=False)
        alone = "yes" if manifest.graph.takes_fewer_rows else "no"
        settings = {"attention": manifest.graph.attention, "rows by themselves": alone}
        ours: Any = Ours(engine)
        return Opened(ours, ("onnxruntime-gpu", "onnxruntime", "numpy"), settings)

    return open_engine


if __name__ == "__main__":
    serve(opener, timed_batch)
