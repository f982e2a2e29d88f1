"""Messages of C++ libraries, without source locations and function signatures."""

from __future__ import annotations

import re

_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
_LOCATION = re.compile(
    r"(?<!\S)\S+\.(?:cc|cpp|cxx|cu|mm|h|hpp):\d+:? (?=\S)"  # file and line
    rf"(?=[^()]*::)[^()]*(?:\(\))?{_ARGUMENTS}(?:::<lambda{_ARGUMENTS}>)?"
    r"(?: (?:const|noexcept|mutable|volatile|override)\b| ?&{1,2}(?=\s|$))*(?: \[with (?:[^\[\]]|\[[^\]]*\])*\])?"
    r"\s+(?=\S)"
)
"""File, line and function, as ONNX Runtime's CodeLocation writes them before a message; `[with T = float]` is gcc's."""
_FULL = r"out.of.(\w+.)?memory|bad_alloc|alloc_failed"
FULL = re.compile(_FULL, re.IGNORECASE)
"""An out-of-memory failure, which may depend on other processes."""
NO_ROOM = re.compile(
    rf"{_FULL}|mem_alloc|memory alloc|allocate \w*\s?memory|smaller than requested bytes",
    re.IGNORECASE,
)
"""Any memory failure, which depends on the device, on sizes and on other processes, and not on support."""


def cut(text: str, longest: int) -> str:
    """The text cut in its middle to `longest` characters: ONNX Runtime prints causes first, compilers last."""
    if len(text) <= longest:
        return text
    first = longest // 3
    return f"{text[: first - 2]} … {text[first + 1 - longest :]}"


def without_signatures(text: str) -> str:
    """Replace every `<file>:<line> <function signature> message` by `message`.

    Locations without a signature or without a message are unchanged. Format: onnxruntime/core/common/exceptions.h, ONNX
    Runtime 1.24 to 1.31.
    """
    return _LOCATION.sub("", text)
