"""Which adapters a package has, by name; loads no ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partita.errors import UsageError
from partita.package import Manifest
from partita.spelling import spelled


def check_adapters(folder: Path, manifest: Manifest, names: Sequence[str | None]) -> None:
    """Check the adapters of the rows of a batch. Raises UsageError for a name that is not there, and for others beside
    each other where all rows have one.
    """
    for name in dict.fromkeys(names):
        check_adapter(folder, manifest, name)
    if len(set(names)) > 1 and not manifest.graph.adapters_by_row:
        listed = ", ".join(name or "none" for name in dict.fromkeys(names))
        raise UsageError(
            f"{spelled('adapter')}: the rows of {folder} have one adapter together, and these are {listed}; generate "
            "with one after the other"
        )


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
        told = f"it has none; export it with {spelled('with_adapters')}"
    raise UsageError(f"{spelled('adapter', name)}: {folder} has no adapter of this name; {told}")
