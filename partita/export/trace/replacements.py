"""Replace cuts of a causal-mask buffer while a model is traced.

Some models (gpt_neo) store the causal mask as a boolean buffer [1, 1, M, M], and slice its last S rows: `bias[:, :,
keys - S : keys, :keys]`. With a static cache of N keys that would always be the last rows of N. Here the slice returns
the rows at the tokens' positions.

Complex numbers as pairs of real numbers while a model is traced, because ONNX has no complex tensors.

In this block `view_as_complex` and `polar`, as used in rotary embeddings, return a `Pair` with a few operations. Other
operations are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from partita.errors import UnsupportedModelError


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


class Pair:
    """A complex tensor [...] as a real one [..., 2]: real parts, then imaginary parts."""

    def __init__(self, parts: torch.Tensor) -> None:
        self.parts = parts

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        if name == "view_as_real":
            return args[0].parts
        if name in ("mul", "multiply", "__mul__", "__rmul__"):
            return args[0] * args[1] if isinstance(args[0], Pair) else args[1] * args[0]
        if name == "unsqueeze":
            return args[0].unsqueeze(*args[1:])
        raise UnsupportedModelError(f"the model computes with complex numbers ({name}), which is not supported")

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModelError(f"the model computes with complex numbers ({name}), which is not supported")

    @property
    def real(self) -> torch.Tensor:
        """Real parts, same shape."""
        return self.parts[..., 0]

    @property
    def imag(self) -> torch.Tensor:
        """Imaginary parts, same shape."""
        return self.parts[..., 1]

    @property
    def shape(self) -> torch.Size:
        """The shape without the last axis of `parts`."""
        return self.parts.shape[:-1]

    @property
    def ndim(self) -> int:
        """The number of axes without the last axis of `parts`."""
        return self.parts.ndim - 1

    @property
    def device(self) -> torch.device:
        """The device of both parts."""
        return self.parts.device

    def __mul__(self, other: Any) -> Pair:
        if isinstance(other, Pair):
            real = self.real * other.real - self.imag * other.imag
            imaginary = self.real * other.imag + self.imag * other.real
            return Pair(torch.stack([real, imaginary], dim=-1))
        factor = other[..., None] if isinstance(other, torch.Tensor) else other
        return Pair(self.parts * factor)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> Pair:
        whole = index if isinstance(index, tuple) else (index,)
        return Pair(self.parts[(*whole, slice(None))] if Ellipsis in whole else self.parts[whole])

    def unsqueeze(self, dim: int) -> Pair:
        """As in torch: a negative `dim` does not count the axis of the two parts."""
        return Pair(self.parts.unsqueeze(dim if dim >= 0 else dim - 1))

    def to(self, *args: Any, **kwargs: Any) -> Pair:
        """Itself: a trace has one device, and the dtype of the parts does not change."""
        return self

    def view(self, *sizes: Any) -> Pair:
        """As in torch; the axis of the two parts stays last."""
        flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
        return Pair(self.parts.view(*flat, 2))

    reshape = view

    def contiguous(self) -> Pair:
        """Itself: both parts are already contiguous."""
        return self


class ComplexAsPairs(TorchFunctionMode):
    """In this block, complex tensors are created as pairs."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.view_as_complex:
            return Pair(args[0])
        if function is torch.polar:
            length, angle = args
            return Pair(torch.stack([length * torch.cos(angle), length * torch.sin(angle)], dim=-1))
        return function(*args, **kwargs)
