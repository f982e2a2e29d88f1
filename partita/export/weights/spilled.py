"""Parameters of the original model in a file: mapped, and let go of when the module that has them has run.

In float32 the original is twice as large as a checkpoint of 16 bits, and by far the most that an export would hold in
memory. So a large one is put on disk while transformers loads it, one parameter after the other. What is in the file is
memory of the operating system, which it takes back when it is short of it: a model may be larger than the memory is.
Parameters stay ordinary tensors, read and written from anywhere; only how long their pages are resident is different.
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
from partita.export.checkpoint.weight_files import TensorInfo
from partita.process import trim

LEAST_PARAMETERS = 64 << 20
"""Models with fewer stay in memory: 256 MiB in float32, less than the rest of an export takes."""
SPACE_MARGIN = 1.05
"""Room on disk, as a factor on the float32 weights."""
SETTER = "set_param_for_module"
"""What gives a module of transformers 5 a parameter that was loaded, in the module that is imported above."""
WRITTEN_BYTES = 64 << 20
TRIMMED_BYTES = 64 << 20
"""Loaded since memory that was freed was given back."""
WAITS = "HF_DEACTIVATE_ASYNC_LOAD"
"""Set, transformers reads one weight after the other: ahead of time it would have all of them in memory."""
LAYER = re.compile(r".*?\.\d+\.")
"""The beginning of a name that says which layer it is of."""
PAGES = "_partita_pages"
CAN = hasattr(mmap.mmap, "madvise") and hasattr(mmap, "MADV_DONTNEED") and hasattr(core_model_loading, SETTER)
"""Linux and macOS, and a transformers that loads as the installed one does."""


def resident_parameters(tensors: Mapping[str, TensorInfo], scratch: Path | None, written: int = 0) -> int:
    """How many parameters of a model of these tensors are in memory at a time, when it is loaded with `scratch` after
    so many bytes were `written` there.

    That is all of them where it stays in memory. Else it is twice the largest layer, or tensor beside the layers: one
    that is loaded, and the tensors that it is made of.
    """
    sizes: dict[str, int] = {}
    for name, info in tensors.items():
        layer = LAYER.match(name)
        part = name if layer is None else layer[0]
        sizes[part] = sizes.get(part, 0) + math.prod(info.shape)
    every = sum(sizes.values())
    return min(every, 2 * max(sizes.values(), default=0)) if _spills(every, scratch, written) else every


def _spills(parameters: int, scratch: Path | None, written: int = 0) -> bool:
    """Whether a model of so many parameters is put into a file in the folder `scratch`, where something is written
    before.
    """
    if scratch is None or not CAN or parameters < LEAST_PARAMETERS:
        return False
    try:
        return shutil.disk_usage(scratch).free - written >= parameters * 4 * SPACE_MARGIN
    except OSError:
        return False


@contextlib.contextmanager
def spilling(tensors: Mapping[str, TensorInfo], scratch: Path | None) -> Iterator[None]:
    """Have transformers put what it loads of `tensors` in a `with` block into a file in `scratch`.

    Small models stay in memory, and all do without `scratch` or where the disk has no room.
    """
    if not _spills(sum(math.prod(info.shape) for info in tensors.values()), scratch):
        yield
        return
    setter: Any = getattr(core_model_loading, SETTER)
    # Without a name: nothing is left of an export that is killed. The last mapping that ends closes it.
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
                        f"{scratch}: no room for the weights of the original model in float32 ({error.strerror}); make "
                        "room there, or export to another disk"
                    ) from error
            if freed > TRIMMED_BYTES:  # else memory for weights of many sizes stays with the C library
                freed = 0
                trim()
            return setter(model, name, value, *others, **named)

        before = os.environ.get(WAITS)
        os.environ[WAITS] = "1"
        setattr(core_model_loading, SETTER, put)
        try:
            yield
        finally:
            setattr(core_model_loading, SETTER, setter)
            if before is None:
                del os.environ[WAITS]
            else:
                os.environ[WAITS] = before


def watch(model: torch.nn.Module) -> None:
    """Let go of a module's parameters each time that it has run."""
    for module in model.modules():
        if any(hasattr(parameter, PAGES) for parameter in module._parameters.values()):
            module.register_forward_hook(_after, always_call=True)
    let_go(model)


def let_go(model: torch.nn.Module) -> None:
    """Let go of all parameters that are in a file; what was written to them is kept there."""
    for module in model.modules():
        _release(module)


def _after(module: torch.nn.Module, *_: Any) -> None:
    _release(module)


def _release(module: torch.nn.Module) -> None:
    for parameter in module._parameters.values():
        pages = getattr(parameter, PAGES, None)
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)


def _parameter(file: int, value: torch.Tensor) -> torch.nn.Parameter | torch.Tensor:
    """`value` in the file, behind what is there; as it is where it has no numbers. Raises OSError for a full disk."""
    size = value.numel() * value.element_size()
    if not size:
        return value
    start = -(-os.fstat(file).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    content: Any = value.detach().contiguous().view(torch.uint8).reshape(-1).numpy().data
    written = 0
    while written < size:  # and not by way of the mapping, which would be in memory beside the value
        written += os.pwrite(file, content[written : written + WRITTEN_BYTES], start + written)
    pages = mmap.mmap(file, size, offset=start)
    kept = torch.frombuffer(pages, dtype=value.dtype).view(value.shape)
    parameter = torch.nn.Parameter(kept, requires_grad=False)
    setattr(parameter, PAGES, pages)
    return parameter
