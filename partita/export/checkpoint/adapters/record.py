"""Manifest record of an adapter."""

from __future__ import annotations

from partita.export.checkpoint.adapters.config import CONFIG
from partita.export.checkpoint.adapters.files import Adapter
from partita.package.folder import AdapterRecord, record_file


def adapter_record(adapter: Adapter, name: str, *, merged: bool) -> AdapterRecord:
    """The record of `adapter` under the name that runs use, with hashes of its files."""
    return AdapterRecord(
        name=name,
        merged=merged,
        kind="dora" if adapter.config.dora else "lora",
        ranks=adapter.ranks,
        modules=len(adapter.modules),
        whole=tuple(sorted(adapter.whole)),
        base_model=adapter.config.base_model,
        source=tuple(record_file(adapter.folder, file) for file in (CONFIG, adapter.file)),
    )
