"""`python -m benchmarks.peers.children.engines PEER`: one peer, which answers on stdout what it reads on stdin.

It runs in the peer's own environment: each function imports its library, and returns what opens a model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.children.serving import Open, Opened, Token, best, captures, provider, serve

if TYPE_CHECKING:
    from partita.package.records import PackedKind

PRECISION = "PARTITA_BENCH_DTYPE"


def partita() -> Open:
    """The engine of `partita generate`."""
    import onnx  # noqa: F401, RUF100 - imports are not to count as loading a model
    import onnxruntime  # noqa: F401, RUF100

    from benchmarks.engine_steps import generate
    from partita.package.folder import read_manifest
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.choice.sampling import greedy
    from partita.runtime.generate.runner import load_runner

    def kind(each: PackedKind) -> str:
        """`30 in int4, blocks of 64`: a weight whose rows the block size does not divide has smaller ones."""
        blocks = f"blocks of {each.block_size}" if each.block_size else "a scale for each row"
        return f"{each.weights} in {each.precision}, {blocks}"

    def open_model(model: Path, threads: int, length: int) -> Opened:
        manifest = read_manifest(model)
        chain = parse_chain(provider() if captures() or provider() == "cpu" else f"{provider()},cpu")
        recorded = chain[0].capture_option if captures() else ""
        options = {chain[0].name: {recorded: "1"}} if recorded else {}
        runner = load_runner(model, chain, threads=threads, manifest=manifest, options=options)
        settings = {"attention": manifest.graph.attention}
        if manifest.packed is not None:
            settings["weights"] = ", ".join(map(kind, manifest.packed.kinds))

        def tokens(prompt: list[int], new_tokens: int) -> Iterator[Token]:
            for step in generate(runner, [prompt], max_new_tokens=new_tokens, sampler=greedy):
                if step.tokens[0]:
                    yield step.tokens[0][0], True  # the engine raises for logits that are not finite

        return Opened(tokens, ("onnxruntime-gpu", "onnxruntime", "numpy"), settings)

    return open_model


def genai() -> Open:
    """onnxruntime-genai, with a model that its own builder wrote."""
    import onnxruntime_genai as og  # type: ignore[import-not-found]

    def open_model(model: Path, threads: int, length: int) -> Opened:
        config = og.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        if provider() != "cpu":
            config.clear_providers()
            config.append_provider(provider())
            config.set_provider_option(provider(), "enable_cuda_graph", "1" if captures() else "0")
        loaded = og.Model(config)

        def tokens(prompt: list[int], new_tokens: int) -> Iterator[Token]:
            length = len(prompt) + new_tokens
            params = og.GeneratorParams(loaded)
            # min_length keeps the end-of-text token from being chosen: everybody makes the same number of tokens.
            params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=1)
            generator = og.Generator(loaded, params)
            generator.append_tokens(np.array([prompt], np.int32))
            for number in range(new_tokens):
                finite = True
                if number == new_tokens - 1:  # a copy of all logits, so not for every step
                    logits = np.asarray(generator.get_logits())
                    finite = bool(np.isfinite(logits[logits > np.finfo(np.float32).min]).all())
                generator.generate_next_token()
                yield int(generator.get_next_tokens()[0]), finite

        versions = ("onnxruntime-genai", "onnxruntime-genai-cuda", "onnxruntime", "onnxruntime-gpu")
        return Opened(tokens, versions, {"cache": "shared buffer"})

    return open_model


def llama() -> Open:
    """llama.cpp."""
    from benchmarks.peers.children.llama import Llama, import_binding

    binding = import_binding()

    def open_model(model: Path, threads: int, length: int) -> Opened:
        system = binding.llama_print_system_info().decode()
        settings = {"build": system.strip(" |").replace(" | ", ", "), "cache": "f16"}
        return Opened(Llama(binding, model, threads, length).generate, ("llama-cpp-python",), settings)

    return open_model


def optimum() -> Open:
    """optimum's ORTModelForCausalLM on the CPU provider, called step by step as its `generate` does."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM  # type: ignore[import-not-found]

    def open_model(model: Path, threads: int, length: int) -> Opened:
        torch.set_num_threads(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        loaded = ORTModelForCausalLM.from_pretrained(
            model, provider="CPUExecutionProvider", session_options=options, use_cache=True
        )

        def tokens(prompt: list[int], new_tokens: int) -> Iterator[Token]:
            ids, cache, length = torch.tensor([prompt]), None, len(prompt)
            for _ in range(new_tokens):
                out = loaded(
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

        versions = ("optimum-onnx", "optimum", "onnxruntime", "transformers", "torch")
        return Opened(tokens, versions, {"io binding": str(loaded.use_io_binding)})

    return open_model


def transformers() -> Open:
    """transformers: sdpa attention, a dynamic cache, the head for the last position only."""
    import torch
    from transformers import AutoModelForCausalLM

    def open_model(model: Path, threads: int, length: int) -> Opened:
        torch.set_num_threads(threads)
        dtype = getattr(torch, os.environ.get(PRECISION, "float32"))
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(provider())

        def tokens(prompt: list[int], new_tokens: int) -> Iterator[Token]:
            ids, cache = torch.tensor([prompt], device=loaded.device), None
            for _ in range(new_tokens):
                with torch.inference_mode():
                    out = loaded(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                token, finite = best(out.logits[0, -1].float().cpu().numpy())
                ids = torch.tensor([[token]], device=loaded.device)
                yield token, finite

        return Opened(tokens, ("transformers", "torch"), {"attention": "sdpa", "cache": "dynamic"})

    return open_model


PEERS = {each.__name__: each for each in (partita, genai, llama, optimum, transformers)}

if __name__ == "__main__":
    serve(PEERS[sys.argv[1]])
