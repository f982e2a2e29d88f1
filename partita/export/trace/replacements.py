"""Parts of the modelling code that are replaced while a model is traced.

Rotary embeddings whose frequencies depend on the sequence length (longrope and dynamic). transformers wraps the forward
of rotary modules in `dynamic_rope_update`, which reads the length from positions and stores results in the module. A
graph step sees only a part of the sequence, so the wrapper is removed and the length becomes a scalar graph input. The
formulas are transformers' own.

    longrope    cos, sin = Where(length > original, with the long factors, with the short factors)
    dynamic     frequencies = Where(length > original, NTK(length), the module's own)

For longrope the Where follows cos and sin, so that both sides depend on positions alone, and the pass `rotary_tables`
can tabulate them.

Cuts of a causal-mask buffer. Some models (gpt_neo) store the causal mask as a boolean buffer [1, 1, M, M], and slice
its last S rows: `bias[:, :, keys - S : keys, :keys]`. With a static cache of N keys that would always be the last rows
of N. Here the slice returns the rows at the tokens' positions.

Complex numbers, which ONNX does not have: `view_as_complex` and `polar`, as used in rotary embeddings, return a `Pair`
of real numbers with a few operations. Other operations are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from transformers import modeling_rope_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from partita.errors import UnsupportedModelError

Kind = Literal["longrope", "dynamic"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """A set of length-dependent frequencies of a rotary module."""

    name: str
    """Path of the module, and the layer type where the module has one set per layer type."""
    module: torch.nn.Module
    layer_type: str | None
    kind: Kind

    @property
    def buffer(self) -> str:
        """Name of the frequencies that the module's forward reads."""
        return "inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"

    @property
    def trained_frequencies(self) -> torch.Tensor:
        """The frequencies within the trained context."""
        name = "original_inv_freq" if self.layer_type is None else f"{self.layer_type}_original_inv_freq"
        found = getattr(self.module, name, None)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedModelError(
                f"{self.name}: {name} is missing, so the frequencies for short sequences are unknown"
            )
        return found

    @property
    def context(self) -> int:
        """The maximum length with the module's own frequencies."""
        module: Any = self.module
        if self.kind == "dynamic":
            return int(module.original_max_seq_len)
        parameters = module.config.rope_parameters
        if self.layer_type is not None:
            parameters = parameters[self.layer_type]
        return int(parameters["original_max_position_embeddings"])

    def at(self, length: Any) -> torch.Tensor:
        """transformers' frequencies for a length, which may be a tensor."""
        compute = ROPE_INIT_FUNCTIONS[self.kind]
        config: Any = self.module.config
        frequencies, _ = compute(config, self.trained_frequencies.device, seq_len=length, layer_type=self.layer_type)
        return frequencies


def static_up_to(model: torch.nn.Module) -> int | None:
    """The length up to which no frequency changes, so that no length input is needed; None: none changes."""
    return min((rotary.context for rotary in rotaries(model)), default=None)


def recompute_above(model: torch.nn.Module) -> int | None:
    """`package.Graph.recompute_above`: the maximum length with the short factors of longrope; None without longrope."""
    # dynamic frequencies: transformers keeps cached keys when they change
    found = {rotary.name: rotary.context for rotary in rotaries(model) if rotary.kind == "longrope"}
    if len(set(found.values())) > 1:
        limits = ", ".join(f"{name} beyond {length}" for name, length in found.items())
        raise UnsupportedModelError(f"longrope layers switch at different lengths: {limits}; this is not supported")
    return next(iter(found.values()), None)


def rotaries(model: torch.nn.Module) -> tuple[Rotary, ...]:
    """Every set of length-dependent frequencies in `model`."""
    found = []
    for path, module in model.named_modules():
        given = getattr(module, "rope_type", None)
        for layer_type, name in given.items() if isinstance(given, dict) else ((None, given),):
            kind: Kind | None = "dynamic" if "dynamic" in str(name) else "longrope" if name == "longrope" else None
            if kind is not None:  # a rope type of `dynamic_rope_update`
                found.append(Rotary(path if layer_type is None else f"{path}.{layer_type}", module, layer_type, kind))
    return tuple(found)


@contextmanager
def rope_by_length(model: torch.nn.Module, length: torch.Tensor | None) -> Iterator[None]:
    """In this block rotary modules read the length from `length` []; None: the trained context."""
    sets: dict[torch.nn.Module, dict[str | None, Rotary]] = {}
    for rotary in rotaries(model):
        sets.setdefault(rotary.module, {})[rotary.layer_type] = rotary
    with ExitStack() as stack:
        for module, by_layer_type in sets.items():
            stack.enter_context(replace_forward(module, _forward_by_length(module, by_layer_type, length)))
        yield


@contextmanager
def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _forward_by_length(
    module: torch.nn.Module, sets: dict[str | None, Rotary], length: torch.Tensor | None
) -> Callable[..., Any]:
    """The forward of a rotary module without transformers' wrapper."""
    forward = _inner_forward(module)
    with _disable_current_modes():  # real numbers even within a trace
        long = {key: each.at(each.context + 1) for key, each in sets.items() if each.kind == "longrope"}

    @torch.no_grad()
    def by_length(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        named = {} if layer_type is None else {"layer_type": layer_type}
        rotary = sets.get(layer_type)
        if rotary is None:
            return forward(module, x, position_ids, **named)

        def wave(frequencies: torch.Tensor) -> Any:
            stand_in = RotaryModule(module, rotary.buffer, frequencies)
            result = forward(stand_in, x, position_ids, **named)
            if not stand_in.read:
                raise UnsupportedModelError(
                    f"{rotary.name} computes its frequencies in an unknown way, which is not supported"
                )
            return result

        if length is None:
            return wave(rotary.trained_frequencies)
        # As a float: exact for all lengths, and providers have more kernels for it.
        text = length.to(torch.float32)
        beyond = text > rotary.context
        if rotary.kind == "dynamic":
            return wave(torch.where(beyond, rotary.at(text), rotary.trained_frequencies))
        return tree_map(
            lambda a, b: torch.where(beyond, a, b), wave(long[layer_type]), wave(rotary.trained_frequencies)
        )

    return by_length


def _inner_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward of a module's class below `dynamic_rope_update`."""
    function: Any = type(module).forward
    while function is not None:
        inner: Any = getattr(function, "__wrapped__", None)
        if inner is not None and function.__code__.co_filename == modeling_rope_utils.__file__:
            wrapped: Callable[..., Any] = inner
            return wrapped
        function = inner
    raise UnsupportedModelError(
        f"{type(module).__name__} has length-dependent frequencies that do not come from transformers' "
        "dynamic_rope_update, which is not supported"
    )


class RotaryModule:
    """A rotary module with other frequencies, for its forward."""

    def __init__(self, module: torch.nn.Module, buffer: str, frequencies: torch.Tensor) -> None:
        self._module, self._buffer, self._frequencies = module, buffer, frequencies
        self.read = False
        """Whether the frequencies were read."""

    def __getattr__(self, name: str) -> Any:
        if name == self._buffer:
            self.read = True
            return self._frequencies
        return getattr(self._module, name)


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
        rows, columns, begin = *index[2:], self._keys - self._positions.shape[1]
        bounds = (rows.start, begin), (rows.stop, self._keys), (columns.stop, self._keys)
        if columns.start not in (None, 0) or rows.step is not None or columns.step is not None:
            return False
        return all(one is not None and bool(statically_known_true(one == other)) for one, other in bounds)


class Pair:
    """A complex tensor [...] as a real one [..., 2]: real parts, then imaginary parts."""

    def __init__(self, parts: torch.Tensor) -> None:
        self.parts = parts

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.view_as_real:
            return args[0].parts
        raise _refused(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        raise _refused(name)

    @property
    def device(self) -> torch.device:
        """The device of both parts."""
        return self.parts.device

    def __mul__(self, other: Any) -> Pair:
        if not isinstance(other, Pair):
            return Pair(self.parts * (other[..., None] if isinstance(other, torch.Tensor) else other))
        one, two = self.parts, other.parts
        real = one[..., 0] * two[..., 0] - one[..., 1] * two[..., 1]
        imaginary = one[..., 0] * two[..., 1] + one[..., 1] * two[..., 0]
        return Pair(torch.stack([real, imaginary], dim=-1))

    def __getitem__(self, index: Any) -> Pair:
        whole = index if isinstance(index, tuple) else (index,)
        return Pair(self.parts[(*whole, slice(None))] if Ellipsis in whole else self.parts[whole])

    def unsqueeze(self, dim: int) -> Pair:
        """As in torch: a negative `dim` does not count the axis of the two parts."""
        return Pair(self.parts.unsqueeze(dim if dim >= 0 else dim - 1))

    def to(self, *args: Any, **kwargs: Any) -> Pair:
        """Itself: a trace has one device, and the dtype of the parts does not change."""
        return self


def _refused(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the model computes with complex numbers ({name}), which is not supported")


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
