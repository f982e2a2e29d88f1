"""Tables, ratios and contender selection of `make bench-peers`, from handwritten records."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers.page import decode, page, ratio
from benchmarks.peers.plan import chosen
from benchmarks.peers.quality import compared
from benchmarks.peers.records import Contender, Machine, PeersResult, ShapeResult, Start, Turn, Work
from partita.capacity.records import FormRates, MachineRates

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
    rates=MachineRates(
        threads=2,
        onnxruntime="1.31.1",
        read_bytes_per_second=20e9,
        elementwise_bytes_per_second=18e9,
        forms={
            "float32": FormRates(
                gemv_bytes_per_second={GIB: 18e9},
                product_bytes=(1, 1),
                large_gemv_bytes_per_second=18e9,
                gemm_flops=300e9,
                product_seconds=1e-6,
            )
        },
        attention_decode_flops=1e9,
        attention_prefill_flops=1e9,
        node_seconds=1e-6,
        process_bytes=GIB,
    ),
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


def test_ratio_is_median_of_per_round_ratios():
    # The machine slowed down by half for the middle round: both took part, so the ratio stays.
    assert ratio(work(1.0, 2.0, 1.0), work(3.0, 6.0, 3.0), decode) == 3.0
    assert ratio(work(1.0, 1.0), work(2.0), decode) == 2.0


def test_page_compares_contenders_of_equal_bit_width():
    ours = contender("partita int4-b64", 4, work(1.0), work(1.0, prompt=16))
    theirs = contender("genai int4", 4, work(3.0), work(2.0, prompt=16))
    text = page([result(shape(ours, theirs, contender("genai fp32", 32, work(4.0))))])
    assert "| partita int4-b64 / genai int4 | 1.00 / 1.00 | 2.00 / 3.00 |" in text and "/ genai fp32" not in text


def test_page_lists_speeds_errors_and_nonfinite_logits():
    ours = contender("partita int4-b64", 4, work(1.0, 2.0, 4.0), versions={"onnxruntime": "1.31.1"})
    broken = contender("llama q4_0", 4, work(1.0, finite=False), error="ended by signal 11")
    text = page([result(shape(ours, broken))])
    assert "| partita int4-b64 | 256 (256 to 256) | 32.0 (24.0 to 48.0) |" in text
    assert "- llama q4_0 has no figures, or not all: ended by signal 11" in text
    assert "- llama q4_0: logits after 128 tokens are not all finite" in text
    assert "- partita int4-b64: onnxruntime 1.31.1" in text
    assert "Disturbed**" not in text


def test_contenders_are_selected_by_peer_and_precision():
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


def test_quality_ignores_positions_without_reference_loss():
    text = {"losses": np.array([[1.0, np.nan, 2.0]]), "best": np.array([[3, 4, 5]])}
    ratio, perplexity, same = compared(text, np.array([[1.5, 9.0, 2.5]]), np.array([[3, 0, 0]]))
    assert ratio == pytest.approx(np.exp(0.5)) and perplexity == pytest.approx(np.exp(2.0)) and same == 0.5
