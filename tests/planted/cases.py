"""Every planted case, by environment."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from tests.planted import (
    around_on_cuda,
    functions_on_cuda,
    graphs_on_qnn,
    more_on_cuda,
    more_on_openvino,
    more_on_plugins,
    more_on_qnn,
    more_on_webgpu,
    on_compilers,
    on_cuda,
    on_everything,
    on_no_provider,
    on_openvino,
    on_plugins,
    on_qnn,
    on_webgpu,
    operators_on_cuda,
    quantised_on_qnn,
    strange_on_compilers,
    strange_on_cuda,
    strange_on_webgpu,
    structure_on_plugins,
    structure_on_webgpu,
    together,
    types_on_cuda,
    whole_on_cuda,
)
from tests.planted.case import Case

MODULES = (
    on_cuda,
    more_on_cuda,
    operators_on_cuda,
    types_on_cuda,
    around_on_cuda,
    functions_on_cuda,
    whole_on_cuda,
    on_webgpu,
    structure_on_plugins,
    structure_on_webgpu,
    more_on_plugins,
    more_on_webgpu,
    on_openvino,
    more_on_openvino,
    on_qnn,
    more_on_qnn,
    quantised_on_qnn,
    graphs_on_qnn,
    together,
    on_compilers,
    on_plugins,
    on_no_provider,
    strange_on_cuda,
    strange_on_compilers,
    strange_on_webgpu,
    on_everything,
)
OFTEN = (on_cuda, on_webgpu, on_openvino, on_qnn, on_plugins, on_no_provider, on_everything)
"""Of their cases every third is in `make test`, of the others every sixteenth, and `make truth` has all."""
EVERY_OF_THESE, EVERY = 3, 16
UNSOLVED: Mapping[str, str] = {}
"""Cases that are true and answered wrongly, and why; each fails the tests as soon as it is answered rightly."""


def _of(module: ModuleType) -> tuple[Case, ...]:
    """All cases of a file."""
    return (*module.CASES, *getattr(module, "FURTHER", ()))


CASES: tuple[Case, ...] = tuple(case for module in MODULES for case in _of(module))
HEAVY: frozenset[str] = frozenset(
    case.name
    for module in MODULES
    for number, case in enumerate(_of(module))
    if number % (EVERY_OF_THESE if module in OFTEN else EVERY)
)
"""Names of the cases that only `make truth` and `make test-heavy` run."""
