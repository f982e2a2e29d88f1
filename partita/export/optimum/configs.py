"""A checkpoint as transformers 4 reads it: the same files, and a config in the words of that version.

transformers 5 writes the settings of rotary embeddings as `rope_parameters`, with the base in it, and by kind of layer
where kinds differ; transformers 4 has `rope_theta`, `rope_scaling` and `rope_local_base_freq`, and would take its own
default for what it does not find. Source: configuration_utils.py and modeling_rope_utils.py of both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT = "default"


def view_for_4(checkpoint: Path, folder: Path) -> Path:
    """Fill the empty `folder` with links to the files of a checkpoint, copies where the disk has no links, and its
    config as transformers 4 has it.
    """
    for path in checkpoint.iterdir():
        if path.is_file() and path.name != CONFIG:
            try:
                (folder / path.name).symlink_to(path.resolve())
            except OSError:
                shutil.copyfile(path, folder / path.name)
    config = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps(for_4(config), indent=1), encoding="utf-8")
    return folder


def for_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the settings of rotary embeddings where transformers 4 looks for them; what is there stays."""
    found = {
        key: for_4(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in config.items()
    }
    if "dtype" in found:
        found.setdefault("torch_dtype", found["dtype"])
    rope = found.get("rope_parameters")
    if not isinstance(rope, dict):
        return found
    by_kind = {kind: each for kind, each in rope.items() if isinstance(each, dict)}
    main = by_kind.get(FULL, rope) if by_kind else rope
    for key, value in _of_4(main).items():
        found.setdefault(key, value)
    if SLIDING in by_kind and "rope_theta" in by_kind[SLIDING]:
        found.setdefault("rope_local_base_freq", by_kind[SLIDING]["rope_theta"])
    return found


def _of_4(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one kind of layer under their names in transformers 4."""
    found = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    if rope.get("rope_type", DEFAULT) != DEFAULT:
        found["rope_scaling"] = {key: value for key, value in rope.items() if key not in found}
    return found
