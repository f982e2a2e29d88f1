"""Check the Python of README and docs with mypy --strict. Run by `make check`.

The blocks of a page are one program, unless they are fragments (`<!-- block: fragment -->` and the like).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "examples"
BLOCK = re.compile(r"^(?:<!-- block: (?P<name>\S+) -->\n)?```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
FRAGMENTS = ("fragment",)
"""Names of blocks that are no whole program."""


def programs(page: Path) -> str:
    """The program of a page; empty without Python."""
    blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return "\n".join(block["code"] for block in blocks if block["name"] not in FRAGMENTS)


def main() -> int:
    """Write each page's program to build/examples, and return mypy's exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if code := programs(page):
            written.append(FOLDER / f"{re.sub('[^a-z]', '_', page.stem.lower())}_page.py")
            written[-1].write_text(code, encoding="utf-8")
    return subprocess.run([sys.executable, "-m", "mypy", "--strict", *written], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
