"""Graphs that no manifest describes, and a cache that grows: both are run by what a contract says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

from partita.contract import Contract, GraphFile, Port, State
from partita.errors import PackageError
from partita.package import MANIFEST
from partita.providers.resolve import parse_chain
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.loop import Engine
from partita.runtime.engine.request import Request
from partita.runtime.engine.running import serve
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.runner import load_runner, open_runner
from partita.runtime.sampling import greedy
from tests.runtime.handmade import VOCAB, handmade, known_tokens

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
    states=(State(past="past", present="present", layer=0, kind="key", shape=(1, 32, 1), dtype="float32"),),
    appends_chunks=True,
    batch_size=1,
    max_length=32,
    vocab_size=VOCAB,
    weight_bytes=0,
)


class Growing:
    """A state with as many rows as tokens were fed: a step reads one buffer and writes a longer one."""

    moves = True
    padding_is_safe = False

    def __init__(self, states, session) -> None:
        assert [state.past for state in states] == ["past"]
        self.now = self.next = host_buffer((1, 0, 1), "float32")

    def named(self) -> list[tuple[str, Buffer]]:
        return [("past", self.now)]

    has_parts = False

    def bind(self, binding, span=None) -> None:
        binding.bind_input("past", self.now)

    def before_run(self, binding, new_tokens) -> None:
        self.next = host_buffer((1, self.now.host.shape[1] + new_tokens, 1), "float32")
        binding.bind_input("past", self.now)
        binding.bind_output("present", self.next)

    def after_run(self, binding, take) -> None:
        self.now = self.next

    def clear(self) -> None:
        self.now = host_buffer((1, 0, 1), "float32")

    def clears(self, rows) -> bool:
        return True

    def begin(self, rows) -> None:
        self.clear()

    def wipes(self, rows) -> bool:
        return True

    def wipe(self, rows) -> None:
        self.clear()

    def rewinds(self, tokens, filled, rows) -> bool:
        return True

    def rewind(self, row, tokens) -> None:
        kept = self.now.host[:, : self.now.host.shape[1] - tokens]
        self.now = host_buffer(kept.shape, "float32")
        self.now.host[...] = kept

    def release_row(self, row) -> None:
        self.clear()

    def row_shapes(self, tokens) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"past": ((tokens, 1), "float32")}

    def saves(self, tokens, filled) -> bool:
        return tokens <= filled

    def save_row(self, row, tokens) -> dict[str, Any]:
        return {"past": self.now.host[0, :tokens].copy()}

    def loads(self, rows) -> bool:
        return True

    def load_row(self, row, states) -> None:
        self.now = host_buffer((1, *states["past"].shape), "float32")
        self.now.host[0] = states["past"]

    def look(self, outputs) -> None:
        raise AssertionError("nothing is observed here")

    def facts(self) -> tuple[()]:
        return ()

    def release(self) -> None:
        self.now = self.next = self.now.released()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(ADDING), tmp_path / "decoder.onnx")
    return tmp_path


def test_a_cache_that_grows_runs_through_the_same_loop(folder: Path) -> None:
    with open_runner(folder, CONTRACT, CPU) as runner:
        executor = Executor(CONTRACT, runner.graphs, lambda states, session: (Growing(states, session),))
        engine = Engine(executor, prefill_chunk=3)
        row = engine.join(Request([5, 9, 1, 7], greedy, 6))
        heard: list[int] = []
        while (step := engine.step()) is not None:
            heard += step.tokens[row]
        assert heard == adding([5, 9, 1, 7], 6)
        assert executor.cache.buffers[0].host.shape == (1, 9, 1), "a row for every token that was fed"
        assert engine.rewind(row, 2)
        assert [token for _ in range(2) if (step := engine.step()) for token in step.tokens[row]] == heard[-2:]
        engine.leave(row)
        engine.join(Request([3], greedy, 4))
        assert [token for _ in range(4) if (step := engine.step()) for token in step.tokens[0]] == adding([3], 4)
        prefix = engine.saved(0)
        engine.leave(0)
        text = [*prefix.tokens.tolist(), 11, 12]
        engine.join(Request(text, greedy, 4, prefix=prefix))
        assert [token for _ in range(4) if (step := engine.step()) for token in step.tokens[0]] == adding(text, 4)
        executor.release()


def test_rejected_draft_tokens_leave_a_cache_that_grows(folder: Path) -> None:
    wanted = adding([2, 3], 8)
    drafts = iter([[wanted[1], wanted[2], 63], [], [wanted[5], 63, 63], [wanted[7]]])
    with open_runner(folder, CONTRACT, CPU) as runner:
        executor = Executor(CONTRACT, runner.graphs, lambda states, session: (Growing(states, session),))

        def drafter(history: object, most: int) -> list[int]:
            return next(drafts, []) if most else []

        request = Request([2, 3], greedy, 8, drafter=drafter)
        steps = list(serve(executor, [request]))
        executor.release()
    assert [token for step in steps for token in step.tokens[0]] == wanted
    assert [len(step.tokens[0]) for step in steps] == [1, 3, 1, 2, 1]


def test_graphs_are_opened_by_a_contract_alone(tmp_path: Path) -> None:
    """What another exporter wrote has no manifest."""
    folder = handmade(tmp_path / "package", batch=2)
    with load_runner(folder, CPU) as runner:
        contract = runner.contract
    (folder / MANIFEST).unlink()
    with open_runner(
        folder, Contract.model_validate(contract.model_dump(include=set(Contract.model_fields))), CPU
    ) as runner:
        prompts = [[4, 8, 15], [16, 23, 42, 7]]
        steps = list(serve(runner.executor, [Request(prompt, greedy, 5) for prompt in prompts]))
    assert [[token for step in steps for token in step.tokens[row]] for row in range(2)] == [
        known_tokens(prompt, 5) for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file": "other.onnx"}, "other.onnx: missing from the package"),
        ({"file": "../decoder.onnx"}, "leaves the model folder"),
        ({"inputs": ()}, "inputs and outputs differ from the manifest: ids"),
    ],
)
def test_a_contract_that_the_folder_does_not_keep_is_refused(folder: Path, change, says) -> None:
    file = CONTRACT.files[0].model_copy(update=change)
    with pytest.raises(PackageError, match=says):
        open_runner(folder, CONTRACT.model_copy(update={"files": (file,)}), CPU)
