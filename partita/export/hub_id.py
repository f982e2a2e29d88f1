"""Ids of models on the hub."""

from __future__ import annotations

import os
import re

from partita.errors import CheckpointError

HUB_ID = re.compile(r"(?:hf:/{1,2})?(?P<name>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
"""owner/name, owner/name@revision, hf://owner/name, also as a path, which has one slash."""


def check_model(given: str) -> None:
    """Raise CheckpointError for what is neither on disk nor a hub id."""
    if not os.path.lexists(given) and not HUB_ID.fullmatch(given):
        raise CheckpointError(f"{given}: no such folder, and not a hub id of the form owner/name")
