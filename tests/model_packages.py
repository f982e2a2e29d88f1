"""Writes small model packages of ONNX Runtime by hand, in the forms that its format allows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from partita.foreign.model_package import WEIGHTS_OPTION


def shared_asset(folder: Path, name: str, data: bytes) -> str:
    """Put one file into `shared_assets`; returns the URI, hashed as in ONNX Runtime's documentation."""
    lines = f"{hashlib.sha256(data).hexdigest()}  {name}\n"
    digest = hashlib.sha256(lines.encode()).hexdigest()
    home = folder / "shared_assets" / f"sha256-{digest}"
    home.mkdir(parents=True, exist_ok=True)
    (home / name).write_bytes(data)
    return f"sha256:{digest}"


def over_shared_weights(folder: Path, model: Path, providers: Mapping[str, str]) -> dict[str, Any]:
    """A package with a component `main`, and the same model for each provider (variant name -> ONNX Runtime's name).

    The weights are one shared asset. Returns its manifest, to change and write again.
    """
    found, data = onnx.load(model), "model.onnx.data"
    onnx.save(found, folder / "m.onnx", save_as_external_data=True, location=data, size_threshold=0)
    uri = shared_asset(folder, data, (folder / data).read_bytes())
    (folder / data).unlink()
    variants = {}
    for name, provider in providers.items():
        home = folder / "main" / name
        home.mkdir(parents=True)
        (home / "model.onnx").write_bytes((folder / "m.onnx").read_bytes())
        info = {"model_file": "model.onnx", "session_options": {WEIGHTS_OPTION: uri}}
        variants[name] = {"variant_directory": f"main/{name}", "ep": provider, "executor_info": {"ort": info}}
    (folder / "m.onnx").unlink()
    manifest = {"schema_version": "1.0", "components": {"main": {"variants": variants}}}
    write(folder, manifest)
    return manifest


def write(folder: Path, manifest: Any, name: str = "manifest.json") -> None:
    (folder / name).write_text(json.dumps(manifest), encoding="utf-8")
