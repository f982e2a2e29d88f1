"""Run a model over several batches in lockstep: all of them stop before a module, then continue.

Each batch is a forward pass in its own thread, and only one thread runs at a time. A module may be changed while all
batches wait before it. Memory holds the activations of one layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

STACK_BYTES = 64 << 20
"""Stack size of a thread: models have deep call stacks."""


class _CancelledError(BaseException):
    """Ends a cancelled pass; models do not catch it."""


class _Pass(threading.Thread):
    """One forward pass, which runs only while its owner waits for it."""

    def __init__(self, forward: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.stop: tuple[str, torch.Tensor] | None = None
        """The module that it stops before, and the module's input; None at the end."""
        self.failed: BaseException | None = None
        self.cancelled = False
        self._forward, self._go, self._back = forward, threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        """Run the pass from the first `resume` on."""
        self._go.acquire()
        try:
            if not self.cancelled:
                with torch.no_grad():  # a per-thread setting
                    self._forward()
        except _CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self.failed = error
        finally:
            self.stop = None
            self._back.release()

    def resume(self) -> None:
        """Continue to the next stop, or to the end. Raises what the pass raises."""
        self._go.release()
        self._back.acquire()
        if self.failed is not None:
            raise self.failed

    def wait_before(self, module: str, given: torch.Tensor) -> None:
        """Stop before a module until continued; called by the pass's own thread."""
        self.stop = module, given
        self._back.release()
        self._go.acquire()
        if self.cancelled:
            raise _CancelledError
        self.stop = None

    def cancel(self) -> None:
        """End the pass where it is."""
        self.cancelled = True
        if self.ident is not None:  # started
            self._go.release()
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
