"""Where a report is to be written, checked before the run that it is about."""

from __future__ import annotations

from pathlib import Path

from partita.errors import ReportError
from partita.partition_reports.views import json as json_view


def check_target(path: Path, package: Path) -> None:
    """Find out before a long run whether its report can be written. Raises ReportError, and so inside the package."""
    if package.is_dir() and path.resolve().is_relative_to(package.resolve()):
        raise ReportError(f"{path}: inside the package {package}, which a report must not change; choose another place")
    json_view.check_writable(path)
