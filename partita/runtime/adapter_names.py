"""Which adapters a package has, by name; loads no ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

from partita.errors import UsageError
from partita.package import Manifest


def check_adapter(folder: Path, manifest: Manifest, name: str | None) -> None:
    """Raise UsageError, which lists the names, where the package has no adapter called `name`."""
    names = [record.name for record in manifest.switchable]
    if name is None or name in names:
        return
    merged = [record.name for record in manifest.adapters if record.merged]
    if names:
        told = f"choose one of {', '.join(names)}, or leave it out"
    elif merged:
        told = f"{', '.join(merged)} is merged into its weights; leave it out"
    elif manifest.foreign is not None:
        takes = manifest.foreign.adapter_inputs
        told = (
            "no *.onnx_adapter file lies in it" if takes else "its graph has no inputs that an adapter gives values for"
        )
    else:
        told = "it has none; export it with `with_adapters`"
    raise UsageError(f"`adapter={name}`: {folder} has no adapter of this name; {told}")
