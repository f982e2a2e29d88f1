"""Store parameters of the source model in a memory-mapped file, and release their pages after use.

In float32 the source model is twice as large as a 16-bit checkpoint. Large ones are written to disk while transformers
loads them. Parameters stay ordinary tensors; the operating system can reclaim their pages.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import core_model_loading

from partita.errors import ResourceError
from partita.export.weights.origins import TensorInfo
from partita.process import trim

LEAST_PARAMETERS = 64 << 20
"""Models with fewer parameters stay in memory (256 MiB in float32)."""
SPACE_MARGIN = 1.05
"""Required disk space, as a factor on the size of the float32 weights."""
SETTER = "set_param_for_module"
"""The function of transformers 5 that assigns a loaded parameter to a module."""
WRITTEN_BYTES = TRIMMED_BYTES = 64 << 20
"""Bytes written at once, and loaded between calls that return freed memory to the system."""
SYNCHRONOUS_LOADING = "HF_DEACTIVATE_ASYNC_LOAD"
"""An environment variable with which transformers loads weights one by one."""
LAYER = re.compile(r".*?\.\d+\.")
"""The beginning of a parameter name up to the layer number."""
PAGES = "_partita_pages"
IS_SUPPORTED = hasattr(mmap.mmap, "madvise") and hasattr(mmap, "MADV_DONTNEED") and hasattr(core_model_loading, SETTER)
"""Whether the system is Linux or macOS, and the installed transformers has `SETTER`."""


def resident_parameters(tensors: Mapping[str, TensorInfo], scratch: Path | None, written: int = 0) -> int:
    """The number of parameters in memory at a time when a model is loaded with `scratch`."""
    sizes: dict[str, int] = {}
    for name, info in tensors.items():
        layer = LAYER.match(name)
        part = name if layer is None else layer[0]
        sizes[part] = sizes.get(part, 0) + math.prod(info.shape)
    every = sum(sizes.values())
    return min(every, 2 * max(sizes.values(), default=0)) if _spills(every, scratch, written) else every


def _spills(parameters: int, scratch: Path | None, written: int = 0) -> bool:
    """Whether a model of this size is stored in a file in `scratch`. `written`: bytes written there before."""
    if scratch is None or not IS_SUPPORTED or parameters < LEAST_PARAMETERS:
        return False
    try:
        return shutil.disk_usage(scratch).free - written >= parameters * 4 * SPACE_MARGIN
    except OSError:
        return False


@contextlib.contextmanager
def spilling(tensors: Mapping[str, TensorInfo], scratch: Path | None) -> Iterator[None]:
    """In the block, large models load their parameters of `tensors` into a file in `scratch`, if it has room."""
    if not _spills(sum(math.prod(info.shape) for info in tensors.values()), scratch):
        yield
        return
    setter: Any = getattr(core_model_loading, SETTER)
    # Unlinked, so that a killed export leaves no file. The last mapping closes it.
    with tempfile.TemporaryFile(dir=scratch) as file:
        freed = 0

        def put(model: Any, name: str, value: torch.Tensor, *others: Any, **named: Any) -> Any:
            nonlocal freed
            owner, _, last = name.rpartition(".")
            if last in model.get_submodule(owner)._parameters and not isinstance(value, torch.nn.Parameter):
                freed += value.nbytes
                try:
                    value = _parameter(file.fileno(), value)
                except OSError as error:
                    raise ResourceError(
                        f"{scratch}: no space for the float32 weights of the source model ({error.strerror}); make "
                        "space there, or export to another disk"
                    ) from error
            if freed > TRIMMED_BYTES:  # otherwise the C library keeps freed memory of many sizes
                freed = 0
                trim()
            return setter(model, name, value, *others, **named)

        before = {name: value for name, value in os.environ.items() if name == SYNCHRONOUS_LOADING}
        os.environ[SYNCHRONOUS_LOADING] = "1"
        setattr(core_model_loading, SETTER, put)
        try:
            yield
        finally:
            setattr(core_model_loading, SETTER, setter)
            del os.environ[SYNCHRONOUS_LOADING]
            os.environ.update(before)


def watch(model: torch.nn.Module) -> None:
    """Release a module's parameters after each run."""
    for module in model.modules():
        if any(hasattr(parameter, PAGES) for parameter in module._parameters.values()):
            module.register_forward_hook(lambda module, *_: let_go(module), always_call=True)
    let_go(model)


def let_go(model: torch.nn.Module) -> None:
    """Release all parameters that are in a file; written values persist."""
    for parameter in model.parameters():
        pages = getattr(parameter, PAGES, None)
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)


def _parameter(file: int, value: torch.Tensor) -> torch.nn.Parameter | torch.Tensor:
    """`value` appended to the file; unchanged where it is empty. Raises OSError for a full disk."""
    size = value.numel() * value.element_size()
    if not size:
        return value
    start = -(-os.fstat(file).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    content: Any = value.detach().contiguous().view(torch.uint8).reshape(-1).numpy().data
    written = 0
    while written < size:  # not through the mapping, which would take memory as well
        written += os.pwrite(file, content[written : written + WRITTEN_BYTES], start + written)
    pages = mmap.mmap(file, size, offset=start)
    kept = torch.frombuffer(pages, dtype=value.dtype).view(value.shape)
    parameter = torch.nn.Parameter(kept, requires_grad=False)
    setattr(parameter, PAGES, pages)
    return parameter
