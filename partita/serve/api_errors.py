"""Errors in the format of OpenAI's API, and JSON responses.

`{"error": {"message", "type", "param", "code"}}` (OpenAI API reference, "Error codes"; openai-python,
`_exceptions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from partita.errors import GenerationError, PartitaError, UsageError

INVALID, SERVER, OVERLOADED = "invalid_request_error", "server_error", "overloaded_error"
RETRY_LATER = {"Retry-After": "1"}
DO_NOT_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients retry twice unless this header forbids it (openai-python, `_base_client.py`)."""


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is rejected, or whose response cannot be completed."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    """Field of the body, e.g. `temperature`, `messages[0].content`."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(record: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response that must not be cached."""
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(to_json(record), status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: the body is invalid, or requests an unsupported feature."""
    return ApiError(400, message, param=param, code=code)


def overloaded_error(message: str, code: str) -> ApiError:
    """503: the request may succeed later."""
    return ApiError(503, message, OVERLOADED, code=code, headers=RETRY_LATER)


def timed_out(seconds: float) -> ApiError:
    """504: the request took longer than the server's limit."""
    message = f"The request exceeded the server's time limit of {seconds:g} s; request fewer tokens."
    return ApiError(504, message, "timeout_error", code="request_timeout", headers=DO_NOT_RETRY)


def shutting_down() -> ApiError:
    """503: the server is shutting down."""
    return ApiError(503, "The server is shutting down.", SERVER, code="shutting_down", headers=RETRY_LATER)


def of_error(error: PartitaError, param: str | None = None) -> ApiError:
    """An error of the package for the client, without server paths and remedies."""
    if isinstance(error, (GenerationError, UsageError)):
        return invalid(sentence(error.message), param)
    return run_error(error)


def run_error(error: PartitaError | None) -> ApiError:
    """500: the run of an accepted request failed."""
    message = "The generation failed." if error is None else sentence(error.message)
    headers = DO_NOT_RETRY if isinstance(error, GenerationError) else {}  # caused by the request, e.g. NaN logits
    return ApiError(500, message, SERVER, code="generation_failed", headers=headers)


def internal_error() -> ApiError:
    """500: a bug; details are only logged for the operator."""
    return ApiError(500, "The server had an internal error while processing the request.", SERVER)


def sentence(text: str) -> str:
    """A message as one line with a capital letter at the beginning and a full stop."""
    line = " ".join(text.split())
    return f"{line[:1].upper()}{line[1:]}{'' if line.endswith('.') else '.'}"
