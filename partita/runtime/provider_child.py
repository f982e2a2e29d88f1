"""The worker process that tries one provider. It may crash, hang or print anything."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from partita.runtime.worker.child import Channel, serve

PROBE_MODEL = base64.b64decode(
    "CAc6aAoYCgF4CgF3EgF5GgVwcm9iZSIGTWF0TXVsEgVwcm9iZSobCAIIAhABQgF3ShAAAIA/AAAAQAAAQEAAAIBAWhMKAXgSDgoMCAESCAoCCAIK"
    "AggCYhMKAXkSDgoMCAESCAoCCAIKAggCQgQKABAN"
)
"""One MatMul, opset 13: y[2,2] = x[2,2] · w, w = [[1, 2], [3, 4]], all float32. tests/runtime makes it again."""
FEED = ((1.0, 2.0), (-3.0, 0.5))
ANSWER = ((7.0, 10.0), (-1.5, -4.0))
"""Every number and every partial sum is exact in float16, so that a provider that computes in it must agree too."""
TOLERANCE = 1e-2


def run(channel: Channel) -> None:
    """Answer `examine`; every stage that is reached is pushed, so that a crash is known to come in it."""
    serve(channel, {"examine": partial(examine, channel.push)})


def examine(
    reached: Callable[[str], object], *, provider: Mapping[str, Any] | None = None, inventory: bool = False
) -> dict[str, Any]:
    """What was found out until something raised, and under `error` what it raised.

    `provider`: what `provider_check.request_of` says of the provider to try. `inventory`: also what is in the build.
    """
    found: dict[str, Any] = {"error": None}
    try:
        reached("import")
        from partita.runtime.ort import registry

        if inventory:
            found["build"] = dataclasses.asdict(registry.ort_build())
            found["available"] = list(registry.available_ort_names())
        try:
            if provider is not None:
                probe(provider, found, reached)
        finally:  # what does not start may be listed all the same
            found["devices"] = [dataclasses.asdict(device) for device in registry.ep_devices()]
            found["hardware"] = list(registry.hardware_kinds())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reads it as the finding
        found["error"] = {"type": type(error).__name__, "text": str(error)}
    return found


def probe(wanted: Mapping[str, Any], found: dict[str, Any], reached: Callable[[str], object]) -> None:
    """Register the plugin library if there is one, run the model on the provider alone, and keep what it says."""
    import numpy as np

    from partita.runtime.ort import registry

    name, library = wanted["ort_name"], wanted.get("library")
    reached("load")
    if wanted.get("preload"):
        registry.preload_libraries()
    if library:
        offered = registry.register_library(name, library)
        found["offered"], found["loaded"] = list(offered), True
        if not offered:
            return
        name = name if name in offered else offered[0]
    found["ort_name"] = name
    reached("run")
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
