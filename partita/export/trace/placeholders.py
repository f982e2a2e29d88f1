"""Norms and rotary embeddings as one placeholder node each, which the passes replace by operators; GELU as torch's own.

A module is an RMS norm or GELU, and a function a rotary embedding, if it computes the formula on random input. There is
no list of models. With R/2 pairs of numbers, cosines c and sines s of a position, and j the partner of i:

    y[i] = x[i] * c[i] - x[j] * s[i]        y[j] = x[j] * c[j] + x[i] * s[j]        y[k] = x[k] beyond R
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.functional import gelu
from torch.utils._python_dispatch import _disable_current_modes

from partita.export.trace import DOMAIN, RMS_NORM, ROTATION
from partita.export.trace.recurrence import modelling_code
from partita.export.trace.replacements import replace_forward

THREE = 3
"""Positions of a token in vision-language models; they are equal for text."""
LARGEST_EPSILON = 1e-2
TOLERANCE = 1e-5
"""For code that computes in float32."""


@contextmanager
def placeholders(model: torch.nn.Module, operators: frozenset[str]) -> Iterator[None]:
    """In this block every RMS norm and rotary embedding of `model` writes one placeholder, of these operators."""
    with ExitStack() as stack:
        for module in model.modules():
            if RMS_NORM in operators and (found := norm_of(module)) is not None:
                stack.enter_context(replace_forward(module, _norm(module, *found)))
            elif (approximate := gelu_of(module)) is not None:
                stack.enter_context(replace_forward(module, partial(gelu, approximate=approximate)))
        for code in modelling_code(model) if ROTATION in operators else ():
            for name, function in list(vars(code).items()):
                if inspect.isfunction(function) and {"cos", "sin"} <= inspect.signature(function).parameters.keys():
                    stack.callback(setattr, code, name, function)
                    setattr(code, name, _rotary(function))
        yield


def norm_of(module: torch.nn.Module) -> tuple[float, float] | None:
    """Epsilon and offset of an RMS norm with one weight [D], or none; None for other modules."""
    weights = dict(module.named_parameters())
    shapes = [each.shape for each in weights.values()]
    if weights.keys() - {"weight"} or any(len(shape) != 1 for shape in shapes) or any(module.children()):
        return None
    epsilons = [each for each in vars(module).values() if isinstance(each, float) and 0 < each < LARGEST_EPSILON]
    if not epsilons or len(inspect.signature(module.forward).parameters) != 1:
        return None
    random = torch.Generator().manual_seed(0)
    width = shapes[0][0] if shapes else 16
    sizes = torch.tensor([1.0, 30.0, 1e-2, *(each**0.5 for each in epsilons), 0.0])
    x = torch.randn(len(sizes), width, generator=random) * sizes[:, None]
    weight = torch.rand(width, generator=random) + 0.5
    try:
        found = torch.func.functional_call(module, dict.fromkeys(weights, weight), (x,)).double()
    except Exception:  # noqa: BLE001 - another module's own code may fail in any way
        return None
    x, weight = x.double(), weight.double()
    for epsilon, offset in itertools.product(epsilons, (0.0, 1.0) if weights else (0.0,)):
        normal = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
        if _same(found, normal * (weight + offset) if weights else normal):
            return epsilon, offset
    return None


def gelu_of(module: torch.nn.Module) -> str | None:
    """The argument `approximate` with which torch's GELU computes what a module does; None for other modules."""
    if any(module.children()) or list(module.parameters()) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    x = torch.cat([torch.linspace(-12, 12, 961), torch.tensor([-1e6, -50.0, 50.0, 1e6])])
    try:
        found = module.forward(x.clone()).double()
    except Exception:  # noqa: BLE001 - another module's own code may fail in any way
        return None
    return next((each for each in ("none", "tanh") if _same(found, gelu(x.double(), approximate=each))), None)


def _same(found: Any, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found.double(), expected, TOLERANCE, TOLERANCE)


def _norm(module: torch.nn.Module, epsilon: float, offset: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that writes the placeholder."""
    forward, attributes = module.forward, {"epsilon": epsilon, "offset": offset}

    def emit(x: torch.Tensor) -> torch.Tensor:
        inputs = x, *module.parameters()
        if len({each.dtype for each in inputs}) > 1:
            output: torch.Tensor = forward(x)
            return output
        return _placeholder(RMS_NORM, inputs, attributes)

    return emit


def _placeholder(operator: str, inputs: tuple[torch.Tensor, ...], attributes: dict[str, Any]) -> torch.Tensor:
    """A node with the shape and dtype of its first input."""
    x, name = inputs[0], f"{DOMAIN}::{operator}"
    return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=x.dtype, shape=x.shape, version=1)


@dataclass(frozen=True, slots=True)
class Form:
    """A rotary embedding of x [B, H, S, D], or [B, S, H, D]."""

    axis: int
    """The axis of S."""
    order: list[int] | None
    """The order of the numbers of x before the placeholder; None as they are."""
    attributes: dict[str, Any]
    """The attributes of the placeholder."""

    def emit(self, x: torch.Tensor, waves: list[torch.Tensor]) -> torch.Tensor:
        """Write the placeholder, of [B, H, S, D]."""
        x = x if self.order is None else x[..., self.order]
        y = _placeholder(ROTATION, (x if self.axis == 2 else x.transpose(1, 2), *waves), self.attributes)
        return y if self.axis == 2 else y.transpose(1, 2)


def _rotary(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes placeholders for its arguments [B, H, S, D], where it is a rotary embedding of them."""
    signature, known = inspect.signature(function), dict[str, list[Form]]()

    def emit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tensors = {name: each for name, each in given.items() if isinstance(each, FakeTensor) and each.ndim == 4}
        names = [name for name in tensors if name not in ("cos", "sin")]
        inputs = [row for pair in zip(_rows(given["cos"]), _rows(given["sin"]), strict=True) for row in pair]
        if not names or not inputs or len({each.dtype for each in (*inputs, *(given[name] for name in names))}) > 1:
            return function(*args, **kwargs)
        key = str([(name, each.shape if isinstance(each, torch.Tensor) else each) for name, each in given.items()])
        if key not in known:
            known[key] = rotations_of(function, given, names)
        # A comparison of symbolic sizes makes them one.
        if not known[key] or any(given[name].shape[known[key][0].axis] != inputs[0].shape[1] for name in names):
            return function(*args, **kwargs)
        results = tuple(form.emit(given[name], inputs) for name, form in zip(names, known[key], strict=True))
        return results if len(results) > 1 else results[0]

    return emit


def _rows(wave: Any) -> list[torch.Tensor]:
    """Cosines or sines [B, S, R] for each position of a token; none where the shape is another."""
    if not isinstance(wave, torch.Tensor) or wave.ndim not in (3, 4):
        return []
    return [wave] if wave.ndim == 3 else [*wave] if wave.shape[0] == THREE else []


def rotations_of(function: Callable[..., Any], given: dict[str, Any], names: list[str]) -> list[Form]:
    """The forms of the rotary embeddings of the arguments `names`; empty if it computes anything else."""
    # Outside of the trace, which has fake tensors and records operations.
    with unset_fake_temporarily(), _disable_current_modes():
        random = torch.Generator().manual_seed(0)
        drawn = {
            name: _drawn(each, random, equal_rows=name in ("cos", "sin"))
            if isinstance(each, torch.Tensor) and each.is_floating_point()
            else each
            for name, each in given.items()
        }
        try:
            results = function(**drawn)
        except Exception:  # noqa: BLE001 - another function's own code may fail in any way
            return []
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        if len(results) != len(names):
            return []
        waves = drawn["cos"], drawn["sin"]
        found = [_rotation(drawn[name], result, *waves) for name, result in zip(names, results, strict=True)]
        return [each for each in found if each is not None] if None not in found else []


def _drawn(tensor: torch.Tensor, random: torch.Generator, *, equal_rows: bool) -> torch.Tensor:
    """Random numbers in the shape of `tensor`, for at most two rows of the batch.

    `equal_rows`: cosines or sines, which are the same for each index of the first of four axes.
    """
    shape = [size if isinstance(size, int) else 3 for size in tensor.shape]
    times = shape[:1] if equal_rows and len(shape) == 4 else []
    batch, *rest = shape[len(times) :]
    return torch.randn(min(batch, 2), *rest, generator=random).expand(*times, -1, *rest)


def _rotation(x: torch.Tensor, y: Any, cos: torch.Tensor, sin: torch.Tensor) -> Form | None:
    """The form with which the formula gives `y`. `own`: each number of a pair has a column of the cosines."""
    cos, sin = (wave[0] if wave.ndim == 4 else wave for wave in (cos, sin))
    booleans, size, numbers = (False, True), cos.shape[-1], torch.arange(x.shape[-1])
    for axis, turned, own in itertools.product((2, 1), (size, 2 * size), booleans):
        if x.shape[axis] != cos.shape[1] or turned > x.shape[-1] or turned % 2 or (own and turned != size):
            continue
        for taken, interleaved in itertools.product(booleans, booleans):
            order, (first, second) = numbers.clone(), _pairs(turned, interleaved)
            order[first], order[second] = (numbers[part] for part in _pairs(turned, taken))
            columns = [numbers[part if own else slice(turned // 2)].tolist() for part in (first, second)]
            expected = x[..., order]
            a, b = expected[..., first].clone(), expected[..., second].clone()
            (c, d), (s, t) = ([wave[..., each].unsqueeze(3 - axis) for each in columns] for wave in (cos, sin))
            expected[..., first], expected[..., second] = a * c - b * s, b * d + a * t
            if _same(y, expected.double()):
                attributes = {"interleaved": interleaved, "first": columns[0], "second": columns[1]}
                return Form(axis, None if taken == interleaved else order.tolist(), attributes)
    return None


def _pairs(turned: int, interleaved: bool) -> tuple[slice, slice]:
    """The first and the second number of each pair: neighbours, or in two halves."""
    if interleaved:
        return slice(0, turned, 2), slice(1, turned, 2)
    return slice(turned // 2), slice(turned // 2, turned)
