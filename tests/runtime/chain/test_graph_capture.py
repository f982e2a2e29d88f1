"""What keeps decode steps from being recorded, said before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.errors import ProviderError, UsageError
from partita.library.chain import read_chain
from partita.options.groups import ProviderChain
from partita.package.contract import Contract, GraphFile, Port, State
from partita.runtime.chain.graph_capture import check_contract, on_host

FILE = Path("model.onnx")
TOKENS = Port(name="ids", role="tokens", shape=(1, "S"), dtype="int64")
LENGTH = Port(name="total", role="total_length", shape=(), dtype="int32")
AT = Port(name="at", role="last_index", shape=(1,), dtype="int32")
ROWS = Port(name="rows", role="logits_rows", shape=("K",), dtype="int64")
LOGITS = Port(name="logits", role="logits", shape=(1, "K", 8), dtype="float32")
KEY = State(past="past", present="present", layer=0, kind="key", shape=(1, 1, 16, 4), dtype="float32")


def contract(*inputs: Port, state: State = KEY, output: Port = LOGITS, rereads: bool = False) -> Contract:
    graph = GraphFile(
        file="model.onnx", phase="any", sequence_length=None, nodes=3, inputs=(TOKENS, *inputs), outputs=(output,)
    )
    return Contract(
        files=(graph,),
        states=(state,),
        appends_chunks=True,
        batch_size=1,
        max_length=16,
        vocab_size=8,
        weight_bytes=0,
        rereads=rereads,
    )


def wanted(described: Contract, memory: str = "Cuda", **others: str) -> dict[str, str]:
    graph = described.files[0]
    names = [*(port.name for port in (*graph.inputs, *graph.outputs)), "past"]
    return {**dict.fromkeys(names, memory), **others}


def found(described: Contract, **others: str) -> list[str]:
    return on_host(described.files[0], described, wanted(described, **others))


def test_everything_on_the_device_can_be_recorded_and_a_length_on_the_host_too():
    described = contract(LENGTH, AT, ROWS)
    assert found(described) == []
    assert found(described, total="Cpu", rows="Cpu") == []  # one is a bound, the other the same in every step


def test_what_the_host_reads_and_is_another_in_each_step_is_named():
    described = contract(LENGTH, AT)
    (said,) = found(described, at="Cpu")
    assert "at in host memory" in said
    assert "1 state of its cache in host memory" in found(described, past="Cpu")
    assert "logits is computed in host memory" in found(described, logits="Cpu")


def test_logits_that_cannot_be_read_back_are_named():
    described = contract(output=LOGITS.model_copy(update={"dtype": "bfloat16"}))
    (said,) = found(described)
    assert "bfloat16" in said
    assert on_host(described.files[0], described, wanted(described, "WebGPU_Buf")) == []


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (contract(rereads=True), "input grows with every step"),
        (contract(state=KEY.model_copy(update={"grows": 2})), "grows with every token"),
        (contract(Port(name="mask", role="mask", shape=(1, "T"), dtype="int64")), "mask grows with every step"),
    ],
)
def test_a_graph_whose_steps_have_other_shapes_is_refused(described, said):
    with pytest.raises(ProviderError, match=said):
        check_contract(FILE, described, described.files[0])
    fixed = contract(Port(name="mask", role="mask", shape=(1, 16), dtype="int64"))
    check_contract(FILE, fixed, fixed.files[0])


def test_the_option_is_that_of_the_provider_that_leads_the_chain():
    for chain, option in (("cuda,cpu", ("cuda", "enable_cuda_graph")), ("webgpu", ("webgpu", "enableGraphCapture"))):
        target = read_chain(ProviderChain(chain), graph_capture=True)
        assert target.options[option[0]] == {option[1]: "1"}
    with pytest.raises(UsageError, match="cpu, the first provider, does not support graph capture; cuda and webgpu do"):
        read_chain(ProviderChain("cpu"), graph_capture=True)
    with pytest.raises(UsageError, match="is set to off"):
        off = {"cuda": {"enable_cuda_graph": "0"}}
        read_chain(ProviderChain("cuda", provider_options=off), graph_capture=True)
