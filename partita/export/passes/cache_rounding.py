"""Quantise the KV cache to int8: half the size of an fp16 cache, a quarter of a float32 one.

GroupQueryAttention supports it with one constant scale per channel and KV head. The package is first written and
verified with a float cache. Then it runs a text, and the scales are the largest value of each channel. Larger values at
run time saturate. Other caches stay floats.

Source: ONNX Runtime 1.31, docs/contrib_ops/cpu/gqa.md; PER_CHANNEL scales are [1, KV heads, 1, head size], float32, and
a value is round(x / scale) between -128 and 127 (checked against numpy: equal).

Cached keys are rotated: a channel pair (a, b) at position p is (a cos pθ - b sin pθ, a sin pθ + b cos pθ). For a small
θ, thousands of positions pass before a small channel gets the size of its large partner. Its bound over all positions
is computed from θ instead of running a text of that length (Su et al., RoFormer, arXiv:2104.09864; ONNX Runtime,
docs/ContribOperators.md, RotaryEmbedding and GroupQueryAttention, do_rotary, for the pairs of channels).

`--cache window`: layers with sliding-window attention cache only the window. The operator drops positions outside it;
positions and cursors do not change. A sequence longer than the window cannot be rewound, so the full cache is the
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from partita import dtypes
from partita.errors import ParityError, ProviderError, UnsupportedModelError
from partita.export.checkpoint.description import Checkpoint
from partita.export.options import WINDOW, ExportOptions
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
    keys = {_pasts(node)[0].name or "": rotation_of(node) for each in nodes.values() for node in each}
    largest = _largest(folder, manifest, text, open_reader, named, keys, stage)
    scales = {  # [1, KV heads, 1, head size]; 1 for a channel that is always 0
        past: np.where(values > 0, values / LARGEST, np.float32(1)).astype(np.float32)[None, :, None, :]
        for past, values in largest.items()
    }
    for file, model in models.items():
        for node in nodes[file]:
            _round_node(model.graph, node, scales)
        ir.save(model, folder / file)
    return _recorded(folder, manifest, text, named)


def _largest(
    folder: Path,
    manifest: Manifest,
    text: Text,
    open_reader: OpenScorer,
    named: set[str],
    rotations: Mapping[str, Rotation | None],
    stage: Stage,
) -> dict[str, Floats]:
    """Past input -> the largest absolute value of every channel [KV heads, head size]."""
    length = manifest.graph.max_length
    largest: dict[str, Floats] = {}
    with open_reader(folder, manifest) as reader:
        for first in range(0, len(text.windows), reader.rows):
            taken = text.windows[first : first + reader.rows]
            reader.score(taken.tolist(), lambda row, position, logits: None)
            for past, values in reader.cached():
                if past in named:
                    found = largest_at_any(values.astype(np.float32), rotations.get(past), length)
                    largest[past] = np.maximum(largest.get(past, found), found)
            stage.advance(len(taken))
    odd = sorted(past for past, values in largest.items() if not np.isfinite(values).all())
    if odd:
        raise ParityError(f"the cached values of {odd[0]} are not finite, so its cache cannot be quantised")
    return largest


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


KEY, COS, SIN = 1, 7, 8
"""Input indices of GroupQueryAttention."""
LAYOUT = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""Operators allowed between a RotaryEmbedding and the attention that reads its keys."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of an attention's keys."""

    interleaved: bool
    """Pairs are neighbours; otherwise the first half of the rotated channels pairs with the second."""
    angles: npt.NDArray[np.float64]
    """Angle of each pair per position, in radians."""

    @property
    def pairs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Channels of a head that form pairs."""
        count = len(self.angles)
        first = 2 * np.arange(count) if self.interleaved else np.arange(count)
        return first, first + (1 if self.interleaved else count)


def rotation_of(attention: ir.Node) -> Rotation | None:
    """The rotation of the keys that a GroupQueryAttention caches; None without one, or with computed tables."""
    if attention.attributes.get_int("do_rotary", 0):
        return _rotation(attention, attention.inputs[COS], attention.inputs[SIN], "rotary_interleaved")
    key = attention.inputs[KEY]
    node = None if key is None else key.producer()
    while node is not None and node.op_type in LAYOUT and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or (node.domain, node.op_type) != ("com.microsoft", "RotaryEmbedding"):
        return None
    return _rotation(node, node.inputs[2], node.inputs[3], "interleaved")


def _rotation(node: ir.Node, cos: ir.Value | None, sin: ir.Value | None, interleaved: str) -> Rotation | None:
    values = [value.const_value for value in (cos, sin) if value is not None and value.const_value is not None]
    tables = [value.numpy() for value in values]
    if len(tables) != 2 or any(table.ndim != 2 or len(table) < 2 for table in tables):
        return None
    step = [table[1].astype(np.float64) for table in tables]
    return Rotation(bool(node.attributes.get_int(interleaved, 0)), np.arctan2(step[1], step[0]))


def largest_at_any(keys: Floats, rotation: Rotation | None, length: int) -> Floats:
    """The largest absolute value of each channel of `keys` [rows, KV heads, tokens, D] at any of `length` positions."""
    found: Floats = np.abs(keys).max(axis=(0, 2))
    if rotation is None:
        return found
    one, other = rotation.pairs
    a, b = keys[..., one].astype(np.float64), keys[..., other].astype(np.float64)
    at = np.arange(keys.shape[2], dtype=np.float64)[:, None] * rotation.angles
    begin = np.arctan2(b, a) - at
    end = begin + (length - 1) * rotation.angles
    low, high = np.minimum(begin, end), np.maximum(begin, end)
    size = np.hypot(a, b)
    for channels, shift in ((one, 0.0), (other, np.pi / 2)):  # sin x = cos(x - π/2)
        first, last = low - shift, high - shift
        crest = np.floor(last / np.pi) >= np.ceil(first / np.pi)  # |cos| is 1 at every multiple of π
        most = np.where(crest, 1.0, np.maximum(np.abs(np.cos(first)), np.abs(np.cos(last))))
        found[:, channels] = np.maximum(found[:, channels], (size * most).max(axis=(0, 2)))
    return found
