"""Partita: the loop behind `partita generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.children.serving import Open, Opened, captures, provider, serve

if TYPE_CHECKING:
    from partita.package.records import PackedKind


def _kind(kind: PackedKind) -> str:
    """`30 in int4, blocks of 64`: a weight whose rows the block size does not divide has smaller ones."""
    blocks = f"blocks of {kind.block_size}" if kind.block_size else "a scale for each row"
    return f"{kind.weights} in {kind.precision}, {blocks}"


def opener() -> Open:
    """Import Partita and ONNX Runtime."""
    import onnx  # noqa: F401, RUF100 - imports are not to count as loading a model
    import onnxruntime  # noqa: F401, RUF100

    from benchmarks.engine_steps import generate
    from partita.package.folder import read_manifest
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.choice.sampling import Sampler, greedy
    from partita.runtime.generate.runner import Runner, load_runner

    class Ours:
        def __init__(self, runner: Runner) -> None:
            self.runner = runner
            self.sampler: Sampler = greedy

        def generate(self, prompt: list[int], new_tokens: int) -> Iterator[tuple[int, bool]]:
            for step in generate(self.runner, [prompt], max_new_tokens=new_tokens, sampler=self.sampler):
                if step.tokens[0]:
                    # The engine itself raises for logits that are not finite.
                    yield step.tokens[0][0], True

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        manifest = read_manifest(model)
        chain = parse_chain(provider() if captures() or provider() == "cpu" else f"{provider()},cpu")
        recorded = chain[0].capture_option if captures() else ""
        options = {chain[0].name: {recorded: "1"}} if recorded else {}
        runner = load_runner(model, chain, threads=threads, manifest=manifest, options=options)
        settings = {"attention": manifest.graph.attention}
        if manifest.packed is not None:
            settings["weights"] = ", ".join(_kind(each) for each in manifest.packed.kinds)
        return Opened(Ours(runner), ("onnxruntime-gpu", "onnxruntime", "numpy"), settings)

    return open_engine


if __name__ == "__main__":
    serve(opener)
