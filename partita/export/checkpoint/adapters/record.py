"""What a manifest keeps of an adapter."""

from __future__ import annotations

from partita.export.checkpoint.adapters.config import CONFIG
from partita.export.checkpoint.adapters.files import Adapter
from partita.package.folder import AdapterRecord, record_file


def adapter_record(adapter: Adapter, name: str, *, merged: bool) -> AdapterRecord:
    """Describe `adapter`, which runs know as `name`; its files are hashed."""
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
