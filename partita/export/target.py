"""Which lowering fits the provider that a package is for: decided by asking that provider, and written down.

Asking needs the runtime, which this folder may not import: the caller passes functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from partita.export.quantise.write.kernels import Kernels
from partita.export.trace.operators import CONTRIB
from partita.export.ways import AUTO, Way, every_way, usual
from partita.export.weights.sources import stored
from partita.package.folder import Manifest
from partita.package.records import AskedLowering, SmokeRecord, Verification


@dataclass(frozen=True, slots=True)
class Answer:
    """What a provider says of one graph."""

    nodes: int
    left: Mapping[str, int]
    """Nodes that it does not take, by operator."""
    fails: str
    """What is said when the whole graph is opened or run there and fails; empty when it is not, or was not tried."""
    unasked: int = 0
    """Nodes for which there was no answer."""

    @property
    def misses(self) -> int:
        """Nodes that would not be on the provider, as far as it is known. What was not answered counts for nothing: on
        a slow machine more is not, and the choice should be that of a fast one.
        """
        return self.nodes if self.fails else sum(self.left.values())

    @property
    def is_known(self) -> bool:
        """Whether there was an answer on any node."""
        return bool(self.fails) or self.unasked < self.nodes or not self.nodes


Ask = Callable[[bytes, Mapping[str, tuple[int, ...]]], Answer]
"""Asks a provider about a model without weights, given the sizes of its inputs."""


Question = tuple[bytes, Mapping[str, tuple[int, ...]]]
"""A model of one node, and the sizes of its inputs."""
TakesEach = Callable[[Sequence[Question]], Sequence[bool]]
"""Asks a provider about several models of one node each: whether it takes the node, as the operator that it is."""


ReplayTarget = Callable[[Path, Manifest], Verification]
"""Replays the known answer of an unpublished package on its target."""
Smoke = Callable[[Path, Manifest], SmokeRecord]
"""Opens an unpublished package and runs a chunk and a token. Raises a PartitaError when that fails."""


Unpacks = Callable[[bytes, Mapping[str, tuple[int, ...]]], bool]
"""Whether a model of packed weights, given the sizes of its inputs, has them restored in every run."""


@dataclass(frozen=True, slots=True)
class Target:
    """The provider that a package is for."""

    provider: str
    source: str
    """Who chose it: `--target`, or why it is the default."""
    preferred: str
    """Lowering that the provider's record names; it is asked about first."""
    how: str
    """How the provider can be asked: itself, over stub libraries, or not at all and why."""
    ask: Ask | None = None
    """None when it cannot be asked."""
    replay: ReplayTarget | None = None
    """Replays the known answer on it; None when it cannot run here."""
    smoke: Smoke | None = None
    """Opens and runs a package on it; None when it cannot run here."""
    not_here: str = ""
    """Why it cannot run here; empty when it can."""
    by_default: bool = False
    """Nobody asked for this provider."""
    rolls: bool = False
    """Whether it is known to keep a cache of a window alone."""
    constant_defaults: bool = False
    """It takes inputs that have a default for constants."""
    kernels: Kernels = Kernels()
    """How packed weights are written for it, as far as that is known without asking."""
    unpacks: Unpacks | None = None
    """Whether it only seems to compute with packed weights; None when that cannot be found out."""
    takes: TakesEach | None = None
    """Asks about nodes that a pass would write; None when it cannot be asked."""


def candidates(target: Target, wanted: str) -> list[Way]:
    """Ways to ask about: in the lowering that was asked for, else in all, that of the provider's record first."""
    if wanted != AUTO:
        return [usual(wanted)]
    return sorted(every_way(), key=lambda way: way.attention != target.preferred)


def instead_of(way: Way, answer: Answer, *, has_both: bool) -> Way | None:
    """The same lowering with experts and recurrences in the other form, where that may be better for the target.

    Standard operators, where it leaves ONNX Runtime's own; those, where the way has standard ones. `has_both`: the
    model has experts or recurrences that can be written in both forms.
    """
    if way.form == "contrib":
        return Way(way.attention, "standard") if CONTRIB.intersection(answer.left) else None
    return Way(way.attention, "contrib") if has_both else None


def rank(answers: Mapping[Way, Answer], order: Sequence[Way]) -> list[Way]:
    """Ways from best to worst: those that anything is known of, fewest nodes off the provider, then lowerings as they
    were asked, and of one lowering the form with fewer and larger operators.
    """
    places = list(dict.fromkeys(way.attention for way in order))

    def key(way: Way) -> tuple[bool, int, int, bool]:
        answer = answers[way]
        return not answer.is_known, answer.misses, places.index(way.attention), way.form != "contrib"

    return sorted(answers, key=key)


def asked(way: Way, answer: Answer, disagrees: str) -> AskedLowering:
    """An answer as the manifest keeps it."""
    return AskedLowering(
        attention=way.attention,
        form=None if way.is_usual else way.form,
        nodes=answer.nodes,
        left=dict(answer.left),
        fails=answer.fails,
        unasked=answer.unasked,
        disagrees=disagrees,
    )


def describe(answer: Answer) -> str:
    """`takes 310 of 316 nodes, not GroupQueryAttention (6)`."""
    if answer.fails:
        return f"fails over the whole graph: {answer.fails}"
    off = sum(answer.left.values())
    listed = ", ".join(f"{op} ({count})" for op, count in sorted(answer.left.items(), key=lambda entry: -entry[1]))
    rest = f"; no answer on {answer.unasked}" if answer.unasked else ""
    taken = answer.nodes - off - answer.unasked
    return f"takes {taken} of {answer.nodes} nodes{f', not {listed}' if listed else ''}{rest}"


def skeleton(model: ir.Model) -> bytes:
    """The model as ONNX without its weights: they are references to a file that is not there."""
    with weights_away(model):
        return bytes(ir.to_proto(model).SerializeToString())


@contextmanager
def weights_away(model: ir.Model) -> Iterator[None]:
    """Weights of the checkpoint as references, for the length of the block."""
    kept: dict[str, ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        weight = stored(value)
        if weight is not None:
            kept[name] = weight
            value.const_value = ir.ExternalTensor(
                "weights", 0, weight.nbytes, weight.dtype, shape=weight.shape, name=name, base_dir=""
            )
    try:
        yield
    finally:
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = tensor
