"""Run a model over several batches in lockstep: all of them stop before a module, then continue.

Each batch is a forward pass in its own thread, and only one thread runs at a time. A module may be changed while all
batches wait before it. Memory holds the activations of one layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import torch

STACK_BYTES = 64 << 20
"""Stack size of a thread: models have deep call stacks."""


class _CancelledError(BaseException):
    """Ends a cancelled pass; models do not catch it."""


class _Pass:
    """One forward pass, which runs only while its owner waits for it."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.stop: tuple[str, Any] | None = None
        """The module that it stops before, and the module's inputs; None at the end."""
        self.failed: BaseException | None = None
        self.cancelled = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)

    def _main(self, run: Callable[[], object]) -> None:
        self._go.acquire()
        try:
            if not self.cancelled:
                with torch.no_grad():  # a per-thread setting
                    run()
        except _CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self.failed = error
        finally:
            self.stop = None
            self._back.release()

    def on(self) -> None:
        """Continue to the next stop, or to the end. Raises what the pass raises."""
        self._go.release()
        self._back.acquire()
        if self.failed is not None:
            raise self.failed

    def wait(self, name: str, given: Any) -> None:
        """Stop before a module until continued; called by the pass's own thread."""
        self.stop = name, given
        self._back.release()
        self._go.acquire()
        if self.cancelled:
            raise _CancelledError
        self.stop = None

    def cancel(self) -> None:
        """End the pass where it is."""
        self.cancelled = True
        if self.thread.ident is not None:  # started
            self._go.release()
            self.thread.join()


def run_lockstep(
    model: Any,
    batches: Sequence[torch.Tensor],
    modules: Mapping[str, torch.nn.Module],
    routed: Collection[str] = (),
) -> Generator[tuple[str, list[Any]]]:
    """Run `model` over `batches` of tokens [B, L]; each module of `modules` with activation inputs stops them once.

    Yields the module's name and its inputs per batch while all batches wait; they continue at the next request. A
    `routed` module (experts) yields the activations and the chosen experts. A batch that reaches a module later than
    the others does not stop there. Raises what the model raises.
    """
    passes = [_Pass(lambda ids=ids: model(input_ids=ids, use_cache=False)) for ids in batches]  # type: ignore[misc]
    by_thread: dict[int, _Pass] = {}
    done: set[str] = set()

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            walker = by_thread.get(threading.get_ident())
            activations, *others = (*given, *named.values()) if name in routed else given or (None,)
            if walker is None or name in done or not isinstance(activations, torch.Tensor):
                return
            if activations.is_floating_point():  # an embedding with the same weights gets tokens
                walker.wait(name, (activations, others[0]) if name in routed else activations)

        return hook

    hooks = [module.register_forward_pre_hook(hook_of(name), with_kwargs=True) for name, module in modules.items()]
    previous = threading.stack_size(STACK_BYTES)
    try:
        for each in passes:
            each.thread.start()
            assert each.thread.ident is not None
            by_thread[each.thread.ident] = each
        threading.stack_size(previous)
        waiting = passes
        while True:
            for each in waiting:
                each.on()
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
