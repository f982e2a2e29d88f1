"""Pins: `--pin PROVIDER:MODULE` runs the nodes of a module on a chosen provider, and the placement is checked.

A pin matches a part of a module path: `lm_head`, `layers.0-11`, `layers.3.mlp`. ONNX Runtime's layer assignment ignores
assignments that it cannot honour; then `check_pins` raises.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from partita.diagnosis.naming import dotted, replaced_by
from partita.errors import ProviderError, UsageError
from partita.observations.names import CPU
from partita.providers.base import Provider
from partita.runtime.ort.registry import ort_build
from partita.runtime.ort.session import Session
from partita.runtime.ort.session_options import Opening
from partita.runtime.place.model_file import all_nodes, graph_node

LAYER = "layer_ann"
"""Key of the node metadata for ONNX Runtime's layer rules."""
MARK = "partita_pin_"
"""Layer name of pinned nodes, up to the index of the pin."""
RULES = "session.layer_assignment_settings"
NEEDED = (1, 27)
"""First version with layer assignment; older versions ignore the key."""
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
        """The pin as the user wrote it, with the provider's canonical name."""
        return f"{self.provider.name}:{self.module}"

    def covers(self, module: str) -> bool:
        """Whether the parts of the pin are consecutive parts of the module path."""
        patterns, parts = self.module.split("."), module.split(".")
        return any(
            all(map(_part_matches, patterns, parts[start : start + len(patterns)]))
            for start in range(len(parts) - len(patterns) + 1)
        )


@dataclass(frozen=True, slots=True)
class Marks:
    """The nodes of a file that are marked for pins, and its other nodes."""

    pins: Mapping[str, Pin]
    """Pins by marked node."""
    unmarked: frozenset[str] = frozenset()
    """Names of nodes without a mark, and of all nodes in subgraphs."""

    def marked_source(self, name: str) -> str | None:
        """The marked node that the node `name` was fused from; None for other nodes."""
        if name in self.pins or name in self.unmarked:
            return None
        longest = max((*replaced_by(name, self.pins), *replaced_by(name, self.unmarked)), key=len, default="")
        return longest if longest in self.pins and longest not in self.unmarked else None


def _part_matches(pattern: str, part: str) -> bool:
    """Whether a part of a module path equals `pattern`, or is a number in its range (e.g. 0-11)."""
    limits = RANGE.fullmatch(pattern)
    if limits is None:
        return pattern == part
    return part.isdigit() and int(limits[1]) <= int(part) <= int(limits[2])


def parse_pins(texts: Sequence[str], chain: Sequence[Provider]) -> tuple[Pin, ...]:
    """Parse `--pin PROVIDER:MODULE` texts.

    Raises UsageError for a text without a colon, a provider outside the chain, an empty part, a descending range, or a
    module that is pinned to two providers.
    """
    by_name = {name: provider for provider in chain for name in provider.names()}
    pins: list[Pin] = []
    for text in texts:
        name, colon, module = (part.strip() for part in text.partition(":"))
        if not colon or not name or not dotted(module) or not all(module.split(".")):
            raise UsageError(f"`pins={text}`: write PROVIDER:MODULE, e.g. cpu:lm_head or webgpu:layers.0-11")
        provider = by_name.get(name.lower())
        if provider is None:
            names = ", ".join(provider.name for provider in chain)
            raise UsageError(f"`pins={text}`: {name} is not in the provider chain ({names}); add it to `providers`")
        for limits in filter(None, map(RANGE.fullmatch, module.split("."))):
            if int(limits[1]) > int(limits[2]):
                raise UsageError(f"`pins={text}`: the range {limits[0]} is descending")
        other = next((pin for pin in pins if pin.module == module), None)
        if other is not None:
            raise UsageError(f"`pins={text}`: {module} is already pinned to {other.provider.name}; pin it once")
        pins.append(Pin(provider, dotted(module)))
    return tuple(pins)


def pinned_opening(path: Path, opening: Opening, pins: Sequence[Pin]) -> tuple[Opening, Marks]:
    """The opening with marked nodes and their layer rules, and the marks.

    Raises ProviderError when this ONNX Runtime has no layer assignment, UsageError when a pin matches no module or two
    pins match the same node.
    """
    if not pins:
        return opening, Marks({})
    version = str(ort_build().version)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < NEEDED:
        raise ProviderError(
            f"`pins` needs ONNX Runtime {NEEDED[0]}.{NEEDED[1]} or newer; {version} ignores pins; "
            "install a newer version"
        )
    rules = "; ".join(f"{pin.provider.ort_name}(={MARK}{index})" for index, pin in enumerate(pins))
    model, marks = marked_model(opening.model or path, pins)
    return replace(opening, model=model, config={**opening.config, RULES: rules}), marks


def marked_model(source: bytes | Path, pins: Sequence[Pin]) -> tuple[bytes, Marks]:
    """The ONNX file with a layer name on each pinned node, and the marks."""
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
                both = f"`pins={first.text}` and `pins={second.text}`"
                raise UsageError(f"{both} both match {module}; pin it once")
        if claims:
            node.metadata_props.append(onnx.StringStringEntryProto(key=LAYER, value=f"{MARK}{claims[0]}"))
            marks[node.name] = pins[claims[0]]
    for index, pin in enumerate(pins):
        if index not in matched:
            raise UsageError(_no_module(pin, modules))
    main = len(model.graph.node)  # nodes of subgraphs follow those of the main graph
    others = {node.name for at, node in enumerate(all_nodes(model.graph)) if at >= main or node.name not in marks}
    return bytes(model.SerializeToString()), Marks(marks, frozenset(others))


def _no_module(pin: Pin, modules: Collection[str]) -> str:
    """The message for a pin that matches no module, with similar module names."""
    if not modules:
        return (
            f"`pins={pin.text}`: pins match module paths in node metadata or node names, as written by "
            "`partita export` and torch.onnx; this file has neither"
        )
    paths = {".".join(module.split(".")[:depth]) for module in modules for depth in range(1, module.count(".") + 2)}
    tails = {path.partition("model.")[2] or path for path in paths}
    near = difflib.get_close_matches(pin.module, sorted(tails), n=3, cutoff=0.5)
    hint = ", ".join(near) if near else ", ".join(sorted({tail.split(".")[0] for tail in tails})[:8])
    return f"`pins={pin.text}`: no module of this model matches; existing modules: {hint}"


def check_pins(session: Session, marks: Marks) -> dict[str, str]:
    """The pin text of every pinned node and of nodes fused from them.

    Raises ProviderError for a pinned node on another provider. Nodes that were optimised away do not count. The node
    lists may lack nodes of any provider but CPU (see `Session.assigned`).
    """
    listed = {node.name: node.provider for node in session.assigned()}
    planned = {name for stream in session.plan or () for name in stream}
    remaining = {name: name for name in marks.pins if name in listed or name in planned}
    remaining |= _fused(marks, remaining, listed)
    remaining |= _fused(marks, set(remaining.values()), planned - listed.keys())
    for pin in {pin.text: pin for pin in marks.pins.values()}.values():
        pinned = sorted(name for name, marked in remaining.items() if marks.pins[marked] == pin)
        otherwise = UNLISTED if pin.provider.ort_name == CPU else pin.provider.ort_name
        wrong = [name for name in pinned if listed.get(name, otherwise) != pin.provider.ort_name]
        if wrong or not pinned:
            where = f"{len(wrong)} of {len(pinned)} nodes run on another provider: {', '.join(wrong[:MOST_NAMED])}"
            found = where if pinned else "none of its nodes is in the plan"
            raise ProviderError(
                f"`pins={pin.text}` was not honoured: {found}; "
                f"{pin.provider.name} has no kernel for them, or they were fused with other nodes"
            )
    pinned_nodes = {*remaining, *remaining.values()}
    return {name: marks.pins[remaining.get(name, name)].text for name in pinned_nodes}


def _fused(marks: Marks, remaining: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Nodes of `names` that were fused from marked nodes outside `remaining`, with their marked nodes.

    ONNX Runtime fuses before it assigns: of a MatMul with a bias, only `<MatMul>/MatMulAddFusion` is listed.
    """
    found = {name: marked for name in names if (marked := marks.marked_source(name)) is not None}
    return {name: marked for name, marked in found.items() if marked not in remaining}
