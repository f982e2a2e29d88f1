"""Errors on their way out of a child process: as data there, raised again here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import partita.errors as errors
from partita.errors import PartitaError, ProviderError, RefusedNode, public_type
from partita.extras import explain


def told(error: Exception) -> dict[str, Any]:
    """An exception as data: ours as what it is, a library that is missing as what brings it, and others by name."""
    ours = error if isinstance(error, PartitaError) else explain(error, foreign=True)
    if ours is None:
        return {"type": "PartitaError", "text": f"internal error: {type(error).__name__}: {error}"}
    nodes = ours.nodes if isinstance(ours, ProviderError) else ()
    return {"type": public_type(ours), "text": str(ours), "nodes": [asdict(node) for node in nodes]}


def rebuilt(given: Mapping[str, Any]) -> PartitaError:
    """What `told` made data of, as the class it was."""
    kind: type[PartitaError] = getattr(errors, given["type"], PartitaError)
    if kind is ProviderError:
        return ProviderError(given["text"], nodes=tuple(RefusedNode(**node) for node in given.get("nodes", ())))
    return kind(given["text"])


def raise_told(given: Mapping[str, Any] | None) -> None:
    """Raise what `told` made data of; nothing for None."""
    if given is not None:
        raise rebuilt(given)
