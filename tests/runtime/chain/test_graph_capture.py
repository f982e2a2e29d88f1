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


def contract(*inputs: Port, state: State = KEY, output: Port = LOGITS, cacheless: bool = False) -> Contract:
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
        cacheless=cacheless,
    )


BFLOAT16 = contract(output=LOGITS.model_copy(update={"dtype": "bfloat16"}))


@pytest.mark.parametrize(
    ("described", "memory", "on_host_ports", "message"),
    [
        (contract(LENGTH, AT, ROWS), "Cuda", (), ""),
        # One is a bound, the other equal in every step.
        (contract(LENGTH, AT, ROWS), "Cuda", ("total", "rows"), ""),
        (contract(LENGTH, AT), "Cuda", ("at",), "at in host memory"),
        (contract(), "Cuda", ("past",), "1 state of its cache in host memory"),
        (contract(), "Cuda", ("logits",), "logits is computed in host memory"),
        (BFLOAT16, "Cuda", (), "logits is bfloat16"),
        (BFLOAT16, "WebGPU_Buf", (), ""),
    ],
)
def test_data_of_a_step_in_host_memory_is_named(described, memory, on_host_ports, message):
    graph = described.files[0]
    names = [*(port.name for port in (*graph.inputs, *graph.outputs)), "past"]
    found = on_host(graph, described, {**dict.fromkeys(names, memory), **dict.fromkeys(on_host_ports, "Cpu")})
    assert len(found) == bool(message) and message in "".join(found)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (contract(cacheless=True), "input grows with every step"),
        (contract(state=KEY.model_copy(update={"growing_axis": 2})), "grows with every token"),
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
