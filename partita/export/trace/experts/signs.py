"""Tracks tensors that cannot contain negative numbers, from operation to operation while a model runs.

The MoE operator gets logarithms of a router's weights. Routers end in a softmax or sigmoid, or in products and
quotients of them, which is detected from torch's operations without values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

MAKES = frozenset(
    (
        *("softmax", "sigmoid", "exp", "softplus", "relu", "abs", "sqrt", "rsqrt", "square", "norm", "one_hot"),
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
    )
)
"""Operations whose results are never negative."""
PASSES = frozenset(
    (
        *("gather", "take_along_dim", "index_select", "getitem", "topk", "sort", "sum", "mean", "amax", "max"),
        *("view", "reshape", "flatten", "transpose", "permute", "t", "squeeze", "unsqueeze", "expand", "repeat"),
        *("contiguous", "clone", "detach", "type", "float", "half", "bfloat16", "repeat_interleave"),
        *("chunk", "split", "cat", "concat"),
    )
)
"""Operations whose results are not negative if their inputs are not; numbers among the arguments are sizes and axes."""
LIKE = frozenset({"type_as", "to", "expand_as", "view_as", "reshape_as"})
"""Operations whose results are not negative if the first argument is not; the second one gives the dtype or shape."""
COMPUTES = frozenset(
    (
        *("mul", "multiply", "imul", "rmul", "div", "true_divide", "truediv", "itruediv"),
        *("add", "iadd", "radd", "masked_fill", "where", "scatter", "maximum"),
    )
)
"""Operations whose results are not negative if their inputs, including numbers, are not."""
RAISES = frozenset({"clamp", "clamp_min", "clip"})
"""Operations whose results are not negative if the input or the lower bound is not."""


class Signs(TorchFunctionMode):
    """Within a `with` block, records which tensors contain no negative number."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakIdKeyDictionary()

    def never_negative(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is known to contain no negative number."""
        return tensor in self._known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and record its results."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        known = self._holds(name.strip("_"), args, kwargs)
        result = func(*args, **kwargs)
        if name.endswith("_") and not name.startswith("__") or name.startswith("__i") or name == "__setitem__":
            self._note([args[0]], known)  # written in place
        self._note(_tensors([result]), known)
        return result

    def _holds(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in MAKES:
            return True
        given = [*args[: 1 if name in LIKE else None], *kwargs.values()]
        tensors = [t for t in _tensors(given) if t.is_floating_point()]
        if name in RAISES:
            lower = kwargs.get("min", args[1] if len(args) > 1 else None)
            return all(map(self.never_negative, tensors)) or (isinstance(lower, int | float) and lower >= 0)
        if name in COMPUTES:
            values = given[2:] if name == "scatter" else given  # the axis of a scatter comes before its values
            numbers = [n for n in values if isinstance(n, int | float)]
            return all(map(self.never_negative, tensors)) and all(number >= 0 for number in numbers)
        return name in PASSES | LIKE and bool(tensors) and all(map(self.never_negative, tensors))

    def _note(self, tensors: Iterable[torch.Tensor], known: bool) -> None:
        for tensor in tensors:
            if known and tensor.is_floating_point():
                self._known[tensor] = True
            elif tensor in self._known:
                del self._known[tensor]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
