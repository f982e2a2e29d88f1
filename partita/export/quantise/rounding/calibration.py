"""Round weights on a text: the original reads it, and every product that is packed is rounded by what it is given.

All windows go through the model side by side (`abreast`). Before a product they wait; its inputs give the mean of
x x^T, its weights are rounded by that, put into the model, and what comes after sees the rounded ones. There is one
such matrix at a time, and the activations of one layer; what was found lies on disk until it is packed (`rounded`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError, ResourceError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.progress import Stage
from partita.export.quantise.rounders import quantiser
from partita.export.quantise.rounders.base import Round
from partita.export.quantise.rounding.abreast import abreast
from partita.export.quantise.rounding.expert_rounding import round_experts, stacks_of
from partita.export.quantise.rounding.reference import ROWS_ELEMENTS, Places, parameter_names
from partita.export.quantise.rounding.stored import Rounded
from partita.export.quantise.write.packed import Packing, in_parts, restored
from partita.export.quantise.write.rewrite import Placed
from partita.export.trace.experts.base import Experts
from partita.export.trace.fake_model import quiet, translated
from partita.export.verify import texts
from partita.export.verify.known_answer import MEMORY_MARGIN, free_bytes
from partita.export.verify.texts import Text
from partita.export.weights.origins import Origin, Stored, blocks
from partita.observations.text_format import human_bytes
from partita.process import give_back

WINDOWS_ABREAST = 4
"""Windows of one forward pass."""
TRIED_TOKENS = 4
"""Tokens on which it is seen what a module computes."""
SAME = 1e-4
"""Relative; float32 sums in another order differ by 1e-6 to 1e-5."""
HELD = 4
"""Activations as wide as the model that wait with a pass, beside the widest of its layer: residual, normalised, and
what a product has given.
"""


MOST_WINDOWS = 128
FEWEST_TOKENS = 2048
"""Fewer say too little of how activations go together: a layer has thousands of them."""


def read_text(path: Path, checkpoint: Checkpoint, max_length: int) -> Text:
    """The first windows of the text in `path`.

    Raises UsageError when it cannot be read or is too short, or there is no tokenizer to read it with.
    """
    raw, sha256 = texts.read(path, "calibrate")
    vocabulary = int(checkpoint.config.get_text_config(decoder=True).vocab_size)
    found = texts.asked_for(texts.tokens(raw, checkpoint, vocabulary), FEWEST_TOKENS, path, "calibrate")
    length = min(texts.WINDOW_TOKENS, max_length)
    most = max(MOST_WINDOWS, -(-FEWEST_TOKENS // length))
    return Text(path.name, sha256, found.windows(length)[:most])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of the checkpoint that a module multiplies by."""

    tensor: str
    packing: Packing


def check_memory(
    placed: Iterable[Placed], parameters: int, hidden: int, text: Text, heads: int = 0, loaded: int = 0
) -> None:
    """Raise ResourceError when there is less memory than a calibration on `text` takes at its peak.

    That is the model in float32, what all windows hold in one layer, its mask and the weights of attention of so many
    `heads` among it, and for the widest product the moments, their float64 factor and its inverse, and the weights
    that are being rounded. `loaded`: parameters that are in memory already.
    """
    placed = tuple(placed)
    width = max((each.packed.width for each in placed), default=0)
    largest = max((each.packed.elements for each in placed if not each.of_experts), default=0)
    stack = max((each.packed.elements for each in placed if each.of_experts), default=0)
    window = text.windows.shape[1]
    waiting = 4 * text.tokens * (HELD * hidden + 2 * width + (1 + heads) * window)
    routed = 4 * 4 * text.tokens * width if stack else 0  # all tokens go to one expert, at the worst
    rounding = max(5 * 4 * largest, 2 * 4 * stack + routed)
    needed = int(4 * (parameters - loaded) * MEMORY_MARGIN) + waiting + width * width * (4 + 3 * 8) + rounding
    free = free_bytes()
    if needed > free:
        raise ResourceError(
            f"`calibrate={text.name}`: calibrating on {text.tokens:,} tokens takes about "
            f"{human_bytes(needed)} of memory, {human_bytes(waiting)} of it for the text, and {human_bytes(int(free))} "
            "are free; calibrate on a shorter text, or leave `calibrate` out"
        )


def calibrate(
    model: Any,
    checkpoint: Checkpoint,
    text: Text,
    placed: Iterable[Placed],
    sources: Sources,
    rounded: Rounded,
    stage: Stage,
) -> list[str]:
    """Round the weights of `placed` in `model`, of transformers, in place, and keep them in `rounded`.

    Returns the weights that could not be: no module multiplies activations by them as they are. Of stacks of experts it
    is the module that has them, and how many of them get too few tokens of the text. Raises CheckpointError
    for a weight or an activation that is no number, and what running the model does.
    """
    _refuse_broken(model, checkpoint)
    placed = tuple(placed)
    stacks = stacks_of(model, placed)
    in_stacks = {id(each) for pair in stacks.values() for each in (pair.up, pair.down)}
    wanted, others = _wanted(model, [each for each in placed if id(each) not in in_stacks], sources)
    names = parameter_names(model, sources)
    left = {name: entry.tensor for name, entry in wanted.items()} | {name: name for name in stacks}
    modules = {name: model.get_submodule(name) for name in left}
    ids = torch.from_numpy(text.windows)
    batches = [ids[start : start + WINDOWS_ABREAST] for start in range(0, len(ids), WINDOWS_ABREAST)]
    rounds = _Rounds(checkpoint, rounded, text)
    running = abreast(model, batches, modules, stacks)
    with quiet(), translated("running the original model"), closing(running) as walk:
        for name, given in walk:
            if name in stacks:
                rounds.refuse_overflow([each for each, _ in given], name)
                few = round_experts(model, modules[name], stacks[name], given, names, rounded)
                del left[name]
                if few:
                    others.add(f"{few} of {Experts.of(modules[name]).count} experts of {name}, which get few tokens")
                stage.advance(sum(each.packed.elements for each in (stacks[name].up, stacks[name].down)))
            else:
                if rounds.take(modules[name], wanted[name], given):
                    del left[name]
                stage.advance(modules[name].weight.numel())
            del given
            if not left:
                break
    give_back()
    return sorted({*left.values(), *others})


@dataclass(slots=True)
class _Rounds:
    """Rounds one module after the other; what several in a row are given alike is counted once."""

    checkpoint: Checkpoint
    rounded: Rounded
    text: Text
    _seen: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _moments: torch.Tensor | None = None
    _found: dict[Packing, Round] = field(default_factory=dict)

    def take(self, module: Any, wanted: _Wanted, given: Sequence[torch.Tensor]) -> bool:
        """Round the weights of a module by what it is `given`; False where it is no product with them."""
        weight = module.weight.detach()
        self.refuse_overflow(given, wanted.tensor)
        turned = _turned(module, given[0])
        if turned is None:
            return False
        rows = self._round(wanted.packing, given)
        found = in_parts(rows, weight.T.contiguous() if turned else weight)
        packing = wanted.packing
        self.rounded.add(wanted.tensor, packing.grid, packing.block_size, found, turned=turned)
        values = restored(found)[:, : weight.shape[0 if turned else 1]]
        weight.copy_(values.T if turned else values)
        return True

    def refuse_overflow(self, given: Sequence[torch.Tensor], what: str) -> None:
        """Raise CheckpointError for activations that are no numbers."""
        if not all(bool(torch.isfinite(each).all()) for each in given):
            raise CheckpointError(
                f"{self.checkpoint.where}: what is multiplied by {what} overflows float32 on "
                f"`calibrate={self.text.name}`, though no weight is NaN or infinite; leave "
                "`calibrate` out"
            )

    def _round(self, packing: Packing, given: Sequence[torch.Tensor]) -> Round:
        known = len(self._seen) == len(given)
        if not known or any(ref() is not each for ref, each in zip(self._seen, given, strict=True)):
            self._seen = [weakref.ref(each) for each in given]
            self._moments = moments(given)
            self._found = {}
        if packing not in self._found:
            calibrated = quantiser(packing.quantiser).calibrate
            assert calibrated is not None and self._moments is not None
            self._found[packing] = calibrated(self._moments, packing.grid, packing.block_size)
        return self._found[packing]


def moments(given: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of x x^T, float32 [K, K], over activations [..., K]."""
    total, count = None, 0
    for each in given:
        flat = each.flatten(0, -2).float()
        total = flat.T @ flat if total is None else total.addmm_(flat.T, flat)
        count += len(flat)
    assert total is not None
    return total / count


def _wanted(model: Any, placed: Iterable[Placed], sources: Sources) -> tuple[dict[str, _Wanted], set[str]]:
    """What is to be rounded, by module, where it may be, and modules with weights that no module of their own has."""
    found: dict[str, _Wanted] = {}
    others: set[str] = set()
    names = parameter_names(model, sources)
    for each in placed:
        packing = each.packed.packing
        known = [name for tensor in each.packed.tensors for name in names.single.get(tensor, ())]
        if not any(name.endswith(".weight") for name in known):
            others.update(each.modules[:1])
            continue
        if quantiser(packing.quantiser).calibrate is None:
            continue
        if not _keeps_columns(each.packed.origin):
            others.update(each.modules[:1])
            continue
        for tensor in sorted(each.packed.tensors):
            modules = [
                name.removesuffix(".weight") for name in names.single.get(tensor, ()) if name.endswith(".weight")
            ]
            modules = [name for name in modules if not isinstance(model.get_submodule(name), torch.nn.Embedding)]
            own = [name for name in modules if name in each.modules]
            if not own and any(_looks_up(model, name) for name in each.modules):  # its head has other weights here
                others.update(each.modules[:1])
                continue
            for module in own or modules:
                found.setdefault(module, _Wanted(tensor, packing))
    return found, others


def _looks_up(model: Any, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), torch.nn.Embedding)
    except AttributeError:  # of the graph, and of no module of the model
        return False


def _keeps_columns(origin: Origin) -> bool:
    """Whether rows of a weight are whole rows of tensors, or whole columns, from the first number to the last."""
    if isinstance(origin, Stored):
        return True
    places = Places(origin.tensors())
    for region in blocks(origin.shape, ROWS_ELEMENTS):
        index = origin.read(region, places)
        for info, first in places.first.items():
            rows = index[(index[:, 0] >= first) & (index[:, 0] < first + info.shape[0] * info.shape[1])]
            if not any(_in_order(rows - first, *sizes) for sizes in ((1, info.shape[1]), (info.shape[1], 1))):
                return False
    return True


def _in_order(rows: torch.Tensor, stride: int, of_row: int) -> bool:
    """Whether rows go on by `stride`, each from the beginning of a row or a column of its tensor."""
    steady = bool((rows.diff(dim=1) == stride).all())
    begins = rows[:, 0] % of_row == 0 if stride == 1 else rows[:, 0] < stride
    return steady and bool(begins.all())


def _turned(module: Any, given: torch.Tensor) -> bool | None:
    """Whether a module multiplies by its weight [K, N] and not by the transpose of [N, K]; None: by neither."""
    weight, bias = module.weight.detach(), getattr(module, "bias", None)
    some = given.flatten(0, -2)[:TRIED_TOKENS]
    with torch.no_grad():
        computed = module.forward(some)
        for turned in (False, True):
            oriented = weight.T if turned else weight
            if some.shape[1] != oriented.shape[1] or computed.shape[1:] != oriented.shape[:1]:
                continue
            expected = torch.nn.functional.linear(some, oriented, bias)
            if float((computed - expected).abs().max()) <= SAME * float(expected.abs().max()):
                return turned
    return None


def _refuse_broken(model: Any, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when a parameter is NaN or infinite: it would spoil every activation after it."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(
                f"{checkpoint.where}: tensor {name} holds NaN or infinite values and cannot be quantised; the "
                "checkpoint is broken"
            )
