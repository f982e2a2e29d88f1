"""HTTP beyond a plain POST: other methods, unusual heads and paths, hosts, origins and disconnects."""

from __future__ import annotations

import json

import httpx2 as httpx
import pytest

from tests.serve.serving import Running, raw, running
from tests.serve.test_bad_requests import COMPLETION, GOOD, said

BODY = json.dumps(GOOD[COMPLETION]).encode()
JSON_HEAD = b"host: localhost\r\ncontent-type: application/json\r\n"
SIZED = JSON_HEAD + b"content-length: %d\r\n" % len(BODY)
CHUNKED = JSON_HEAD + b"transfer-encoding: chunked\r\n"


def answered(server: Running, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to bytes on a connection that is closed behind them."""
    with raw(server.address) as connection:
        connection.sendall(sent.replace(b"host: localhost", b"host: localhost\r\nconnection: close", 1))
        said = b""
        while more := connection.recv(65536):
            said += more
    while said.startswith(b"HTTP/1.1 100 "):
        said = said.partition(b"\r\n\r\n")[2]
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/tiny", "/metrics", "/report"])
def test_head_returns_headers_of_get_without_body(server, path):
    answer = httpx.head(f"{server.url}{path}")
    assert answer.status_code == 200 and not answer.content
    assert answer.headers["content-type"] == server.get(path).headers["content-type"]


def test_internal_error_returns_500_and_details_only_in_log(server, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(server.server.app, "names", None)
        answers = [server.get("/v1/models"), server.post(COMPLETION, GOOD[COMPLETION])]
    for answer in answers:
        error = said(answer, 500)
        assert error["type"] == "server_error" and "NoneType" not in error["message"]
    assert server.get("/health").status_code == 200  # by then the operator has been told of what was before
    told = list(server.log)
    server.log.clear()
    assert len(told) == 2 and all("NoneType" in line and "bug in Partita" in line for line in told)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\n" + SIZED + b"\r\n" + BODY, 200),
        (b"GET http://x HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"POST http://localhost/v1/completions HTTP/1.1\r\n" + SIZED + b"\r\n" + BODY, 200),
        (b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\n" + SIZED + b"\r\n" + BODY, 200),
        (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"\r\n%x;a=b\r\n%s\r\n0\r\nx: y\r\n\r\n", 200),
        (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"\r\n-5\r\n{}\r\n0\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\n" + SIZED + b"content-length: 3\r\n\r\n" + BODY, 400),
        (b"GET /v1/models/%2e%2e%2f%00%ff%d8 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"GET /report?view=../../x&model=tiny HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else str(value),
)
def test_unusual_requests_get_expected_status_and_json_body(server, sent, status):
    if b"%x;a=b" in sent:
        sent %= (len(BODY), BODY)
    found, body = answered(server, sent)
    assert found == status
    if b"Invalid HTTP request received." in body:  # uvicorn's own answer
        return
    record = json.loads(body)
    assert ("choices" in record) == (status == 200)
    assert status == 200 or set(record["error"]) == {"message", "type", "param", "code"}


def test_chunked_encoding_with_content_length_returns_400_and_closes(server):
    """Prevents request smuggling (RFC 9112, section 6.1)."""
    both = b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"content-length: 6\r\n\r\n0\r\n\r\n"
    with raw(server.address) as connection:
        connection.sendall(both + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        said = b"".join(iter(lambda: connection.recv(65536), b""))
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1") == 1
    assert b"connection: close" in said.lower() and b"cannot be sent together" in said


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:1", 200),
        ("evil.example", 400),
        ("localhost.evil.example:8000", 400),
        ("evil.example@localhost", 400),
        ("", 400),
    ],
)
def test_host_header_other_than_localhost_is_rejected(server, host, status):
    """Prevents DNS rebinding: a page of evil.example resolved to 127.0.0.1 is same-origin."""
    for path in ("/health", "/v1/models", "/report", "/metrics"):
        assert server.get(path, headers={"host": host}).status_code == status


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "file://"])
def test_foreign_origin_returns_403(server, origin):
    answer = server.post(COMPLETION, GOOD[COMPLETION], headers={"origin": origin})
    assert said(answer, 403)["code"] == "origin_not_allowed"
    own = server.post(COMPLETION, GOOD[COMPLETION], headers={"origin": server.url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_allowed_origin_gets_cors_headers_and_keyless_preflight(package):
    page = "http://app.example:3000"
    with running({"tiny": package}, api_key=["secret"], allowed_origin=[page]) as guarded:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = httpx.options(f"{guarded.url}{COMPLETION}", headers={"origin": page, **wanted})
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == page
        other = httpx.options(f"{guarded.url}{COMPLETION}", headers={"origin": "http://evil.example", **wanted})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        key = {"authorization": "Bearer secret"}
        for host in ("localhost", "app.example"):  # the second behind a proxy of that name
            answer = guarded.post(COMPLETION, GOOD[COMPLETION], headers={"origin": page, "host": host, **key})
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page
        assert guarded.post(COMPLETION, GOOD[COMPLETION], headers={"origin": page}).status_code == 401
        assert guarded.post(COMPLETION, GOOD[COMPLETION], headers={"origin": "null", **key}).status_code == 403
    with running({"tiny": package}, allowed_origin=["*"]) as public:
        answer = public.get("/v1/models", headers={"origin": "http://any.example", "host": "any.example"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


def test_half_closed_connection_is_dropped_and_holds_no_slot(server):
    """A disconnected client looks the same as a half-closed connection."""
    with raw(server.address) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + SIZED + b"\r\n" + BODY[:-4])
        connection.shutdown(1)
        assert connection.recv(65536) == b""
    assert server.metric("partita_slots_running") == 0
