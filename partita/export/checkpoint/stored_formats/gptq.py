"""GPTQ and AWQ: integers packed in int32 words, with a scale and a zero point per group.

GPTQ, as AutoGPTQ and GPTQModel save it (nn_modules/qlinear/__init__.py, dequantize_weight), 2, 3, 4 or 8 bits:

    X.qweight [K * bits / 32, N] int32     integers packed along K, the lowest bits first
    X.qzeros  [G, N * bits / 32] int32     zero points packed along N; format "gptq" stores them minus 1
    X.scales  [G, N] float16 or bfloat16
    X.g_idx   [K] int32                    the group of each input; with desc_act in the order of importance

    W[n, k] = scales[g, n] * (q[k, n] - z[g, n]),  g = g_idx[k]

A zero point stored as all ones is refused: kernels differ in reading it as 0 or 2^bits.

AWQ, as AutoAWQ saves it for its GEMM kernels (awq/utils/packing_utils.py): 4 bits, qweight [K, N / 8] packed along N,
nibble i of a word is number ORDER[i], zero points stored unchanged. X.scales without integers divide the output of an
activation (awq/modules/act.py); they are not supported.
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
AWQ_BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read(sources: StoredTensors) -> list[StoredWeight]:
    """The weights of a GPTQ or AWQ checkpoint."""
    stems = sources.stems(".qweight", INT32)
    if sources.method == "AWQ":
        return _read_awq(sources, stems)
    stored = str(sources.settings.get("checkpoint_format") or sources.settings.get("format") or "")
    if stored not in (*PLAIN, *SECOND):
        raise sources.unsupported_error(f"in the format {stored[:40]}", "save it in the format gptq or gptq_v2")
    bits, size = sources.number("bits"), sources.number("group_size", least=-1)
    if sources.settings.get("dynamic"):  # other settings of some modules (GPTQModel), which the shapes show
        bits = size = None
    elif sources.settings.get("sym"):
        sources.symmetric |= {f"{stem}.weight": "sym" for stem in stems}
    return [_packed(sources, stem, bits, size, offset=0 if stored in SECOND else 1) for stem in stems]


def _read_awq(sources: StoredTensors, stems: list[str]) -> list[StoredWeight]:
    version, bits = str(sources.settings.get("version") or "gemm").lower(), sources.number("bits", "w_bit")
    if version != "gemm":
        raise sources.unsupported_error(f"packed for the kernels {version[:40]}", "save it in AWQ's version gemm")
    if bits not in (None, AWQ_BITS):
        raise sources.unsupported_error(f"with {bits} bits", f"only {AWQ_BITS} bits are supported")
    for stem in sources.stems(".scales"):
        if not any(f"{stem}.{part}" in sources.tensors for part in ("qweight", "qzeros")):
            raise sources.unsupported_error(
                f"with activation scales ({stem}.scales)",
                "activation scales are not supported; export the unquantised checkpoint",
            )
    if sources.settings.get("zero_point") is False:
        sources.symmetric |= {f"{stem}.weight": "zero_point false" for stem in stems}
    size = sources.number("group_size", "q_group_size", least=-1)
    return [_packed(sources, stem, AWQ_BITS, size, order=ORDER) for stem in stems]


def _packed(
    sources: StoredTensors,
    stem: str,
    bits: int | None,
    size: int | None,
    *,
    order: tuple[int, ...] = (),
    offset: int = 0,
) -> StoredWeight:
    """A weight of packed integers with `size` inputs per group (-1: all).

    `bits` and `size` are those of the shapes where they are None. `order`: integers are packed along N, in this order
    (AWQ). `offset`: the zero points minus the stored ones. Raises CheckpointError.
    """
    qweight, scales = sources.take(f"{stem}.qweight", INT32), sources.take(f"{stem}.scales", FLOAT)
    qzeros = sources.take(f"{stem}.qzeros", INT32)
    g_idx = None if order else sources.optional(f"{stem}.g_idx", INT32)
    for info in (qweight, scales, qzeros):
        if len(info.shape) != 2:
            raise sources.tensor_error(info.name, f"is {list(info.shape)}, not a matrix")
    width, rows = qweight.shape
    bits = bits or qzeros.shape[1] * WORD // max(1, rows)
    if bits not in BITS:
        raise sources.tensor_error(qweight.name, f"has integers of {bits} bits; 2, 3, 4, 8 bits are supported")
    width, rows = (width, rows * WORD // bits) if order else (width * WORD // bits, rows)
    size = size or max(1, width // max(1, scales.shape[0]))
    group = max(1, width) if size < 0 else size
    groups = -(-width // group)
    detail = f"of {bits} bits in groups of {size}"
    sources.check_shape(scales, (groups, rows), by=qweight, detail=detail)
    sources.check_shape(qzeros, (groups, rows * bits // WORD), by=qweight, detail=detail)
    if g_idx is not None:
        sources.check_shape(g_idx, (width,), by=qweight)
    elif order and width % group:
        raise sources.tensor_error(qweight.name, f"has {width} inputs, not a multiple of the group size {size}")
    tensors = (qweight, scales, qzeros, *([] if g_idx is None else [g_idx]))
    integers = Integers(qweight, bits, transposed=True, across=bool(order), order=order)
    zeros = Integers(qzeros, bits, transposed=True, across=True, order=order, offset=offset)
    name, dtype = f"{stem}.weight", scales.dtype
    return GroupedWeight(name, (rows, width), tensors, dtype, bits, 1, group, integers, scales, zeros, g_idx)
