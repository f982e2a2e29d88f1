"""The original model run over several batches of a text side by side: all of them stop before a module, and go on.

Each batch is a forward pass of its own in a thread of its own, and only one of them ever runs. So whatever a model does
between two modules is done by its own code, once, and a module may be changed while everything waits before it: what
comes after it has seen only what the package will compute. In memory is what the passes hold where they stand: the
activations of one layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import torch

STACK_BYTES = 64 << 20
"""Of a thread: models nest deeply."""


class _CancelledError(BaseException):
    """Ends a pass that is not wanted any more; no code of a model catches it."""


class _Pass:
    """One forward pass, which runs only while its owner waits for it."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.stop: tuple[str, Any] | None = None
        """The module that it stands before, and what that is given; None when it is through."""
        self.failed: BaseException | None = None
        self.cancelled = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)

    def _main(self, run: Callable[[], object]) -> None:
        self._go.acquire()
        try:
            if not self.cancelled:
                with torch.no_grad():  # a setting of each thread
                    run()
        except _CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            self.failed = error
        finally:
            self.stop = None
            self._back.release()

    def on(self) -> None:
        """Let it run up to its next stop, or to its end. Raises what it raises."""
        self._go.release()
        self._back.acquire()
        if self.failed is not None:
            raise self.failed

    def wait(self, name: str, given: Any) -> None:
        """Called by its own thread: stand before a module until it is let on."""
        self.stop = name, given
        self._back.release()
        self._go.acquire()
        if self.cancelled:
            raise _CancelledError
        self.stop = None

    def cancel(self) -> None:
        """End it where it stands."""
        self.cancelled = True
        if self.thread.ident is not None:  # it was started
            self._go.release()
            self.thread.join()


def abreast(
    model: Any,
    batches: Sequence[torch.Tensor],
    modules: Mapping[str, torch.nn.Module],
    routed: Collection[str] = (),
) -> Generator[tuple[str, list[Any]]]:
    """Run `model` over `batches` of tokens [B, L]; every module of `modules` that is given activations stops them once.

    Yields the name of the module, as `modules` has it, and what each batch gives it, while all of them wait before it;
    they go on when the next one is asked for. Of a module that is `routed`, of experts, that is the activations and the
    chosen experts. A batch that comes to a module later than others did, as experts see
    some of the tokens, does not stop there any more. Raises what the model raises.
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
            if activations.is_floating_point():  # an embedding of the same weights is given tokens
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
