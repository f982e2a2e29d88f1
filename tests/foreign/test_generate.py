"""Folders of optimum, hub repositories and onnxruntime-genai generate the tokens of their own libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import partita
from partita import cli
from tests.foreign.conftest import KNOWN, SAMPLES, Sample, changed
from tests.foreign.reference_loop import plain_tokens

PROMPT, TOKENS = KNOWN["prompt"], KNOWN["tokens"]


def generated(
    folder: Path, *, count: int = len(TOKENS), chunk: int | None = None, variant: str | None = None
) -> list[int]:
    with partita.load(folder, "cpu", variant=variant) as model:
        answer = model.generate(PROMPT, max_new_tokens=count, stop_token_ids=(), prefill_chunk=chunk).run()
        return list(answer.results[0].tokens)


def test_too_long_prompt_error_suggests_max_length(sample: Sample) -> None:
    """No new export is suggested."""
    folder = sample("optimum")
    said = "the cache length is 16; shorten the prompt, or open the folder with a longer cache: --max-length 64$"
    for length, tokens, words in (
        (16, 40, said),
        (None, 70, "64; shorten the prompt: the model supports at most 64 positions$"),
    ):
        with (
            partita.load(folder, "cpu", max_length=length) as model,
            pytest.raises(partita.GenerationError, match=words),
        ):
            model.generate([5] * tokens)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("layout", ["optimum", "pair", "merged", "whole", "genai-fp32-cpu"])
def test_generated_tokens_match_transformers(layout: str, chunk: int | None, sample: Sample) -> None:
    assert generated(sample(layout), chunk=chunk) == TOKENS


def test_unrelated_manifest_json_is_ignored(sample: Sample) -> None:
    """Web apps and browser extensions have a manifest.json; a damaged package manifest is an error."""
    folder = sample("optimum")
    (folder / "manifest.json").write_text('{"name": "chat", "manifest_version": 3, "icons": {}}', encoding="utf-8")
    assert generated(folder) == TOKENS
    for damaged in ("{", '{"schema": "partita.package/9"}', '{"files": []}'):
        (folder / "manifest.json").write_text(damaged, encoding="utf-8")
        with pytest.raises(partita.PackageError, match="manifest"):
            generated(folder)


def test_genai_config_sampling_defaults_require_sampling_option(
    sample: Sample, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sample("genai-fp32-cpu")
    for name, value in {"do_sample": True, "temperature": 0.6, "top_k": 20}.items():
        changed(folder / "genai_config.json", **{f"search__{name}": value})
    words = ["generate", str(folder), "5,9,17", "--token-ids", "-n", "2", "--provider", "cpu", "--json"]
    assert cli.run(words) == 0
    plain = capsys.readouterr()
    assert "the checkpoint suggests temperature 0.6, top-k 20: --sampling checkpoint" in plain.err
    assert json.loads(plain.out)["options"]["temperature"] == 0
    assert cli.run([*words, "--sampling", "checkpoint", "--seed", "3"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert (options["temperature"], options["top_k"], options["top_p"]) == (0.6, 20, 1.0)


def test_int4_tokens_match_onnxruntime_genai() -> None:
    known = json.loads((SAMPLES / "genai-int4-cpu" / "tokens.json").read_text(encoding="utf-8"))
    assert generated(SAMPLES / "genai-int4-cpu") == known["tokens"] != TOKENS


@pytest.mark.parametrize(
    ("variant", "precision"),
    [(None, "fp32"), ("model", "fp32"), ("fp16", "fp16")]
    + [(name, "int8") for name in ("int8", "uint8")]
    + [(name, "int4") for name in ("q4", "q4f16", "bnb4")],
)
def test_variant_is_selected_by_name(variant: str | None, precision: str, hub_folder: Path) -> None:
    file = "model.onnx" if variant in (None, "model") else f"model_{variant}.onnx"
    wanted = plain_tokens(hub_folder / "onnx" / file, PROMPT, len(TOKENS))
    assert generated(hub_folder, variant=variant) == wanted
    with partita.load(hub_folder, "cpu", variant=f"onnx/{file}") as model:
        assert model.manifest.graph.precision == precision
        assert model.manifest.foreign is not None and model.manifest.foreign.layout == "transformers.js"


@pytest.mark.parametrize(("layout", "in_place"), [("optimum", 0), ("merged", 0), ("genai-fp32-cpu", 2)])
def test_report_counts_copied_cache_bytes(layout: str, in_place: int, sample: Sample) -> None:
    with partita.load(sample(layout), "cpu") as model:
        model.generate(PROMPT, max_new_tokens=4, stop_token_ids=()).run()
        report = model.report(probe_seconds=0)
    cache = report.cache
    assert cache is not None and cache.states == 2 and cache.in_place_states == in_place
    # Past of the last step: 11 tokens of the prompt and 2 new ones, 16 numbers of 4 bytes each, keys and values.
    assert cache.copied_bytes == (0 if in_place else 2 * 13 * 16 * 4)
    assert ("in the last step" in report.to_text()) is not bool(in_place)


def test_child_process_uses_same_variant_and_length(hub_folder: Path) -> None:
    with partita.load(hub_folder, "cpu", process="child", variant="q4", max_length=40) as model:
        assert model.max_length == 40
        answer = model.generate(PROMPT, max_new_tokens=3, stop_token_ids=()).run()
    assert list(answer.results[0].tokens) == plain_tokens(hub_folder / "onnx" / "model_q4.onnx", PROMPT, 3)


def test_generate_place_and_bench_accept_foreign_folder(
    hub_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ",".join(map(str, PROMPT))
    choice = ("--variant", "int8", "--provider", "cpu")
    assert cli.run(["generate", str(hub_folder), ids, "--token-ids", "-n", "3", *choice]) == 0
    out = capsys.readouterr().out
    assert [int(word) for word in out.replace(",", " ").split()] == plain_tokens(
        hub_folder / "onnx" / "model_int8.onnx", PROMPT, 3
    )
    assert cli.run(["place", str(hub_folder), *choice, "--json"]) == 0
    placed = json.loads(capsys.readouterr().out)
    assert placed["package"]["precision"] == "int8" and placed["cache"]["in_place_states"] == 0
    bench = ["bench", str(hub_folder), "--token-ids", "-p", ids, "-n", "3", "--rounds", "1", "--json", *choice]
    assert cli.run(bench) == 0
    assert json.loads(capsys.readouterr().out)["contenders"][0]["rounds"]
