"""Exporters, one file each: (checkpoint, options) -> graphs and their contract."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from partita.errors import UsageError
from partita.export.exporters.base import Attempts, Exported, Exporter

if TYPE_CHECKING:
    from partita.export.checkpoint.stored_formats import Quantised
    from partita.export.options import ExportOptions

__all__ = ["Attempts", "Exported", "Exporter", "check_name", "exporter", "names", "refuse_unable"]


def names() -> tuple[str, ...]:
    """Names of all exporters, sorted. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def check_name(name: str) -> None:
    """Raise UsageError, which lists the names, for an unknown exporter. Imports none of them."""
    if name not in names():
        raise UsageError(f"`exporter={name}`: unknown exporter; choose one of {', '.join(names())}")


def exporter(name: str) -> Exporter:
    """The exporter with this name. Raises UsageError where there is none."""
    check_name(name)
    found = importlib.import_module(f"{__name__}.{name}").EXPORTER
    assert isinstance(found, Exporter)
    return found


def refuse_unable(chosen: Exporter, options: ExportOptions, quantised: Quantised | None = None) -> None:
    """Raise UsageError for adapters or quantised weights that the exporter does not support."""
    if (options.adapter is not None or options.with_adapters) and not chosen.adapts:
        said = f"`{'with_adapters' if options.adapter is None else 'adapter'}`"
        raise UsageError(f"{said}: exporter {chosen.name} does not support adapters; omit `exporter`")
    if chosen.packs:
        return
    left_out = f"omit `exporter={chosen.name}`"
    if quantised is not None:
        raise UsageError(
            f"{options.checkpoint}: the checkpoint is quantised ({quantised.method}), and exporter "
            f"{chosen.name} cannot read such weights; {left_out}"
        )
    if options.computing.bits is not None:
        raise UsageError(
            f"`precision={options.precision}`: exporter {chosen.name} does not quantise weights; choose "
            f"another `precision`, or {left_out}"
        )
