"""Who takes part: each peer with each form of the weights, how its files are made and how its child is started.

A contender is compared with those of the same width. What a peer's builder cannot write is tried all the same, and its
refusal is the result.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.records import Bits, PeerName


@dataclass(frozen=True, slots=True)
class Entry:
    """A peer with one form of the weights."""

    peer: PeerName
    form: str
    bits: Bits
    words: tuple[str, ...] = ()
    """Options of the exporter."""
    environ: dict[str, str] = field(default_factory=dict)
    """Variables of its child."""
    provider: str = "cpu"
    """Where it runs."""

    @property
    def name(self) -> str:
        """As people write it: `genai int4`."""
        return f"{self.peer} {self.form}"


ENTRIES = (
    Entry("partita", "fp32", 32, ("--precision", "fp32")),
    Entry("genai", "fp32", 32, ("-p", "fp32")),
    Entry("optimum", "fp32", 32),
    Entry("transformers", "fp32", 32),
    Entry("partita", "fp16", 16, ("--precision", "fp16")),
    Entry("partita", "bf16", 16, ("--precision", "bf16")),
    Entry("llama", "f16", 16),
    Entry("transformers", "bf16", 16, environ={"PARTITA_BENCH_DTYPE": "bfloat16"}),
    Entry("partita", "int8-b128", 8, ("--precision", "int8", "--block-size", "128")),
    Entry("partita", "int8-int8", 8, ("--precision", "int8", "--activations", "int8")),
    Entry("llama", "q8_0", 8),
    Entry("partita", "int4-b64", 4, ("--precision", "int4", "--block-size", "64")),
    Entry(
        "partita",
        "int4-b64-head8+int8",
        4,
        (
            *("--precision", "int4", "--block-size", "64", "--keep", "lm_head=int8"),
            *("--prefill-precision", "int8"),
        ),
    ),
    Entry("partita", "int4-b128", 4, ("--precision", "int4", "--block-size", "128")),
    Entry("genai", "int4", 4, ("-p", "int4")),
    Entry("llama", "q4_0", 4),
    Entry("llama", "q4_0-pure", 4),
    Entry("llama", "q4_k_m", 4),
)
"""In the order of the tables. Ours first: ratios are ours against each."""
GPU_ENTRIES = (
    Entry("partita", "fp32", 32, ("--precision", "fp32"), provider="cuda"),
    Entry("transformers", "fp32", 32, provider="cuda"),
    Entry("partita", "fp16", 16, ("--precision", "fp16"), provider="cuda"),
    Entry("partita", "fp16-replayed", 16, ("--precision", "fp16"), {"PARTITA_BENCH_CAPTURE": "1"}, provider="cuda"),
    Entry("genai", "fp16", 16, ("-p", "fp16"), provider="cuda"),
    Entry("genai", "fp16-replayed", 16, ("-p", "fp16"), {"PARTITA_BENCH_CAPTURE": "1"}, provider="cuda"),
    Entry("transformers", "fp16", 16, environ={"PARTITA_BENCH_DTYPE": "float16"}, provider="cuda"),
    Entry("partita", "int8", 8, ("--precision", "int8"), provider="cuda"),
    Entry("partita", "int4", 4, ("--precision", "int4"), provider="cuda"),
    Entry("partita", "int4-replayed", 4, ("--precision", "int4"), {"PARTITA_BENCH_CAPTURE": "1"}, provider="cuda"),
    Entry("genai", "int4", 4, ("-p", "int4"), provider="cuda"),
    Entry("genai", "int4-replayed", 4, ("-p", "int4"), {"PARTITA_BENCH_CAPTURE": "1"}, provider="cuda"),
)
"""On a GPU. `replayed`: decode steps are recorded once (CUDA graphs), ours by `--graph-capture`, onnxruntime-genai's
by `enable_cuda_graph`.
"""
PLANS = {"cpu": ENTRIES, "cuda": GPU_ENTRIES}
PEERS: tuple[PeerName, ...] = ("partita", "genai", "llama", "optimum", "transformers")
ENVIRONMENTS = {"genai": "peer-genai", "llama": "peer-llama", "optimum": "peer-optimum"}
"""Those that have one of their own; the others live in the main one."""
GPU_ENVIRONMENTS = {"genai": "peer-genai-cuda"}
REPLAYED = "-replayed"
"""The same files, run otherwise."""


def chosen(peers: list[str], forms: list[str], provider: str = "cpu") -> list[Entry]:
    """The entries of these peers; of these forms or widths (`4`), where any are named. Raises ValueError for none."""
    entries = PLANS[provider]
    known = {entry.form for entry in entries} | {str(entry.bits) for entry in entries}
    for word in forms:
        if word not in known:
            raise ValueError(f"{word} is no precision here; there are {', '.join(sorted(known))}")
    found = [
        entry
        for entry in entries
        if entry.peer in peers and (not forms or entry.form in forms or str(entry.bits) in forms)
    ]
    if not found:
        raise ValueError("no contender is left: these peers have none of these precisions")
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie."""

    work: Path
    environments: Path

    def python(self, entry: Entry) -> str:
        """The interpreter of a peer."""
        name = (ENVIRONMENTS if entry.provider == "cpu" else GPU_ENVIRONMENTS).get(entry.peer)
        return sys.executable if name is None else str(self.environments / name / "bin" / "python")

    def checkpoint(self, shape: str) -> Path:
        """The checkpoint of a shape."""
        return self.work / shape / "checkpoint"

    def model(self, shape: str, entry: Entry) -> Path:
        """What an exporter writes: a folder or a file."""
        if entry.peer == "transformers":
            return self.checkpoint(shape)
        return self.work / shape / f"{entry.peer}-{entry.form.removesuffix(REPLAYED)}{of_provider(entry)}"


def of_provider(entry: Entry) -> str:
    """What its files are told apart by."""
    return "" if entry.provider == "cpu" else f"-{entry.provider}"


def child_command(entry: Entry, places: Places) -> list[str]:
    """What serves a contender."""
    return [places.python(entry), "-m", "benchmarks.peers.children.engines", entry.peer]


def export_command(entry: Entry, shape: str, places: Places, length: int, threads: int) -> list[str] | None:
    """What writes its files; None where there is nothing to write."""
    python, source, out = places.python(entry), str(places.checkpoint(shape)), str(places.model(shape, entry))
    if entry.peer == "partita":
        words = ["--target", entry.provider, "--max-length", str(length), "--force", "--json"]
        return [python, "-m", "partita", "export", source, out, *entry.words, *words]
    if entry.peer == "genai":
        builder = [python, "-m", "onnxruntime_genai.models.builder", "-m", source, "-i", source]
        return [*builder, "-o", out, *entry.words, "-e", entry.provider, "-c", str(places.work / "cache")]
    if entry.peer == "llama":
        return [python, "-m", "benchmarks.peers.gguf_write", source, out, entry.form, "--threads", str(threads)]
    if entry.peer == "optimum":
        return [python, "-m", "optimum.exporters.onnx", "--model", source, "--task", "text-generation-with-past", out]
    return None
