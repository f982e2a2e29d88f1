"""docs/passes.md: the graph passes in their order, made from the files that they are.

To write it again: python -m tools.passes_page docs
"""

from __future__ import annotations

import sys
from pathlib import Path

from partita.export.passes import ORDER

HEAD = """# Graph passes

The passes over a traced graph, in order. Each is one file in `partita/export/passes/`. `partita export --explain` and
`passes` in `--json` have the number of places that each pass changed. `--without-pass NAME` leaves a pass out, and the
manifest records it; `write_after_read` cannot be left out.

- A pass recognises norms, views and tables by their results: the nodes are run on random numbers in float64, with
  random weights. Names of models, modules and weights are not used.
- It writes an operator only if the provider that the package is for takes it. Without `--target` that is the best
  usable provider, or the CPU provider with `--attention`. Operators without a CPU kernel are never written.
- The operators depend on the lowering: ONNX Runtime's own with `gqa`, those of ONNX opsets 23 and 24 with `onnx24`, and
  none with `primitives`.

## Nodes of a layer

Nodes per layer that ONNX Runtime runs, without and with the passes, for a llama of two layers. In parentheses: nodes
that run on the CPU.

| lowering | precision | cpu | cuda (dry run) | webgpu (SwiftShader) |
|---|---|---|---|---|
| gqa | fp32 | 44 → 10 | 50 → 12 (1) | 48 → 10 |
| gqa | fp16 | 44 → 10 | 50 → 10 | no float16 |
| gqa | int4 | 44 → 10 | 50 → 10 | 48 → 10 |
| gqa | int8, `--activations int8` | 44 → 40 | refused | 48 → 61.5 (13.5) |
| onnx24 | fp32 | 47 → 24 | 49 → 26 | 55 → 30 (3) |
| onnx24 | fp16 | 47 → 24 | 53 → 26 | 59 → 30 (3) |
| onnx24 | int4 | 47 → 24 | 53 → 26 | 55 → 44 (10) |
| onnx24 | int8, `--activations int8` | 47 → 70 | refused | 55 → 99.5 (18.5) |
| primitives | fp32, fp16 | 56.5 | 58.5, 62.5 | 61.5, no float16 |
| primitives | int4 | 56.5 | 62.5 | 61.5 → 68.5 |
| primitives | int8, `--activations int8` | 56.5 → 102.5 | refused | 61.5 → 131 (15.5) |

`python -m benchmarks.layer_nodes`, 2026-11-24 to 26, onnxruntime-gpu 1.31.1, onnxruntime-webgpu 1.27. On the CPU, fp16
has float32 arithmetic ([precisions.md](precisions.md#16-bits)); float16 arithmetic has 16 nodes with `gqa`. CUDA has no
float32 kernel of GroupQueryAttention, so `--attention auto` takes `onnx24` there. `--activations int8` adds nodes that
round each row.

## Effect of each pass

Nodes, and time relative to all passes, if one pass is left out: a random llama of four layers in int4, CPU provider.

| left out | nodes | per layer | decode step | prefill |
|---|---|---|---|---|
| nothing | 44 | 10 | 1.00 | 1.00 |
| rotary_tables | 126 | 28 | 1.20 | 0.96 |
| fused_norms | 106 | 22 | 1.11 | 0.91 |
| rotary_embedding | 93 | 22 | 1.04 | 1.01 |
| views | 76 | 18 | 0.96 | 0.95 |
| packed_attention | 52 | 12 | 0.90 | 0.93 |
| transposed_weights | 52 | 12 | 0.98 | 1.00 |
| skip_norms | 52 | 10 | 0.99 | 0.99 |
| activations | 44 | 10 | 0.90 | 0.97 |

`python -m benchmarks.passes --precision int4`, 2026-11-24, ONNX Runtime 1.31.1, AMD EPYC, 2 cores; medians of 7, 128
prompt tokens, 48 steps. Ratios between 0.9 and 1.1 are noise. `head_norms` changes nothing in this model.
`python -m benchmarks.passes CHECKPOINT` measures another model; `--rounds 0` counts nodes only.

This page is generated: `python -m tools.passes_page docs`.
"""


def page() -> str:
    """The page, as docs/passes.md holds it."""
    return "\n".join([HEAD, *(f"## {each.name}\n\n{each.description}\n" for each in ORDER)])


def main(folder: Path) -> None:
    """Write the page to `folder`."""
    (folder / "passes.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
