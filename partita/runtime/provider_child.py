"""The child process that tries one provider: `python -m partita.runtime.provider_child`, JSON in, JSON lines out.

It may crash, hang or print what it likes: stdout carries one line per stage that was reached, so that the parent knows
how far it came, and everything else that anybody prints goes to stderr. The last line is the result.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

from partita.orphans import end_with_parent

PROBE_MODEL = base64.b64decode(
    "CAc6aAoYCgF4CgF3EgF5GgVwcm9iZSIGTWF0TXVsEgVwcm9iZSobCAIIAhABQgF3ShAAAIA/AAAAQAAAQEAAAIBAWhMKAXgSDgoMCAESCAoCCAIK"
    "AggCYhMKAXkSDgoMCAESCAoCCAIKAggCQgQKABAN"
)
"""One MatMul, opset 13: y[2,2] = x[2,2] · w, w = [[1, 2], [3, 4]], all float32. tests/runtime makes it again."""
FEED = ((1.0, 2.0), (-3.0, 0.5))
ANSWER = ((7.0, 10.0), (-1.5, -4.0))
"""Every number and every partial sum is exact in float16, so that a provider that computes in it must agree too."""
TOLERANCE = 1e-2


def main() -> None:
    """Read the request, announce stages, write the result, and leave without running anybody's destructors."""
    end_with_parent()
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code and ONNX Runtime's Python print to stdout
    result = _answer(request, out)
    say(out, {"result": result})
    os._exit(0)


def say(out: TextIO, line: dict[str, Any]) -> None:
    """Write one line at once."""
    out.write(json.dumps(line) + "\n")
    out.flush()


def _answer(request: dict[str, Any], out: TextIO) -> dict[str, Any]:
    """The result: what was found out until something raised, and what it raised."""
    found: dict[str, Any] = {"error": None}
    try:
        say(out, {"stage": "import"})
        from partita.runtime.ort import registry

        if request.get("inventory"):
            found["build"] = dataclasses.asdict(registry.ort_build())
            found["available"] = list(registry.available_ort_names())
        try:
            if request.get("provider"):
                probe(request["provider"], found, out)
        finally:  # what does not start may be listed all the same
            found["devices"] = [dataclasses.asdict(device) for device in registry.ep_devices()]
            found["hardware"] = list(registry.hardware_kinds())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reads it as the finding
        found["error"] = {"type": type(error).__name__, "text": str(error)}
    return found


def probe(wanted: dict[str, Any], found: dict[str, Any], out: TextIO) -> None:
    """Register the plugin library if there is one, run the model on the provider alone, and keep what it says."""
    import numpy as np

    from partita.runtime.ort import registry

    name, library = wanted["ort_name"], wanted.get("library")
    say(out, {"stage": "load"})
    if wanted.get("preload"):
        registry.preload_libraries()
    if library:
        offered = registry.register_library(name, Path(library))
        found["offered"], found["loaded"] = list(offered), True
        if not offered:
            return
        name = name if name in offered else offered[0]
    found["ort_name"] = name
    say(out, {"stage": "run"})
    outputs, registered, options = registry.run_alone(
        PROBE_MODEL,
        name,
        wanted.get("options", {}),
        prefix=wanted.get("option_prefix", ""),
        plugin=bool(library),
        feed={"x": np.array(FEED, np.float32)},
    )
    found["registered"], found["options"] = list(registered), options
    found["output"] = np.asarray(outputs[0], np.float32).tolist()
    found["correct"] = bool(np.allclose(outputs[0], np.array(ANSWER, np.float32), rtol=0, atol=TOLERANCE))


if __name__ == "__main__":
    main()
