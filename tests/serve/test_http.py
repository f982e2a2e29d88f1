"""What comes over a connection that is no plain POST: other methods, odd heads and paths, other calls of the client."""

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
def test_a_head_is_that_of_the_answer_without_its_body(server, path):
    answer = httpx.head(f"{server.url}{path}")
    assert answer.status_code == 200 and not answer.content
    assert answer.headers["content-type"] == server.get(path).headers["content-type"]


@pytest.mark.parametrize("version", ["\xff", "1..2", "9" * 400])
def test_figures_are_given_whatever_version_a_scraper_asks_for(server, version):
    accept = f"application/openmetrics-text; version={version}".encode("latin-1")
    answer = httpx.get(f"{server.url}/metrics", headers={b"accept": accept})
    assert answer.status_code == 200 and "partita_slots" in answer.text


def test_a_bug_is_an_error_in_the_format_of_all_and_told_to_the_operator_alone(server, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(server.server.endpoints, "names", None)
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
        (b"POST /v1/completions HTTP/1.0\r\n" + SIZED + b"\r\n" + BODY, 200),
        (b"POST http://x:1/v1/completions HTTP/1.1\r\n" + SIZED + b"\r\n" + BODY, 200),
        (b"GET http://x HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\n" + SIZED + b"\r\n" + BODY, 200),
        (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"\r\n%x;a=b\r\n%s\r\n0\r\nx: y\r\n\r\n", 200),
        (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"\r\n-5\r\n{}\r\n0\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEAD + b"content-length: -3\r\n\r\n" + BODY, 400),
        (b"POST /v1/completions HTTP/1.1\r\n" + SIZED + b"content-length: 3\r\n\r\n" + BODY, 400),
        (b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEAD + b"transfer-encoding: gzip\r\n\r\n" + BODY, 400),
        (b"GET /v1/models/%2e%2e%2f%00%ff%d8 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"GET /report?view=../../x&model=tiny HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        (b"PRI * HTTP/2.0\r\nhost: localhost\r\n\r\nSM\r\n\r\n", 404),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else str(value),
)
def test_odd_requests_have_a_status_and_an_object_of_json(server, sent, status):
    if b"%x;a=b" in sent:
        sent %= (len(BODY), BODY)
    found, body = answered(server, sent)
    assert found == status
    if b"Invalid HTTP request received." in body:  # uvicorn's own answer
        return
    record = json.loads(body)
    assert ("choices" in record) == (status == 200)
    assert status == 200 or set(record["error"]) == {"message", "type", "param", "code"}


def test_two_lengths_of_a_body_end_the_connection(server):
    """What follows would be the body to one reader, and the next request to another (RFC 9112, section 6.1)."""
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
def test_a_host_that_leads_to_this_machine_by_another_name_is_refused(server, host, status):
    """A page of evil.example whose name is made to lead to 127.0.0.1 is same-origin."""
    for path in ("/health", "/v1/models", "/report", "/metrics"):
        assert server.get(path, headers={"host": host}).status_code == status


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "file://"])
def test_a_foreign_origin_is_refused(server, origin):
    answer = server.post(COMPLETION, GOOD[COMPLETION], headers={"origin": origin})
    assert said(answer, 403)["code"] == "origin_not_allowed"
    own = server.post(COMPLETION, GOOD[COMPLETION], headers={"origin": server.url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_an_allowed_origin_may_ask_and_preflight_without_a_key(package):
    page = "http://app.example:3000"
    with running({"tiny": package}, keys=("secret",), origins=(page,)) as guarded:
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
    with running({"tiny": package}, origins=("*",)) as public:
        answer = public.get("/v1/models", headers={"origin": "http://any.example", "host": "any.example"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


def test_one_who_says_no_more_is_taken_as_gone_and_holds_no_row(server):
    """The end of a stream is how a client that has gone looks."""
    with raw(server.address) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + SIZED + b"\r\n" + BODY[:-4])
        connection.shutdown(1)
        assert connection.recv(65536) == b""
    assert server.metric("partita_slots_running") == 0
