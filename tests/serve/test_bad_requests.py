"""Invalid requests: status and format follow OpenAI's API, the error names the field, other requests continue."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from partita.errors import GenerationError
from partita.serve import protocol
from tests.serve.serving import Running, raw, running

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    COMPLETION: {"model": "tiny", "prompt": "return", "max_tokens": 2},
}


class _Gone:
    def __repr__(self) -> str:  # of which the name of a test is made: the same in every process
        return "GONE"


GONE = _Gone()
"""In place of a value: the field is left out."""


def body_of(path: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**GOOD[path], **changes}.items() if value is not GONE}


def said(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, which has all the parts that clients look for."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    (name, error), *rest = answer.json().items()
    assert name == "error" and not rest and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    return error


BAD_JSON = [
    b"",
    b"{",
    b"nonsense",
    b'{"model": "\\ud800"}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"seed": ' + b"9" * 5000 + b"}",
]
NO_OBJECT = [b"null", b"[]", b'"text"', b"3"]


@pytest.mark.parametrize("data", BAD_JSON + NO_OBJECT, ids=lambda data: repr(data[:12]))
def test_non_object_json_body_returns_400(server, data):
    answer = httpx.post(f"{server.url}{CHAT}", content=data, headers={"content-type": "application/json"})
    assert said(answer, 400)["code"] in ("invalid_json", "invalid_type")


TYPES = [7, 1.5, True, [], {}, "text", [[]], [None]]
FITS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "temperature": (int, float),
    "top_p": (int, float),
    "max_tokens": (int,),
    "n": (int,),
    "seed": (int,),
    "stream": (bool,),
    "stop": (str, list),
    "logit_bias": (dict,),
}


@pytest.mark.parametrize("field", FITS)
def test_wrong_value_type_error_names_field(server, field):
    for value in TYPES:
        if type(value) in FITS[field] and value not in ([[]], [None]):
            continue
        error = said(server.post(COMPLETION, body_of(COMPLETION, **{field: value})), 400)
        assert error["param"].startswith(field) and error["type"] == "invalid_request_error", (value, error)


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (CHAT, {"model": GONE}, "model"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 500}]}, "messages"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAT, {"temperature": 2.1}, "temperature"),
        (CHAT, {"max_tokens": 129}, "max_tokens"),
        (CHAT, {"seed": 2**63}, "seed"),
        (CHAT, {"stop": "a" * 4097}, "stop[0]"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETION, {"prompt": ["a", 3]}, "prompt"),
        (COMPLETION, {"prompt": [[5], []]}, "prompt[1]"),
        (COMPLETION, {"prompt": [288]}, "prompt"),
        (COMPLETION, {"prompt": [5] * 128}, "prompt"),
        (COMPLETION, {"n": 2, "best_of": 3}, "best_of"),
        (COMPLETION, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETION, {"echo": True, "logprobs": 1}, "logprobs"),
        (COMPLETION, {"stop_token_ids": [999]}, "stop_token_ids"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_value_error_names_parameter(server, path, changes, param):
    # The client would not write half of a surrogate pair as JSON writes it.
    data = json.dumps(body_of(path, **changes)).encode()
    headers = {"content-type": "application/json"}
    error = said(httpx.post(f"{server.url}{path}", content=data, headers=headers, timeout=60), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    if "word" in str(changes):
        assert error["code"] == "context_length_exceeded" and "128 tokens" in error["message"]


def test_unknown_field_returns_400_with_suggestion(server):
    error = said(server.post(CHAT, body_of(CHAT, temprature=1)), 400)
    assert error["code"] == "unknown_parameter" and "temperature" in error["message"]
    error = said(server.post(CHAT, body_of(CHAT, **{"temprature" * 100_000: 1})), 400)
    assert error["code"] == "unknown_parameter" and len(error["param"]) == 60
    error = said(server.post(CHAT, body_of(CHAT, **{f"field{number}": 1 for number in range(300)})), 400)
    assert "more than 256 fields" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_no_op_field_values_are_accepted(server, path):
    """null for every field (including fields of other servers), and default values of other servers."""
    nothing = dict.fromkeys(
        {**protocol.ChatRequest.model_fields, **protocol.CompletionRequest.model_fields, "guided_json": None}
    )
    assert server.post(path, {**nothing, **GOOD[path]}).status_code == 200
    nothing = {"use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "priority": 3, "logit_bias": {"5": 0}}
    nothing |= {"add_special_tokens": path == COMPLETION}
    of_chat = {"chat_template_kwargs": {}, "documents": [], "echo": False, "tools": [], "tool_choice": "none"}
    of_chat |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "metadata": {"a": "b"}}
    nothing |= of_chat if path == CHAT else {"suffix": ""}
    nothing |= {"n": 3, "best_of": 3} if path == COMPLETION else {}
    assert server.post(path, body_of(path, **nothing)).status_code == 200


def test_unknown_model_returns_404(server):
    error = said(server.post(CHAT, body_of(CHAT, model="gpt-5\n\x1b[2J" + "x" * 500)), 404)
    assert error["code"] == "model_not_found" and "tiny" in error["message"]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/report?model=other", 404),
        ("GET", "/report?view=other", 400),
    ],
)
def test_invalid_path_or_method_returns_error_status(server, method, path, status):
    said(httpx.request(method, f"{server.url}{path}"), status)


@pytest.mark.parametrize("header", ["text/plain", "multipart/form-data", ""])
def test_wrong_content_type_returns_415(server, header):
    data = json.dumps(GOOD[CHAT]).encode()
    answer = httpx.post(f"{server.url}{CHAT}", content=data, headers={"content-type": header})
    assert "application/json" in said(answer, 415)["message"]


def test_large_body_returns_413_and_slow_body_returns_408(package, monkeypatch):
    monkeypatch.setattr("partita.serve.app.READ_SECONDS", 0.5)
    with running({"tiny": package}, max_body=2000) as small:
        answer = small.post(CHAT, body_of(CHAT, user="x" * 5000))
        assert said(answer, 413)["code"] == "request_too_large"
        parts = (part for part in [b'{"model": "', b"x" * 6000, b'"}'])
        streamed = httpx.post(f"{small.url}{CHAT}", content=parts, headers={"content-type": "application/json"})
        assert said(streamed, 413)
        with raw(small.address) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        assert small.post(CHAT, GOOD[CHAT]).status_code == 200
        assert small.metric("partita_http_responses_total", endpoint=CHAT, status="413") == 2


def test_api_key_is_required_except_for_health(package):
    with running({"tiny": package}, api_key=["first-key", "zweiter-schlüssel"]) as guarded:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first-key"}):
            for path in ("/v1/models", "/metrics", "/report"):
                answer = guarded.get(path, headers=headers)
                assert said(answer, 401)["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
            assert guarded.post(CHAT, GOOD[CHAT], headers=headers).status_code == 401
        assert guarded.get("/health").status_code == 200
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="first-key", max_retries=0) as client:
            assert client.chat.completions.create(**GOOD[CHAT]).choices
        with (
            openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="first", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_shutdown_returns_503_with_retry_after(server, monkeypatch):
    monkeypatch.setattr(server.server.app, "draining", True)
    answer = server.post(COMPLETION, GOOD[COMPLETION])
    assert said(answer, 503)["code"] == "shutting_down" and answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (COMPLETION, "prompt")])
def test_tokenizer_error_names_parameter_without_server_path(server, monkeypatch, path, param):
    def refuses(self, given):
        raise GenerationError("the chat template rejects these messages: no", path=Path("/srv/secret"))

    text = type(server.models["tiny"].text)
    monkeypatch.setattr(text, "encode_messages" if path == CHAT else "encode", refuses)
    error = said(server.post(path, body_of(path)), 400)
    assert (error["param"], error["message"]) == (param, "The chat template rejects these messages: no.")


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETION, {"prompt": "a" * 3_900_000}), (CHAT, {"messages": [{"role": "user", "content": "b" * 3_900_000}]})],
)
def test_overlong_text_returns_400_quickly(server, path, body):
    began = time.monotonic()
    error = said(server.post(path, {"model": "tiny", **body}), 400)
    assert error["code"] == "context_length_exceeded" and "The text is too long" in error["message"]
    assert time.monotonic() - began < 5


def test_endless_chat_template_fails_only_its_own_request(server, monkeypatch):
    monkeypatch.setattr("partita.runtime.generate.text.chat_templates.RENDER_SECONDS", 1.0)
    text = server.models["tiny"].text
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with monkeypatch.context() as patch:
        patch.setattr(text, "_template", (endless, {}))
        error = said(server.post(CHAT, body_of(CHAT)), 400)
    assert "gave no answer within 1 s" in error["message"] and error["param"] == "messages"
    assert server.post(CHAT, body_of(CHAT)).status_code == 200


# HTTP beyond a plain POST: other methods, unusual heads and paths, hosts, origins and disconnects


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


def test_server_is_idle_and_working_after_all_bad_requests(server: Running):
    """Runs last in this file."""
    for path, body in GOOD.items():
        assert server.post(path, body).status_code == 200
    assert server.metric("partita_slots_running") == server.metric("partita_queue_waiting") == 0
    assert server.metric("partita_model_up") == 1 and server.log == []
