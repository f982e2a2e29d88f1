"""`python -m tools.packed_experts [TYPE ...]`: what becomes of the experts of each mixture in int4.

A tiny random checkpoint of each type is exported as `partita export --precision int4` does for the CPU provider, which
verifies it. docs/precisions.md has a summary. Prints a row per type: the operators that read the experts, the share of
the numbers that is packed, and the weights that are not. Takes ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import onnx

from partita.demo import heldout_path
from partita.errors import PartitaError
from partita.package.folder import Manifest, read_manifest
from tests.export.breadth import recipes

TYPES = (
    "afmoe",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_moe",
    "jamba",
    "lfm2_moe",
    "llama4_text",
    "longcat_flash",
    "minimax",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
SHORT = 1200
"""Characters of the text on which the quality is measured."""


def packed(folder: Path, model_type: str) -> Manifest:
    """Export a tiny checkpoint of a type into `folder`/package. Raises a PartitaError where that is refused."""
    from partita.export.options import ExportOptions
    from partita.export.pipeline import export
    from partita.library.exporting import replay, scorer

    recipes.save(folder / "checkpoint", model_type)
    text = folder / "text.txt"
    text.write_text(heldout_path().read_text(encoding="utf-8")[:SHORT], encoding="utf-8")
    options = ExportOptions(
        str(folder / "checkpoint"),
        folder / "package",
        precision="int4",
        max_length=64,
        quality_text=text,
        attention="gqa",
    )
    export(options, replay=replay, scorer=scorer)
    return read_manifest(folder / "package")


def row(folder: Path, model_type: str) -> str:
    """What came of a type, as a row of the table."""
    try:
        manifest = packed(folder, model_type)
    except PartitaError as error:
        return f"| {model_type} | - | - | {error} |"
    assert manifest.packed is not None
    found: Counter[str] = Counter()
    for file in manifest.graph.files:
        model = onnx.load(folder / "package" / file.file, load_external_data=False)
        found.update(node.op_type for node in model.graph.node if "experts" in node.name)
    readers = [name for name in ("QMoE", "MatMulNBits", "MoE", "Gemm", "MatMul") if found[name]]
    numbers = sum(kind.parameters for kind in manifest.packed.kinds)
    rest = "; ".join(manifest.packed.not_packed) or "-"
    share = numbers / manifest.source.parameters
    return f"| {model_type} | {', '.join(readers) or 'none'} | {share:.1%} | {rest} |"


def main() -> None:
    """A row for every type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=TYPES)
    for model_type in parser.parse_args().types:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(row(Path(folder), model_type) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
