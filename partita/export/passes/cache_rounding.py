"""Quantise the KV cache to int8: half the size of an fp16 cache, a quarter of a float32 one.

GroupQueryAttention supports it with one constant scale per channel and KV head. The package is first written and
verified with a float cache. Then it runs a text, and the scales are the largest value of each channel. Larger values at
run time saturate. Other caches stay floats.

Source: ONNX Runtime 1.31, docs/contrib_ops/cpu/gqa.md; PER_CHANNEL scales are [1, KV heads, 1, head size], float32, and
a value is round(x / scale) between -128 and 127 (checked against numpy: equal).

Cached keys are rotated: a channel pair (a, b) at position p is (a cos pθ - b sin pθ, a sin pθ + b cos pθ), so each may
become as large as the root of a² + b², which is the bound for both. For a small θ that takes thousands of positions,
more than a text has (Su et al., RoFormer, arXiv:2104.09864; ONNX Runtime, docs/ContribOperators.md, RotaryEmbedding and
GroupQueryAttention, do_rotary, for the pairs of channels).

`--cache window`: layers with sliding-window attention cache only the window. The operator drops positions outside it;
positions and cursors do not change. A sequence longer than the window cannot be rewound, so the full cache is the
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from partita import dtypes
from partita.errors import ParityError, ProviderError, UnsupportedModelError
from partita.export.checkpoint.description import Checkpoint
from partita.export.options import WINDOW, ExportOptions
from partita.export.passes.arithmetic import last_size
from partita.export.passes.manager import question as node_question
from partita.export.progress import Stage
from partita.export.target import Question, Target
from partita.export.verify import texts
from partita.export.verify.quality import OpenScorer, measured_tokens
from partita.export.verify.texts import WINDOW_TOKENS, Text
from partita.export.weights import to_ir
from partita.package.contract import state_bytes
from partita.package.folder import Graph, Manifest, record_file
from partita.package.records import QuantisedCache

OPERATOR, DOMAIN = "GroupQueryAttention", "com.microsoft"
ROUNDED = "int8"
LARGEST = 127
PAST_KEY, PAST_VALUE, KEY_SCALE = 3, 4, 12
"""Input indices; the scale of values follows that of keys."""
PRESENT = 1
"""Output index of keys; values follow."""
TEXT_TOKENS, FEWEST_TOKENS = 4096, 256
FLOAT_COPY = "with a float32 cache, before quantisation"
OPSET, HEADS, KV_HEADS, SIZE, LENGTH = 21, 4, 2, 64, 16
"""Operator set and sizes of the probed node."""

Floats = npt.NDArray[np.float32]
Scales = Mapping[str, Floats]
"""Past input of a state -> [1, KV heads, 1, head size]."""


def ask(options: ExportOptions, target: Target | None) -> None:
    """Raise ProviderError where the target does not support the cache, before anything is written."""
    if target is None:
        return
    rest = "nothing was written; omit it, or choose another `target`, e.g. cpu"
    rounds, windows = options.cache_precision is not None, options.cache == WINDOW
    setting = f"`cache={WINDOW}`" if windows else f"`cache_precision={options.cache_precision}`"
    if windows and not target.rolls:
        raise ProviderError(
            f"{setting}: {target.provider} is not known to support a window cache ({OPERATOR} with "
            f"sliding_window_cache); {rest}"
        )
    if (rounds or windows) and target.supports is not None:
        dtype = options.computing.dtype
        if not target.supports([question(dtype, window=windows)])[0]:
            kind = "sliding_window_cache" if windows else f"{dtype} activations and a cache of {ROUNDED}"
            raise ProviderError(f"{setting}: {target.provider} has no kernel for {OPERATOR} with {kind}; {rest}")


def question(dtype: str, *, window: bool = False) -> Question:
    """A model of one GroupQueryAttention in `dtype` with an int8 or a window cache, and the sizes of its inputs."""
    kind, new, past = to_ir(dtype), (1, 1, KV_HEADS * SIZE), (1, KV_HEADS, LENGTH, SIZE)
    cached = kind if window else ir.DataType.INT8
    inputs = (((1, 1, HEADS * SIZE), kind), (new, kind), (new, kind), (past, cached), (past, cached))
    cursors = (((1,), ir.DataType.INT32), ((), ir.DataType.INT32))
    given = [
        ir.Value(name=str(place), shape=ir.Shape(size), type=ir.TensorType(dtype))
        for place, (size, dtype) in enumerate((*inputs, *cursors))
    ]
    numbers = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    numbers |= {"local_window_size": LENGTH, "sliding_window_cache": 1} if window else {}
    node = ir.node(OPERATOR, given, numbers, domain=DOMAIN, num_outputs=3)
    if not window:
        one = np.ones((1, KV_HEADS, 1, SIZE), np.float32)
        _round_node(ir.Graph([], [], nodes=[node]), node, {str(PAST_KEY): one, str(PAST_VALUE): one})
    requested = node_question(node, OPSET)
    assert requested is not None
    return requested


def _nodes(graph: ir.Graph) -> list[ir.Node]:
    """GroupQueryAttention nodes whose cache is a state of the package and has no other consumer."""
    given = set(graph.inputs)
    found = (node for node in graph if node.op_type == OPERATOR and len(node.outputs) > PRESENT)
    return [node for node in found if all(value in given and len(value.uses()) == 1 for value in _pasts(node))]


def _pasts(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs[PAST_KEY : PAST_VALUE + 1] if value is not None]


def _round_node(graph: ir.Graph, node: ir.Node, scales: Scales) -> None:
    node.resize_inputs(max(len(node.inputs), KEY_SCALE + 2))
    for place, (past, kind) in enumerate(zip(_pasts(node), "kv", strict=True)):
        assert past.name is not None
        scale = ir.Value(name=f"{past.name}.scale")
        scale.const_value = ir.tensor(scales[past.name], name=scale.name)
        scale.type, scale.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(scales[past.name].shape)
        graph.register_initializer(scale)
        node.replace_input_with(KEY_SCALE + place, scale)
        node.attributes[f"{kind}_quant_type"] = ir.AttrString(f"{kind}_quant_type", "PER_CHANNEL")
        for value in (past, node.outputs[PRESENT + place]):
            value.type = ir.TensorType(ir.DataType.INT8)
    node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", dtypes.dtype_named(ROUNDED).bits or 0)


def read_text(options: ExportOptions, checkpoint: Checkpoint, manifest: Manifest, *, chosen: bool = True) -> Text:
    """The text of `calibrate`, else tokens of `quality_text` after the measured ones. Raises UsageError."""
    calibrates = options.calibrate is not None
    given = options.calibrate if calibrates else options.quality_text
    assert given is not None
    return texts.read_windows(
        Path(given),
        "calibrate" if calibrates else "quality_text",
        checkpoint,
        manifest.graph.vocab_size,
        min(WINDOW_TOKENS, manifest.graph.max_length),
        TEXT_TOKENS,
        FEWEST_TOKENS,
        after=0 if calibrates else measured_tokens(options, manifest.source.parameters),
        chosen=chosen or calibrates,
        needs_tokenizer=calibrates,
        seed=2,
    )


def apply(folder: Path, manifest: Manifest, text: Text, open_reader: OpenScorer, stage: Stage) -> Manifest:
    """Quantise the cache of a package: the new manifest. Raises UnsupportedModelError, ParityError, GenerationError."""
    models = {file.file: ir.load(folder / file.file) for file in manifest.graph.files}
    nodes = {file: _nodes(model.graph) for file, model in models.items()}
    named = set.intersection(*({past.name or "" for node in each for past in _pasts(node)} for each in nodes.values()))
    if not named:
        raise UnsupportedModelError(
            f"`cache_precision={ROUNDED}`: this model has no states kept by {OPERATOR} (attention "
            f"{manifest.graph.attention}); omit it",
            option="cache_precision",
        )
    keys = {_pasts(node)[0].name or "": rotated_pairs(node) for each in nodes.values() for node in each}
    largest: dict[str, Floats] = {}
    with open_reader(folder, manifest) as reader:
        for first in range(0, len(text.windows), reader.rows):
            taken = text.windows[first : first + reader.rows]
            reader.score(taken.tolist(), lambda row, position, logits: None)
            for past, values in reader.cached():
                if past in named:
                    found = largest_at_any(values.astype(np.float32), keys.get(past))
                    largest[past] = np.maximum(largest.get(past, found), found)
            stage.advance(len(taken))
    odd = sorted(past for past, values in largest.items() if not np.isfinite(values).all())
    if odd:
        raise ParityError(f"the cached values of {odd[0]} are not finite, so its cache cannot be quantised")
    scales = {  # [1, KV heads, 1, head size]; 1 for a channel that is always 0
        past: np.where(values > 0, values / LARGEST, np.float32(1)).astype(np.float32)[None, :, None, :]
        for past, values in largest.items()
    }
    for file, model in models.items():
        for node in nodes[file]:
            _round_node(model.graph, node, scales)
        ir.save(model, folder / file)
    return _recorded(folder, manifest, text, named)


def _recorded(folder: Path, manifest: Manifest, text: Text, named: set[str]) -> Manifest:
    """The manifest after the graphs changed."""
    states = tuple(
        state.model_copy(update={"dtype": ROUNDED}) if state.past in named else state for state in manifest.graph.states
    )
    graph: Graph = manifest.graph.model_copy(update={"states": states, "cache_bytes": state_bytes(states)})
    changed = {file.file for file in graph.files}
    files = tuple(record_file(folder, file.name) if file.name in changed else file for file in manifest.files)
    found = manifest.verification
    copy = FLOAT_COPY if found.converted_copy is None else f"{found.converted_copy}, {FLOAT_COPY}"
    cache = QuantisedCache(
        dtype=ROUNDED,
        states=len(named),
        float_states=tuple(state.past for state in states if state.past not in named),
        float_bytes=manifest.graph.cache_bytes,
        text=text.name,
        text_sha256=text.sha256,
        tokens=text.tokens,
    )
    verification = found.model_copy(update={"converted_copy": copy, "detail": f"{found.detail}; {FLOAT_COPY}"})
    changes = {"graph": graph, "files": files, "verification": verification, "quantised_cache": cache}
    return manifest.model_copy(update=changes)


KEY, COS = 1, 7
"""Input indices of GroupQueryAttention."""
LAYOUT = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""Operators allowed between a RotaryEmbedding and the attention that reads its keys."""
Pairs = tuple[slice, slice]
"""The first and the second channel of each rotated pair of a head."""


def rotated_pairs(attention: ir.Node) -> Pairs | None:
    """The rotated channels of the keys that a GroupQueryAttention caches; None without a rotation."""
    if attention.attributes.get_int("do_rotary", 0):
        return _pairs(attention.inputs[COS], attention.attributes.get_int("rotary_interleaved", 0))
    key = attention.inputs[KEY]
    node = None if key is None else key.producer()
    while node is not None and node.op_type in LAYOUT and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or (node.domain, node.op_type) != (DOMAIN, "RotaryEmbedding"):
        return None
    return _pairs(node.inputs[2], node.attributes.get_int("interleaved", 0))


def _pairs(cosines: ir.Value | None, interleaved: int) -> Pairs | None:
    """The pairs for a table [N, R/2]; None where its size is unknown."""
    count = None if cosines is None else last_size(cosines)
    if count is None:
        return None
    return (slice(0, 2 * count, 2), slice(1, 2 * count, 2)) if interleaved else (slice(count), slice(count, 2 * count))


def largest_at_any(keys: Floats, pairs: Pairs | None) -> Floats:
    """The largest absolute value of each channel of `keys` [rows, KV heads, tokens, D] at any position."""
    found: Floats = np.abs(keys).max(axis=(0, 2))
    if pairs is not None:
        one, other = pairs
        found[:, one] = found[:, other] = np.hypot(keys[..., one], keys[..., other]).max(axis=(0, 2))
    return found
