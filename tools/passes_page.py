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
package is for takes it: the provider is asked about every such node before anything is written, and without `--target`
the CPU provider is. Every package is verified on the CPU provider, so operators that it lacks are not written at all.

Which operators a pass may write goes with the lowering of attention: ONNX Runtime's own with `gqa`, those of ONNX's
operator sets 23 and 24 with `onnx24`, none with `primitives`.

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
