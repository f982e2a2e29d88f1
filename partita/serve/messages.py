"""The messages of a chat, as a body has them and as a chat template takes them: contents are texts."""

from __future__ import annotations

from typing import Any

from partita.library.asking import BETWEEN_PARTS, TEXT_PARTS
from partita.serve.api_errors import ApiError, invalid
from partita.serve.fields import json_type, shown, text, wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PASSED_ON = ("name", "tool_call_id")
CALLS = ("tool_calls", "function_call")


def conversation(value: Any, name: str) -> tuple[dict[str, str], ...]:
    """The messages of a body. Raises ApiError with the place of what is wrong."""
    if not isinstance(value, list):
        raise wrong_type(name, "an array of messages", value)
    if not value:
        raise invalid(f"Invalid '{name}': the array is empty; give at least one message.", name, "empty_array")
    return tuple(_message(entry, f"{name}[{index}]") for index, entry in enumerate(value))


def _message(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object with role and content", value)
    if "role" not in value:
        raise invalid(f"Missing required parameter: '{name}.role'.", f"{name}.role", "missing_required_parameter")
    role = text(value["role"], f"{name}.role")
    if role not in ROLES:
        raise invalid(f"Invalid value: {shown(role)}. Supported values are: {', '.join(ROLES)}.", f"{name}.role")
    for key in CALLS:
        if value.get(key):
            raise ApiError(
                400,
                f"Unsupported parameter: '{name}.{key}'; this server has no tools.",
                param=f"{name}.{key}",
                code="unsupported_parameter",
            )
    if "content" not in value:
        raise invalid(f"Missing required parameter: '{name}.content'.", f"{name}.content", "missing_required_parameter")
    kept = {key: text(value[key], f"{name}.{key}") for key in PASSED_ON if value.get(key) is not None}
    return {"role": role, "content": _content(value["content"], f"{name}.content"), **kept}


def _content(value: Any, name: str) -> str:
    if isinstance(value, str):
        return text(value, name)
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array of parts", value)
    return BETWEEN_PARTS.join(_part(part, f"{name}[{index}]") for index, part in enumerate(value))


def _part(value: Any, name: str) -> str:
    if isinstance(value, str):
        return text(value, name)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"Invalid '{name}': expected an object with a type, but got {json_type(value)}.", name)
    field = TEXT_PARTS.get(kind)
    if field is None:
        raise ApiError(
            400,
            f"Unsupported value: '{name}.type' is {shown(kind)}, and packages read text alone.",
            param=f"{name}.type",
            code="unsupported_value",
        )
    return text(value.get(field), f"{name}.{field}")
