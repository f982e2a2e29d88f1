"""Measure which operators the installed providers support, and write a page and a table for each in docs/support.

`python -m tools.support_tables [NAME ...]`, or `make support-tables`. A table of another version of ONNX Runtime
becomes the previous table, and the page has the differences. `--pages` writes the pages from the tables.
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

from partita.compare.packages import compare_tables
from partita.partition_reports.render.show import load_view
from partita.support.records import SupportTable

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
NO_EARLIER = {
    "openvino": "There is no earlier table: before 1.24, ONNX Runtime does not report the provider of a node."
}
SECONDS = "900"
SOFTWARE_VULKAN = {"VK_ICD_FILENAMES": "/usr/lib/chromium/vk_swiftshader_icd.json", "XDG_RUNTIME_DIR": "/tmp"}
"""SwiftShader, which computes on the CPU: the same kernels as on a GPU, on every machine with Debian's chromium."""


def measure(name: str) -> None:
    """Measure one provider, and write its table."""
    environment, options, _ = TABLES[name]
    kept = FOLDER / f"{name}.json.xz"
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = ("--all", "--provider", name, "--seconds", SECONDS, *options)
        partita(folder, environment, "support", *asked, "--out", "current.json")
        current = json.loads((folder / "current.json").read_bytes())
    if kept.exists() and runtime(table(kept)) != current["versions"]["onnxruntime_package"]:
        kept.replace(FOLDER / f"{name}.previous.json.xz")
    compact = json.dumps(current, separators=(",", ":")).replace(f"{ROOT}/", "")
    kept.write_bytes(lzma.compress(compact.encode(), preset=9))


def table(file: Path) -> SupportTable:
    """The table in a compressed file."""
    return SupportTable.model_validate_json(lzma.decompress(file.read_bytes()))


def page(name: str) -> str:
    """The page of a provider: the differences from its previous table, and its table."""
    current, previous = table(FOLDER / f"{name}.json.xz"), FOLDER / f"{name}.previous.json.xz"
    parts = [f"# {TABLES[name][2]}"]
    if previous.exists():
        earlier = table(previous)
        names = (f"{name}, {runtime(earlier)}", f"{name}, {runtime(current)}")
        parts.append(f"## Changes since {runtime(earlier)}")
        parts.append(markdown("partita.compare.document", compare_tables(earlier, current, names=names)))
    else:
        parts.append(NO_EARLIER.get(name, "There is no table of an earlier version."))
    parts.append(f"## Operators of {runtime(current)}")
    parts.append(markdown("partita.support.sections", current))
    return "\n\n".join(parts) + "\n"


def markdown(views: str, record: object) -> str:
    """A record as Markdown for the site, its counts below its headings."""
    headline, _, rest = load_view("markdown", views).to_text(record).strip().removeprefix("### ").partition("\n")
    rest = re.sub(r"^####? ([^:\n]+): (.+)$", r"### \1\n\n\2", rest, flags=re.MULTILINE)
    rest = re.sub("^####(?= )", "###", rest, flags=re.MULTILINE).replace("<details>", '<details markdown="1">')
    return f"{headline}.\n{rest}"


def partita(folder: Path, environment: str, *arguments: str) -> None:
    """Run a command of Partita of this working tree, in a folder and with the interpreter of an environment."""
    command = [str(ROOT / environment / "bin" / "python"), "-m", "partita", *arguments]
    variables = {**SOFTWARE_VULKAN, **os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=folder, env=variables, stdout=subprocess.DEVNULL)


def runtime(found: SupportTable) -> str:
    """The wheel of ONNX Runtime, with its version, that a table was measured with."""
    return found.versions.onnxruntime_package or found.versions.onnxruntime


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    given = [word for word in sys.argv[1:] if word != "--pages"] or list(TABLES)
    for provider in given:
        if "--pages" not in sys.argv:
            measure(provider)
        (FOLDER / f"{provider}.md").write_text(page(provider), encoding="utf-8")
