"""Packages made by hand, without an exporter: tiny graphs whose right answer is known in a few lines of numpy.

`summing`: logits depend on all tokens that a row was fed, in their order, through three kinds of state.

    recurrent [B, H]       h(t) = decay * h(t-1) + embedding(t)
    conv [B, 2, H]         the two embeddings before: c(t) = e(t-2) - 2 e(t-1)
    key [B, 1, N, 1]       the token's first feature, written at its position; those up to a position are summed

With adapters, the embedding of a token is e + e A B of that of its row, so that every state depends on it.

`felt`: the same, but its mask multiplies by 0, and token BROKEN has no finite embedding.

`rope`: logits show the rope_length that a step was given, and the smallest one that is cached up to its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from partita.package.contract import AdapterInput, GraphFile, Port, Role, State
from partita.package.folder import (
    KNOWN_ANSWER,
    AdapterRecord,
    Graph,
    Manifest,
    Source,
    adapter_file,
    read_manifest,
    record_file,
    write_manifest,
)
from partita.package.records import Verification
from partita.runtime.ort.buffers import write_adapter

VOCAB, WIDTH, LENGTH, DECAY = 64, 8, 48, 0.9
BROKEN = VOCAB - 1
RANDOM = np.random.default_rng(5)
EMBEDDING = RANDOM.normal(size=(VOCAB, WIDTH)).astype(np.float32)
HEAD = RANDOM.normal(size=(WIDTH, VOCAB)).astype(np.float32)
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64, "int32": 6}

Kind = Literal["recurrent", "conv", "key"]
ALL: tuple[Kind, ...] = ("recurrent", "conv", "key")
Logits = npt.NDArray[np.float32]
PROMPTS = [[(5 * i + 1) % VOCAB for i in range(20)], [(11 * i + 2) % VOCAB for i in range(6)], [9, 4, 33]]


def adapter(name: str, rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A [width, rank] and B [rank, width] of an adapter, large enough to change tokens."""
    random = np.random.default_rng([rank, *name.encode()])
    down, up = random.normal(size=(WIDTH, rank)), random.normal(size=(rank, WIDTH))
    return down.astype(np.float32), up.astype(np.float32)


def known_logits(tokens: Sequence[int], states: Sequence[str] = ALL, adapted: tuple[str, int] | None = None) -> Logits:
    """[T, vocab]: what `summing` computes for a whole text. `adapted`: name and rank of an adapter."""
    inner, before, keys, rows = np.zeros(WIDTH), np.zeros((2, WIDTH)), 0.0, []
    down, up = adapter(*adapted) if adapted is not None else (np.zeros((WIDTH, 0)), np.zeros((0, WIDTH)))
    for token in tokens:
        now = EMBEDDING[token].astype(np.float64)
        now = now + now @ down @ up
        inner = DECAY * inner + now
        keys += now[0]
        parts = {"recurrent": inner, "conv": before[0] - 2 * before[1], "key": keys}
        rows.append(sum((parts[kind] for kind in states), np.zeros(WIDTH)) @ HEAD)
        before = np.stack([before[1], now])
    return np.array(rows, np.float32)


def known_tokens(
    prompt: Sequence[int], count: int, states: Sequence[str] = ALL, adapted: tuple[str, int] | None = None
) -> list[int]:
    """Greedy tokens of `summing` after a prompt."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(known_logits(text, states, adapted)[-1].argmax()))
    return text[len(prompt) :]


def adding(tokens: list[int], count: int) -> list[int]:
    """Tokens that follow, each the sum of all before it modulo VOCAB, as in decoders of tests/foreign."""
    text = list(tokens)
    for _ in range(count):
        text.append(sum(text) % VOCAB)
    return text[len(tokens) :]


class Drawing:
    """Nodes and constants of a graph that is being put together; every method gives the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: Any, dtype: str = "int64") -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def node(self, kind: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        result = result or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [result], name=result, **attributes))
        return result

    def column(self, value: str, axis: int) -> str:
        return self.node("Unsqueeze", value, self.constant([axis]))

    def at_positions(self, state: str, positions: str, values: str, batch: int, result: str) -> str:
        """The key state [B, 1, N, 1] with `values` [B, S] written at `positions` [B, S]."""
        shape = self.constant([batch, 1, -1, 1])
        where = self.node("Reshape", self.node("Cast", positions, to=TensorProto.INT64), shape)
        return self.node("ScatterElements", state, where, self.node("Reshape", values, shape), axis=2, result=result)

    def up_to(self, keys: str, positions: str, batch: int, beyond: float, *, felt: bool = False) -> str:
        """[B, S, N]: the keys that a position sees, and `beyond` for the others. `felt`: these times 0."""
        rows = self.constant(np.arange(LENGTH), "int32")
        seen = self.node("LessOrEqual", rows, self.column(positions, 2))
        flat = self.node("Reshape", keys, self.constant([batch, 1, LENGTH]))
        if felt:
            return self.node("Mul", flat, self.node("Cast", seen, to=TensorProto.FLOAT))
        return self.node("Where", seen, flat, self.constant(beyond, "float32"))


def summing_graph(
    drawing: Drawing, batch: int, states: Sequence[str], adapted: bool = False, *, felt: bool = False
) -> str:
    """Draw the graph of `summing`, or `felt`, and name its logits [B, S, vocab]."""
    table = EMBEDDING.copy()
    table[BROKEN] = np.inf if felt else table[BROKEN]
    embedded = drawing.node("Gather", drawing.constant(table, "float32"), "ids")
    if adapted:
        added = drawing.node("MatMul", drawing.node("MatMul", embedded, "lora_A"), "lora_B")
        embedded = drawing.node("Add", embedded, added)
    size = drawing.node("Shape", "ids", start=1, end=2)
    steps = drawing.node("Range", drawing.constant(0), drawing.node("Squeeze", size), drawing.constant(1))
    parts = []
    decay = drawing.constant(DECAY, "float32")
    last = drawing.constant([-1])
    if "recurrent" in states:
        gap = drawing.node("Sub", drawing.column(steps, 1), drawing.column(steps, 0))
        power = drawing.node("Pow", decay, drawing.node("Cast", drawing.node("Abs", gap), to=TensorProto.FLOAT))
        early = drawing.node("GreaterOrEqual", gap, drawing.constant(0))
        weights = drawing.node("Where", early, power, drawing.constant(0, "float32"))
        age = drawing.node("Cast", drawing.node("Add", steps, drawing.constant(1)), to=TensorProto.FLOAT)
        carried = drawing.node("Mul", drawing.column(drawing.node("Pow", decay, age), 1), drawing.column("past.0", 1))
        inner = drawing.node("Add", drawing.node("MatMul", weights, embedded), carried)
        drawing.node("Squeeze", drawing.node("Gather", inner, last, axis=1), drawing.constant([1]), result="present.0")
        parts.append(inner)
    if "conv" in states:
        line = drawing.node("Concat", "past.1", embedded, axis=1)
        drawing.node(
            "Slice",
            line,
            drawing.constant([-2]),
            drawing.constant([1 << 30]),
            drawing.constant([1]),
            result="present.1",
        )
        one, end = drawing.constant([1]), drawing.node("Add", size, drawing.constant([1]))
        first = drawing.node("Slice", line, drawing.constant([0]), size, one)
        second = drawing.node("Slice", line, one, end, one)
        parts += [first, drawing.node("Mul", second, drawing.constant(-2, "float32"))]
    if "key" in states:
        feature = drawing.node("Gather", embedded, drawing.constant(0), axis=2)
        keys = drawing.at_positions("past.2", "positions", feature, batch, "present.2")
        total = drawing.node("ReduceSum", drawing.up_to(keys, "positions", batch, 0.0, felt=felt), last, keepdims=1)
        parts.append(total)
    whole = drawing.constant(np.zeros(WIDTH), "float32")
    for part in parts:
        whole = drawing.node("Add", whole, part)
    return drawing.node("MatMul", whole, drawing.constant(HEAD, "float32"))


def rope_graph(drawing: Drawing, batch: int, states: Sequence[str], adapted: bool = False) -> str:
    """Logits [B, S, vocab]: 2 at the rope_length of the step, 1 at the smallest one cached up to the position."""
    given = drawing.node("Cast", "rope_length", to=TensorProto.FLOAT)
    shape = drawing.node("Shape", "ids")
    keys = drawing.at_positions("past.2", "positions", drawing.node("Expand", given, shape), batch, "present.2")
    least = drawing.node("ReduceMin", drawing.up_to(keys, "positions", batch, 1e9), axes=[-1], keepdims=1)
    numbers = drawing.constant(np.arange(VOCAB), "float32")
    now = drawing.node("Cast", drawing.node("Equal", numbers, given), to=TensorProto.FLOAT)
    cached = drawing.node("Cast", drawing.node("Equal", numbers, least), to=TensorProto.FLOAT)
    return drawing.node("Add", drawing.node("Mul", now, drawing.constant(2, "float32")), cached)


STATES: dict[Kind, tuple[str, str, Callable[[int], tuple[int, ...]]]] = {
    "recurrent": ("past.0", "present.0", lambda batch: (batch, WIDTH)),
    "conv": ("past.1", "present.1", lambda batch: (batch, 2, WIDTH)),
    "key": ("past.2", "present.2", lambda batch: (batch, 1, LENGTH, 1)),
}
GRAPHS: dict[str, Callable[[Drawing, int, Sequence[str], bool], str]] = {
    "summing": summing_graph,
    "felt": partial(summing_graph, felt=True),
    "rope": rope_graph,
}
PHASES: dict[str, tuple[tuple[str, str, int | None], ...]] = {
    "any": (("model.onnx", "any", None),),
    "one": (("model.onnx", "any", 1),),
    "pair": (("prefill.onnx", "prefill", 5), ("decode.onnx", "decode", 1)),
}
"""File, phase and S of the graphs of a package."""


def handmade(
    folder: Path,
    *,
    graph: str = "summing",
    shapes: str = "any",
    batch: int = 1,
    appends: bool = True,
    states: Sequence[str] = ALL,
    recompute_above: int | None = None,
    chooses_rows: bool = True,
    fewer: bool = False,
    adapters: Mapping[str, int] | None = None,
    apart: bool = True,
    words: bool = False,
) -> Path:
    """Write a package; `shapes` is one of PHASES, `chooses_rows` whether its graphs have an input for K, `fewer`
    whether they take fewer rows than the batch has.

    `adapters`: the rank of each; `apart`: rows may have their own, which is symbolic in graphs of any size, and has a
    fixed axis, and rank, in the others. `words`: a tokenizer whose words are w0, w1, …
    """
    folder.mkdir(exist_ok=True)
    states = ("key",) if graph == "rope" else states
    adapters = adapters or {}
    given = adapter_inputs(adapters, batch if apart else None, fixed=shapes != "any")
    files = [
        write_graph(folder, graph, file, phase, size, "B" if fewer else batch, states, chooses_rows, given)
        for file, phase, size in PHASES[shapes]
    ]
    beside = [adapter_file(name) for name in adapters]
    for name, rank in adapters.items():
        write_adapter(folder / adapter_file(name), adapter_values(name, rank, given))
    if words:
        save_words(folder)
        beside.append("tokenizer.json")
    records = [
        State(past=past, present=present, layer=0, kind=kind, shape=shape(batch), dtype="float32")
        for kind, (past, present, shape) in STATES.items()
        if kind in states
    ]
    source = Source(checkpoint="none", model_type="none", architecture="none", dtype="float32", parameters=0, files=())
    save_answer(folder, graph, states)
    write_manifest(
        folder,
        Manifest(
            created="2026-11-21T00:00:00+00:00",
            source=source,
            graph=Graph(
                files=tuple(files),
                states=tuple(records),
                opsets={"": 17},
                attention="primitives",
                appends_chunks=appends,
                precision="fp32",
                batch_size=batch,
                max_length=LENGTH,
                vocab_size=VOCAB,
                weight_bytes=0,
                cache_bytes=0,
                recompute_above=recompute_above,
                symbolic_batch=fewer,
            ),
            files=tuple(
                record_file(folder, name) for name in (KNOWN_ANSWER, *(entry.file for entry in files), *beside)
            ),
            adapters=tuple(AdapterRecord(name=name, merged=False, file=adapter_file(name)) for name in adapters),
            tokenizer="tokenizers" if words else "none",
            toolchain={},
            verification=Verification(status="unverified", detail="made by hand"),
        ),
    )
    return folder


def reseal(folder: Path) -> None:
    """List the files of a package as they are now; those that are gone are left out."""
    manifest = read_manifest(folder)
    names = [each.name for each in manifest.files if (folder / each.name).is_file()]
    write_manifest(folder, manifest.model_copy(update={"files": tuple(record_file(folder, name) for name in names)}))


def adapter_inputs(adapters: Mapping[str, int], batch: int | None, *, fixed: bool) -> tuple[AdapterInput, ...]:
    """A and B; `batch`: for rows that may have their own. None where there are no adapters."""
    if not adapters:
        return ()
    rank: int | str = max(adapters.values()) if fixed else "rank"
    rows: tuple[int | str, ...] = () if batch is None else (batch,) if fixed else ("adapter_rows",)
    return tuple(
        AdapterInput(name=name, shape=(*rows, *shape), dtype="float32", by_row=batch is not None)
        for name, shape in (("lora_A", (WIDTH, rank)), ("lora_B", (rank, WIDTH)))
    )


def adapter_values(name: str, rank: int, given: Sequence[AdapterInput]) -> dict[str, npt.NDArray[np.float32]]:
    """What an adapter has for its inputs, padded with zeros to their rank where that is fixed."""
    down, up = adapter(name, rank)
    fixed = given[0].shape[-1]
    more = fixed - rank if isinstance(fixed, int) else 0
    padded = np.pad(down, ((0, 0), (0, more))), np.pad(up, ((0, more), (0, 0)))
    return {port.name: value[None] if port.by_row else value for port, value in zip(given, padded, strict=True)}


def save_words(folder: Path) -> None:
    """A tokenizer that knows a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known.save(str(folder / "tokenizer.json"))


def write_graph(
    folder: Path,
    graph: str,
    file: str,
    phase: Any,
    size: int | None,
    batch: int | str,
    states: Sequence[str],
    choose: bool,
    given: Sequence[AdapterInput] = (),
) -> GraphFile:
    """Write one ONNX file, and say what is in it. `batch`: its name, where it is symbolic. `given`: by adapters."""
    drawing = Drawing()
    rows_of = batch if isinstance(batch, int) else 0  # 0: that of what is reshaped
    logits = GRAPHS[graph](drawing, rows_of, states, bool(given))
    rows: int | str = size or "S"
    if choose:
        rows = 1 if size else "K"
        drawing.node("Gather", logits, "rows", axis=1, result="logits")
    else:
        drawing.node("Identity", logits, result="logits")
    roles: dict[str, tuple[Role, tuple[int | str, ...], str]] = {
        "ids": ("tokens", (batch, size or "S"), "int64"),
        "positions": ("positions", (batch, size or "S"), "int32"),
        "rope_length": ("rope_length", (), "int32"),
        "rows": ("logits_rows", (rows,), "int64"),
    }
    read = {name for node in drawing.nodes for name in node.input}
    inputs = [
        Port(name=name, role=role, shape=shape, dtype=dtype)
        for name, (role, shape, dtype) in roles.items()
        if name in read
    ]
    output = Port(name="logits", role="logits", shape=(batch, rows, VOCAB), dtype="float32")
    kept = [
        (past, present, (batch, *shape(1)[1:])) for kind, (past, present, shape) in STATES.items() if kind in states
    ]
    model = helper.make_model(
        helper.make_graph(
            drawing.nodes,
            "handmade",
            [
                *(declared(port.name, port.shape, port.dtype) for port in inputs),
                *(declared(past, shape) for past, _, shape in kept),
                *(declared(port.name, port.shape) for port in given),
            ],
            [declared(output.name, output.shape), *(declared(present, shape) for _, present, shape in kept)],
            [*drawing.constants, *(default_of(port) for port in given if not size)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=10,
    )
    onnx.save(model, folder / file)
    return GraphFile(
        file=file,
        phase=phase,
        sequence_length=size,
        nodes=len(drawing.nodes),
        inputs=tuple(inputs),
        outputs=(output,),
        adapter_inputs=tuple(given),
    )


def default_of(port: AdapterInput) -> onnx.TensorProto:
    """Of rank 0; graphs of a fixed size have none."""
    sizes = [size if isinstance(size, int) else int(size == "adapter_rows") for size in port.shape]
    return numpy_helper.from_array(np.zeros(sizes, np.float32), port.name)


def declared(name: str, shape: Sequence[int | str], dtype: str = "float32") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TYPES[dtype], list(shape))


def save_answer(folder: Path, graph: str, states: Sequence[str]) -> None:
    """The known answer. For `rope` it is that of one run over prompt and tokens together."""
    prompt = [(7 * i + 3) % VOCAB for i in range(17)]
    tokens = known_tokens(prompt, 6, states)
    text = [*prompt, *tokens]
    logits = known_logits(text, states)
    if graph == "rope":
        logits = np.tile(3 * (np.arange(VOCAB) == len(text)).astype(np.float32), (len(text), 1))
    count = len(prompt)
    tensors: dict[str, npt.NDArray[Any]] = {
        "prompt": np.array(prompt),
        "tokens": np.array(tokens),
        "prefill_logits": logits[:count].copy(),
        "decode_logits": logits[count:].copy(),
    }
    save_file(tensors, folder / KNOWN_ANSWER, metadata={"reference": "numpy"})
