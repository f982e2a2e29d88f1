"""The views of a report, one module each except JSON."""

from partita.partition_reports.render.show import Views

VIEWS = Views(None, modules={name: f"{__name__}.{name}" for name in ("brief", "html", "markdown", "text")})
