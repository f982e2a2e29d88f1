"""The packages of the contract tests, exported once in the main environment and handed to the others by path.

The other environments have no torch. The folder is named after what the packages depend on, so that a change of the
exporter makes them anew. By hand: `python -m tests.contract.packages build/contract` prints where they are.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.conftest import DEMO_CHECKPOINT, REPOSITORY

LLAMA: dict[str, Any] = {"max_length": 64}
DEMO: dict[str, Any] = {"max_length": 128}
STATIC: dict[str, Any] = {**LLAMA, "static_shapes": True, "prefill_chunk": 8}
PACKAGES: dict[str, dict[str, Any]] = {
    "llama-gqa-fp32": {**LLAMA, "attention": "gqa"},
    "llama-gqa-fp16": {**LLAMA, "attention": "gqa", "precision": "fp16"},
    "llama-onnx24-fp32": {**LLAMA, "attention": "onnx24"},
    "llama-onnx24-fp16": {**LLAMA, "attention": "onnx24", "precision": "fp16"},
    "llama-gqa-fp32-static": {**STATIC, "attention": "gqa"},
    "llama-onnx24-fp32-static": {**STATIC, "attention": "onnx24"},
    "demo-gqa-fp32": {**DEMO, "attention": "gqa"},
    "llama-primitives-fp32": {**LLAMA, "attention": "primitives"},
    "qwen3-primitives-fp32": {**LLAMA, "attention": "primitives"},
    "gemma3_text-primitives-fp32": {**LLAMA, "attention": "primitives"},
    "llama-gqa-fp32-rows": {**LLAMA, "attention": "gqa", "batch_size": 3},
    "llama-gqa-fp16-rows": {**LLAMA, "attention": "gqa", "precision": "fp16", "batch_size": 3},
    "llama-primitives-fp32-rows": {**LLAMA, "attention": "primitives", "batch_size": 3},
    "llama-primitives-fp16-static-rows": {**STATIC, "attention": "primitives", "precision": "fp16", "batch_size": 3},
    "demo-primitives-fp32": {**DEMO, "attention": "primitives"},
    "demo-primitives-fp16-static": {
        **DEMO,
        "attention": "primitives",
        "precision": "fp16",
        "static_shapes": True,
        "prefill_chunk": 16,
    },
}
"""Name -> options of `ExportOptions`. The name begins with a model type, which is the tiny one of tests/conftest.py, or
with demo, which is the embedded checkpoint.
"""

MODEL_PACKAGE = "demo-variants"
VARIANTS = {
    "cpu": ("CPUExecutionProvider", "demo-gqa-fp32"),
    "openvino": ("OpenVINOExecutionProvider", "demo-primitives-fp32"),
}
"""Targets of the model package: ONNX Runtime's name of the provider, and the package that the variant is made from."""

SOURCES = ("partita/export/**/*.py", "partita/package/folder.py", "tests/conftest.py", "tests/contract/packages.py")
TOOLS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy")
EXPORT_SECONDS = 600


def key() -> str:
    """Hash of everything that the packages depend on."""
    digest = hashlib.sha256()
    files = [path for pattern in SOURCES for path in REPOSITORY.glob(pattern)]
    for path in sorted([*files, *DEMO_CHECKPOINT.iterdir()]):
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    digest.update(" ".join(f"{name} {importlib.metadata.version(name)}" for name in TOOLS).encode())
    return digest.hexdigest()[:16]


def can_export() -> bool:
    """Whether this environment has what an export needs."""
    return all(importlib.util.find_spec(name) for name in ("torch", "onnxscript"))


def ensure_packages(folder: Path) -> Path:
    """Where the packages are, exported first if they are not there. The export runs in a process of its own.

    Raises RuntimeError with what the export said when it fails.
    """
    wanted = folder / f"packages-{key()}"
    if not wanted.is_dir():
        done = subprocess.run(
            [sys.executable, "-m", "tests.contract.packages", str(folder)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=EXPORT_SECONDS,
        )
        if done.returncode != 0:
            raise RuntimeError(f"exporting the packages of the contract tests failed:\n{done.stdout}{done.stderr}")
    return wanted


def export_all(folder: Path) -> Path:
    """Export every package; the folder appears when all are there, and older ones go."""
    from partita.export.pipeline import ExportOptions, export
    from partita.library.exporting import replay

    wanted = folder / f"packages-{key()}"
    if wanted.is_dir():
        return wanted
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as temporary:
        made = Path(temporary) / "packages"
        for name, options in PACKAGES.items():
            checkpoint = checkpoint_of(name.partition("-")[0], Path(temporary))
            export(ExportOptions(str(checkpoint), made / name, **options), replay=replay)
        write_variants(made)
        for old in folder.glob("packages-*"):
            shutil.rmtree(old, ignore_errors=True)
        made.replace(wanted)
    return wanted


def write_variants(made: Path) -> None:
    """Write the model package of the embedded checkpoint, from its packages for cpu and openvino."""
    from partita.export.model_package import TargetPackage, write_model_package
    from partita.export.progress import Silent
    from partita.package.folder import read_manifest

    packages = [
        TargetPackage(target, ort_name, made / name, read_manifest(made / name))
        for target, (ort_name, name) in VARIANTS.items()
    ]
    (made / MODEL_PACKAGE).mkdir()
    write_model_package(packages, made / MODEL_PACKAGE, Silent())


def checkpoint_of(model: str, folder: Path) -> Path:
    """The embedded checkpoint, or a tiny one of a model type, which is made in `folder` once."""
    from tests.checkpoints import save_random_model
    from tests.conftest import BASE, MODELS, _save_tokenizer

    if model == "demo":
        return DEMO_CHECKPOINT
    checkpoint = folder / model
    if not checkpoint.is_dir():
        checkpoint.mkdir()
        settings = {**BASE, **MODELS[model]}
        save_random_model(checkpoint, model, settings, "float32", seed=0)
        _save_tokenizer(checkpoint, settings["vocab_size"])
    return checkpoint


if __name__ == "__main__":
    sys.stdout.write(f"{export_all(Path(sys.argv[1]))}\n")
