"""Provider chains: parsing, name suggestions, and resolution against the installed ONNX Runtime."""

from __future__ import annotations

import pytest

from partita.errors import UsageError
from partita.providers.base import Provider
from partita.providers.resolve import known_providers, names_to_providers, parse_chain, resolve
from partita.remedies import Remedy


def provider(name: str, aliases: tuple[str, ...] = (), remedy: str = "") -> Provider:
    return Provider(
        name=name,
        ort_name=f"{name.title()}ExecutionProvider",
        aliases=aliases,
        wheels=(f"onnxruntime-{name}",),
        remedies={"not_in_build": Remedy(remedy)} if remedy else {},
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        (" , ", "empty"),
        ("cpu,", "empty item"),
        ("cpu,cpu", "twice"),
        ("cpu,CPUExecutionProvider", "twice"),
        ("cpx", "did you mean 'cpu'"),
        ("quantum", "known providers: "),
    ],
)
def test_invalid_chain_is_a_usage_error(text, says):
    with pytest.raises(UsageError, match=says):
        parse_chain(text)


def test_providers_sharing_a_name_raise_value_error():
    with pytest.raises(ValueError, match="'npu' is a name of both a and b"):
        names_to_providers((provider("a", ("npu",)), provider("b", ("NPU",))))


def test_provider_missing_from_build_has_evidence_and_remedy():
    wanted, with_remedy = provider("fpga"), provider("dsp", remedy="buy one")
    found = resolve((wanted, with_remedy, known_providers()["cpu"]), ("CPUExecutionProvider",))
    assert [entry.status for entry in found] == ["unavailable", "unavailable", "active"]
    assert found[0].reason == "not_in_build"
    assert "CPUExecutionProvider" in (found[0].evidence or "")
    assert found[0].remedy is not None and found[0].remedy.command == ("pip", "install", "onnxruntime-fpga")
    assert found[1].remedy == Remedy("buy one")
    assert (found[2].reason, found[2].evidence, found[2].remedy) == (None, None, None)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("gpu", "'cuda' or 'webgpu'"),
        ("GPU", "'cuda' or 'webgpu'"),
        ("vulkan", "'webgpu'"),
        ("metal", "'webgpu' or 'coreml'"),
        ("mps", "'coreml'"),
        ("rocm", "'migraphx'"),
        ("npu", "'openvino' or 'coreml' or 'qnn'"),
        ("directx", "'directml'"),
        ("nvida", "'cuda'"),
        ("wgp", "'webgpu'"),
    ],
)
@pytest.mark.parametrize("argument", ["providers", "target"])
def test_unknown_provider_error_suggests_known_names(word, meant, argument):
    with pytest.raises(UsageError, match=rf"did you mean {meant}\? known providers: ") as caught:
        parse_chain(f"{word},cpu", argument=argument)
    listed = str(caught.value).partition("known providers: ")[2]
    assert all(name.strip("'") in listed for name in meant.split(" or "))
    assert caught.value.remedy is not None
    option, chain = caught.value.remedy.options
    assert option == {"providers": "--provider", "target": "--target"}[argument]
    assert [provider.name for provider in parse_chain(chain)] == [meant.split("'")[1], "cpu"]


def test_tpu_gets_no_suggestion():
    with pytest.raises(UsageError, match="unknown provider 'tpu'; known providers"):
        parse_chain("tpu")


def test_suggestion_words_are_not_provider_names():
    names = names_to_providers(tuple(known_providers().values()))
    for entry in known_providers().values():
        assert not set(entry.suggested_for) & names.keys(), entry.name
        assert all(word == word.lower() for word in entry.suggested_for)
