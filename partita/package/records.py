"""Manifest records of how a package was made: verification, weights, cache, quality, target.

They are for people; the data for running is in `folder` and `contract`.
"""

from __future__ import annotations

from typing import Literal

from partita.package.contract import Record


class StepError(Record):
    """The error of one step of the known answer."""

    step: str
    """prefill, chunked prefill, or decode 1 .. n; prefixed by the name of an adapter and a colon, if any."""
    output: str
    max_abs_error: float
    max_rel_error: float
    """max |ours - reference| / max |reference| over the output."""
    tokens_equal: bool
    """Greedy tokens match in every row with a clear maximum; see `Verification.near_ties`."""
    rerouted: int = 0
    """Excluded positions; see `Verification.rerouted`."""


class Verification(Record):
    """Whether the graph matches its source model, and how that was verified."""

    status: Literal["verified", "unverified"]
    detail: str
    """How it was verified, or why it was not."""
    provider: str | None = None
    converted_copy: str | None = None
    """The copy that was replayed instead of the package's graphs, where the provider lacks kernels; null for the
    package itself."""
    proof: str | None = None
    """The proof of the graph where 16-bit rounding changes the chosen experts; null where none was needed."""
    reference: str | None = None
    """The reference model that computed the known answer."""
    tolerance: float | None = None
    """Maximum max_rel_error that passes."""
    near_ties: int = 0
    """Compared positions at which the reference's two best logits are closer than the tolerance."""
    rerouted: int = 0
    """Compared positions that exceed the tolerance and are excluded, because rounding changes the chosen experts. Fewer
    than half."""
    not_run: tuple[str, ...] = ()
    """Graph files that the known answer did not run: their chunk is longer than its prompt."""
    not_exercised: tuple[str, ...] = ()
    """Windows, attention chunks, rotary frequencies and graphs that the known answer is too short for."""
    steps: tuple[StepError, ...] = ()

    @property
    def headline(self) -> str:
        """The status, and the parts that a verified package was not verified for."""
        missed = self.not_exercised if self.status == "verified" else ()
        return f"{self.status} (not exercised: {'; '.join(missed)})" if missed else self.status


class PackedKind(Record):
    """Weights with one packing."""

    precision: str
    """int4 or int8."""
    block_size: int
    """Weights of a row that share a scale, and a zero point where there are any; 0: the whole row."""
    zero_points: bool
    """Each block has an integer zero point; False: it is the middle of the range."""
    quantiser: str
    weights: int
    parameters: int
    size_bytes: int
    """Including scales and zero points."""


class Calibration(Record):
    """The text on which weights were calibrated."""

    quantiser: str
    text: str
    """Name of the file."""
    text_sha256: str
    tokens: int
    """Number of tokens that the source model read."""
    window_tokens: int
    """Tokens per window, each with an empty cache."""
    not_calibrated: tuple[str, ...] = ()
    """Quantised weights that were not calibrated, by module or tensor, because no module multiplies by them directly.
    """


class UnitCost(Record):
    """The loss by quantising some weights alone."""

    modules: tuple[str, ...]
    kl_mean: float
    """Divergence from the source model on the search text, in nats."""


class MeasuredMix(Record):
    """A mix of bits that was measured on the search text."""

    applied_steps: int
    """The number of applied steps, each of which gives one unit more bits."""
    kl_mean: float
    perplexity_ratio: float


class Mix(Record):
    """How the bits of weights were chosen."""

    text: str
    """Name of the search text."""
    text_sha256: str
    tokens: int
    held_out: bool
    """The quality of the package was measured on other text."""
    max_perplexity_ratio: float | None
    max_weight_size: int | None
    """Bytes."""
    steps: int
    """The number of all steps, from the bits of the package to float32."""
    applied_steps: int
    """The number of applied steps."""
    costs: tuple[UnitCost, ...]
    """The largest first."""
    measured: tuple[MeasuredMix, ...]


class PackedWeights(Record):
    """The weights of an int8 or int4 package."""

    kinds: tuple[PackedKind, ...]
    accuracy_level: int
    """Attribute of MatMulNBits: 4 allows 8-bit activations."""
    form: str = "matmul_nbits"
    """A name of `export/quantise/plan.py`, FORMS."""
    operators: str = "MatMulNBits and GatherBlockQuantized"
    """The operators that read them, in words."""
    activations: str = "fp32"
    """Activations of quantised products: fp32, fp16, or int8 where the graph quantises them."""
    keep: tuple[str, ...] = ()
    """Settings of single modules, as MODULE=PRECISION."""
    not_packed: tuple[str, ...] = ()
    """Weights that stayed floats without a setting, and their operators."""
    calibration: Calibration | None = None
    """null: no calibration."""
    mix: Mix | None = None
    """null: the bits were not searched."""


class PrefillChoice(Record):
    """The decision on a separate prefill graph in another precision, with its reason."""

    requested: str
    """The requested precision: int8."""
    reason: str
    packed: PackedWeights | None = None
    """The weights that the prefill graph alone reads; the others are in `Manifest.packed`."""


class HalfPrecisionWeights(Record):
    """Matrices that are stored in 16 bits and computed in float32."""

    dtype: str
    """dtype of the stored matrices."""
    weights: int
    rounded: int
    """Number of matrices that were rounded; 0: lossless."""
    compared: Literal["model", "rounded"] = "model"
    """The model that the graph was compared with, within the float32 tolerance: the source model, or with its weights
    rounded in the same way."""


class QuantisedCache(Record):
    """Keys and values that are cached as integers, with one scale per channel and KV head."""

    dtype: str
    states: int
    """Number of quantised states."""
    float_states: tuple[str, ...] = ()
    """Past inputs of states that stayed floats."""
    float_bytes: int
    """Size of all state buffers without quantisation."""
    text: str
    """Name of the calibration text."""
    text_sha256: str
    tokens: int


class PhaseQuality(Record):
    """The quality of one graph of a pair."""

    phase: str
    """prefill or decode."""
    tokens: int
    perplexity_ratio: float
    top1_agreement: float
    kl_mean: float


class LikelyDivergence(Record):
    """The divergence over the source model's likeliest tokens, with all others as one.

    It is a lower bound of the full divergence. The package contains the data to measure it again on any provider.
    """

    tokens: int
    """Number of likeliest tokens per position. With the whole vocabulary it is the full divergence."""
    share: float
    """Their share of the source model's probability, mean over the positions."""
    kl_mean: float
    kl_p99: float


class Quality(Record):
    """The loss of the precision: the package compared with the source model, on the same text."""

    text: str
    """Name of the file; `random tokens` for a checkpoint without a tokenizer, whose perplexity is meaningless."""
    text_sha256: str
    tokens: int
    """Number of predicted tokens."""
    window_tokens: int
    """Tokens per window, each with an empty cache."""
    provider: str
    """The execution provider of the package."""
    converted_copy: str | None = None
    """The copy that ran instead of the package's graphs, where the provider lacks kernels."""
    original_perplexity: float
    """Perplexity of the source model in float32."""
    perplexity: float
    perplexity_ratio: float
    """perplexity / original_perplexity; 1 is lossless."""
    top1_agreement: float
    """Fraction of positions with the same most likely token."""
    kl_mean: float
    """Kullback-Leibler divergence of the package from the source model in nats, mean over the positions."""
    kl_p99: float
    """Its 99th percentile."""
    likely: LikelyDivergence | None = None
    """Data for repeating the measurement; null in packages without it."""
    phases: tuple[PhaseQuality, ...] = ()
    """With a separate prefill graph: it ran the first half of each window, and the decode graph the rest. Empty
    otherwise."""


class Evaluation(Record):
    """The quality of a package on a provider, against the source model's figures in the package."""

    provider: str
    tokens: int
    """Tokens that were predicted."""
    perplexity: float
    original_perplexity: float
    perplexity_ratio: float
    """perplexity / original_perplexity; 1 is lossless."""
    top1_agreement: float
    """Fraction of tokens with the same most likely prediction, from 0 to 1."""
    kl_mean_at_least: float | None = None
    """Lower bound of the mean Kullback-Leibler divergence from the source model in nats, with all but its likeliest
    tokens as one. None where the package has no likeliest tokens; so are the next fields."""
    kl_p99_at_least: float | None = None
    """Its 99th percentile."""
    kl_tokens: int | None = None
    """Number of likeliest tokens."""
    kl_share: float | None = None
    """Their mean share of the source model's probability."""


class ProbedLowering(Record):
    """The result of probing a provider with one lowering, before weights were written."""

    attention: str
    form: Literal["contrib", "standard"] | None = None
    """The form of experts and recurrences, where it is not the lowering's default; null otherwise."""
    nodes: int
    unsupported: dict[str, int]
    """Operator -> number of unsupported nodes."""
    error: str
    """The error when the whole graph was opened or run and failed; empty otherwise."""
    untested_nodes: int
    """Nodes without a result."""
    mismatch: str
    """The mismatch of the known answer replayed on the provider; empty otherwise."""


class TargetRecord(Record):
    """The target provider, and the results of probing it."""

    provider: str
    source: str
    """The origin of the choice: --target, or why it is the default."""
    probe_method: str
    """How it was probed: directly, over stub libraries, or not at all and why."""
    probed: tuple[ProbedLowering, ...] = ()
    """In the order of the probes; none follow after a lowering that is fully supported and verified."""
    excluded: dict[str, str] = {}
    """Lowerings that the model does not fit, with the reason; they were not probed."""
    verification: Literal["verified", "unverified", "not_run"] = "not_run"
    """The known answer, replayed on this provider."""
    detail: str = ""


class SmokeRecord(Record):
    """The smoke run: the package opens, runs a prompt chunk and one token, and returns finite logits."""

    chain: str
    """The provider chain, as in --provider."""
    status: Literal["ran", "failed", "not_run"]
    detail: str
    """What ran or failed, or why nothing could run here."""
    replayed: bool = False
    """It was the replay of the known answer on the package itself, which runs a prompt and tokens, too."""


class PortSource(Record):
    """The source of the meaning of a foreign graph's input or output."""

    name: str
    meaning: str
    """Its role, or for a state its kind and layer."""
    source: str
    """Its name, genai_config.json, the file given with --contract, …"""


class ForeignRecord(Record):
    """How a foreign folder was interpreted."""

    layout: str
    """The layout: optimum, transformers.js, onnxruntime-genai, or onnx for any other."""
    variant: str
    """The chosen variant of several files of one model: q4, fp16, …; empty for the plain one."""
    candidates: tuple[str, ...] = ()
    """The other variants in the folder."""
    producer: str = ""
    """The producer named in the graph."""
    adapters: tuple[str, ...] = ()
    """Switchable adapter files in ONNX Runtime's format."""
    adapter_inputs: int = 0
    """Number of adapter inputs with defaults."""
    ports: tuple[PortSource, ...] = ()
    notes: tuple[str, ...] = ()
    """Ambiguous decisions, a sentence each."""
