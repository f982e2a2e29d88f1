"""Answers of the server, asked with OpenAI's own client: the texts are those of `generate`, in every form there is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import partita
from tests.serve.serving import Running, running

PROMPT = "return the value of"
MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "return the value"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def model(package: Path) -> Iterator[partita.Model]:
    with partita.load(package, providers="cpu", threads=1) as found:
        yield found


def generated(model: partita.Model, prompt: str, **options: Any) -> partita.Generation:
    """What `generate` says, in the first row; the others hold the same."""
    return model.generate([prompt] * model.batch_size, stop_token_ids=(), **options).run()


def test_a_completion_is_what_generate_says(client, model):
    answer = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    expected = generated(model, PROMPT, max_new_tokens=8)
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.id.startswith("cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(model.encode(PROMPT)), 8)
    assert usage.total_tokens == usage.prompt_tokens + 8


def test_a_chat_is_what_chat_says(client, model):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    expected = model.chat([MESSAGES] * 4, max_new_tokens=8, stop_token_ids=()).run()
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert answer.object == "chat.completion" and answer.usage.completion_tokens == 8


def test_parts_of_text_and_newer_names_of_roles_are_taken(client):
    parts = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, MESSAGES[1]]
    asked: Any = {**GREEDY, "max_tokens": None, "max_completion_tokens": 8}
    one, other = (client.chat.completions.create(model="tiny", messages=m, **asked) for m in (parts, MESSAGES))
    assert one.choices[0].message.content == other.choices[0].message.content != ""


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_says_the_same(client, chat):
    if chat:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        said = whole.choices[0].message.content
    else:
        whole = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        said = whole.choices[0].text
    chunks = list(stream)
    *parts, last = chunks
    assert all(part.usage is None and len(part.choices) == 1 for part in parts)
    assert last.choices == [] and last.usage == whole.usage
    texts = [(c.choices[0].delta.content if chat else c.choices[0].text) or "" for c in parts]
    assert "".join(texts) == said and sum(map(bool, texts)) > 1
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert len({part.id for part in chunks}) == 1
    if chat:
        assert parts[0].choices[0].delta.role == "assistant"


def test_a_stream_ends_with_done_and_is_not_buffered_by_proxies(server):
    body = {"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": 3, "temperature": 0}
    answer = server.post("/v1/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no" and "content-length" not in answer.headers
    events = [line for line in answer.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in events[:-1])
    assert all("usage" not in json.loads(line[6:]) for line in events[:-1])


def test_a_stop_string_ends_the_answer_before_it(client, model):
    text = generated(model, PROMPT, max_new_tokens=8).text
    stop = text[3:5]
    assert text.find(stop) > 0
    answer = client.completions.create(model="tiny", prompt=PROMPT, stop=[stop, "@@"], **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.find(stop)], "stop")


def test_a_stop_token_ends_the_answer(client, model):
    tokens = generated(model, PROMPT, max_new_tokens=8).tokens[0]
    last = tokens[3]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=8, extra_body={"stop_token_ids": [last]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == tokens.index(last) + 1
    before = generated(model, PROMPT, max_new_tokens=tokens.index(last))
    assert answer.choices[0].text == before.text, "without the token that ends it"


def test_the_same_seed_gives_the_same_answer_and_another_one_another(client):
    def answer(seed: int | None) -> str:
        asked: Any = {"max_tokens": 12, "seed": seed, "extra_body": {"ignore_eos": True}}
        found: str = client.completions.create(model="tiny", prompt=PROMPT, **asked).choices[0].text
        return found

    assert answer(7) == answer(7) and answer(-7) == answer(-7)
    assert len({answer(seed) for seed in (1, 2, 3, 4)}) > 1
    assert len({answer(None) for _ in range(4)}) > 1, "temperature is 1 where nobody says, as in OpenAI's API"


def test_several_choices_are_drawn_apart_and_several_prompts_keep_their_order(client):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, n=3, seed=1, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1 and answer.usage.completion_tokens == 36
    prompts = [f"return the {word}" for word in ("value", "list", "item", "given", "other", "the")]
    together = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    alone = [client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]
    assert [choice.text for choice in sorted(together.choices, key=lambda c: c.index)] == alone
    streamed = dict.fromkeys(range(len(prompts)), "")
    for chunk in client.completions.create(model="tiny", prompt=prompts, stream=True, **GREEDY):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == alone


def test_token_ids_are_a_prompt_and_an_echo_begins_with_it(client, model):
    ids = model.encode(PROMPT)
    one = client.completions.create(model="tiny", prompt=ids, **GREEDY)
    two = client.completions.create(model="tiny", prompt=[ids, ids], echo=True, **GREEDY)
    assert [choice.text for choice in two.choices] == [PROMPT + one.choices[0].text] * 2
    streamed = client.completions.create(model="tiny", prompt=PROMPT, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == two.choices[0].text


def test_logprobs_of_a_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1 + 1e-6
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, stream=True, **GREEDY)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    streamed = [entry for part in parts if part is not None for entry in part.content]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in content]


def test_logprobs_of_a_completion(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 8
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
    assert all(max(top.values()) == own for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True))
    assert [offset + len(token) for offset, token in zip(found.text_offset, found.tokens, strict=True)][:-1] == (
        found.text_offset[1:]
    )
    stop: Any = {**GREEDY, "stop": "".join(found.tokens[2:4]) + "@"}  # text is held back, which is not to come
    stream = client.completions.create(model="tiny", prompt=PROMPT, logprobs=2, stream=True, **stop)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [offset for part in parts if part is not None for offset in part.text_offset] == found.text_offset


def test_a_stop_token_of_the_client_is_neither_shown_nor_has_a_figure(client, model):
    tokens = generated(model, PROMPT, max_new_tokens=8).tokens[0]
    asked: Any = {"temperature": 0, "max_tokens": 8, "extra_body": {"stop_token_ids": [tokens[3]]}}
    answer = client.completions.create(model="tiny", prompt=PROMPT, logprobs=0, **asked)
    found = answer.choices[0]
    assert found.finish_reason == "stop" and "".join(found.logprobs.tokens) == found.text


def test_without_a_limit_a_chat_ends_where_the_cache_is_full(client, model):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == model.max_length


@pytest.mark.parametrize(("room", "tokens"), [(2, 2), (1, 1), (0, None), (-1, None)])
def test_a_prompt_of_about_the_size_of_the_cache(client, model, room, tokens):
    """The answer has what is left of the cache; a prompt that leaves nothing is refused, and one longer as well."""
    prompt = [5] * (model.max_length - room)
    if tokens is None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=prompt, **GREEDY)
        assert caught.value.code == "context_length_exceeded" and str(len(prompt)) in str(caught.value)
        return
    answer = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
    assert answer.usage.completion_tokens == tokens and answer.usage.total_tokens == model.max_length
    assert answer.choices[0].finish_reason == "length"


def test_settings_that_change_nothing_are_taken(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{**MESSAGES[1], "name": "me"}, {"role": "assistant", "content": "ok", "tool_calls": []}, MESSAGES[1]],
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        n=1,
        user="me",
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        stop=None,
        seed=None,
        **GREEDY,
    )
    assert answer.choices[0].message.content


def test_top_p_of_zero_is_the_likeliest_token(client):
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    greedy = client.completions.create(temperature=0, **asked).choices[0].text
    assert client.completions.create(top_p=0, **asked).choices[0].text == greedy
    assert client.completions.create(temperature=1.5, **{**asked, "extra_body": {"ignore_eos": True, "top_k": 1}})


def test_models_are_listed(client, package):
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("tiny", "model", "partita")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_several_packages_are_several_models(package, own_copy):
    with running({"one": package, "two": own_copy(package)}) as both:
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answers = [both.post("/v1/completions", {"model": name, **body}).json() for name in ("one", "two")]
        assert [answer["model"] for answer in answers] == ["one", "two"]
        assert answers[0]["choices"] == answers[1]["choices"]
        for path in ("/v1/models", "/v1/models/"):
            assert [entry["id"] for entry in both.get(path).json()["data"]] == ["one", "two"]
        paths = [both.get(f"/report?model={name}").json()["request"]["path"] for name in ("one", "two")]
        assert paths[0] == str(package) != paths[1]
        assert [both.metric("partita_generated_tokens_total", model=name) for name in ("one", "two")] == [6, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_with_several_choices_is_counted_once(server, stream):
    body = {"model": "tiny", "prompt": ["return the", "value"], "max_tokens": 3, "ignore_eos": True}

    def used(**more: Any) -> dict[str, int]:
        if not stream:
            told: dict[str, int] = server.post("/v1/completions", {**body, **more}).json()["usage"]
            return told
        asked = {**body, **more, "stream": True, "stream_options": {"include_usage": True}}
        events = server.post("/v1/completions", asked).text.split("\n\n")
        found: dict[str, int] = json.loads(events[-3].removeprefix("data: "))["usage"]
        return found

    one, four = used(), used(n=4)
    assert four["prompt_tokens"] == one["prompt_tokens"] > 0 and four["completion_tokens"] == 2 * 4 * 3
    assert four["total_tokens"] == four["prompt_tokens"] + 24
