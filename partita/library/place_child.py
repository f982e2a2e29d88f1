"""The child process of `place_dry`: `python -m partita.library.place_child`, JSON in, JSON lines out.

In a dry run its environment points the loader at stub libraries. These, or a provider's own, may end it in any way
they like: the parent reads that as a finding. The report goes to a file that the parent names, because a report can be
large.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.errors import ProviderError
from partita.library.crossing import told
from partita.orphans import end_with_parent
from partita.signals import ended_by_exception
from partita.spelling import read_by

if TYPE_CHECKING:
    from partita.partition_reports.records import Report

OVER_THE_GRAPH = frozenset({"subgraph_rejected", "dynamic_shape"})
"""Reasons with which a provider that does start is left out: a report on the graph is what was asked for then."""
NOT_REAL = (
    "values: memory of the device reads as zeros, so no output means anything",
    "times: nothing is computed on a device, so none is given",
    "sizes that follow from values: unknown, and marked so",
    "memory use, and what depends on how much memory is free",
    "the device profile: it answers questions about the device; no placement was seen to depend on it",
)


def main() -> None:
    """Read the request, place the model, write the report, and leave without running anybody's destructors."""
    end_with_parent()
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code and ONNX Runtime's Python print to stdout
    with ended_by_exception(), read_by(request["reader"]):  # its own children go with it
        result = _answer(request)
    out.write(json.dumps({"result": result}) + "\n")
    out.flush()
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """What came of it: an error of ours as data, an interruption, and why a run failed."""
    try:
        return {"error": None, **_place_it(request)}
    except KeyboardInterrupt:  # before there was anything to report
        return {"error": None, "interrupted": True}
    except Exception as error:  # noqa: BLE001 - the parent must hear of it; nobody else reads a traceback here
        return {"error": told(error)}


def _place_it(request: dict[str, Any]) -> dict[str, Any]:
    """Place the model and write the report; whether it was cut short by Ctrl-C, and why a run failed.

    In a dry run: prove first that the stubs are in place, and that they still are at the end.
    """
    from partita.library.chain import read_chain_options
    from partita.library.place_options import from_json
    from partita.library.place_run import place
    from partita.partition_reports import storage
    from partita.partition_reports.request_records import DryRunFacts
    from partita.providers.cuda_dry_run.standins import ensure_child

    options, played = from_json(request["options"]), None
    if request["played"] is not None:
        build = ensure_child()
        played = DryRunFacts(**{**request["played"], "stand_ins": build, "not_real": NOT_REAL, "graph_capture": None})
    report, error = place(options, read_chain_options(options.where), played, crashed=request["crashed"])
    if played is not None:
        ensure_child()  # what the session loaded is still the same
        if not request["crashed"]:
            _check_started(report)
    storage.write(report, Path(request["report"]))
    return {
        "interrupted": bool(report.interrupted),
        "failed": None if error is None or "runs" in report.interrupted else told(error),
    }


def _check_started(report: Report) -> None:
    """Raise ProviderError when the provider of a dry run did not start."""
    first = report.chain[0]
    if first.status != "active" and first.reason not in OVER_THE_GRAPH:
        raise ProviderError(
            f"dry run: {first.provider} did not start over the stub libraries: {first.reason}: {first.evidence}"
        )


if __name__ == "__main__":
    main()
