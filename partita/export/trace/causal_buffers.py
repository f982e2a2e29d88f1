"""Replace cuts of a causal-mask buffer while a model is traced.

Some models (gpt_neo) store the causal mask as a boolean buffer [1, 1, M, M], and slice its last S rows: `bias[:, :,
keys - S : keys, :keys]`. With a static cache of N keys that would always be the last rows of N. Here the slice returns
the rows at the tokens' positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode


@contextmanager
def rows_by_position(model: torch.nn.Module, positions: torch.Tensor, keys: int) -> Iterator[None]:
    """In this block, a slice of the last S of `keys` rows returns the rows at `positions` [B, S]."""
    buffers = {id(buffer) for buffer in model.buffers() if is_table(buffer)}
    with _Rows(buffers, positions, keys):
        yield


def is_table(buffer: torch.Tensor) -> bool:
    """Whether a buffer may be a causal mask: boolean [1, 1, M, M]."""
    return (
        buffer.dtype == torch.bool
        and buffer.ndim == 4
        and buffer.shape[:2] == (1, 1)
        and buffer.shape[2] == buffer.shape[3]
    )


class _Rows(TorchFunctionMode):
    def __init__(self, buffers: set[int], positions: torch.Tensor, keys: int) -> None:
        super().__init__()
        self._buffers, self._positions, self._keys = buffers, positions, keys

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and id(args[0]) in self._buffers and self._is_cut(args[1]):
            table = args[0][0, 0, :, : self._keys]
            return table[self._positions].unsqueeze(1)
        return function(*args, **(kwargs or {}))

    def _is_cut(self, index: Any) -> bool:
        """Whether an index is `[:, :, keys - S : keys, :keys]`."""
        if not (isinstance(index, tuple) and len(index) == 4 and all(isinstance(part, slice) for part in index)):
            return False
        start = self._keys - self._positions.shape[1]
        wanted = (slice(None), slice(None), slice(start, self._keys), slice(None, self._keys))
        return all(_same_slice(ours, theirs) for ours, theirs in zip(wanted, index, strict=True))


def _same_slice(one: slice, other: slice) -> bool:
    """Whether two slices are known to be equal; their bounds may be symbolic."""
    pairs = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
    return all(
        (a is None and b is None) or (a is not None and b is not None and bool(statically_known_true(a == b)))
        for a, b in pairs
    )
