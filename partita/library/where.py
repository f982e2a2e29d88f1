"""Where a model is to run, in the words of programs: names in lists, options in mappings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from partita.errors import UsageError
from partita.library.chain import PROGRAM, ChainOptions

Value: TypeAlias = str | int | float | bool
Options: TypeAlias = Mapping[str, Value]
Providers: TypeAlias = str | Sequence[str | tuple[str, Options]]
"""`"webgpu,cpu"`, `["webgpu", "cpu"]`, or as ONNX Runtime has them, `[("CUDAExecutionProvider", {"device_id": 1})]`."""
ProviderOptions: TypeAlias = Mapping[str, Options]
"""Options by provider name."""
Libraries: TypeAlias = Mapping[str, str | os.PathLike[str]]
"""Library files of plugin providers by name."""


def where(
    providers: Providers | None,
    provider_options: ProviderOptions | None = None,
    provider_libraries: Libraries | None = None,
    pins: Sequence[str] = (),
    threads: int | None = None,
) -> ChainOptions:
    """The same in the form of the command line, to be read by `read_chain_options`. Raises UsageError."""
    if isinstance(pins, str):
        raise UsageError(f"pins must be a list of strings, not the string {pins!r}")
    entries = [providers] if isinstance(providers, str) else list(providers or ())
    if providers is not None and not entries:
        raise UsageError("providers is empty; name at least one, or leave it out for the best usable one")
    names = [entry if isinstance(entry, str) else entry[0] for entry in entries]
    given = [(entry[0], entry[1]) for entry in entries if not isinstance(entry, str)]
    given += list((provider_options or {}).items())
    return ChainOptions(
        provider=",".join(names) if entries else None,
        provider_options=tuple(
            f"{name}.{option}={text(value)}" for name, options in given for option, value in options.items()
        ),
        provider_libraries=tuple(f"{name}={os.fspath(path)}" for name, path in (provider_libraries or {}).items()),
        pins=tuple(pins),
        threads=threads,
        source=PROGRAM,
    )


def text(value: Value) -> str:
    """An option's value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
