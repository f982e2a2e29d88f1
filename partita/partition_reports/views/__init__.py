"""The views of a report, one module each except JSON."""

from partita.partition_reports.render.show import Views

OWN = {name: f"{__name__}.{name}" for name in ("brief", "html", "markdown", "text")}
VIEWS = Views(None, modules={**OWN, "model-explorer": f"{__name__}.model_explorer"})
