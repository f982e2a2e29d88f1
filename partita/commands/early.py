"""Checks that need no heavy import, made before a verb is loaded: names of providers, and what is at a path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from partita.errors import PackageError
from partita.options import ExportOptions
from partita.providers.resolve import parse_chain
from partita.strangers import recognise

CHAINS = {"providers": "providers", "provider": "providers", "target": "target", "chains": "chains", "more": "chains"}
"""Options that name providers, and the argument that a message names."""


def check_early(options: Any) -> None:
    """Raise UsageError for an unknown provider, PackageError and CheckpointError for a missing or empty folder."""
    libraries = getattr(options, "provider_libraries", None) or getattr(options, "target_libraries", None)
    if not libraries:  # a library may bring a provider of another name
        for name, argument in CHAINS.items():
            given = getattr(options, name, None) or ()
            for chain in (given,) if isinstance(given, str) else given:
                parse_chain(chain, argument=argument)
    for path in (getattr(options, "package", None), *getattr(options, "packages", ())):
        if path is not None:
            _check_package(Path(path))
    model = getattr(options, "model", None)
    operators = getattr(options, "operators", None)  # support refuses them beside a model, or compares tables
    if model is not None and not operators and not os.path.lexists(model):
        raise PackageError(f"{model}: no such file; name an ONNX file or a package")
    if isinstance(options, ExportOptions):
        from partita.library.exporting import check_before_loading

        check_before_loading(options)


def _check_package(path: Path) -> None:
    if path.is_dir() and any(path.iterdir()):
        return
    stranger = recognise(path)
    if path.is_dir() or not path.exists():
        raise PackageError(f"{path}: {stranger.what}", remedy=stranger.remedy)
