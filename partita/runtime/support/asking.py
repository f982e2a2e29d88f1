"""Who takes which variant: many of them in one session, each alone where that session fails or does not tell.

Runs in the child process. A session holds independent nodes of one version of one operator set, nothing is folded or
fused, and nothing is run. What a session says of a node by its name counts; everything else is asked again, with fewer
variants beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita.observations.names import CPU, INLINED
from partita.observations.native_text import cut
from partita.runtime.probes.child import CAST, CPU_KERNEL, ILLEGAL, LOADING, NOBODY, REFUSED
from partita.runtime.support.variants import COMPANY, Variant, batch_model, fragment
from partita.support.answers import Outcome

if TYPE_CHECKING:
    from partita.providers.resolve import Resolution
    from partita.runtime.ort.session import NativeFailureError, Session

UNPLACED = re.compile(r"Provider type for \S+ node with name '[^']*' is not set")
"""What ONNX Runtime says of a node that nobody has a kernel for, where a provider prefers another layout."""
NAME = re.compile(r"\bv\d+\b")
AS_FUNCTION = "only as the nodes of its function body"
NOTHING_LEFT = "before anything runs: no node of it is left"
LEFT_PARTS = "of its function, {} left to the CPU provider"
CASTS = "between casts that ONNX Runtime inserts, because there is no kernel for the type"
LONGEST = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one variant."""

    outcome: Outcome
    said: str = ""
    replaced: bool = False
    """Taken, but as something else that ONNX Runtime has put in its place."""


class Asker:
    """Asks one provider. `sessions` counts what it took."""

    def __init__(self, resolution: Resolution, folder: Path, before: Callable[[Sequence[str]], None]) -> None:
        self.resolution, self.folder = resolution, folder
        self.name, self.compiles = resolution.provider.ort_name, resolution.provider.compiles
        self.before = before
        """Told the variants of a session before it is opened; it may raise TimeoutError."""
        self.sessions = 0

    def ask(self, variants: Mapping[str, Variant]) -> Iterator[tuple[str, Verdict]]:
        """The verdict on each variant, in no order. All are of one version of an operator set."""
        parts = {name: fragment(name, variant, company=self.compiles) for name, variant in variants.items()}
        operator = next(iter(variants.values())).form.operator
        waiting = [list(variants)]
        while waiting:
            names = waiting.pop()
            found, alone = self.open(names, batch_model([parts[name] for name in names], operator))
            yield from found.items()
            rest = [name for name in names if name not in found and name not in alone]
            waiting += [[name] for name in alone]
            if found or (alone and rest):
                waiting += [rest] if rest else []
            else:
                waiting += _halves(rest)

    def open(self, names: Sequence[str], model: bytes) -> tuple[dict[str, Verdict], list[str]]:
        """What one session tells, and who has to be asked alone; the rest has to be asked again together."""
        from partita.runtime.ort.session import NativeFailureError, Opening, open_native

        self.before(names)
        self.sessions += 1
        opening = Opening(threads=1, explain=self.name != CPU, optimise=False, model=model)
        try:
            session = open_native(self.folder / "model.onnx", [self.resolution], opening)
        except NativeFailureError as failure:
            return self.failed(failure, names)
        try:
            return self.opened(session, names)
        finally:
            session.close()

    def opened(self, session: Session, names: Sequence[str]) -> tuple[dict[str, Verdict], list[str]]:
        """A session that is open: where each node is."""
        if self.name not in session.registered:
            told = Verdict("failed", f"ONNX Runtime left {self.name} out of the session")
            return ({names[0]: told}, []) if len(names) == 1 else ({}, [])
        place = Places(session)
        logged = self.logged(session.log)
        found: dict[str, Verdict] = {}
        for name in names:
            verdict = self.placed(name, place, logged, only=len(names) == 1)
            # A provider that compiles may drop what it can take, because of the other nodes of the model (seen with
            # OpenVINO and TopK, and with integers): that it leaves a node is sure only of the node alone.
            if verdict is not None and (len(names) == 1 or not self.compiles or verdict.outcome == "taken"):
                found[name] = verdict
        return found, [name for name in names if name not in found]

    def placed(self, name: str, place: Places, logged: Mapping[str, str], *, only: bool) -> Verdict | None:
        """Where one node is; None where ONNX Runtime has put others in its place, and only it alone can tell."""
        casts = place.has_casts(name)
        if place.listed.get(name) == self.name and not (self.name == CPU and casts):
            return Verdict("taken")
        if place.listed.get(name) == CPU or casts:
            return Verdict("left", logged.get(name) or (CASTS if casts else ""))
        if name in place.streams:
            if self.compiles or (place.streams[name] == "0" and place.other_devices):
                return Verdict("left", logged.get(name, ""))
            return Verdict("taken") if name not in logged else Verdict("left", logged[name])
        if not only:
            return None
        return place.function(self.name, self.compiles)

    def failed(self, failure: NativeFailureError, names: Sequence[str]) -> tuple[dict[str, Verdict], list[str]]:
        """A session that could not be opened: whom the provider's log says that it leaves, and whom the error names."""
        if len(names) == 1:
            return {names[0]: self.verdict(failure, names[0])}, []
        found = {name: Verdict("left", said) for name, said in self.logged(failure.log).items() if name in names}
        named = [name for name in dict.fromkeys(NAME.findall(str(failure))) if name in names and name not in found]
        if len(named) == 1 and (verdict := self.verdict(failure, named[0])).outcome in ("left", "invalid"):
            return {**found, named[0]: verdict}, []
        return found, named

    def verdict(self, failure: NativeFailureError, name: str) -> Verdict:
        """What the failure of a session with this variant alone says of it."""
        kind, text = type(failure.error).__name__, _plain(str(failure), name)
        logged = self.logged(failure.log).get(name, "")
        if kind == NOBODY or UNPLACED.search(text):
            return Verdict("left", logged)
        if CAST in text:  # put around a kernel of another type, in an operator set that has no such Cast
            return Verdict("left", logged or CASTS)
        if self.name == CPU and (kind in REFUSED or ILLEGAL.search(text)):
            return Verdict("invalid", text)
        if logged or CPU_KERNEL.search(str(failure)):
            return Verdict("left", logged or text)
        return Verdict("invalid" if self.name == CPU else "failed", text)

    def logged(self, log: Sequence[str]) -> dict[str, str]:
        """What the provider's log says of variants that it leaves, by name."""
        from partita.runtime.ort.native_log import HEAD

        found: dict[str, str] = {}
        for pattern in self.resolution.provider.node_patterns:
            matcher = re.compile(pattern.pattern)
            for line in log:
                match = matcher.search(line)
                name = (match.groupdict().get("node") or "") if match else ""
                if NAME.fullmatch(name) and name not in found:
                    head = HEAD.match(line)
                    found[name] = _plain(head["text"] if head else line, name)
        return found


class Places:
    """Where the nodes of a session are, from the list of nodes and the plan."""

    def __init__(self, session: Session) -> None:
        self.nodes = session.assigned() or ()
        self.listed = {node.name: node.provider for node in self.nodes}
        devices = session.plan_devices or ()
        self.streams = {
            node: devices[number] if number < len(devices) else ""
            for number, stream in enumerate(session.plan or ())
            for node in stream
        }
        self.other_devices = any(device != "0" for device in devices)
        self.casts = " ".join(node for node in self.streams if CAST in node)

    def has_casts(self, name: str) -> bool:
        """Whether ONNX Runtime has put casts around a node, so that another type's kernel can run it."""
        return re.search(rf"(?<![A-Za-z0-9]){name}(?![0-9])", self.casts) is not None

    def function(self, provider: str, compiles: bool) -> Verdict:
        """The only variant is there as the nodes of its function: whether the provider has all of them."""
        parts = [node for node in self.nodes if not node.name.endswith(COMPANY)]
        inlined = [node for node in parts if not node.name or node.name.startswith(INLINED)]
        if self.casts:
            return Verdict("left", CASTS)
        on_cpu = sorted({node.op_type for node in parts if node.provider == CPU})
        if provider != CPU and on_cpu:
            return Verdict("left", LEFT_PARTS.format(", ".join(on_cpu)))
        if not parts and all(node.endswith(COMPANY) for node in self.streams):
            return Verdict("taken", NOTHING_LEFT, replaced=True)
        if compiles and not inlined:
            return Verdict("left", "")
        return Verdict("taken", AS_FUNCTION, replaced=True)


def _halves(names: Sequence[str]) -> list[list[str]]:
    """Two parts, or one variant after the other where there are few."""
    if len(names) <= 4:
        return [[name] for name in names]
    middle = len(names) // 2
    return [list(names[:middle]), list(names[middle:])]


def _plain(text: str, name: str) -> str:
    """A message without the name of the variant and the temporary file."""
    from partita.runtime.ort.errors import one_line

    text = LOADING.sub("", one_line(text))
    text = text.replace(f" node name: {name}", "").replace(f" in node ({name})", "").replace(f"Node ({name}) ", "Node ")
    text = text.replace(f"{name}_", "")
    # The cause may stand at the end, behind the signature of a C++ function.
    return cut(text, LONGEST)
