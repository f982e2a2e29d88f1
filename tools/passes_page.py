"""docs/passes.md: the graph passes in their order, made from the files that they are.

To write it again: python -m tools.passes_page docs
"""

from __future__ import annotations

import sys
from pathlib import Path

from partita.export.passes import ORDER

HEAD = """# Graph passes

What is done to a traced graph before it is written, in this order. Each pass is one file in `partita/export/passes/`.
`partita export --explain` says how many places each of them changed, and `--json` has it in `passes`.

A pass that writes one operator for several finds its places by what a subgraph computes: its nodes are run on random
numbers in float64, with random numbers in the place of weights, and the result is compared with what the operator would
compute. Names of models, modules and weights decide nothing. It writes an operator only where the provider that the
package is for takes it: the provider is asked about every such node before anything is written. Without `--target` that
is the best usable provider, and the CPU provider where `--attention` alone is given. Every package is verified on the
CPU provider, so operators that it lacks are not written at all.

Which operators a pass may write goes with the lowering of attention: ONNX Runtime's own with `gqa`, those of ONNX's
operator sets 23 and 24 with `onnx24`, none with `primitives`.

`--without-pass NAME` leaves one out, which the manifest records; `write_after_read` cannot be left out. What each
brings is measured by `python -m benchmarks.passes [CHECKPOINT]`: it exports with all passes and without each, and
prints the nodes of a layer as ONNX Runtime runs them, after its own optimiser, and the times of a step and of a
prompt. A ratio is the median of what a turn takes beside the turn of the same round with all passes: at 1.10 a step
takes a tenth longer without the pass; the turns in `--json FILE` say how far they scatter. A pass may save nodes that
cost next to nothing, and two passes may do the same for each other: leaving one of them out then shows less than it
does. Where leaving it out gives the same graph, the model has no place for it. `--rounds 0` counts nodes only. The
default, a llama of four layers in float32, takes some ten minutes.

## Nodes of a layer

`python -m benchmarks.layer_nodes` exports a llama of two layers without all of the passes that can be left out, and
with them, and prints the nodes of a layer that ONNX Runtime runs, before and after (2026-11-24, onnxruntime-gpu
1.31.1, onnxruntime-webgpu 1.27; the CPU, of which fp16 is of 2026-11-26, and CUDA in the dry run, packages written
with `--target`; WebGPU on a software Vulkan driver, packages written without a target). `?`: SwiftShader has no
float16, and WebGPU refuses it; CUDA has no kernel for `--activations int8`, which is refused for it.

| lowering | precision | cpu | cuda | webgpu |
|---|---|---|---|---|
| gqa | fp32 | 44 → 10 | 50 → 12 (1 on the CPU) | 48 → 10 |
| gqa | fp16 | 44 → 10 | 50 → 10 | ? → ? |
| gqa | int4 | 44 → 10 | 50 → 10 | 48 → 10 |
| gqa | int8 x int8 | 44 → 40 | ? → ? | 48 → 61.5 (13.5 on the CPU) |
| onnx24 | fp32 | 47 → 24 | 49 → 26 | 55 → 30 (3 on the CPU) |
| onnx24 | fp16 | 47 → 24 | 53 → 26 | 59 → 30 (3 on the CPU) |
| onnx24 | int4 | 47 → 24 | 53 → 26 | 55 → 44 (10 on the CPU) |
| onnx24 | int8 x int8 | 47 → 70 | ? → ? | 55 → 99.5 (18.5 on the CPU) |
| primitives | fp32 | 56.5 → 56.5 | 58.5 → 58.5 | 61.5 → 61.5 |
| primitives | fp16 | 56.5 → 56.5 | 62.5 → 62.5 | ? → ? |
| primitives | int4 | 56.5 → 56.5 | 62.5 → 62.5 | 61.5 → 68.5 |
| primitives | int8 x int8 | 56.5 → 102.5 | ? → ? | 61.5 → 131 (15.5 on the CPU) |

On the CPU fp16 has arithmetic in float32 ([precisions.md](precisions.md#16-bits)); float16 has Casts around what it
multiplies there, 16 nodes with `gqa`. On CUDA fp32 has 12 with `gqa`, two more than fp16, because ONNX Runtime 1.31.1
has no float32 kernel of GroupQueryAttention there (`CUDA kernel not found in registries`): attention runs on the CPU,
between a copy from the device and one back, and a Cast before it and one after it would be as many nodes. ONNX's own
Attention has one, and `--attention auto` takes `onnx24` for such a package; int4 is multiplied in float16 there.
Integers times integers cost nodes, because each row that is multiplied is rounded in standard operators. Other
models, nodes of a whole tiny graph of two layers as it is written, before and after the passes saw where they turn
queries and keys: deepseek_v2 186 → 156, deepseek_v3 177 → 144 (`onnx24` 173 → 141), qwen2_vl 102 → 26, qwen3_vl 163 →
32; and where rows are divided by their length, qwen3_next of four layers 350 → 320.

## What each pass brings

`python -m benchmarks.passes --precision int4` (2026-11-24, ONNX Runtime 1.31.1, AMD EPYC, 2 cores, nothing else
running; a random llama of four layers, medians of 7 turns, 128 tokens of prompt, 48 steps):

| left out | nodes | a layer | step | prompt |
|---|---|---|---|---|
| nothing | 44 | 10 | 1.00 | 1.00 |
| rotary_tables | 126 | 28 | 1.20 | 0.96 |
| fused_norms | 106 | 22 | 1.11 | 0.91 |
| rotary_attention | 93 | 22 | 1.04 | 1.01 |
| views | 76 | 18 | 0.96 | 0.95 |
| packed_attention | 52 | 12 | 0.90 | 0.93 |
| transposed_weights | 52 | 12 | 0.98 | 1.00 |
| skip_norms | 52 | 10 | 0.99 | 0.99 |
| gather_rows | 47 | 10 | 0.97 | 1.01 |
| activations | 44 | 10 | 0.90 | 0.97 |

A step takes 0.8 ms here, and graphs of as many nodes are told apart by a tenth: what is between 0.9 and 1.1 says
nothing. Left out, `rotary_embedding`, `expert_weights`, `tied_head` and `head_norms` give the same graph: this model
has no place for them. So tables of cosines and sines and fused norms are what a step gains by, and prompts, which are
products, by none.

This page is generated: to write it again, run `python -m tools.passes_page docs`.
"""


def page() -> str:
    """The page, as docs/passes.md holds it."""
    return "\n".join([HEAD, *(f"## {each.name}\n\n{each.description}\n" for each in ORDER)])


def main(folder: Path) -> None:
    """Write the page to `folder`."""
    (folder / "passes.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
