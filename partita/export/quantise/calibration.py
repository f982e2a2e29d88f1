"""Quantise weights on a text: run the source model, and quantise every product by its inputs.

All windows run in lockstep. Before a product, the inputs of all windows give the mean of x x^T; its weights are
quantised and replaced in the model, so that later layers see the quantised ones. One such matrix exists at a time.
Stacks of experts are quantised without the text.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from partita.errors import CheckpointError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.progress import Stage
from partita.export.quantise.lockstep import run_lockstep
from partita.export.quantise.quantisers import CALIBRATED, Packing, Quantised, Round
from partita.export.quantise.reference import ROWS_ELEMENTS, parameter_names
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.rounding import gptq
from partita.export.quantise.weight_source import QuantisedSource, in_parts, restored
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify import texts
from partita.export.verify.known_answer import check_memory
from partita.export.verify.texts import Text
from partita.export.weights.origins import IndexReader, Origin, blocks
from partita.process import give_back

WINDOWS_ABREAST = 4
"""Windows per forward pass."""
HELD = 4
"""Activations of hidden size that a waiting pass holds, besides the widest of its layer."""
MOST_WINDOWS = 128
FEWEST_TOKENS = 2048
"""Minimum tokens for an estimate of x x^T in thousands of dimensions."""

Readers = list[tuple[str, QuantisedSource]]
"""Weights with rows of a module's weight, with the checkpoint tensor that has these."""


def read_text(path: Path, checkpoint: Checkpoint, max_length: int) -> Text:
    """The first windows of a text. Raises UsageError when it is unreadable or too short, or has no tokenizer."""
    vocabulary = int(checkpoint.config.get_text_config(decoder=True).vocab_size)
    length = min(texts.WINDOW_TOKENS, max_length)
    most = max(MOST_WINDOWS, -(-FEWEST_TOKENS // length))
    found = texts.read_windows(
        path, "calibrate", checkpoint, vocabulary, length, length * most, FEWEST_TOKENS, needs_tokenizer=True
    )
    return replace(found, windows=found.windows[:most])


def check_calibration_memory(placed: Iterable[PlacedWeight], parameters: int, hidden: int, text: Text) -> None:
    """Raise ResourceError when free memory is below the peak of a calibration. `parameters`: those in memory."""
    sizes = [(each.packed.width, each.packed.elements) for each in placed if not each.of_experts]
    width, largest = (max((size[axis] for size in sizes), default=0) for axis in (0, 1))
    waiting = 4 * text.tokens * (HELD * hidden + 2 * width + text.windows.shape[1])
    extra_bytes = waiting + width * width * (4 + 3 * 8) + 5 * 4 * largest
    check_memory(parameters, 0, extra_bytes, use=f"to calibrate on {text.tokens:,} tokens of {text.name}", needed=True)


def calibrate(
    model: Any,
    checkpoint: Checkpoint,
    text: Text,
    placed: Iterable[PlacedWeight],
    sources: Sources,
    stage: Stage,
) -> list[str]:
    """Quantise the weights of `placed` in place. Returns the uncalibrated ones. Raises CheckpointError."""
    weights, others = _weights_to_quantise(model, placed, sources)
    uncalibrated = {name: tensor for name, ((tensor, _), *_) in weights.items()}
    modules = {name: model.get_submodule(name) for name in uncalibrated}
    batches = torch.split(torch.from_numpy(text.windows), WINDOWS_ABREAST)
    quantiser = _ModuleQuantiser()
    running = run_lockstep(model, batches, modules)
    with quiet(), translate_errors("running the source model"), closing(running) as walk:
        for name, given in walk:
            if not all(bool(torch.isfinite(each).all()) for each in given):
                raise CheckpointError(
                    f"{checkpoint.location}: the input of {uncalibrated[name]} is not finite on "
                    f"`calibrate={text.name}`: a weight is NaN or infinite, or activations overflow; omit `calibrate`"
                )
            if quantiser.take(modules[name], weights[name], given):
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

    _inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _moments: torch.Tensor | None = None
    _rounds: dict[Packing, Round] = field(default_factory=dict)

    def take(self, module: Any, readers: Readers, given: Sequence[torch.Tensor]) -> bool:
        """Quantise the weights of a module by its inputs `given`; False where it is not a product with them."""
        weight = module.weight.detach()
        transposed = {torch.nn.Linear.forward: False, Conv1D.forward: True}.get(type(module).forward)
        if transposed is None:
            return False
        packing = readers[0][1].packing
        found = in_parts(self._round(packing, given), weight.T.contiguous() if transposed else weight)
        for tensor, each in readers:
            rows, of_tensor = _rows_of(each.origin, tensor, transposed=transposed)
            each.rounded.add(each, rows, Quantised(*(part[of_tensor] for part in found)))
        values = restored(found)[:, : weight.shape[0 if transposed else 1]]
        weight.copy_(values.T if transposed else values)
        return True

    def _round(self, packing: Packing, given: Sequence[torch.Tensor]) -> Round:
        known = len(self._inputs) == len(given)
        if not known or any(ref() is not each for ref, each in zip(self._inputs, given, strict=True)):
            self._inputs = [weakref.ref(each) for each in given]
            self._moments = moments(given)
            self._rounds = {}
        if packing not in self._rounds:
            assert self._moments is not None
            self._rounds[packing] = gptq(self._moments, packing.grid, packing.block_size)
        return self._rounds[packing]


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
) -> tuple[dict[str, Readers], set[str]]:
    """Module -> the weights with its rows, and the modules of weights that no module multiplies by directly."""
    found: dict[str, Readers] = {}
    others: set[str] = set()
    names = parameter_names(model, sources)
    embeddings = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    for each in placed:
        known = [name for tensor in each.packed.tensors for name in names.single.get(tensor, ())]
        if each.of_experts or not any(name.endswith(".weight") for name in known):
            others.update(each.modules[:1])
            continue
        if each.packed.packing.quantiser != CALIBRATED:
            continue
        if not _keeps_columns(each.packed.origin):
            others.update(each.modules[:1])
            continue
        for tensor in sorted(each.packed.tensors):
            modules = [
                name.removesuffix(".weight") for name in names.single.get(tensor, ()) if name.endswith(".weight")
            ]
            modules = [name for name in modules if name not in embeddings]
            own = [name for name in modules if name in each.modules]
            if not own and not embeddings.isdisjoint(each.modules):  # the head has other weights here
                others.update(each.modules[:1])
                continue
            for module in own or modules:
                readers = found.setdefault(module, [])
                if all(
                    each.packed.packing == known.packing and each.packed.whole != known.whole for _, known in readers
                ):
                    readers.append((tensor, each.packed))
    return found, others


def _rows_of(origin: Origin, tensor: str, *, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a weight that are rows of `tensor`, or columns if `transposed`, and the indices of these."""
    places = IndexReader(origin.tensors())
    index = origin.read(((0, origin.shape[0]), (0, 1)), places)[:, 0]
    info, first = next((info, first) for info, first in places.first.items() if info.name == tensor)
    rows = ((index >= first) & (index < first + math.prod(info.shape))).nonzero()[:, 0]
    return rows, (index[rows] - first) // (1 if transposed else info.shape[1])


def _keeps_columns(origin: Origin) -> bool:
    """Whether rows of a weight are whole rows, or whole columns, of tensors in order."""
    places = IndexReader(origin.tensors())
    for region in blocks(origin.shape, ROWS_ELEMENTS):
        index = origin.read(region, places)
        for info, first in places.first.items():
            rows = index[(index[:, 0] >= first) & (index[:, 0] < first + math.prod(info.shape))]
            whole = ((info.shape[1], 1), (info.shape[0], info.shape[1]))
            if not any(rows.shape[1] == size and bool((rows.diff(dim=1) == step).all()) for size, step in whole):
                return False
    return True
