"""Checks of an export that need neither torch nor transformers, which take seconds to load."""

from __future__ import annotations

import os
from pathlib import Path

from partita.capped import read_json_value
from partita.errors import CheckpointError, UsageError
from partita.export.hub import check_model
from partita.export.options import ExportOptions, check_options
from partita.export.publish import check_target
from partita.package.contract import CONTEXT_LENGTHS
from partita.package.folder import MANIFEST, check_folder


def check(options: ExportOptions) -> None:
    """Raise UsageError, PackageError and CheckpointError for options, an output and a checkpoint that cannot work."""
    check_target(options.reads, options.folder, force=options.force)
    check_options(options)
    given, path = os.fspath(options.checkpoint), Path(options.checkpoint)
    if path.is_dir():
        _check_folder(options, path)
    else:
        check_model(given)


def _check_folder(options: ExportOptions, folder: Path) -> None:
    """Check that the files are in the folder, that it has a config, and the maximum length against config.json."""
    try:
        check_folder(folder, kind=CheckpointError)
    except OSError:  # reported when the checkpoint is opened
        return
    config = folder / "config.json"
    if not config.is_file():
        if not (folder / MANIFEST).is_file() and not any(folder.glob("*.gguf")):
            raise CheckpointError(f"{folder}: not a checkpoint: config.json is missing")
        return
    try:
        raw = read_json_value(config)
    except (OSError, ValueError):  # reported when the checkpoint is opened
        return
    text = raw.get("text_config", raw) if isinstance(raw, dict) else None
    if options.max_length is None or not isinstance(text, dict):
        return
    if "dynamic" in str((text.get("rope_scaling"), text.get("rope_parameters"))):  # such a model has no fixed limit
        return
    name = next((name for name in CONTEXT_LENGTHS if name in text), None)
    most = None if name is None else text[name]
    if type(most) is int and 1 < most < options.max_length:
        raise UsageError(
            f"`max_length={options.max_length}`: the model supports at most {most} positions ({name} in config.json)"
        )
