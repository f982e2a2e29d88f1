"""Messages of C++ libraries, without source locations and function signatures."""

from __future__ import annotations

import re

_SOURCE = re.compile(r"(?<!\S)\S+\.(?:cc|cpp|cxx|cu|mm|h|hpp):\d+:? (?=\S)")
"""File and line, as ONNX Runtime's CodeLocation writes them before the function."""
_OPERATOR = re.compile(r"operator\s?(?:\(\)|\[\]|[-+*/%^&|~!=<>]+)")
_QUALIFIERS = re.compile(
    r"(?: (?:const|noexcept|mutable|volatile|override)\b| ?&{1,2}(?=\s|$))*(?: \[with (?:[^\[\]]|\[[^\]]*\])*\])?"
)
"""What may follow the arguments: `const`, and gcc's `[with T = float]`."""
_FULL = r"out.of.(\w+.)?memory|bad_alloc|alloc_failed"
FULL = re.compile(_FULL, re.IGNORECASE)
"""An out-of-memory failure, which may depend on other processes."""
NO_ROOM = re.compile(
    rf"{_FULL}|mem_alloc|memory alloc|allocate \w*\s?memory|smaller than requested bytes",
    re.IGNORECASE,
)
"""Any memory failure, which depends on the device, on sizes and on other processes, and not on support."""
_OPENING, _CLOSING = "([{<", ")]}>"


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
    kept, position = [], 0
    while match := _SOURCE.search(text, position):
        end = _signature_end(text, match.end())
        if end is None or not text[end:].strip():
            kept.append(text[position : match.end()])
            position = match.end()
            continue
        kept.append(text[position : match.start()])
        position = end + len(text[end:]) - len(text[end:].lstrip())
    return "".join((*kept, text[position:]))


def _signature_end(text: str, start: int) -> int | None:
    """End of the signature that begins at `start`; None if there is none."""
    depth, position, in_lambda = 0, start, False
    while position < len(text):
        if depth == 0 and (named := _OPERATOR.match(text, position)):
            position = named.end()
            continue
        letter = text[position]
        if letter in _OPENING:
            in_lambda |= depth == 0 and text.startswith("<lambda", position)
            depth += 1
        elif letter in _CLOSING and text[position - 1 : position + 1] != "->":
            depth -= 1
            if depth < 0:
                return None
            ends = letter == (">" if in_lambda else ")")
            if depth == 0 and ends and not text.startswith("::", position + 1):
                qualifiers = _QUALIFIERS.match(text, position + 1)
                return qualifiers.end() if qualifiers and "::" in text[start:position] else None
        position += 1
    return None
