"""What a client is told when something is wrong: a status, and a body in the format of OpenAI's API.

`{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`: clients read the status and `code`, people the
message (OpenAI API reference, "Error codes"; openai-python, `_exceptions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partita.errors import GenerationError, PartitaError, UsageError

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED = "overloaded_error"
RETRY_SECONDS = 1
"""After which a client that was turned away may ask again."""
AGAIN = {"Retry-After": str(RETRY_SECONDS)}
NOT_AGAIN = {"x-should-retry": "false"}
"""What OpenAI's clients go by before the status (openai-python, `_base_client.py`): they would ask twice more for an
answer that takes too long, or that cannot be given.
"""


@dataclass(eq=False)
class ApiError(Exception):
    """A request that gets no answer, or no more of one."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    """The part of the body that it is about: `temperature`, `messages[0].content`."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """As clients read it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A body that makes no sense, or asks for what there is not."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, code: str) -> ApiError:
    """Nothing is wrong with the request: later it would be taken."""
    return ApiError(503, message, OVERLOADED, code=code, headers=AGAIN)


def too_slow(seconds: float) -> ApiError:
    """The answer takes longer than a request may."""
    return ApiError(
        504,
        f"The request took longer than {seconds:g} s, which is the limit of this server; ask for fewer tokens.",
        "timeout_error",
        code="request_timeout",
        headers=NOT_AGAIN,
    )


def shutting_down() -> ApiError:
    """The server ends."""
    return ApiError(503, "The server is shutting down.", SERVER, code="shutting_down", headers=AGAIN)


def of_error(error: PartitaError, param: str | None = None) -> ApiError:
    """An error of ours, as a client reads it: what was asked was wrong, in `param` where that is known, or something
    here is. Where it is, a folder of the server's, and what its operator can do are not for clients.
    """
    if isinstance(error, (GenerationError, UsageError)):
        return invalid(sentence(error.said), param)
    return failed(error)


def failed(error: PartitaError | None) -> ApiError:
    """A request that was taken, and whose run failed."""
    said = "The generation failed." if error is None else sentence(error.said)
    headers = NOT_AGAIN if isinstance(error, GenerationError) else {}  # its own, as logits that are not finite
    return ApiError(500, said, SERVER, code="generation_failed", headers=headers)


def bug() -> ApiError:
    """Something here that is not as it was meant; what, is told to the operator."""
    return ApiError(500, "The server had an error while it processed the request.", SERVER)


def sentence(text: str) -> str:
    """A message of ours, which begins small and has no full stop, as a sentence on one line."""
    line = " ".join(text.split())
    return f"{line[:1].upper()}{line[1:]}{'' if line.endswith('.') else '.'}"
