"""Adapters of served packages: each is a model of the API, and rows with different adapters share a batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from partita.errors import PackageError, UsageError
from partita.package.folder import adapter_file
from partita.serve.app import model_names
from tests.conftest import require
from tests.runtime.handmade_packages import VOCAB, handmade, known_tokens, reseal
from tests.serve.serving import Running, running

RANKS = {"loud": 3, "small": 1}
SYSTEM = [(7 * i + 3) % VOCAB for i in range(20)]
CREATE: Any = {"temperature": 0, "max_tokens": 5}


def served_package(folder: Path, **options: Any) -> Path:
    require("starlette")
    return handmade(folder, adapters=RANKS, words=True, **options)


@pytest.fixture(scope="module", params=["symbolic", "fixed", "together"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    options: dict[str, Any] = {"symbolic": {}, "fixed": {"shapes": "pair"}, "together": {"apart": False}}
    with running({"tiny": served_package(folder, batch=3, **options[request.param])}) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def known(prompt: list[int], name: str | None) -> str:
    tokens = known_tokens(prompt, 5, adapted=None if name is None else (name, RANKS[name]))
    return "".join(f" w{token}" for token in tokens)


def test_each_adapter_is_served_as_its_own_model(server: Running, client: openai.OpenAI) -> None:
    listed = server.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["parent"]) for entry in listed] == [("tiny", None), ("loud", "tiny"), ("small", "tiny")]
    assert server.get("/v1/models/small").json()["parent"] == "tiny"
    unknown = server.post("/v1/completions", {"model": "tiny:loud", "prompt": "w5"})
    assert unknown.status_code == 404 and "this server has tiny, loud, small." in unknown.json()["error"]["message"]
    wanted = {model: known(SYSTEM, name) for model, name in (("tiny", None), ("loud", "loud"), ("small", "small"))}
    assert len(set(wanted.values())) == 3
    for model, text in wanted.items():
        answer = client.completions.create(model=model, prompt=SYSTEM, **CREATE)
        assert (answer.choices[0].text, answer.model) == (text, model)
    chunks = list(client.completions.create(model="loud", prompt=SYSTEM, stream=True, **CREATE))
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted["loud"]
    assert {chunk.model for chunk in chunks} == {"loud"}


def test_prefix_cache_is_not_shared_between_adapters(server: Running, client: openai.OpenAI) -> None:
    """All prompts share a prefix and run with different adapters, before and at the same time."""
    asked = [([*SYSTEM, last], model) for last in (9, 4) for _ in range(3) for model in ("tiny", "loud", "small")]

    def answered(each: tuple[list[int], str]) -> str:
        text: str = client.completions.create(model=each[1], prompt=each[0], **CREATE).choices[0].text
        return text

    wanted = [known(prompt, None if model == "tiny" else model) for prompt, model in asked]
    assert len(set(wanted)) == 6
    with server.slowly(0.002), ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(answered, asked)) == wanted
    assert [answered(each) for each in asked] == wanted


def test_model_names_map_each_name_to_a_single_model() -> None:
    assert model_names({"a": ("loud",), "b": ()}) == {"a": ("a", None), "b": ("b", None), "loud": ("a", "loud")}
    for adapters in ({"a": ("loud",), "b": ("loud",)}, {"a": ("b",), "b": ()}):
        with pytest.raises(UsageError, match="two models are named"):
            model_names(adapters)


def test_damaged_adapter_raises_package_error_at_startup(tmp_path: Path) -> None:
    folder = served_package(tmp_path / "p", batch=3)
    (folder / adapter_file("small")).write_bytes(b"nothing of the kind")
    reseal(folder)
    with pytest.raises(PackageError, match="damaged"), running({"tiny": folder}):
        raise AssertionError("it listens")
