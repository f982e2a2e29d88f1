"""The child process of a dry run: `python -m partita.library.place_child`, JSON in, JSON lines out.

Its environment points the loader at stand-in libraries, which may end it in any way they like: the parent reads that as
a finding. The report goes to a file that the parent names, because a report can be large.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from partita.errors import PartitaError, public_type
from partita.extras import explain
from partita.signals import ended_by_exception

OVER_THE_GRAPH = frozenset({"subgraph_rejected", "dynamic_shape"})
"""Reasons with which a provider that does start is left out: a report on the graph is what was asked for then."""
NOT_REAL = (
    "values: memory of the device reads as zeros, so no output means anything",
    "times: nothing is computed on a device, so none is given",
    "sizes that follow from values: unknown, and marked so",
    "memory use, and what depends on how much memory is free",
    "the device profile: it answers questions about the device, on which no placement was seen to depend",
)


def main() -> None:
    """Read the request, place the model, write the report, and leave without running anybody's destructors."""
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code and ONNX Runtime's Python print to stdout
    with ended_by_exception():  # its own children go with it
        result = answer(request)
    out.write(json.dumps({"result": result}) + "\n")
    out.flush()
    os._exit(0)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What came of it: an error of ours as data, an interruption, or nothing to say."""
    try:
        interrupted = place_dry(request)
    except PartitaError as error:
        details = getattr(error, "details", "")
        return {"error": {"type": public_type(error), "text": str(error), "details": details}}
    except KeyboardInterrupt:  # before there was anything to report
        return {"error": None, "interrupted": True}
    except Exception as error:  # noqa: BLE001 - the parent must hear of it; nobody else reads a traceback here
        lacking = explain(error, foreign=True)
        if lacking is not None:
            return {"error": {"type": public_type(lacking), "text": str(lacking), "details": ""}}
        return {"error": {"type": "PartitaError", "text": f"internal error: {type(error).__name__}: {error}"}}
    return {"error": None, "interrupted": interrupted}


def place_dry(request: dict[str, Any]) -> bool:
    """Prove that the stand-ins are in place, place the model, write the report; whether it was cut short by Ctrl-C."""
    from partita.errors import ProviderError
    from partita.library.chain import read_chain_options
    from partita.library.place_options import from_json
    from partita.library.place_run import place
    from partita.library.probing import was_interrupted
    from partita.partition_reports.records import DryRunFacts
    from partita.partition_reports.views import json as json_view
    from partita.providers.cuda_dry_run.standins import ensure_child
    from partita.runtime.place import RunInterruptedError

    build = ensure_child()
    options = from_json(request["options"])
    played = DryRunFacts(**{**request["played"], "stand_ins": build, "not_real": NOT_REAL, "graph_capture": None})
    report, error = place(options, read_chain_options(options.where), played)
    ensure_child()  # what the session loaded is still the same
    first = report.chain[0]
    if first.status != "active" and first.reason not in OVER_THE_GRAPH:
        raise ProviderError(
            f"dry run: {first.provider} did not start over the stand-ins: {first.reason}: {first.evidence}"
        )
    json_view.write(report, Path(request["report"]))
    return isinstance(error, RunInterruptedError) or was_interrupted(report.notes)


if __name__ == "__main__":
    main()
