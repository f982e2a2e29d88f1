"""Quantise weights on a text: run the source model, and quantise every product by its inputs.

All windows run in lockstep. Before a product, the inputs of all windows give the mean of x x^T; its weights are
quantised and replaced in the model, so that later layers see the quantised ones. One such matrix exists at a time.
Results are stored on disk until they are packed.

Before experts, all windows wait with their inputs and the router's choice. For each expert, the first stack is
quantised by the mean of x x^T of its tokens; the quantised first stack then gives the inputs of the second. Experts
with few tokens are quantised without the text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from partita.errors import CheckpointError, ResourceError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.progress import Stage
from partita.export.quantise.calibrate import CalibratedWeights
from partita.export.quantise.calibrate.lockstep import run_lockstep
from partita.export.quantise.calibrate.reference import ROWS_ELEMENTS, Parameters, parameter_names, put_back
from partita.export.quantise.quantisers import Packing, Round, quantiser
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.weight_source import QuantisedSource, in_parts, restored
from partita.export.trace.experts import STACKED
from partita.export.trace.experts.standard import Experts
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify import texts
from partita.export.verify.known_answer import MEMORY_MARGIN
from partita.export.verify.texts import Text
from partita.export.weights.origins import IndexReader, Origin, TensorInfo, blocks
from partita.observations.text_format import human_bytes
from partita.process import free_bytes, give_back

WINDOWS_ABREAST = 4
"""Windows per forward pass."""
HELD = 4
"""Activations of hidden size that a waiting pass holds, besides the widest of its layer."""


MOST_WINDOWS = 128
FEWEST_TOKENS = 2048
"""Minimum tokens for an estimate of x x^T in thousands of dimensions."""


def read_text(path: Path, checkpoint: Checkpoint, max_length: int) -> Text:
    """The first windows of a text. Raises UsageError when it is unreadable or too short, or has no tokenizer."""
    vocabulary = int(checkpoint.config.get_text_config(decoder=True).vocab_size)
    length = min(texts.WINDOW_TOKENS, max_length)
    most = max(MOST_WINDOWS, -(-FEWEST_TOKENS // length))
    found = texts.read_windows(
        path, "calibrate", checkpoint, vocabulary, length, length * most, FEWEST_TOKENS, needs_tokenizer=True
    )
    return replace(found, windows=found.windows[:most])


_Weight = tuple[str, Packing]
"""A checkpoint tensor that a module multiplies by, and its packing."""


def check_memory(
    placed: Iterable[PlacedWeight], parameters: int, hidden: int, text: Text, heads: int = 0, loaded: int = 0
) -> None:
    """Raise ResourceError when free memory is below the peak of a calibration. `loaded`: parameters in memory."""
    placed = tuple(placed)
    width = max((each.packed.width for each in placed), default=0)
    largest = max((each.packed.elements for each in placed if not each.of_experts), default=0)
    stack = max((each.packed.elements for each in placed if each.of_experts), default=0)
    window = text.windows.shape[1]
    waiting = 4 * text.tokens * (HELD * hidden + 2 * width + (1 + heads) * window)
    routed = 4 * 4 * text.tokens * width if stack else 0  # worst case: one expert gets all tokens
    rounding = max(5 * 4 * largest, 2 * 4 * stack + routed)
    needed = int(4 * (parameters - loaded) * MEMORY_MARGIN) + waiting + width * width * (4 + 3 * 8) + rounding
    free = free_bytes()
    if needed > free:
        raise ResourceError(
            f"`calibrate={text.name}`: calibrating on {text.tokens:,} tokens takes about "
            f"{human_bytes(needed)} of memory, {human_bytes(waiting)} of it for the text, but "
            f"{human_bytes(int(free))} are free; use a shorter text, or omit `calibrate`"
        )


def calibrate(
    model: Any,
    checkpoint: Checkpoint,
    text: Text,
    placed: Iterable[PlacedWeight],
    sources: Sources,
    rounded: CalibratedWeights,
    stage: Stage,
) -> list[str]:
    """Quantise the weights of `placed` in place, into `rounded`: uncalibrated ones, and numbers of unused experts."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(
                f"{checkpoint.location}: tensor {name} contains NaN or infinite values and cannot be "
                "quantised; the checkpoint is damaged"
            )
    placed = tuple(placed)
    stacks = stacks_of(model, placed)
    in_stacks = {id(each) for pair in stacks.values() for each in pair}
    weight_of, others = _weights_to_quantise(model, [each for each in placed if id(each) not in in_stacks], sources)
    names = parameter_names(model, sources)
    uncalibrated = {name: tensor for name, (tensor, _) in weight_of.items()} | {name: name for name in stacks}
    modules = {name: model.get_submodule(name) for name in uncalibrated}
    ids = torch.from_numpy(text.windows)
    batches = [ids[start : start + WINDOWS_ABREAST] for start in range(0, len(ids), WINDOWS_ABREAST)]
    rounds = _ModuleQuantiser(checkpoint, rounded, text)
    running = run_lockstep(model, batches, modules, stacks)
    with quiet(), translate_errors("running the source model"), closing(running) as walk:
        for name, given in walk:
            if name in stacks:
                rounds.refuse_overflow([each for each, _ in given], name)
                few = round_experts(model, modules[name], stacks[name], given, names, rounded)
                del uncalibrated[name]
                if few:
                    others.add(
                        f"{few} of {Experts.of(modules[name]).count} experts of {name}, which receive few tokens"
                    )
                stage.advance(sum(each.packed.elements for each in stacks[name]))
            else:
                if rounds.take(modules[name], *weight_of[name], given):
                    del uncalibrated[name]
                stage.advance(modules[name].weight.numel())
            del given
            if not uncalibrated:
                break
    give_back()
    return sorted({*uncalibrated.values(), *others})


@dataclass(slots=True)
class _ModuleQuantiser:
    """Quantises one module after another; consecutive modules with equal inputs share the moments."""

    checkpoint: Checkpoint
    rounded: CalibratedWeights
    text: Text
    _inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _moments: torch.Tensor | None = None
    _rounded: dict[Packing, Round] = field(default_factory=dict)

    def take(self, module: Any, tensor: str, packing: Packing, given: Sequence[torch.Tensor]) -> bool:
        """Quantise the weights of a module by its inputs `given`; False where it is not a product with them."""
        weight = module.weight.detach()
        self.refuse_overflow(given, tensor)
        transposed = _is_transposed(module)
        if transposed is None:
            return False
        found = in_parts(self._round(packing, given), weight.T.contiguous() if transposed else weight)
        self.rounded.add(tensor, packing.grid, packing.block_size, found, transposed=transposed)
        values = restored(found)[:, : weight.shape[0 if transposed else 1]]
        weight.copy_(values.T if transposed else values)
        return True

    def refuse_overflow(self, given: Sequence[torch.Tensor], what: str) -> None:
        """Raise CheckpointError for activations that are not finite."""
        if not all(bool(torch.isfinite(each).all()) for each in given):
            raise CheckpointError(
                f"{self.checkpoint.location}: the input of {what} overflows float32 on "
                f"`calibrate={self.text.name}`, although no weight is NaN or infinite; omit `calibrate`"
            )

    def _round(self, packing: Packing, given: Sequence[torch.Tensor]) -> Round:
        known = len(self._inputs) == len(given)
        if not known or any(ref() is not each for ref, each in zip(self._inputs, given, strict=True)):
            self._inputs = [weakref.ref(each) for each in given]
            self._moments = moments(given)
            self._rounded = {}
        if packing not in self._rounded:
            calibrated = quantiser(packing.quantiser).calibrate
            assert calibrated is not None and self._moments is not None
            self._rounded[packing] = calibrated(self._moments, packing.grid, packing.block_size)
        return self._rounded[packing]


def moments(given: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of x x^T, float32 [K, K], over activations [..., K]."""
    total, count = None, 0
    for each in given:
        flat = each.flatten(0, -2).float()
        total = flat.T @ flat if total is None else total.addmm_(flat.T, flat)
        count += len(flat)
    assert total is not None
    return total / count


def _weights_to_quantise(
    model: Any, placed: Iterable[PlacedWeight], sources: Sources
) -> tuple[dict[str, _Weight], set[str]]:
    """Module -> the weight to quantise, and the modules whose weights no module multiplies by directly."""
    found: dict[str, _Weight] = {}
    others: set[str] = set()
    names = parameter_names(model, sources)
    embeddings = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
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
            readers = [name for name in names.single.get(tensor, ()) if name.endswith(".weight")]
            modules = [name.removesuffix(".weight") for name in readers]
            modules = [name for name in modules if name not in embeddings]
            own = [name for name in modules if name in each.modules]
            if not own and not embeddings.isdisjoint(each.modules):  # the head has other weights here
                others.update(each.modules[:1])
                continue
            for module in own or modules:
                found.setdefault(module, (tensor, packing))
    return found, others


def _keeps_columns(origin: Origin) -> bool:
    """Whether rows of a weight are whole rows, or whole columns, of tensors in order."""
    if isinstance(origin, TensorInfo):
        return True
    places = IndexReader(origin.tensors())
    for region in blocks(origin.shape, ROWS_ELEMENTS):
        index = origin.read(region, places)
        for info, first in places.first.items():
            rows = index[(index[:, 0] >= first) & (index[:, 0] < first + info.shape[0] * info.shape[1])]
            if not any(_in_order(rows - first, *sizes) for sizes in ((1, info.shape[1]), (info.shape[1], 1))):
                return False
    return True


def _in_order(rows: torch.Tensor, stride: int, of_row: int) -> bool:
    """Whether rows advance by `stride`, each from the start of a row or column of its tensor."""
    steady = bool((rows.diff(dim=1) == stride).all())
    begins = rows[:, 0] % of_row == 0 if stride == 1 else rows[:, 0] < stride
    return steady and bool(begins.all())


def _is_transposed(module: Any) -> bool | None:
    """Whether a module multiplies by its weight [K, N] rather than the transpose of [N, K]; None: neither."""
    return {torch.nn.Linear.forward: False, Conv1D.forward: True}.get(type(module).forward)


FEWEST_EXPERT_TOKENS = 128
"""Experts with fewer tokens are quantised without the text."""
Routed = tuple[torch.Tensor, torch.Tensor]
"""Inputs of experts [..., H], and the chosen experts of each token [..., K]."""


Stacks = tuple[PlacedWeight, PlacedWeight]
"""The weights of one layer's experts, [E * F, H] and [E * H, I]."""


def stacks_of(model: Any, placed: Iterable[PlacedWeight]) -> dict[str, Stacks]:
    """Module of the source model -> its stacks, for stacks that can be calibrated."""
    of: dict[str, list[PlacedWeight]] = {}
    for each in placed:
        if each.of_experts and quantiser(each.packed.packing.quantiser).calibrate is not None:
            of.setdefault(each.modules[0], []).append(each)
    modules = dict(model.named_modules())
    return {
        name: (pair[0], pair[1])
        for name, pair in of.items()
        if len(pair) == 2 and name in modules and _fits(modules[name], *(each.packed for each in pair))
    }


def _fits(module: Any, up: QuantisedSource, down: QuantisedSource) -> bool:
    """Whether two weights are the stacks of a module, in this order."""
    if not hasattr(module, STACKED):
        return False
    experts = Experts.of(module)
    (count, inner, hidden), (_, width, _) = experts.up.shape, experts.down.shape
    shapes = (up.rows, up.width), (down.rows, down.width)
    return experts.after is None and shapes == ((count * inner, hidden), (count * hidden, width))


def round_experts(
    model: Any, module: Any, stacks: Stacks, given: Sequence[Routed], names: Parameters, rounded: CalibratedWeights
) -> int:
    """Quantise both stacks of `module` by inputs `given`; the number of experts without. Raises CheckpointError."""
    experts = Experts.of(module)
    flat = [(each.flatten(0, -2), index.flatten(0, -2)) for each, index in given]
    few: set[int] = set()

    def tokens_of(number: int) -> torch.Tensor:
        return torch.cat([each[(index == number).any(-1)] for each, index in flat]).float()

    def inner_of(number: int) -> torch.Tensor:
        bias = None if experts.up_bias is None else experts.up_bias[number]
        return experts.activate(torch.nn.functional.linear(tokens_of(number), experts.up[number], bias))

    for placed, inputs in zip(stacks, (tokens_of, inner_of), strict=True):
        few |= _round(placed.packed, experts.count, inputs, rounded)
        put_back(model, placed, names, placed.packed.rows_restored())
    return len(few)


def _round(
    packed: QuantisedSource, count: int, inputs: Callable[[int], torch.Tensor], rounded: CalibratedWeights
) -> set[int]:
    """Quantise one stack of `count` experts; returns those with too few tokens."""
    packing, height, few = packed.packing, packed.rows // count, set()
    calibrated = quantiser(packing.quantiser).calibrate
    assert calibrated is not None
    with OpenFiles() as files, torch.no_grad():
        for number in range(count):
            region = (number * height, (number + 1) * height), (0, packed.width)
            weights = packed.origin.read(region, files).to(torch.float32)
            given = inputs(number)
            if len(given) < FEWEST_EXPERT_TOKENS:
                few.add(number)
                found = in_parts(packed.quantised, weights)
            else:
                by = calibrated(moments([given]), packing.grid, packing.block_size)
                found = in_parts(by, weights)
            rounded.add_rows(packed.origin, packing.grid, packing.block_size, region[0][0], found)
    rounded.complete(packed.origin, packing.grid, packing.block_size)
    return few
