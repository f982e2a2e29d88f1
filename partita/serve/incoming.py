"""The body of a request as it comes in: its type, its size, and how long it takes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request

from partita.observations.text_format import human_bytes
from partita.serve.api_errors import ApiError
from partita.serve.limits import ServerLimits

JSON_TYPE = "application/json"
DISCARDED = 8
"""Times the limit: so much of a body that is too large is read and thrown away, for most clients read an answer only
when they have sent all."""
DISCARD_SECONDS = 5.0


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """The whole body. Raises ApiError for another type than JSON, one that is too large, and one that takes too long;
    ClientDisconnect.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != JSON_TYPE:
        told = f"'{media[:60]}'" if media else "none"
        raise ApiError(
            415,
            f"Unsupported content type: {told}; send JSON, with the header Content-Type: {JSON_TYPE}.",
            code="unsupported_content_type",
        )
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise ApiError(415, f"Unsupported content encoding: '{coding[:60]}'; send the body as it is.", code="encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_seconds):
            more = True
            while more:
                chunk, more = await _next(request)
                body += chunk
                if max(len(body), _announced(request)) > limits.body_bytes:
                    raise await _too_large(request, limits, more=more)
    except TimeoutError as error:
        raise ApiError(
            408, f"The request did not arrive within {limits.read_seconds:g} s.", "timeout_error", code="slow_request"
        ) from error
    return bytes(body)


async def _next(request: Request) -> tuple[bytes, bool]:
    """The next part of the body, and whether more of it comes. Raises ClientDisconnect."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _announced(request: Request) -> int:
    """The size that the client said, 0 where it said none."""
    said = request.headers.get("content-length", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 20 else 0


async def _too_large(request: Request, limits: ServerLimits, *, more: bool) -> ApiError:
    """The error for a body that is too large, once its rest has been thrown away, as far as that goes."""
    left = DISCARDED * limits.body_bytes
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while left > 0 and more:
                chunk, more = await _next(request)
                left -= len(chunk)
    return ApiError(
        413,
        f"The request is larger than {human_bytes(limits.body_bytes)}, which is the limit of this server.",
        code="request_too_large",
    )
