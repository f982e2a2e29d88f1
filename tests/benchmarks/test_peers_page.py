"""Tables, ratios and targets of `make bench-peers`, from records that are written by hand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.peers import records
from benchmarks.peers.decode_bytes import decode_bytes
from benchmarks.peers.page import PREAMBLE, page
from benchmarks.peers.plan import ENTRIES, Places, chosen, export_command
from benchmarks.peers.quality import compared
from benchmarks.peers.records import Contender, Machine, PeersResult, ShapeResult, Spread, Start, Turn, Work, Written
from benchmarks.peers.targets import Verdict, decode, ratios, verdicts
from tests.conftest import REPOSITORY

GIB = 1 << 30


def work(*decode_seconds: float, prompt=128, prefill=0.5, new=65, finite=True) -> Work:
    turns = tuple(Turn(prefill_seconds=prefill, decode_seconds=each, others_cores=0.0) for each in decode_seconds)
    return Work(
        prompt_tokens=prompt, new_tokens=new, turns=turns, tokens=(5,) * new, finite=finite, tokens_per_turn_equal=True
    )


def contender(name: str, bits: int, *works: Work, **more) -> Contender:
    peer, form = name.split()
    start = Start(import_seconds=1, load_seconds=0.5, prefill_seconds=0.5, peak_rss_bytes=GIB)
    filled = {"file_bytes": GIB, "starts": (start,), "works": works, **more}
    return Contender.model_validate({"name": name, "peer": peer, "form": form, "bits": bits, **filled})


def shape(*contenders: Contender) -> ShapeResult:
    return ShapeResult(
        shape="tiny", title="tiny llama", parameters=GIB, checkpoint_bytes=2 * GIB, contenders=contenders
    )


MACHINE = Machine(
    processor="A processor",
    cores=2,
    memory_bytes=24 * GIB,
    system="Linux x86_64",
    python="3.11.7",
    threads=2,
    load_average=0.1,
    read_gbps=20.0,
    gemv_gbps=18.0,
    gemm_gflops=300.0,
    int8_gops=1200.0,
    matrix_unit=True,
)


def result(*shapes: ShapeResult, disturbed=()) -> PeersResult:
    return PeersResult(
        partita_version="0",
        commit=None,
        date="2026-01-01 00:00 UTC",
        command="python -m benchmarks.peers",
        machine=MACHINE,
        rounds=3,
        start_prompt=128,
        disturbed=disturbed,
        shapes=shapes,
    )


def test_a_ratio_is_the_median_of_those_of_the_rounds():
    # The machine slowed down by half for the middle round: both took part, so the ratio stays.
    ours, theirs = work(1.0, 2.0, 1.0), work(3.0, 6.0, 3.0)
    assert ratios(ours, theirs, decode) == Spread(median=3.0, low=3.0, high=3.0)


def found(given: ShapeResult) -> dict[str, Verdict]:
    return {each.what: each for each in verdicts(given, MACHINE)}


def test_targets_are_met_or_missed_by_a_share():
    ours = contender("partita int4-b64", 4, work(1.0), work(1.0, prompt=16))
    theirs = contender("genai int4", 4, work(3.0), work(2.0, prompt=16))
    given = found(shape(ours, theirs))
    after_128 = given["decode after 128 tokens, partita int4-b64 / genai int4"]
    after_16 = given["decode after 16 tokens, partita int4-b64 / genai int4"]
    assert (after_128.value, after_128.met, after_128.words) == (3.0, True, "met")
    assert (after_16.value, after_16.met, after_16.words) == (2.0, False, "missed by 20 %")


def test_an_export_on_a_busy_machine_is_marked_and_not_compared():
    slow = Written(command="x", seconds=100, peak_rss_bytes=GIB, others_cores=1.0)
    ours = contender("partita int4-b64", 4, work(1.0), written=slow)
    theirs = contender("genai int4", 4, work(1.0), written=Written(command="y", seconds=20, peak_rss_bytes=GIB))
    given = shape(ours, theirs)
    assert "seconds of export, partita int4-b64 / genai int4" not in found(given)
    assert "| 100 (disturbed) |" in page([result(given)])


def test_wide_forms_are_compared_with_the_fastest_peer():
    ours, slow, fast = (
        contender("partita fp16", 16, work(2.0)),
        contender("genai fp32", 32, work(4.0)),
        contender("optimum fp32", 32, work(3.0)),
    )
    given = found(shape(ours, slow, fast))
    name = "decode after 128 tokens, partita fp16 / optimum fp32 (best of ONNX Runtime's peers)"
    assert given[name].value == pytest.approx(1.5)


def test_bandwidth_counts_weights_and_the_cache_half_way():
    ours = contender("partita int4-b64", 4, work(6.4, new=65), decode_bytes=10**9, cache_token_bytes=10**6)
    value = found(shape(ours))["read bandwidth in decode after 128 tokens, partita int4-b64"].value
    assert value == pytest.approx((1.0 + 0.1605) * 10 / 20)


def test_the_page_tells_speeds_refusals_and_faults():
    ours = contender("partita int4-b64", 4, work(1.0, 2.0, 4.0), versions={"onnxruntime": "1.31.1"})
    broken = contender("llama q4_0", 4, work(1.0, finite=False), error="ended by signal 11")
    text = page([result(shape(ours, broken))])
    assert "| partita int4-b64 | 256 (256 to 256) | 32.0 (24.0 to 48.0) |" in text
    assert "- llama q4_0 has no figures, or not all: ended by signal 11" in text
    assert "- llama q4_0: logits after 128 tokens are not all finite" in text
    assert "- partita int4-b64: onnxruntime 1.31.1" in text
    assert "Disturbed**" not in text


def test_a_result_survives_its_file(tmp_path):
    before = result(shape(contender("genai int4", 4, work(1.0))))
    records.write(before, tmp_path / "deep" / "result.json")
    assert records.read(tmp_path / "deep" / "result.json") == before


def test_contenders_are_chosen_by_peer_and_by_form_or_width():
    assert [each.name for each in chosen(["genai"], [])] == ["genai fp32", "genai int4"]
    assert [each.name for each in chosen(["genai", "llama"], ["4"])][:2] == ["genai int4", "llama q4_0"]
    assert [each.name for each in chosen(["llama"], ["q8_0"])] == ["llama q8_0"]
    with pytest.raises(ValueError, match="q5_0 is no precision here"):
        chosen(["llama"], ["q5_0"])
    with pytest.raises(ValueError, match="no contender is left"):
        chosen(["optimum"], ["4"])
    on_a_gpu = [each.name for each in chosen(["partita", "genai"], ["4"], "cuda")]
    assert on_a_gpu == ["partita int4", "partita int4-replayed", "genai int4", "genai int4-replayed"]
    with pytest.raises(ValueError, match="q4_0 is no precision here"):
        chosen(["partita"], ["q4_0"], "cuda")


def test_exporters_run_in_the_environment_of_their_peer(tmp_path):
    places = Places(tmp_path / "work", tmp_path / "venvs")
    for entry in ENTRIES:
        command = export_command(entry, "tiny", places, 192, 2)
        if entry.peer in ("genai", "llama", "optimum"):
            assert command is not None and command[0].startswith(str(tmp_path / "venvs" / f"peer-{entry.peer}"))
        assert (command is None) == (entry.peer == "transformers")


def test_a_packed_weight_reads_its_blocks_with_a_scale_and_a_sum(tmp_path):
    shapes = {"packed": (64, 2, 32), "scales": (64, 2), "b": (64, 100), "table": (7, 128)}
    constants = [helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s, np.float32)) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node(
            "MatMulNBits",
            ["x", "packed", "scales"],
            ["y"],
            "n",
            K=128,
            N=64,
            bits=4,
            block_size=64,
            domain="com.microsoft",
        ),
        helper.make_node("MatMul", ["y", "b"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "g", [], [], constants)
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    assert decode_bytes(tmp_path / "model.onnx") == 64 * 2 * (32 + 8) + 64 * 100 * 4


def test_what_is_gone_when_a_graph_is_open_is_looked_through(tmp_path):
    def stored(name, dtype, shape):
        size = int(np.prod(shape))
        bits = {TensorProto.UINT4: 4, TensorProto.UINT8: 8, TensorProto.BFLOAT16: 16, TensorProto.FLOAT: 32}[dtype]
        return helper.make_tensor(name, dtype, shape, bytes(size * bits // 8), raw=True)

    constants = [
        stored("narrow", TensorProto.BFLOAT16, (128, 64)),
        stored("integers", TensorProto.UINT4, (64, 32)),
        stored("scales", TensorProto.FLOAT, (2, 32)),
        stored("experts", TensorProto.UINT8, (4, 32, 16)),
        stored("expert_scales", TensorProto.FLOAT, (4, 32, 1)),
    ]
    nodes = [
        helper.make_node("Cast", ["narrow"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
        helper.make_node("DequantizeLinear", ["integers", "scales"], ["floats"], axis=0, block_size=32),
        helper.make_node("MatMul", ["y", "floats"], ["z"]),
        helper.make_node(
            "QMoE",
            ["z", "router", "experts", "expert_scales"],
            ["out"],
            k=2,
            expert_weight_bits=4,
            domain="com.microsoft",
        ),
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [], constants)), tmp_path / "model.onnx")
    products = 128 * 64 * 4 + (64 * 32 // 2 + 64 * 32 // 32 * 8)
    assert decode_bytes(tmp_path / "model.onnx") == products + 2 * (32 * 16 + 32 * 8)


def test_quality_compares_where_the_original_has_a_loss():
    text = {"losses": np.array([[1.0, np.nan, 2.0]]), "best": np.array([[3, 4, 5]])}
    ratio, perplexity, same = compared(text, np.array([[1.5, 9.0, 2.5]]), np.array([[3, 0, 0]]))
    assert ratio == pytest.approx(np.exp(0.5)) and perplexity == pytest.approx(np.exp(2.0)) and same == 0.5


def test_the_published_page_is_the_generated_one():
    text = (REPOSITORY / "benchmarks" / "results" / "README.md").read_text("utf-8")
    assert text.startswith(PREAMBLE), (
        "write it again: python -m benchmarks.peers --read RESULTS --docs benchmarks/results/README.md"
    )
