"""GPTQ, as AutoGPTQ and GPTQModel save it: integers of 2, 3, 4 or 8 bits with a scale and a zero point per group.

    X.qweight [K * bits / 32, N] int32     integers packed along K, the lowest bits first
    X.qzeros  [G, N * bits / 32] int32     zero points packed along N; format "gptq" stores them minus 1
    X.scales  [G, N] float16 or bfloat16
    X.g_idx   [K] int32                    the group of each input; with desc_act in the order of importance

    W[n, k] = scales[g, n] * (q[k, n] - z[g, n]),  g = g_idx[k]

(GPTQModel, nn_modules/qlinear/__init__.py, dequantize_weight; AutoGPTQ, qlinear_cuda_old.py.) A zero point stored as
all ones is refused: kernels differ in reading it as 0 or 2^bits.
"""

from __future__ import annotations

from partita.export.checkpoint.stored_formats import (
    FLOAT,
    INT32,
    WORD,
    GroupedWeight,
    Integers,
    StoredTensors,
    StoredWeight,
)

BITS = (2, 3, 4, 8)
PLAIN, SECOND = ("gptq", ""), ("gptq_v2",)
"""Values of `checkpoint_format` with zero points stored minus 1, and stored unchanged."""
AMBIGUOUS = (
    "has a zero point that is stored as {top}, which some kernels of this format read as 0 and others as {top} + 1; "
    "quantise the model again in the format gptq_v2"
)


def read(sources: StoredTensors) -> list[StoredWeight | None]:
    """The weights of a GPTQ checkpoint."""
    stored = str(sources.settings.get("checkpoint_format") or sources.settings.get("format") or "")
    if stored not in (*PLAIN, *SECOND):
        raise sources.unsupported_error(f"in the format {stored[:40]}", "save it in the format gptq or gptq_v2")
    stems = sources.stems(".qweight", INT32)
    bits, size = sources.number("bits"), sources.number("group_size", least=-1)
    if sources.settings.get("dynamic"):  # other settings of some modules (GPTQModel), which the shapes show
        bits = size = None
    elif sources.settings.get("sym"):
        sources.symmetric |= {f"{stem}.weight": "sym" for stem in stems}
    return [packed_weight(sources, stem, bits, size, offset=0 if stored in SECOND else 1) for stem in stems]


def packed_weight(
    sources: StoredTensors,
    stem: str,
    bits: int | None,
    size: int | None,
    *,
    order: tuple[int, ...] = (),
    offset: int = 0,
) -> StoredWeight | None:
    """A weight of packed integers with `size` inputs per group (-1: all); None where a tensor is missing.

    `bits` and `size` are those of the shapes where they are None. `order`: integers are packed along N, in this order
    (AWQ). `offset`: the zero points minus the stored ones. Raises CheckpointError.
    """
    qweight, scales = sources.take(f"{stem}.qweight", INT32), sources.take(f"{stem}.scales", FLOAT)
    qzeros = sources.take(f"{stem}.qzeros", INT32)
    g_idx = None if order else sources.optional(f"{stem}.g_idx", INT32)
    if qweight is None or scales is None or qzeros is None:
        return None
    for info in (qweight, scales, qzeros):
        if len(info.shape) != 2:
            raise sources.tensor_error(info.name, f"is {list(info.shape)}, not a matrix")
    width, rows = qweight.shape
    bits = bits or qzeros.shape[1] * WORD // max(1, rows)
    if bits not in BITS:
        raise sources.tensor_error(
            qweight.name, f"has integers of {bits} bits; {', '.join(map(str, BITS))} bits are supported"
        )
    width, rows = (width, rows * WORD // bits) if order else (width * WORD // bits, rows)
    size = size or width // max(1, scales.shape[0])
    group = width if size < 0 else size
    if group < 1:
        raise sources.tensor_error(qweight.name, f"is {list(qweight.shape)}, but {scales.name} is {list(scales.shape)}")
    if order and width % group:
        raise sources.tensor_error(qweight.name, f"has {width} inputs, not a multiple of the group size {size}")
    groups = -(-width // group)
    for info, shape in ((scales, (groups, rows)), (qzeros, (groups, rows * bits // WORD))):
        if info.shape != shape:
            raise sources.tensor_error(
                info.name,
                f"is {list(info.shape)}, but {qweight.name} {list(qweight.shape)} of {bits} bits in groups of {size} "
                f"requires {list(shape)}: bits or group size of the quantisation settings are wrong",
            )
    if g_idx is not None and g_idx.shape != (width,):
        raise sources.tensor_error(g_idx.name, f"is {list(g_idx.shape)}, but {qweight.name} has {width} inputs")
    tensors = (qweight, scales, qzeros, *([] if g_idx is None else [g_idx]))
    integers = Integers(qweight, bits, transposed=True, across=bool(order), order=order)
    zeros = Integers(qzeros, bits, transposed=True, across=True, order=order, offset=offset, excess=AMBIGUOUS)
    name, dtype = f"{stem}.weight", scales.dtype
    return GroupedWeight(name, (rows, width), tensors, dtype, bits, 1, group, integers, scales, zeros, g_idx)
