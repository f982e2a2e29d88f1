"""The child process of experiments: `python -m partita.runtime.probes.child`, a line of JSON in per batch of models.

The answers go to a file, a line of JSON per model; a line on stdout says that the batch is done. Each model is opened
on one provider, with ONNX Runtime's CPU provider behind it: what is asked is who takes the node. A changed node that is
taken is also run, except in a dry run. A model may crash this process or hang it; the lines that were written by then
stand, and the alarm that ends a hang comes from the operating system.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from partita.observations.facts import Outcome
from partita.observations.log_pattern import LogPattern
from partita.observations.names import CPU, INLINED
from partita.orphans import end_with_parent
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.runtime.probes.cases import COMPANY, NODE, RUN
from partita.runtime.probes.reference_run import ORIGINAL, fault

if TYPE_CHECKING:
    from partita.providers.resolve import Resolution
    from partita.runtime.ort.session import NativeFailureError, Session

NOBODY = "NotImplemented"
"""ONNX Runtime's exception for a node that no provider of the session has a kernel for."""
REFUSED = frozenset({"InvalidGraph", "InvalidArgument", "InvalidProtobuf", "NoSuchFile"})
ILLEGAL = re.compile(
    r"invalid model|Type Error|TypeInferenceError|ShapeInferenceError|Unrecognized attribute|ValidateOpset|"
    r"under development|only guaranteed support|not a registered function/op|IR version|is not currently registered",
    re.IGNORECASE,
)
LOADING = re.compile(r"Load model from \S+ failed:\s*")
"""Names a temporary file, which says nothing."""
CPU_KERNEL = re.compile(r"providers[/\\]cpu[/\\]\S+\.cc:")
"""Where in ONNX Runtime a kernel of its CPU provider complains. Headers there serve other providers, too."""
AROUND = re.compile(rf"{COMPANY}\d+")
"""Names of several nodes around the one that is tried."""
ABOUT_NODE = re.compile(f"`{NODE}`")
ABOUT_COMPANY = re.compile(rf"`{COMPANY}\d*`")
"""A complaint about a node beside the one that is tried, as QNN words it."""
STARTUP = "start"
CAST = "InsertedPrecisionFreeCast"
"""Part of the name of casts that ONNX Runtime inserts around kernels of another type."""
AS_FUNCTION = "only as the nodes of its function body"


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of one model in this process, to be written as a line for the parent."""

    outcome: Outcome
    said: str
    unfolded: bool = False
    """Taken as the nodes of its function, and not as itself."""


def main() -> None:
    """Answer for one batch after the other, and leave without running anybody's destructors."""
    end_with_parent()
    warnings.simplefilter("ignore")
    back = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code prints to stdout
    resolution: Resolution | None = None
    for line in sys.stdin:
        request = json.loads(line)
        with Path(request["answers"]).open("a", encoding="utf-8") as out:
            resolution = experiment(request, out, resolution)
        say(back, {"done": True})
    os._exit(0)


def experiment(request: Mapping[str, Any], out: TextIO, started: Resolution | None) -> Resolution | None:
    """Answer for every model of the request, or say why none could be tried; the provider as it is here.

    `started`: the provider, when a batch before this one has started it.
    """
    resolution = started
    if resolution is None:
        say(out, {"begun": STARTUP})
        set_alarm(request["start_seconds"])
        try:
            resolution = wanted_provider(request["provider"])
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent reads it as the finding
            say(out, {"unusable": f"{type(error).__name__}: {error}"})
            return None
    first, order = started is None, Order(request.get("turns", {}))
    for name in request["models"]:
        if not order.comes(name):
            continue
        say(out, {"begun": name})
        # The first model also starts the provider, which may take long on a GPU.
        set_alarm(request["start_seconds"] if first else request["model_seconds"])
        try:
            found = _try_model(Path(request["folder"]) / name, resolution, request["one_node"])
        except Exception as error:  # noqa: BLE001 - not the provider's doing, so it must not be read as its crash
            found = Found("invalid", f"the experiment itself failed: {type(error).__name__}: {error}")
        say(out, {"model": name, **asdict(found)})
        if found.outcome == "taken" and not found.unfolded:
            order.taken(name)
        first = False
    set_alarm(0)
    return resolution


class Order:
    """Which models' turns still come, as they are taken; see `lab.Turn`."""

    def __init__(self, turns: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self.turns = turns
        self.first: dict[int, int] = {}
        """Of models among which one was taken: the lowest place of such a one."""

    def comes(self, name: str) -> bool:
        """Whether a model is still to be tried; one without turns always is."""
        turns = self.turns.get(name, ())
        return not turns or any(place <= self.first.get(among, place) for among, place in turns)

    def taken(self, name: str) -> None:
        """A model was taken."""
        for among, place in self.turns.get(name, ()):
            self.first[among] = min(place, self.first.get(among, place))


def say(out: TextIO, line: Mapping[str, Any]) -> None:
    """Write one line at once."""
    out.write(json.dumps(line) + "\n")
    out.flush()


def set_alarm(seconds: float) -> None:
    """End this process when it is not back in time, even out of native code; 0: no alarm."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def wanted_provider(wanted: Mapping[str, Any]) -> Resolution:
    """The provider as this process has it: its library registered, its device found."""
    from partita.providers.generic import generic_provider
    from partita.providers.resolve import Resolution, known_providers
    from partita.runtime.registering import registered

    own = Path(wanted["own"]) if wanted["own"] else None
    known = known_providers().get(wanted["name"]) or generic_provider(wanted["ort_name"], own)
    provider = replace(known, ort_name=wanted["ort_name"], library=own)
    library = Path(wanted["library"]) if wanted["library"] else None
    (settled,) = registered([Resolution(provider, "active", options=wanted["options"], library=library)])
    if settled.status != "active":
        raise RuntimeError(f"{settled.reason}: {settled.evidence}")
    return settled


def _try_model(path: Path, resolution: Resolution, one_node: bool) -> Found:
    """Open one model: the outcome, and what was said."""
    from partita.runtime.ort.errors import one_line
    from partita.runtime.ort.session import NativeFailureError, Opening, open_native

    opening = Opening(explain=True, optimise=not one_node, verbose=one_node and bool(resolution.provider.says_why))
    try:
        session = open_native(path, [resolution], opening)
    except NativeFailureError as failure:
        return failed(failure, resolution, one_node, legal=lambda: _legal_elsewhere(path))
    try:
        found = _opened(session, resolution, one_node)
        if found.outcome != "taken":
            return found
        if any(name.startswith(PREFIX) for name in os.environ):
            return _compared(path, session.metadata(ORIGINAL), found)
        said = session.failure_of_run(RUN)
        return Found("failed", f"it claims the node, and the run fails: {one_line(said)}") if said else found
    finally:
        session.close()


def _compared(path: Path, original: str, found: Found) -> Found:
    """What is found of a changed node that is claimed in a dry run, after a run on the CPU provider."""
    if not original or found.unfolded:
        return found
    said, ran = fault(path, original)
    if said:
        return Found("invalid", said)
    return found if ran else replace(found, outcome="placed")


def _legal_elsewhere(path: Path) -> bool:
    """Whether ONNX Runtime accepts the model without the provider, even if no kernel is found then.

    A provider's own complaint can read like one about the model.
    """
    from partita.providers.resolve import Resolution, known_providers
    from partita.runtime.ort.session import NativeFailureError, Opening, open_native

    try:
        open_native(path, [Resolution(known_providers()["cpu"], "active")], Opening(optimise=False)).close()
    except NativeFailureError as failure:
        return type(failure.error).__name__ == NOBODY
    return True


def failed(failure: NativeFailureError, resolution: Resolution, one_node: bool, *, legal: Callable[[], bool]) -> Found:
    """A session that could not be opened: nobody has a kernel, the model is not legal, or the provider failed.

    `legal`: whether ONNX Runtime accepts the model without the provider.
    """
    from partita.runtime.ort.errors import one_line
    from partita.runtime.ort.native_log import HEAD

    kind, text = type(failure.error).__name__, LOADING.sub("", one_line(str(failure)))
    told = _reason_in(failure.log, resolution.provider.node_patterns)
    if kind == NOBODY:
        return Found("left", told or text)
    illegal = kind in REFUSED or (kind not in ("EPFail", "RuntimeException", "RuntimeError") and ILLEGAL.search(text))
    if illegal and not legal():
        return Found("invalid", text)
    if one_node and (told or CPU_KERNEL.search(str(failure))):
        # What failed came after the provider had left the node: the CPU's kernel, or none.
        return Found("left", told or text)
    said = [
        one_line(match["text"]) for line in failure.log if (match := HEAD.match(line)) and match["severity"] in "EF"
    ]
    more = next((line for line in said if line not in text and text not in line), "")
    both = f"{text} {more}"
    if one_node and ABOUT_COMPANY.search(both) and not ABOUT_NODE.search(both):
        return Found("invalid", f"the provider fails on the node beside it: {text}")
    return Found("failed", f"{text}; {more}" if more else text)


def _opened(session: Session, resolution: Resolution, one_node: bool) -> Found:
    """A session that was opened: the preferred provider has every node, or some are left to the CPU provider."""
    name = resolution.provider.ort_name
    if name not in session.registered:
        return Found("failed", f"ONNX Runtime left {name} out of the session")
    if not one_node:
        return Found("taken", "")
    said = _left_to_cpu(session, resolution.provider.compiles, name)
    if said is None:
        around = any(AROUND.fullmatch(node.name) for node in session.assigned() or ())
        if not around and unfolded(session, resolution.provider.compiles):
            return Found("taken", AS_FUNCTION, unfolded=True)
        return Found("taken", "")
    provider = resolution.provider
    why = _reason_in(session.log, provider.node_patterns) or why_in(session.log, provider.says_why)
    return Found("left", why or said)


def unfolded(session: Session, compiles: bool) -> bool:
    """Whether ONNX Runtime has put the nodes of the operator's function in its place.

    The list of nodes tells of a provider that compiles, the plan of any other: that one's list may have gaps.
    """
    names = {node.name for node in session.assigned() or ()}
    if compiles:
        return NODE not in names and any(not name or name.startswith(INLINED) for name in names)
    planned = [node for stream in session.plan or () for node in stream]
    return bool(planned) and not any(node == NODE or node.startswith(f"{NODE}_") for node in planned)


def _left_to_cpu(session: Session, compiles: bool, name: str) -> str | None:
    """What shows that the node is not with the provider; None when it is.

    The list of nodes can lack those of a provider that prefers another layout, and those for which ONNX Runtime puts
    casts around the CPU provider's kernel of another type. A function without a kernel is there as its nodes.
    """
    everything = {node.name: node.provider for node in session.assigned() or ()}
    listed = {node: provider for node, provider in everything.items() if not node.startswith(COMPANY)}
    if name == CPU or listed.get(NODE) == name:
        return None
    planned = [node for stream in session.plan or () for node in stream]
    if any(AROUND.fullmatch(node) for node in (*everything, *planned)):
        return "" if listed.get(NODE) == CPU else None  # casts and nodes of functions may be those of the others
    if CPU in listed.values():
        return ""
    if any(CAST in node for node in planned):
        return (
            "the CPU provider runs it, between casts that ONNX Runtime inserts because the CPU provider has no kernel "
            "for the type either"
        )
    return "it is not among the nodes that the provider claims" if compiles and NODE in planned else None


def why_in(log: Sequence[str], expressions: Sequence[str]) -> str:
    """What the provider says of the node at VERBOSE, most telling first."""
    text = "\n".join(log)
    for expression in expressions:
        for match in re.finditer(expression, text):
            if match["node"] == NODE:
                return match["why"].replace(f" for node `{NODE}` of type", " for").strip(" .")
    return ""


def _reason_in(log: Sequence[str], patterns: Sequence[LogPattern]) -> str:
    """The line in which the provider says something of the node; failing that, of another, as of one in its body."""
    from partita.runtime.ort.errors import one_line
    from partita.runtime.ort.native_log import HEAD

    found = [(line, match) for pattern in patterns for line in log if (match := re.search(pattern.pattern, line))]
    own = (line for line, match in found if match.groupdict().get("node") == NODE)
    line = next(own, found[0][0] if found else "")
    head = HEAD.match(line)
    return one_line(head["text"] if head else line).replace(f" node name: {NODE}", "")


if __name__ == "__main__":
    main()
