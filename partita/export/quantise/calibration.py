"""Quantise weights on a text: run the source model, and quantise every product by its inputs.

All windows run in lockstep: each batch of them is a forward pass in its own thread, one thread runs at a time, and all
stop before a module. The inputs of a product give the mean of x x^T; its weights are quantised and replaced in the
model, so that later layers see the quantised ones. One such matrix, and the activations of one layer, exist at a time.
Stacks of experts and transposed weights (Conv1D) are quantised without the text.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from partita.errors import CheckpointError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.progress import Stage
from partita.export.quantise import CALIBRATED, Packing
from partita.export.quantise.reference import parameter_names
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.rounding import Round, gptq
from partita.export.quantise.weight_source import QuantisedSource, in_parts, restored
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify import texts
from partita.export.verify.known_answer import check_memory
from partita.export.verify.texts import Text
from partita.export.weights import Quantised
from partita.export.weights.origins import whole_rows
from partita.process import give_back

WINDOWS_ABREAST = 4
"""Windows per forward pass."""
HELD = 4
"""Activations of hidden size that a waiting pass holds, besides the widest of its layer."""
MOST_WINDOWS = 128
FEWEST_TOKENS = 2048
"""Minimum tokens for an estimate of x x^T in thousands of dimensions."""
STACK_BYTES = 64 << 20
"""Stack size of a thread: models have deep call stacks."""

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
    model: Any, checkpoint: Checkpoint, text: Text, placed: Iterable[PlacedWeight], sources: Sources, stage: Stage
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
        if type(module).forward is not torch.nn.Linear.forward:
            return False
        weight = module.weight.detach()
        found = in_parts(self._round(readers[0][1].packing, given), weight)
        for tensor, each in readers:
            rows, of_tensor = whole_rows(each.origin, tensor)
            each.rounded.add(each, rows, Quantised(*(part[of_tensor] for part in found)))
        weight.copy_(restored(found)[:, : weight.shape[1]])
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
        readers_of = {
            tensor: [name.removesuffix(".weight") for name in names.single.get(tensor, ()) if name.endswith(".weight")]
            for tensor in sorted(each.packed.tensors)
        }
        is_product = not each.of_experts and any(readers_of.values())
        if is_product and each.packed.packing.quantiser != CALIBRATED:
            continue
        if not is_product or not all(len(whole_rows(each.packed.origin, tensor)[0]) for tensor in readers_of):
            others.update(each.modules[:1])
            continue
        for tensor, modules in readers_of.items():
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


Stop = tuple[str, torch.Tensor]
"""The module that a pass stops before, and the module's input."""


class _CancelledError(BaseException):
    """Ends a cancelled pass; models do not catch it."""


class _Pass(threading.Thread):
    """One forward pass, which runs only while its owner waits for it."""

    def __init__(self, forward: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.stop: Stop | None = None
        """Where it waits; None at the end."""
        self._forward, self._go, self._back = forward, SimpleQueue[bool](), SimpleQueue[Stop | BaseException | None]()

    def run(self) -> None:
        """Run the pass from the first `resume` on."""
        ended: BaseException | None = None
        try:
            self._wait()
            with torch.no_grad():  # a per-thread setting
                self._forward()
        except _CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            ended = error
        self._back.put(ended)

    def _wait(self) -> None:
        if not self._go.get():
            raise _CancelledError

    def resume(self) -> None:
        """Continue to the next stop, or to the end. Raises what the pass raises."""
        self.stop = None
        self._go.put(True)
        found = self._back.get()
        if isinstance(found, BaseException):
            raise found
        self.stop = found

    def wait_before(self, module: str, given: torch.Tensor) -> None:
        """Stop before a module until continued; called by the pass's own thread."""
        self._back.put((module, given))
        self._wait()

    def cancel(self) -> None:
        """End the pass where it is."""
        if self.ident is not None:  # started
            self._go.put(False)
            self.join()


def run_lockstep(
    model: Any, batches: Sequence[torch.Tensor], modules: Mapping[str, torch.nn.Module]
) -> Generator[tuple[str, list[torch.Tensor]]]:
    """Run `model` over `batches` of tokens [B, L]; each module of `modules` with activation inputs stops them once.

    Yields the module's name and its inputs per batch while all batches wait; they continue at the next request. A
    batch that reaches a module later than the others does not stop there. Raises what the model raises.
    """
    passes = [_Pass(partial(model, input_ids=ids, use_cache=False)) for ids in batches]
    done: set[str] = set()

    def stop_before(name: str, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        current, first = threading.current_thread(), given[0] if given else None
        if name in done or not isinstance(current, _Pass) or not isinstance(first, torch.Tensor):
            return
        if first.is_floating_point():  # an embedding with the same weights gets tokens
            current.wait_before(name, first)

    hooks = [module.register_forward_pre_hook(partial(stop_before, name)) for name, module in modules.items()]
    previous = threading.stack_size(STACK_BYTES)
    try:
        for each in passes:
            each.start()
        threading.stack_size(previous)
        waiting = passes
        while True:
            for each in waiting:
                each.resume()
            standing = [each.stop for each in passes if each.stop is not None]
            if not standing:
                return
            name = standing[0][0]
            yield name, [given for at, given in standing if at == name]
            del standing
            done.add(name)
            waiting = [each for each in passes if each.stop is not None and each.stop[0] == name]
    finally:
        threading.stack_size(previous)
        for hook in hooks:
            hook.remove()
        for each in passes:
            each.cancel()
