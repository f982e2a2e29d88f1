"""int8 prefill graph with a quantised decode graph: plan, export and verification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from partita.errors import UnsupportedModelError
from partita.export.quantise.plan import make_plan, prefill_plan
from partita.package.folder import check_files, read_manifest
from partita.providers.resolve import parse_chain
from partita.runtime.generate.bound_graph import BoundGraph
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.planner import StepPlan
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import load_runner
from partita.runtime.verify.quality import open_scorer
from tests.conftest import Exported, TinyCheckpoint
from tests.export.quantise.test_forms import wide_integers
from tests.export.quantise.test_plan import MODULES, options
from tests.export.quantise.test_precision import operators, places


@pytest.fixture(scope="session")
def pair(tiny_checkpoint: TinyCheckpoint, exported: Exported, short_text: Path) -> Path:
    """A package with both graphs, of a model whose head is its embedding."""
    checkpoint = tiny_checkpoint("llama", tied=True)
    return exported(checkpoint, precision="int4", prefill_precision="int8", quality_text=short_text, batch_size=2)


def test_both_graphs_are_verified_and_share_head_and_embedding(pair: Path) -> None:
    manifest = read_manifest(pair)
    check_files(pair, manifest, hashes=True)
    assert manifest.verification.status == "verified" and not manifest.verification.not_exercised
    assert max(step.max_rel_error for step in manifest.verification.steps) < 2e-5
    assert "which differ after the prompt" in str(manifest.verification.reference)
    layers = len([state for state in manifest.graph.states if state.kind == "key"])
    prompts, decode = (operators(pair, file) for file in ("prefill.onnx", "decode.onnx"))
    assert prompts["MatMulIntegerToFloat"] == 5 * layers and prompts["MatMulNBits"] == 1
    assert decode["MatMulNBits"] == 5 * layers + 1 and decode["QuantizeLinear"] == 0
    first, second = (places(pair, file) for file in ("prefill.onnx", "decode.onnx"))
    shared = set(first.values()) & set(second.values())
    assert {first[name] for name in first if name.startswith("model.embed_tokens")} <= shared
    own = [name for name in first if first[name] not in shared]
    assert own and all(".int8" in name for name in own), "norms and tables are the same bytes, too"
    assert not wide_integers(pair / "prefill.onnx") and not wide_integers(pair / "decode.onnx")
    found = manifest.prefill
    assert found is not None and found.packed is not None
    assert (found.packed.activations, sum(kind.weights for kind in found.packed.kinds)) == ("int8", 5 * layers)


def test_quality_is_measured_in_total_and_per_graph(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quality = read_manifest(pair).quality
    assert quality is not None and [each.phase for each in quality.phases] == ["prefill", "decode"]
    assert sum(each.tokens for each in quality.phases) == quality.tokens
    assert quality.phases[0].kl_mean < quality.phases[1].kl_mean, "8 bits cost less than 4"
    with open_scorer(pair, parse_chain("cpu")) as scorer:
        assert scorer.continues_at(63) == 31
        executor, files = scorer.runner, list[str]()
        run = executor.run

        def noted(plan: StepPlan, graph: BoundGraph, rope_length: int) -> float:
            files.append(graph.file)
            return run(plan, graph, rope_length)

        monkeypatch.setattr(executor, "run", noted)
        heard: list[int] = []
        scorer.score([list(range(1, 21))], lambda row, position, logits: heard.append(position))
    assert files == ["prefill.onnx"] + ["decode.onnx"] * 10, "with a batch of 2 several rows take one token at a time"
    assert sorted(heard) == list(range(20))


def test_prompts_run_the_prefill_graph_and_later_steps_the_decode_graph(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, short_text: Path
) -> None:
    package = exported(tiny_checkpoint("qwen2"), precision="int4", prefill_precision="int8", quality_text=short_text)
    with load_runner(package, parse_chain("cpu")) as runner:
        engine = GenerationLoop(runner)

        def greedy(logits: object, history: object) -> int:
            return int(logits.argmax())  # type: ignore[attr-defined]

        def draft(history: object, most: int, /) -> list[int]:
            return [1, 2, 3][:most]

        row = engine.add_request(Request(list(range(1, 9)), greedy, 6, drafter=draft))
        steps = []
        while (step := engine.step()) is not None:
            steps.append(step)
        assert [step.file for step in steps] == ["prefill.onnx"] + ["decode.onnx"] * (len(steps) - 1)
        assert any(step.drafted for step in steps), "verified by the graph of decode steps"
        engine.release_row(row)
        engine.add_request(Request([5, 6, 7], greedy, 2))
        turn = engine.step()
        assert turn is not None and (turn.file, turn.phase) == ("prefill.onnx", "prefill")


def test_keep_applies_to_both_graphs_and_calibration_to_decode(tmp_path: Path) -> None:
    wanted = options(keep={"layers.1": "fp32", "lm_head": "int8"})
    wanted = replace(wanted, prefill_precision="int8", calibrate=tmp_path / "text")
    plan = make_plan(wanted, None, MODULES)
    prefill = prefill_plan(wanted, None, plan)
    assert plan is not None and plan.quantiser == "gptq"
    assert prefill is not None and prefill.quantiser == "refit" and prefill.packing(["model.layers.1"], 256) is None
    found = prefill.packing(["model.layers.10"], 256)
    assert found is not None and (found.grid.bits, found.block_size) == (8, 256)


@pytest.mark.heavy
def test_recurrent_model_rejects_prefill_precision(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, short_text: Path
) -> None:
    checkpoint = tiny_checkpoint("mamba")
    with pytest.raises(UnsupportedModelError, match=r"`prefill_precision=int8`: .* recurrent states, .*; omit it"):
        exported(checkpoint, precision="int4", prefill_precision="int8", quality_text=short_text)
