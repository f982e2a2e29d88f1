"""Pins: nodes of a module are to run on a provider of the user's choice, and are checked afterwards.

A pin names a module by a part of its path: `lm_head`, `layers.0-11`, `layers.3.mlp`. ONNX Runtime's layer assignment
does the work: nodes are marked with a layer name of ours, and the session is told which provider each name belongs to.
To ONNX Runtime that is a wish, and it grants or drops it silently; to us it is a condition.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from partita.diagnosis.naming import dotted
from partita.errors import ProviderError, UsageError
from partita.observations.names import CPU
from partita.providers.base import Provider
from partita.runtime.model_file import graph_node
from partita.runtime.ort.registry import ort_build
from partita.runtime.ort.session import Opening, Session
from partita.spelling import spelled

LAYER = "layer_ann"
"""Key of the node metadata that ONNX Runtime matches its layer rules with."""
RULES = "session.layer_assignment_settings"
NEEDED = (1, 27)
"""First version seen to have it; older ones accept the key and ignore it."""
RANGE = re.compile(r"(\d+)-(\d+)")
MOST_NAMED = 5
UNLISTED = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """One `--pin PROVIDER:MODULE`."""

    provider: Provider
    module: str

    @property
    def text(self) -> str:
        """As the user wrote it, with the provider's own name."""
        return f"{self.provider.name}:{self.module}"

    def covers(self, module: str) -> bool:
        """Whether a node of this module is meant: the parts of the pin stand one after the other in the path."""
        wanted, parts = self.module.split("."), module.split(".")
        return any(
            all(map(_part_matches, wanted, parts[start : start + len(wanted)]))
            for start in range(len(parts) - len(wanted) + 1)
        )


def _part_matches(wanted: str, part: str) -> bool:
    """Whether one part of a module path is meant: equal, or a number within a range such as 0-11."""
    limits = RANGE.fullmatch(wanted)
    if limits is None:
        return wanted == part
    return part.isdigit() and int(limits[1]) <= int(part) <= int(limits[2])


def parse_pins(texts: Sequence[str], chain: Sequence[Provider]) -> tuple[Pin, ...]:
    """Read `--pin PROVIDER:MODULE` texts.

    Raises UsageError when one has no colon, names a provider that is not in the chain, has an empty part or a range
    that runs backwards, or pins the same module to two providers.
    """
    by_name = {name: provider for provider in chain for name in provider.names()}
    pins: list[Pin] = []
    for text in texts:
        name, colon, module = (part.strip() for part in text.partition(":"))
        if not colon or not name or not dotted(module) or not all(module.split(".")):
            raise UsageError(f"{spelled('pins', text)}: write PROVIDER:MODULE, e.g. cpu:lm_head or webgpu:layers.0-11")
        provider = by_name.get(name.lower())
        if provider is None:
            names = ", ".join(provider.name for provider in chain)
            raise UsageError(
                f"{spelled('pins', text)}: {name} is not in the provider chain ({names}); add it to "
                f"{spelled('providers')}"
            )
        for limits in filter(None, map(RANGE.fullmatch, module.split("."))):
            if int(limits[1]) > int(limits[2]):
                raise UsageError(f"{spelled('pins', text)}: the range {limits[0]} runs backwards")
        other = next((pin for pin in pins if pin.module == module), None)
        if other is not None:
            raise UsageError(
                f"{spelled('pins', text)}: {module} is pinned to {other.provider.name} already; pin it once"
            )
        pins.append(Pin(provider, dotted(module)))
    return tuple(pins)


def pinned_opening(path: Path, opening: Opening, pins: Sequence[Pin]) -> tuple[Opening, dict[str, Pin]]:
    """The opening with every pin in it, the model with marked nodes and the rules for the marks; and each marked node.

    Raises ProviderError when this ONNX Runtime has no layer assignment, UsageError when a pin matches no module or two
    pins claim one node.
    """
    if not pins:
        return opening, {}
    version = ort_build().version
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < NEEDED:
        raise ProviderError(
            f"{spelled('pins')} needs ONNX Runtime {NEEDED[0]}.{NEEDED[1]} or newer; {version} would ignore it; "
            "install a newer one"
        )
    rules = "; ".join(f"{pin.provider.ort_name}(={_mark(index)})" for index, pin in enumerate(pins))
    model, marks = marked_model(opening.model or path, pins)
    return replace(opening, model=model, config={**opening.config, RULES: rules}), marks


def _mark(index: int) -> str:
    """Layer name that the nodes of a pin get."""
    return f"partita_pin_{index}"


def marked_model(source: bytes | Path, pins: Sequence[Pin]) -> tuple[bytes, dict[str, Pin]]:
    """The ONNX file with the layer name of its pin on each pinned node, and these nodes by name."""
    import onnx

    raw = source if isinstance(source, bytes) else source.read_bytes()
    model = onnx.load_from_string(raw)
    marks: dict[str, Pin] = {}
    modules: set[str] = set()
    matched: set[int] = set()
    for node in model.graph.node:
        module = graph_node(node).module
        if module is None:
            continue
        modules.add(module)
        claims = [index for index, pin in enumerate(pins) if pin.covers(module)]
        matched.update(claims)
        if len(claims) > 1:
            first, second = pins[claims[0]], pins[claims[1]]
            if first.provider is not second.provider:
                both = f"{spelled('pins', first.text)} and {spelled('pins', second.text)}"
                raise UsageError(f"{both} both claim {module}; pin it once")
        if claims:
            node.metadata_props.append(onnx.StringStringEntryProto(key=LAYER, value=_mark(claims[0])))
            marks[node.name] = pins[claims[0]]
    for index, pin in enumerate(pins):
        if index not in matched:
            raise UsageError(_no_module(pin, modules))
    return bytes(model.SerializeToString()), marks


def _no_module(pin: Pin, modules: Collection[str]) -> str:
    """The message for a pin that matches nothing, with the nearest modules that exist."""
    if not modules:
        return (
            f"{spelled('pins', pin.text)}: a pin matches module paths in the metadata or node names, as "
            "`partita export` and torch.onnx write them, and this file has neither"
        )
    paths = {".".join(module.split(".")[:depth]) for module in modules for depth in range(1, module.count(".") + 2)}
    tails = {path.partition("model.")[2] or path for path in paths}
    near = difflib.get_close_matches(pin.module, sorted(tails), n=3, cutoff=0.5)
    hint = ", ".join(near) if near else ", ".join(sorted({tail.split(".")[0] for tail in tails})[:8])
    return f"{spelled('pins', pin.text)}: no module of this model matches; some that exist: {hint}"


def check_pins(session: Session, marks: Mapping[str, Pin]) -> dict[str, str]:
    """Every pinned node that is left, and its pin as it was written. Raises ProviderError when one is elsewhere.

    Nodes that were optimised away do not count. The list of nodes can miss those of a provider (see
    `Session.assigned`), but never those of the CPU provider: a node that it lacks is not on the CPU.
    """
    listed = {node.name: node.provider for node in session.assigned() or ()}
    left = listed.keys() | {name for stream in session.plan or () for name in stream}
    for pin in {pin.text: pin for pin in marks.values()}.values():
        pinned = sorted(name for name, other in marks.items() if other == pin and name in left)
        otherwise = UNLISTED if pin.provider.ort_name == CPU else pin.provider.ort_name
        wrong = [name for name in pinned if listed.get(name, otherwise) != pin.provider.ort_name]
        if wrong or not pinned:
            where = f"{len(wrong)} of {len(pinned)} nodes are elsewhere: {', '.join(wrong[:MOST_NAMED])}"
            found = where if pinned else "none of its nodes is in the plan"
            raise ProviderError(
                f"{spelled('pins', pin.text)} does not hold: {found}; "
                f"{pin.provider.name} has no kernel for them, or they were fused with other nodes"
            )
    return {name: pin.text for name, pin in marks.items() if name in left}
