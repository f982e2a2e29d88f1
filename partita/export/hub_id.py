"""Hub ids of models."""

from __future__ import annotations

import os
import re

from partita.errors import CheckpointError

HUB_ID = re.compile(r"(?:hf:/{1,2})?(?P<name>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
"""owner/name, owner/name@revision, hf://owner/name, also normalised as a path with one slash."""


def check_model(given: str) -> None:
    """Raise CheckpointError for a string that is neither a path nor a hub id."""
    if not os.path.lexists(given) and not HUB_ID.fullmatch(given):
        raise CheckpointError(f"{given}: no such folder, and not a hub id of the form owner/name")
