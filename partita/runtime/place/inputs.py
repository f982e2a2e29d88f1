"""Inputs for a model: values from files, or reproducible generated values of sizes from the user.

Generated floats are small random numbers, and integers are zeros, because they may be indices, or ones if the input's
name contains mask or length.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import ResourceError, UsageError
from partita.observations.text_format import families, human_bytes, listing, plural
from partita.options.fields import PathText
from partita.process import free_bytes
from partita.remedies import Remedy
from partita.runtime.place.onnx_model import ModelPort
from partita.untrusted_files import MOST_BYTES, check_size

SEED = 0
SCALE = 0.1
BLOCK = 1 << 20
"""Number of generated random numbers; longer inputs repeat them."""
ONES = re.compile(r"mask|len(gth)?s?(_|$)", re.IGNORECASE)
GIVE_SIZES = Remedy("add them, as in", options=("{sizes}",))
Shape = tuple[int, ...]


def read_inputs(
    ports: Sequence[ModelPort], sizes: Mapping[str, int | Sequence[int]], files: Mapping[str, PathText]
) -> tuple[dict[str, Shape], dict[str, npt.NDArray[Any]]]:
    """The shape of every input, and the values from files. Raises UsageError."""
    values = read_values(ports, files)
    return input_shapes(ports, sizes, {name: array.shape for name, array in values.items()}), values


def read_values(ports: Sequence[ModelPort], files: Mapping[str, PathText]) -> dict[str, npt.NDArray[Any]]:
    """The arrays for these inputs from files; bfloat16 as uint16.

    Raises UsageError for an unknown input, and for a file without an array of the input's type.
    """
    by_name = {port.name: port for port in ports}
    values: dict[str, npt.NDArray[Any]] = {}
    for name, path in files.items():
        text = f"{name}={os.fspath(path)}"
        if name not in by_name or not os.fspath(path):
            names = listing(by_name) if by_name else "none (it has no inputs)"
            raise UsageError(f"`inputs={text}`: write NAME=FILE.npy, where NAME is one of: {names}")
        values[name] = _read_array(text, by_name[name], Path(path))
    return values


def _read_array(text: str, port: ModelPort, path: Path) -> npt.NDArray[Any]:
    """One array of the type of its input. Raises UsageError."""
    if reason := not_generated(port):
        raise UsageError(f"`inputs={text}`: {port.name} is {reason}, which is not supported in .npy files")
    try:
        check_size(path, MOST_BYTES)
        array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")  # np.load would also read pickles and .npz
    except (OSError, ValueError, EOFError, TokenError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "it is not a .npy file of numbers"
        raise UsageError(f"`inputs={text}`: {path} cannot be read: {reason}; write it with numpy.save") from error
    stored_as = dtypes.storage(port.dtype)
    if array.dtype != np.dtype(stored_as):
        stored = f", stored as {stored_as}" if stored_as != port.dtype else ""
        raise UsageError(f"`inputs={text}`: {path} is {array.dtype}, but {port.name} is {port.dtype}{stored}")
    return array


def input_shapes(
    ports: Sequence[ModelPort],
    sizes_by_name: Mapping[str, int | Sequence[int]],
    given: Mapping[str, Shape] | None = None,
) -> dict[str, Shape]:
    """The shape of every input, from the file and the user's options.

    `sizes_by_name`: sizes of inputs or symbols; `given`: shapes of values. Raises UsageError for an unknown
    name, for sizes that conflict with the file or each other, and for a missing size. Inputs whose values cannot be
    generated need no sizes.
    """
    by_name = {port.name: port for port in ports}
    symbols = {size for port in ports for size in port.shape or () if isinstance(size, str)}
    shapes: dict[str, Shape] = {}
    sizes: dict[str, int] = {}
    for name, value in sizes_by_name.items():
        numbers, source = (value,) if isinstance(value, int) else tuple(value), f"`shapes={size_text(name, value)}`"
        if not all(isinstance(number, int) and number >= 1 for number in numbers):
            raise UsageError(f"{source}: a size must be 1 or more")
        if name in by_name:
            if by_name[name].kind != "tensor":
                raise UsageError(f"{source}: {name} is {not_generated(by_name[name])}, which has no sizes")
            shapes[name] = _fitted_shape(source, by_name[name], numbers, sizes)
        elif name in symbols:
            _fitted_shape(source, ModelPort(name, "tensor", "", (name,)), numbers, sizes)
        else:
            known = f"inputs are {listing(f'{port.name} {port.declared}' for port in ports)}"
            known = known if ports else "it has no inputs"
            known += f"; symbolic sizes are {listing(sorted(symbols))}" if symbols else ""
            raise UsageError(f"{source}: {name!r} is neither an input nor a symbolic size; {known}")
    for name, shape in (given or {}).items():
        source = f"`inputs={name}`"
        if name in shapes:
            raise UsageError(f"{source}: {name} has a shape in `shapes`, too; set it once")
        shapes[name] = _fitted_shape(source, by_name[name], shape, sizes, what="array")
    for port in ports:
        if port.name not in shapes and port.shape is not None:
            found = tuple(sizes.get(size) if isinstance(size, str) else size for size in port.shape)
            if None not in found:
                shapes[port.name] = tuple(size for size in found if size is not None)
    missing = [port for port in ports if port.name not in shapes and not not_generated(port)]
    if missing:
        raise _missing_sizes_error(missing, sizes)
    return {port.name: shapes[port.name] for port in ports if port.name in shapes}


def size_text(name: str, sizes: int | Sequence[int]) -> str:
    """Sizes as on the command line: `x=1,3,224,224`."""
    return f"{name}={sizes if isinstance(sizes, int) else ','.join(map(str, sizes))}"


def not_generated(port: ModelPort) -> str:
    """The type of an input whose values cannot be generated; empty for others."""
    if port.kind != "tensor":
        return f"an {port.kind}" if port.kind.startswith(tuple("aeiou")) else f"a {port.kind}"
    element = dtypes.find(port.dtype)
    numbers = element is not None and element.storage is not None and element.kind != "complex"
    return "" if numbers else f"a tensor of {port.dtype}"


def _fitted_shape(source: str, port: ModelPort, numbers: Shape, sizes: dict[str, int], *, what: str = "shape") -> Shape:
    """The shape, if the file allows it. Its symbolic sizes are added to `sizes`.

    `source`: the option for messages; `what`: its kind of value. Raises UsageError.
    """
    if port.shape is None:
        return numbers
    if len(numbers) != len(port.shape):
        raise UsageError(
            f"{source}: {port.name} is {port.declared}, which needs {plural(len(port.shape), 'size')}, not "
            f"{len(numbers)}: the {what} is [{','.join(map(str, numbers))}]"
        )
    for position, (declared, number) in enumerate(zip(port.shape, numbers, strict=True)):
        if isinstance(declared, int) and declared != number:
            raise UsageError(
                f"{source}: size {position} of {port.name} is fixed to {declared} in the file, not {number}"
            )
        if isinstance(declared, str) and sizes.setdefault(declared, number) != number:
            raise UsageError(
                f"{source}: conflicting values for the symbolic size {declared}: {number} and {sizes[declared]}; "
                "the file declares them equal"
            )
    return numbers


def _missing_sizes_error(missing: Sequence[ModelPort], sizes: Mapping[str, int]) -> UsageError:
    """The error for inputs without sizes, with similar inputs together and the options to add."""
    symbols = {size for port in missing for size in port.shape or () if isinstance(size, str)}
    flags: dict[str, None] = {}
    for port in missing:
        if port.shape is not None and None not in port.shape:
            lacking = [size for size in port.shape if isinstance(size, str) and size not in sizes]
            flags |= dict.fromkeys(f"{size}={_likely(size, symbols, sizes)}" for size in lacking)
        else:
            example = ",".join(
                str(size) if isinstance(size, int) else str(sizes.get(size or "", 1)) for size in port.shape or (1,)
            )
            flags[f"{port.name}={example}"] = None
    verb = "needs" if len(missing) == 1 else "need"
    kinds: dict[str, list[str]] = {}
    for port in missing:
        kinds.setdefault(port.declared, []).append(port.name)
    merged = [(name, kind, len(each)) for kind, names in kinds.items() for name, each in families(names).items()]
    listed = [f"{name} {kind}" + (f" ({plural(count, 'input')})" if count > 1 else "") for name, kind, count in merged]
    return UsageError(
        f"{plural(len(missing), 'input')} {verb} sizes: {'; '.join(listed)}",
        remedy=GIVE_SIZES.filled(sizes=tuple(word for given in flags for word in ("--shape", given))),
    )


def _likely(symbol: str, symbols: Collection[str], sizes: Mapping[str, int]) -> int:
    """A size that is likely to run: 1; 2 for a total with one past token; the sum for a sum of symbols."""
    terms = [term.strip() for term in symbol.split("+")]
    if len(terms) > 1:
        return sum(
            int(term) if term.isdecimal() else sizes.get(term) or _likely(term, symbols, sizes) for term in terms
        )
    return 2 if "total" in symbol.lower() and any("past" in other.lower() for other in symbols) else 1


def check_free_memory(ports: Sequence[ModelPort], shapes: Mapping[str, Shape], given: Collection[str]) -> None:
    """Raise ResourceError when generated values would exceed the free memory. `given`: inputs with values."""
    sizes = {
        port.name: dtypes.size_bytes(port.dtype, shapes[port.name])
        for port in ports
        if port.name not in given and not not_generated(port)
    }
    if not sizes:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    needed = sum(sizes.values()) + sizes[largest]  # twice in memory while generated
    free = free_bytes()
    if needed > free:
        raise ResourceError(
            f"generating values for the inputs needs {human_bytes(needed)} of memory, but {human_bytes(int(free))} "
            f"is free; the largest is {largest}[{','.join(map(str, shapes[largest]))}], {human_bytes(sizes[largest])}; "
            "set smaller sizes with `shapes=NAME=SIZES` for symbolic sizes"
        )


def make_values(port: ModelPort, shape: Shape, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Generated values for one input, in its storage type."""
    if port.dtype == "bool":
        return np.ones(shape, np.bool_)
    if dtypes.dtype_named(port.dtype).kind == "integer":
        return np.full(shape, int(ONES.search(port.name) is not None), port.dtype)
    count = math.prod(shape)
    block = rng.standard_normal(min(count, BLOCK), dtype=np.float32) * np.float32(SCALE)
    if dtypes.dtype_named(port.dtype).upper_half:
        return np.resize((block.view(np.uint32) >> 16).astype(dtypes.storage(port.dtype)), shape)
    return np.resize(block.astype(port.dtype), shape)
