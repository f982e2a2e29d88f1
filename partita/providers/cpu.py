"""The CPU execution provider, part of every ONNX Runtime build.

ONNX Runtime 1.31.1 ignores its provider options. The options here are Partita's; `runtime/chain/cpu_settings.py` sets
them through the session configuration and environment variables.
"""

from dataclasses import replace

from partita.observations.patterns import ABSENT, PRESENT, KernelRow
from partita.providers.base import Option, PackedWeights, Provider, choice
from partita.remedies import Remedy

PACKED, QUERY, HEADS = ("MatMulNBits",), ("GroupQueryAttention",), ("MultiHeadAttention",)
INTEGERS = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
LEVELS = (ABSENT, "0", "1", "2", "3")
"""Values of accuracy_level that compute in float32."""
UNPACKED = r"unpacked compute mode"
"""MatMulNBits dequantises the whole matrix in every run (contrib_ops/cpu/quantization/matmul_nbits.cc, `Compute`)."""
INT8 = "packed weights, int8 products"
FLOATS = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "Conv")
ARM = "asimddp"
KLEIDIAI = "use of KleidiAI (ONNX Runtime does not report it; compare times with mlas.disable_kleidiai=1)"
VNNI = "use of {integer_unit} (the processor has it; ONNX Runtime does not report it)"
UNREPORTED = {**dict.fromkeys(("amx_int8", "avx512_vnni", "avx_vnni"), VNNI), ARM: KLEIDIAI}
"""Instruction set -> what neither the log nor the profile of ONNX Runtime reports about a product."""
STRINGS = "1.31.1: strings of the library"
TIMED = "1.31.1: log and time of one-node sessions"
TOGGLED = "1.31.1: outputs with and without {}"
FLASH_OFF, HEADS_FLASH_OFF = "ORT_GQA_DISABLE_FLASH_ATTENTION", "ORT_DISABLE_FLASH_ATTENTION"
SATURATES = "1.31.1: products of pairs do not saturate"
GRAPH = "1.31.1: optimised graph of a Conv"
PROBE_4 = ("accuracy_level", "4")
EXPORT = ("partita", "export", "{checkpoint}", "{out}")
LEVEL_4 = Remedy(
    "set its attribute accuracy_level to 4",
    alternative=Remedy("export the checkpoint for this provider", (*EXPORT, "{same_precision}", "--target", "cpu")),
)
WEIGHT_ONLY = Remedy(
    "quantise the weight to MatMulNBits",
    alternative=Remedy("export the checkpoint again", (*EXPORT, "--precision", "int4", "--attention", "gqa")),
)
SORTED = Remedy("sort the columns of the weight by g_idx and remove the input, as an export of a GPTQ checkpoint does")
INTEGER_ZEROS = Remedy("round the zero points to integers (uint8), or quantise symmetrically")
CONSTANT = Remedy("store the weight and its scales as initializers")
OTHER_BLOCKS = Remedy("quantise with blocks of 32, 64 or 128")
SINGLE = Remedy(
    "use a float32 model",
    alternative=Remedy("export the checkpoint again", (*EXPORT, "--precision", "fp32", "--target", "cpu")),
)
GROUPED = Remedy(
    "use GroupQueryAttention",
    alternative=Remedy("export the checkpoint again", (*EXPORT, "{same_precision}", "--attention", "gqa")),
)


def unpacked(cause: str, remedy: Remedy, probe: tuple[str, str] | None, **when: tuple[str, ...]) -> KernelRow:
    """MatMulNBits without a kernel for packed weights."""
    cause = f"{cause}, so the whole matrix is dequantised in every run"
    return KernelRow(PACKED, "unpacked weights", TIMED, when, UNPACKED, cause=cause, remedy=remedy, probe=probe)


def naive(operators: tuple[str, ...], variable: str, **when: str) -> KernelRow:
    """Attention that computes all scores at once; `variable` turns flash off."""
    return KernelRow(
        operators, "naive", TOGGLED.format(variable), when={name: (value,) for name, value in when.items()}
    )


KERNELS = (
    unpacked("g_idx has no kernel for packed weights", SORTED, ("input4", ABSENT), input4=(PRESENT,)),
    unpacked(
        "float zero points have no kernel for packed weights",
        INTEGER_ZEROS,
        ("input3", ABSENT),
        input3=("float32", "float16"),
    ),
    unpacked("a weight that is not a constant cannot be packed", CONSTANT, None, constant1=(ABSENT,)),
    unpacked(
        "8-bit and 2-bit weights have no packed kernel with float32 products",
        LEVEL_4,
        PROBE_4,
        bits=("8", "2"),
        accuracy_level=LEVELS,
    ),
    unpacked(
        "2-bit weights have no packed kernel for this block size",
        OTHER_BLOCKS,
        None,
        bits=("2",),
        block_size=("16", "256"),
    ),
    KernelRow(
        PACKED,
        "packed weights, float32 products",
        "1.31.1: time of one-node sessions, 2 to 5 times that of level 4 for one token",
        when={"bits": (ABSENT, "4"), "accuracy_level": LEVELS},
        cause="accuracy_level below 4 computes in float32, which is slower for few tokens",
        remedy=LEVEL_4,
        probe=PROBE_4,
    ),
    *(
        KernelRow((operator,), path, TIMED, {"accuracy_level": ("4",), "integer_unit": (unit,)}, unknown=text)
        for operator, path in (("MatMulNBits", INT8), ("QMoE", "int8 products"))
        for unit, text in UNREPORTED.items()
    ),
    KernelRow(PACKED, INT8, TIMED, when={"accuracy_level": ("4",)}),
    KernelRow(
        ("MatMulBnb4",),
        "dequantised weights",
        "1.31.1: 12 to 40 times the time of MatMulNBits for one token",
        cause="it has no packed kernel, so the whole matrix is dequantised in every run",
        remedy=WEIGHT_ONLY,
    ),
    KernelRow(
        ("QMoE",),
        "float32 products",
        "1.31.1: time of one-node sessions, 3 times that of level 4 for one token",
        when={"accuracy_level": LEVELS},
        cause="accuracy_level below 4 computes in float32",
        remedy=LEVEL_4,
        probe=PROBE_4,
    ),
    KernelRow(("QMoE",), "int8 products", "1.31.1: time of one-node sessions", when={"accuracy_level": ("4",)}),
    KernelRow(
        ("DequantizeLinear",),
        "dequantised weights",
        "1.31.1: optimised graph, and 15 to 55 times the time of MatMulNBits for one token",
        when={"constant0": ("yes",), "rank0": ("2", "3")},
        cause="ONNX Runtime did not fuse it with its reader, so the whole weight is dequantised in every run",
        remedy=WEIGHT_ONLY,
    ),
    KernelRow(("DequantizeLinear",), "values", "1.31.1: it reads no weight"),
    KernelRow(
        ("Cast",),
        "16-bit values cast to float32",
        "1.31.1: inserted in half-precision graphs only",
        when={"prefix": ("InsertedPrecisionFreeCast",)},
        cause="the CPU provider has no half-precision kernel for a neighbour, so values are cast in every run",
        remedy=SINGLE,
    ),
    KernelRow(("Cast",), "cast of the model", "1.31.1: it is in the file"),
    *(naive(QUERY, FLASH_OFF, **{name: PRESENT}) for name in ("softcap", "input11")),
    *(naive(QUERY, FLASH_OFF, **{name: "float16"}) for name in ("output0", "input3")),
    naive(QUERY, FLASH_OFF, smooth_softmax="1"),
    naive(QUERY, FLASH_OFF, attention="naive"),
    KernelRow(QUERY, "flash", TOGGLED.format(FLASH_OFF)),
    naive(HEADS, HEADS_FLASH_OFF, unidirectional="1"),
    *(naive(HEADS, HEADS_FLASH_OFF, **{name: PRESENT}) for name in ("input4", "input5", "input6")),
    KernelRow(HEADS, "flash", TOGGLED.format(HEADS_FLASH_OFF)),
    KernelRow(
        ("Attention",),
        "naive, whole cache",
        "1.31.1: time of one-node sessions grows with the buffer, 7 times GroupQueryAttention at 15 of 8,192 tokens",
        when={"domain": (ABSENT,), "input6": (PRESENT,)},
        cause="it computes all positions of the cache, also those without a token",
        remedy=GROUPED,
    ),
    naive(("Attention",), HEADS_FLASH_OFF, domain=ABSENT),
    *(
        KernelRow(INTEGERS, f"int8 products ({unit})", SATURATES, when={"integer_unit": (unit,)})
        for unit in ("amx_int8", "avx512_vnni", "avx_vnni")
    ),
    KernelRow(("Conv",), "NCHWc layout", GRAPH, when={"domain": ("com.microsoft.nchwc",)}),
    KernelRow(("ReorderInput", "ReorderOutput"), "layout conversion", GRAPH),
    # No ARM machine was available: that KleidiAI is not reported is from the strings of the library.
    KernelRow((*INTEGERS, *FLOATS), "KleidiAI or MLAS", STRINGS, when={"integer_unit": (ARM,)}, unknown=KLEIDIAI),
)

PROVIDER = Provider(
    name="cpu",
    ort_name="CPUExecutionProvider",
    wheels=("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu"),
    preferred_attention="gqa",
    alternating_options={"spinning_after": "0"},  # spinning threads slow down those of the other package
    rolling_caches=True,  # verified against a full cache, ONNX Runtime 1.31.1
    # Level 4 has the only fast kernels (core/mlas/lib/qnbitgemm.h), which store a sum per block, so that zero points
    # cost nothing: with blocks of 64, scale and sum (8 bytes) make 5 bits per 4-bit weight.
    packed_weights=PackedWeights(
        symmetric=False, accuracy_level=4, bias=True, gather=True, experts=True, block_sizes={4: 64, 8: 128}
    ),
    options=tuple(
        replace(option, partita_option=True)
        for option in (
            choice("attention", "auto flash naive", "attention algorithm; auto: by processor and head size"),
            Option("huge_pages", "bool", "1", "put packed weights into pages of 2 MiB (Linux)"),
            Option("parallel_packing", "bool", "1", "pack weights with all threads"),
            Option("spinning", "bool", "", "threads wait for work in a loop; default 1 unless threads exceed cores"),
            Option("spinning_after", "bool", "1", "threads keep spinning for a while after a run"),
        )
    ),
    rank=1,
    kernels=KERNELS,
    remedies={
        "not_in_build": Remedy(
            "every ONNX Runtime has the CPU provider; reinstall it",
            ("pip", "install", "--force-reinstall", "onnxruntime"),
        )
    },
)
