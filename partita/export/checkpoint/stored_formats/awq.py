"""AWQ, as AutoAWQ saves it for its GEMM kernels: 4-bit integers with a scale and a zero point per group.

    X.qweight [K, N / 8] int32     integers packed along N; nibble i of a word, from the lowest, is number ORDER[i]
    X.qzeros  [G, N / 8] int32     zero points, packed in the same way
    X.scales  [G, N] float16

    W[n, k] = scales[g, n] * (q[k, n] - z[g, n]),  g = k / group size

X.scales without integers divide the output of an activation (awq/modules/act.py); they are not supported.

(AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.)
"""

from __future__ import annotations

from partita.export.checkpoint.stored_formats import INT32, StoredTensors, StoredWeight
from partita.export.checkpoint.stored_formats.gptq import packed_weight

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read(sources: StoredTensors) -> list[StoredWeight | None]:
    """The weights of an AWQ checkpoint."""
    version = str(sources.settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise sources.unsupported_error(f"packed for the kernels {version[:40]}", "save it in AWQ's version gemm")
    bits = sources.number("bits", "w_bit")
    if bits not in (None, BITS):
        raise sources.unsupported_error(f"with {bits} bits", f"only {BITS} bits are supported")
    size = sources.number("group_size", "q_group_size", least=-1)
    for stem in sources.stems(".scales"):
        if any(f"{stem}.{part}" in sources.tensors for part in ("qweight", "qzeros")):
            continue  # the scales of a weight that lacks one of its tensors
        raise sources.unsupported_error(
            f"with activation scales ({stem}.scales)",
            "activation scales are not supported; export the unquantised checkpoint",
        )
    stems = sources.stems(".qweight", INT32)
    if sources.settings.get("zero_point") is False:
        sources.symmetric |= {f"{stem}.weight": "zero_point false" for stem in stems}
    return [packed_weight(sources, stem, BITS, size, order=ORDER) for stem in stems]
