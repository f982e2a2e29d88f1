"""Graphs without a manifest and growing KV caches run as their contract describes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita.errors import GenerationError, PackageError
from partita.package.contract import Contract, GraphFile, Port, State
from partita.package.folder import FileRecord, read_manifest
from partita.providers.resolve import parse_chain
from partita.runtime.generate.choice.drafting import no_speculation_reason
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import Runner, load_runner
from tests.runtime.handmade_packages import VOCAB, handmade

CPU = parse_chain("cpu")
ADDING = """<ir_version: 10, opset_import: ["" : 17]>
g (int64[1,S] ids, float[1,P,1] past) => (float[1,S,64] logits, float[1,T,1] present)
<int64[1] last = {2}, int64[1] one = {1}, int64[1] huge = {1000000}, int64[1] time = {1}, int64 axis = {1},
 int64 depth = {64}, float[2] values = {0, 1}>
{
  numbers = Cast<to = 1>(ids)
  new = Unsqueeze(numbers, last)
  present = Concat<axis = 1>(past, new)
  sums = CumSum(present, axis)
  size = Shape<start = 1, end = 2>(ids)
  begin = Neg(size)
  own = Slice(sums, begin, huge, time, one)
  flat = Squeeze(own, last)
  whole = Cast<to = 7>(flat)
  next = Mod(whole, depth)
  logits = OneHot(next, depth, values)
}"""
"""What follows a token is the sum of all tokens to it, modulo 64; the cache has a number for each and grows by them."""


def adding(tokens: list[int], count: int) -> list[int]:
    """Tokens that follow."""
    text = list(tokens)
    for _ in range(count):
        text.append(sum(text) % VOCAB)
    return text[len(tokens) :]


CONTRACT = Contract(
    files=(
        GraphFile(
            file="decoder.onnx",
            phase="any",
            sequence_length=None,
            nodes=11,
            inputs=(Port(name="ids", role="tokens", shape=(1, "S"), dtype="int64"),),
            outputs=(Port(name="logits", role="logits", shape=(1, "S", VOCAB), dtype="float32"),),
        ),
    ),
    states=(
        State(past="past", present="present", layer=0, kind="key", shape=(1, 32, 1), dtype="float32", growing_axis=1),
    ),
    appends_chunks=True,
    batch_size=1,
    max_length=32,
    vocab_size=VOCAB,
    weight_bytes=0,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = handmade(tmp_path / "package")
    onnx.save(parser.parse_model(ADDING), package / "decoder.onnx")
    return package


def opened(folder: Path, contract: Contract) -> Runner:
    """The graphs of a contract; the rest of the manifest is a handmade package's."""
    manifest = read_manifest(folder)
    graph = manifest.graph.model_copy(update={name: getattr(contract, name) for name in Contract.model_fields})
    listed = FileRecord(name="decoder.onnx", size_bytes=(folder / "decoder.onnx").stat().st_size, sha256="")
    files = (*manifest.files, listed)
    return load_runner(folder, CPU, manifest=manifest.model_copy(update={"graph": graph, "files": files}))


@pytest.mark.parametrize("batch", [1, 2])
def test_growing_cache_supports_reuse_and_prefix_of_a_single_sequence(folder: Path, batch: int) -> None:
    """All rows share a length, so every row receives the same tokens."""
    text = ADDING.replace("[1,S] ids, float[1,P,1]", f"[{batch},S] ids, float[{batch},P,1]")
    text = text.replace("[1,T,1]", f"[{batch},T,1]").replace("float[1,S,64]", f"float[{batch},S,64]")
    onnx.save(parser.parse_model(text), folder / "decoder.onnx")
    (file,), (state,) = CONTRACT.files, CONTRACT.states
    ports = {
        "inputs": (file.inputs[0].model_copy(update={"shape": (batch, "S")}),),
        "outputs": (file.outputs[0].model_copy(update={"shape": (batch, "S", VOCAB)}),),
    }
    changes = {
        "batch_size": batch,
        "files": (file.model_copy(update=ports),),
        "states": (state.model_copy(update={"shape": (batch, 32, 1)}),),
    }

    def answer(engine: GenerationLoop, prompt: list[int], count: int) -> list[int]:
        row = engine.add_request(Request(prompt, greedy, count))
        with pytest.raises(GenerationError, match="no row of the batch is free"):
            engine.add_request(Request([3], greedy, 4))
        return [token for step in iter(engine.step, None) for token in step.tokens[row]]

    with opened(folder, CONTRACT.model_copy(update=changes)) as runner:
        engine = GenerationLoop(runner, prefill_chunk=3)
        assert answer(engine, [5, 9, 1, 7], 6) == adding([5, 9, 1, 7], 6)
        assert runner.cache.buffers[0].value.shape() == [batch, 9, 1], "a row for every token that was fed"
        assert not runner.cache.rewind(0, 3)
        assert no_speculation_reason(runner) == "its states cannot be rewound: past"
        engine.release_row(0)
        assert answer(engine, [3], 4) == adding([3], 4)
        prefix = engine.save_prefix(0)
        engine = GenerationLoop(runner, shares=True)
        engine.prefixes.add(prefix)
        prompt = [*prefix.tokens.tolist(), 11, 12]
        assert answer(engine, prompt, 4) == adding(prompt, 4)
        assert engine.prefixes.reused_tokens == len(prefix.tokens)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file": "other.onnx"}, "other.onnx: missing from the package"),
        ({"file": "../decoder.onnx"}, "is outside the model folder"),
        ({"inputs": ()}, "inputs and outputs differ from the manifest: ids"),
    ],
)
def test_contract_mismatch_with_model_folder_raises_package_error(folder: Path, change, says) -> None:
    file = CONTRACT.files[0].model_copy(update=change)
    with pytest.raises(PackageError, match=says):
        opened(folder, CONTRACT.model_copy(update={"files": (file,)}))
