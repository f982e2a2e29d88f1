"""Server responses to OpenAI's client: texts equal those of `generate`, in every response format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import partita
from partita.runtime.generate.prefix_file import read_content
from partita.serve.served_package import ServedPackage
from tests.library.engine.test_speculation import always_draft
from tests.serve.serving import CHAT, COMPLETION, SYSTEM, Running, running

PROMPT = "return the value of"
MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "return the value"}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def complete(client: openai.OpenAI) -> Any:
    return client.completions.create


@pytest.fixture(scope="module")
def chat(client: openai.OpenAI) -> Any:
    return client.chat.completions.create


@pytest.fixture(scope="module")
def model(package: Path) -> Iterator[partita.Model]:
    with partita.load(package, providers="cpu", threads=1) as found:
        yield found


def generated(model: partita.Model, prompt: str, **options: Any) -> partita.Generation:
    """The run of `generate`; every row has the prompt."""
    return model.generate([prompt] * model.batch_size, stop_token_ids=(), **options).run()


def test_response_text_and_usage_match_library(complete, chat, model):
    answer = complete(prompt=PROMPT, **GREEDY)
    expected = generated(model, PROMPT, max_new_tokens=8)
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.id.startswith("cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(model.encode(PROMPT)), 8)
    assert usage.total_tokens == usage.prompt_tokens + 8
    answer = chat(messages=MESSAGES, **GREEDY)
    expected = model.chat([MESSAGES] * 4, max_new_tokens=8, stop_token_ids=()).run()
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert answer.object == "chat.completion" and answer.usage.completion_tokens == 8
    parts = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, MESSAGES[1]]
    asked = {**GREEDY, "max_tokens": None, "max_completion_tokens": 8}
    assert chat(messages=parts, **asked).choices[0].message.content == message.content


@pytest.mark.parametrize("chats", [True, False])
def test_stream_matches_text_and_usage_of_plain_response(complete, chat, chats):
    asked: Any = {"messages": MESSAGES, **GREEDY} if chats else {"prompt": PROMPT, **GREEDY}
    create = chat if chats else complete
    whole, chunks = create(**asked), list(create(**asked, **USAGE))
    *parts, last = chunks
    assert all(part.usage is None and len(part.choices) == 1 for part in parts)
    assert last.choices == [] and last.usage == whole.usage
    texts = [(c.choices[0].delta.content if chats else c.choices[0].text) or "" for c in parts]
    said = whole.choices[0].message.content if chats else whole.choices[0].text
    assert "".join(texts) == said and sum(map(bool, texts)) > 1
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert len({part.id for part in chunks}) == 1
    assert not chats or parts[0].choices[0].delta.role == "assistant"


def test_stream_ends_with_done_and_disables_proxy_buffering(server):
    body = {"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": 3, "temperature": 0}
    answer = server.post(COMPLETION, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no" and "content-length" not in answer.headers
    *events, last = [line for line in answer.text.split("\n\n") if line]
    assert last == "data: [DONE]" and all("usage" not in json.loads(line.removeprefix("data: ")) for line in events)


def test_stop_strings_and_stop_tokens_end_the_completion(complete, model):
    whole = generated(model, PROMPT, max_new_tokens=8)
    text, tokens = whole.text, whole.tokens[0]
    stop, last = text[3:5], tokens[3]
    assert text.find(stop) > 0
    answer = complete(prompt=PROMPT, stop=[stop, "@@"], **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.find(stop)], "stop")
    answer = complete(prompt=PROMPT, logprobs=0, **{**GREEDY, "extra_body": {"stop_token_ids": [last]}})
    found, count = answer.choices[0], tokens.index(last)
    assert found.finish_reason == "stop" and answer.usage.completion_tokens == count + 1
    assert found.text == generated(model, PROMPT, max_new_tokens=count).text == "".join(found.logprobs.tokens)


def test_equal_seeds_repeat_and_different_seeds_vary_completions(complete):
    def answer(seed: int | None) -> str:
        asked: Any = {**GREEDY, "max_tokens": 12, "seed": seed, "temperature": None}
        found: str = complete(prompt=PROMPT, **asked).choices[0].text
        return found

    assert answer(7) == answer(7) and answer(-7) == answer(-7)
    assert len({answer(seed) for seed in (1, 2, 3, 4)}) > 1
    assert len({answer(None) for _ in range(4)}) > 1, "the default temperature is 1, as in OpenAI's API"
    greedy = complete(prompt=PROMPT, **GREEDY).choices[0].text
    assert complete(prompt=PROMPT, top_p=0, **{**GREEDY, "temperature": None}).choices[0].text == greedy


def test_multiple_choices_differ_and_multiple_prompts_keep_order(complete, model):
    answer = complete(prompt=PROMPT, n=3, seed=1, **{**GREEDY, "temperature": 1})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1 and answer.usage.completion_tokens == 24
    prompts = [f"return the {word}" for word in ("value", "list", "item", "given", "other", "the")]
    alone = [complete(prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]
    together = complete(prompt=prompts, **GREEDY)
    assert [choice.text for choice in sorted(together.choices, key=lambda c: c.index)] == alone
    streamed = dict.fromkeys(range(len(prompts)), "")
    for chunk in complete(prompt=prompts, stream=True, **GREEDY):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == alone
    several = list(complete(prompt=prompts, n=2, **GREEDY, **USAGE))[-1].usage
    assert several.prompt_tokens == sum(len(model.encode(prompt)) for prompt in prompts), "each prompt counts once"
    assert several.completion_tokens == 2 * 6 * 8


def test_token_id_prompts_and_echo_match_text_prompts(complete, model):
    ids = model.encode(PROMPT)
    one = complete(prompt=ids, **GREEDY)
    two = complete(prompt=[ids, ids], echo=True, **GREEDY)
    assert [choice.text for choice in two.choices] == [PROMPT + one.choices[0].text] * 2
    streamed = complete(prompt=PROMPT, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == two.choices[0].text


def test_chat_logprobs_are_consistent_and_match_when_streamed(chat):
    content = chat(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY).choices[0].logprobs.content
    assert len(content) == 8
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1 + 1e-6
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    parts = [chunk.choices[0].logprobs for chunk in chat(messages=MESSAGES, logprobs=True, stream=True, **GREEDY)]
    streamed = [entry for part in parts if part is not None for entry in part.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    # the second answer reuses the prompt's cached tokens, and rounding depends on the tokens per run
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content], abs=1e-4)


def test_completion_logprobs_and_text_offsets_are_consistent(complete):
    found = complete(prompt=PROMPT, logprobs=2, **GREEDY).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 8
    assert all(max(top.values()) == own for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True))
    ends = [offset + len(token) for offset, token in zip(found.text_offset, found.tokens, strict=True)]
    assert found.text_offset == [0, *ends[:-1]]
    stop: Any = {**GREEDY, "stop": "".join(found.tokens[2:4]) + "@"}  # which does not come
    parts = [chunk.choices[0].logprobs for chunk in complete(prompt=PROMPT, logprobs=2, stream=True, **stop)]
    assert [offset for part in parts if part is not None for offset in part.text_offset] == found.text_offset


@pytest.mark.parametrize("room", [0, 1, 8])
def test_prompt_must_be_shorter_than_cache(complete, model, room):
    prompt, asked = [5] * (model.max_length - room), {**GREEDY, "max_tokens": None}
    if not room:
        with pytest.raises(openai.BadRequestError, match=str(len(prompt))) as caught:
            complete(prompt=prompt, **asked)
        assert caught.value.code == "context_length_exceeded"
        return
    answer = complete(prompt=prompt, **asked)
    assert answer.usage.completion_tokens == room and answer.usage.total_tokens == model.max_length
    assert answer.choices[0].finish_reason == "length"


def test_models_are_listed(client):
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("tiny", "model", "partita")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_several_packages_are_served_as_several_models(package, own_copy):
    with running({"one": package, "two": own_copy(package)}) as both:
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answers = [both.post(COMPLETION, {"model": name, **body}).json() for name in ("one", "two")]
        assert [answer["model"] for answer in answers] == ["one", "two"]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert [entry["id"] for entry in both.get("/v1/models").json()["data"]] == ["one", "two"]
        paths = [both.get(f"/report?model={name}").json()["request"]["path"] for name in ("one", "two")]
        assert paths[0] == str(package) != paths[1]
        assert [both.metric("partita_generated_tokens_total", model=name) for name in ("one", "two")] == [6, 6]


def test_chat_without_max_tokens_ends_at_cache_length(server, model):
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    answer = server.post(CHAT, body).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == model.max_length


# A server with a saved prefix, or with a draft package, gives the text of a plain one


QUESTIONS = ["hi", "return the value", "def add(a, b):", "a b c"]


def answer(server: Running, question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    told = server.post("/v1/chat/completions", {**body, "ignore_eos": True}).json()
    assert "choices" in told, (told, server.log)
    text: str = told["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("process", ["this", "child"])
def test_first_request_reuses_saved_prefix(server, package, prefix, process, monkeypatch):
    submit, tickets = ServedPackage.submit, []

    def noted(*given):
        tickets.append(submit(*given))
        return tickets[-1]

    monkeypatch.setattr(ServedPackage, "submit", noted)
    with running({"tiny": package}, process=process, prefix=prefix) as begun:
        text = answer(begun, QUESTIONS[0])
        copied = [ticket.copied_tokens for ticket in tickets]
        assert text == answer(server, QUESTIONS[0])
        known = len(read_content(prefix).tokens)
        assert copied == [known] and known > 16


def test_draft_package_keeps_answers(server, tiny_checkpoint, exported, monkeypatch):
    package = exported(tiny_checkpoint("llama"), attention="gqa", max_length=128)
    always_draft(monkeypatch)
    monkeypatch.setattr("partita.serve.served_package.REPORT_SECONDS", 0.0)
    wanted = [answer(server, question) for question in QUESTIONS]
    with running({"tiny": package}, draft=package) as drafting:
        assert [answer(drafting, question) for question in QUESTIONS] == wanted
        told = drafting.get("/report?view=json").json()["speculation"]
        assert 0 < told["accepted"] <= told["drafted"]
