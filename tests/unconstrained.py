"""Export, verify and generate with small families in the environment of the running Python, a line for each.

`make unconstrained` runs it in a fresh environment with the newest versions that pyproject.toml allows, and again with
the oldest transformers and the families that are named then. It needs the extras `cpu` and `export` and no test
library. Exit code 1 when a family fails.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import partita
from tests.export.breadth import recipes

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3", "phi3", "mamba", "qwen2_5_vl", "gpt_oss")
PACKAGES = ("transformers", "torch", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy", "tokenizers")
NEW_TOKENS = 4


def check(model_type: str, folder: Path) -> str:
    """What an export of a tiny random model of this type, its verification and a generation gave."""
    recipes.save(folder / "checkpoint", model_type)
    exported = partita.export(folder / "checkpoint", folder / "package", max_length=64, target="cpu")
    if exported.manifest.verification.status != "verified":
        raise AssertionError(f"not verified: {exported.manifest.verification}")
    with partita.load(folder / "package", providers="cpu") as model:
        model.verify()
        tokens = model.generate([5, 9, 17, 40], max_new_tokens=NEW_TOKENS).run().tokens
    if not tokens[0]:
        raise AssertionError("no tokens were generated")
    return f"exported, verified; {len(tokens[0])} tokens"


def main(families: Sequence[str]) -> int:
    """Check each of these families. Returns the exit code."""
    print("versions: " + ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    failed = []
    for model_type in families:
        try:
            with tempfile.TemporaryDirectory() as folder:
                said = check(model_type, Path(folder))
        except Exception as error:  # noqa: BLE001 - the other families are still tried
            failed.append(model_type)
            traceback.print_exc()
            said = f"FAILED: {type(error).__name__}: {error}"
        print(f"{model_type:<12} {said}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FAMILIES))
