"""Measure which operators the installed providers support, and write a page and a table for each in docs/support.

`python -m tools.support_tables [NAME ...]`, or `make support-tables`. A page begins with the differences from the table
that it replaces, where that is of another version of ONNX Runtime.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "support"
MAIN = ".venv"
TABLES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "cpu": (".venvs/qnn", (), "CPU provider"),
    "cuda": (MAIN, ("--dry-run",), "CUDA provider, measured without a GPU"),
    "webgpu": (".venvs/webgpu", (), "WebGPU provider"),
    "openvino": (".venvs/openvino", (), "OpenVINO provider on a CPU"),
    "qnn": (".venvs/qnn", (), "QNN provider on its emulator"),
}
"""Provider -> environment, options of `partita support`, and title of the page."""
SECONDS = "900"
SOFTWARE_VULKAN = {"VK_ICD_FILENAMES": "/usr/lib/chromium/vk_swiftshader_icd.json", "XDG_RUNTIME_DIR": "/tmp"}
"""SwiftShader, which computes on the CPU: the same kernels as on a GPU, on every machine with Debian's chromium."""
NO_EARLIER = "There is no earlier table of another version."


def measure(name: str, environment: str, options: tuple[str, ...], title: str) -> None:
    """Write the page and the table of one provider."""
    kept = FOLDER / f"{name}.json.xz"
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = ("--all", "--provider", name, "--seconds", SECONDS, *options)
        partita(folder, environment, "support", *asked, "--out", "current.json", "--markdown", "table.md")
        current = (folder / "current.json").read_bytes()
        difference = NO_EARLIER
        if kept.exists():
            previous = lzma.decompress(kept.read_bytes())
            if runtime(previous) != runtime(current):
                (folder / "previous.json").write_bytes(previous)
                compared = ("previous.json", "current.json", "--markdown", "changes.md")
                partita(folder, environment, "support", "diff", *compared)
                difference = (folder / "changes.md").read_text(encoding="utf-8")
        table = (folder / "table.md").read_text(encoding="utf-8")
        (FOLDER / f"{name}.md").write_text(page(title, difference, table), encoding="utf-8")
        compact = json.dumps(json.loads(current), separators=(",", ":")).replace(f"{ROOT}/", "")
        kept.write_bytes(lzma.compress(compact.encode(), preset=9))


def page(title: str, *parts: str) -> str:
    """One page of several texts in Markdown, with their headings under its title."""
    text = "\n\n".join(part.strip() for part in parts).replace("<details>", '<details markdown="1">')
    text = text.replace(f"{ROOT}/", "")
    return f"# {title}\n\n{re.sub('^##(?=#)', '#', text, flags=re.MULTILINE)}\n"


def partita(folder: Path, environment: str, *arguments: str) -> None:
    """Run a command of Partita of this working tree, in a folder and with the interpreter of an environment."""
    command = [str(ROOT / environment / "bin" / "python"), "-m", "partita", *arguments]
    variables = {**SOFTWARE_VULKAN, **os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=folder, env=variables, stdout=subprocess.DEVNULL)


def runtime(table: bytes) -> object:
    """The wheel of ONNX Runtime, with its version, that a table was measured with."""
    return json.loads(table)["versions"]["onnxruntime_package"]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for provider in sys.argv[1:] or TABLES:
        measure(provider, *TABLES[provider])
