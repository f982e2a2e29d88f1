"""LoRA adapters of foreign models in the Olive and onnxruntime-genai layouts; tokens match ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import partita
from partita import cli
from partita.runtime.ort.buffers import write_adapter
from tests.foreign.conftest import KNOWN, Sample, changed
from tests.foreign.reference_loop import plain_tokens

PROMPT, TOKENS = KNOWN["prompt"], KNOWN["tokens"]
DOWN, UP = "base.down_proj.lora_A", "base.down_proj.lora_B"
HIDDEN = 32


def with_lora(folder: Path, *names: str) -> Path:
    """The folder with two inputs with empty defaults at one product, and an adapter file of each name."""
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    node = next(node for node in graph.node if node.op_type == "MatMul" and "down_proj" in node.name)
    wide = next(list(tensor.dims)[0] for tensor in graph.initializer if tensor.name == node.input[1])
    shapes: dict[str, list[str | int | None]] = {DOWN: [wide, "r"], UP: ["r", HIDDEN]}
    for name, shape in shapes.items():
        sizes = [size if isinstance(size, int) else 0 for size in shape]
        graph.initializer.append(numpy_helper.from_array(np.zeros(sizes, np.float32), name))
        graph.input.append(helper.make_tensor_value_info(name, 1, shape))
    (out,), node.output[0] = list(node.output), "base_out"
    place = list(graph.node).index(node)
    added = [
        helper.make_node("MatMul", [node.input[0], DOWN], ["narrow"]),
        helper.make_node("MatMul", ["narrow", UP], ["delta"]),
        helper.make_node("Add", ["base_out", "delta"], [out]),
    ]
    for offset, each in enumerate(added):
        graph.node.insert(place + 1 + offset, each)
    onnx.save(model, folder / "model.onnx")
    for seed, name in enumerate(names):
        random = np.random.default_rng(seed)
        values = {
            DOWN: random.normal(size=(wide, 2 + seed)).astype(np.float32),
            UP: random.normal(size=(2 + seed, HIDDEN)).astype(np.float32),
        }
        write_adapter(folder / f"{name}.onnx_adapter", values)
    return folder


def adapted(folder: Path, count: int, name: str) -> list[int]:
    """Greedy tokens of ONNX Runtime with an adapter."""
    return plain_tokens(folder / "model.onnx", PROMPT, count, adapter=folder / f"{name}.onnx_adapter")


def test_adapters_are_switched_by_name(sample: Sample) -> None:
    folder = with_lora(sample("optimum"), "travel", "poems")
    wanted = {name: adapted(folder, 6, name) for name in ("travel", "poems")}
    assert len({tuple(tokens) for tokens in (*wanted.values(), TOKENS[:6])}) == 3, "an adapter changes nothing"
    with partita.load(folder, "cpu") as model:
        assert model.adapters == ("poems", "travel")
        for name, tokens in (("travel", wanted["travel"]), (None, TOKENS[:6]), ("poems", wanted["poems"])):
            answer = model.generate(PROMPT, max_new_tokens=6, stop_token_ids=(), adapter=name).run()
            assert list(answer.results[0].tokens) == tokens, name


def test_generate_and_inspect_support_adapters(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_lora(sample("optimum"), "travel")
    for name in ("config.json", "generation_config.json"):
        changed(folder / name, eos_token_id=1)
    ids = ",".join(map(str, PROMPT))
    asked = ["generate", str(folder), ids, "--token-ids", "-n", "4", "--provider", "cpu", "--adapter"]
    assert cli.run([*asked, "travel"]) == 0
    out = capsys.readouterr().out
    assert [int(word) for word in out.split()] == adapted(folder, 4, "travel")
    assert cli.run([*asked, "poems"]) == 2
    assert "choose one of travel" in capsys.readouterr().err
    found = partita.inspect(folder)
    assert found.foreign is not None
    assert (found.foreign.adapters, found.foreign.adapter_inputs) == (("travel.onnx_adapter",), 2)
    assert cli.run(["inspect", str(folder)]) == 0
    assert "travel.onnx_adapter" in capsys.readouterr().out


def test_missing_adapters_or_adapter_inputs_raise_usage_error(sample: Sample) -> None:
    for folder, said in (
        (with_lora(sample("optimum")), r"no \*.onnx_adapter"),
        (sample("merged"), "no inputs for adapter values"),
    ):
        with partita.load(folder, "cpu") as model, pytest.raises(partita.UsageError, match=said):
            model.generate(PROMPT, max_new_tokens=1, adapter="travel")


def test_adapter_of_another_model_is_rejected(sample: Sample) -> None:
    folder = with_lora(sample("optimum"), "travel")
    write_adapter(folder / "travel.onnx_adapter", {DOWN: np.zeros((5, 2), np.float32)})
    with partita.load(folder, "cpu") as model, pytest.raises(partita.PackageError, match="not an adapter of this pac"):
        model.generate(PROMPT, max_new_tokens=1, adapter="travel")
    (folder / "travel.onnx_adapter").write_bytes(b"no adapter")
    with partita.load(folder, "cpu") as model, pytest.raises(partita.PackageError, match="damaged"):
        model.generate(PROMPT, max_new_tokens=1, adapter="travel")


def test_saved_prefix_depends_on_adapter_content(sample: Sample, tmp_path: Path) -> None:
    folder, prefix = with_lora(sample("optimum"), "a", "b"), tmp_path / "p.prefix"
    with partita.load(folder, "cpu") as model:
        model.save_prefix(prefix, [5, 9, 17], adapter="a")
        alike = model.generate([40], prefix=prefix, adapter="a", max_new_tokens=4, stop_token_ids=()).run()
        whole = model.generate([5, 9, 17, 40], adapter="a", max_new_tokens=4, stop_token_ids=()).run()
        assert alike.tokens == whole.tokens
    (folder / "b.onnx_adapter").replace(folder / "a.onnx_adapter")
    with (
        partita.load(folder, "cpu") as model,
        pytest.raises(partita.GenerationError, match="saved with another package"),
    ):
        model.generate([40], prefix=prefix, adapter="a", max_new_tokens=4)
