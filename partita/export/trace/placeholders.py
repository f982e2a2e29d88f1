"""RMS norms as one placeholder node each, which the pass `fused_norms` replaces.

A module is a norm if it computes the formula on random input. There is no list of classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from partita.export.trace import DOMAIN, RMS_NORM
from partita.export.trace.replacements import replace_forward

LARGEST_EPSILON = 1e-2
TOLERANCE = 1e-5
"""For modules that compute in float32."""


@contextmanager
def norms_as_nodes(model: torch.nn.Module) -> Iterator[None]:
    """In this block every RMS norm of `model` writes one placeholder."""
    with ExitStack() as stack:
        for module in model.modules():
            if (found := norm_of(module)) is not None:
                stack.enter_context(replace_forward(module, _emitting(module, *found)))
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
    for epsilon in epsilons:
        normal = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
        for offset in (0.0, 1.0) if weights else (0.0,):
            expected = normal * (weight + offset) if weights else normal
            if found.shape == x.shape and torch.allclose(found, expected, TOLERANCE, TOLERANCE):
                return epsilon, offset
    return None


def _emitting(module: torch.nn.Module, epsilon: float, offset: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that writes the placeholder."""
    forward, attributes = module.forward, {"epsilon": epsilon, "offset": offset}

    def emit(x: torch.Tensor) -> torch.Tensor:
        inputs = x, *module.parameters()
        if len({each.dtype for each in inputs}) > 1:
            output: torch.Tensor = forward(x)
            return output
        operator = f"{DOMAIN}::{RMS_NORM}"
        return torch.onnx.ops.symbolic(operator, inputs, attributes, dtype=x.dtype, shape=x.shape, version=1)

    return emit
