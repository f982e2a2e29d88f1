"""Write the output blocks of the pages again, cut where they were cut: `python -m tests.docs.update`."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from tests.docs.blocks import FENCE, Block, blocks_of, pages, renewed
from tests.docs.outputs import OUTPUTS, run


def printed(block: Block) -> list[str] | None:
    """All that is printed where the block shows parts of it; None for a block that shows no output."""
    if block.name in OUTPUTS:
        return [line.rstrip() for line in OUTPUTS[block.name]().rstrip("\n").splitlines()]
    if block.text.startswith("$ "):
        first = block.lines[0]
        return [first, *(line.rstrip() for line in run(first.removeprefix("$ ")).rstrip("\n").splitlines())]
    return None


def updated(page: Path) -> str:
    """The text of a page with its output blocks as they should be."""
    blocks = iter(list(blocks_of(page)))

    def write(found: re.Match[str]) -> str:
        block = next(blocks)
        lines = printed(block)
        if lines is None:
            return found[0]
        text = "".join(f"{line}\n" for line in renewed(block.lines, lines))
        return f"{found[1]}```{found[2]}\n{textwrap.indent(text, found[1])}{found[1]}```"

    return FENCE.sub(write, page.read_text("utf-8"))


def main() -> None:
    """Every page, or those that are named."""
    for page in map(Path, sys.argv[1:]) if sys.argv[1:] else pages():
        page.write_text(updated(page), encoding="utf-8")


if __name__ == "__main__":
    main()
