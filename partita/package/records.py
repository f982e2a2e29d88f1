"""What a manifest keeps of how a package was made: how it was verified, its weights and cache, its quality, its target.

All of it is written by the export and shown to people; what running needs is in `package` and `contract`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from partita.package.contract import Record


class StepError(Record):
    """How far one step of the known answer was off."""

    step: str
    """prefill, chunked prefill, or decode 1 .. n; behind the name of an adapter and a colon with that one."""
    output: str
    max_abs_error: float
    max_rel_error: float
    """max |ours - reference| / max |reference| over the output."""
    tokens_equal: bool
    """Greedy tokens agree in every row that has a clear winner; see `Verification.near_ties`."""
    rerouted: int = 0
    """Positions that do not count; see `Verification.rerouted`."""


class Verification(Record):
    """Whether the graph computes what its model computes, and how that was found out."""

    status: Literal["verified", "unverified"]
    detail: str
    """How it was verified, or why it was not."""
    provider: str | None = None
    twin: str | None = None
    """What was replayed in place of the package's own graphs, where the provider has no kernels for those; null when
    it was the package itself.
    """
    proof: str | None = None
    """What showed that the graph is right where 16 bits send tokens to other experts; null where nothing had to."""
    reference: str | None = None
    """What was run for the known answer."""
    tolerance: float | None = None
    """Largest max_rel_error that passes."""
    near_ties: int = 0
    """Compared positions at which the reference's two best logits are closer than the tolerance allows to tell
    apart.
    """
    rerouted: int = 0
    """Compared positions that are further from the reference, and left out, because the package is rounded and its
    model takes the best of some experts: where two are nearly equally good, rounding decides. Fewer than half.
    """
    not_run: tuple[str, ...] = ()
    """Graph files that the known answer did not run: their chunk is longer than its prompt."""
    not_exercised: tuple[str, ...] = ()
    """What the text of the known answer is too short for: windows, attention chunks, rotary frequencies, graphs."""
    steps: tuple[StepError, ...] = ()

    @property
    def headline(self) -> str:
        """The status, and what a verified package was not verified for."""
        missed = self.not_exercised if self.status == "verified" else ()
        return f"{self.status} (not exercised: {'; '.join(missed)})" if missed else self.status


class PackedKind(Record):
    """Weights that are packed in one way."""

    precision: str
    """int4 or int8."""
    block_size: int
    """Weights of a row that share a scale, and a zero point where there are any; 0: all of them."""
    zero_points: bool
    """Each block has an integer zero point of its own; False: it is the middle of the range everywhere."""
    quantiser: str
    weights: int
    parameters: int
    size_bytes: int
    """With scales and zero points."""


class Calibration(Record):
    """The text on which weights were rounded."""

    quantiser: str
    text: str
    """Name of the file."""
    text_sha256: str
    tokens: int
    """How many of its tokens the original model read."""
    window_tokens: int
    """Tokens that were read at a time, each window from the beginning of an empty cache."""
    not_calibrated: tuple[str, ...] = ()
    """Weights that are packed and were rounded without the text, because no module multiplies by them as they are, by
    module, or by tensor.
    """


class UnitCost(Record):
    """What rounding some weights alone costs."""

    modules: tuple[str, ...]
    kl_mean: float
    """Of the model from the original on the text of the search, in nats."""


class TriedMix(Record):
    """A mix of widths that was judged on the text of the search."""

    wider: int
    """How many steps of the row it takes: one makes the weights of a unit wider."""
    kl_mean: float
    perplexity_ratio: float


class Mix(Record):
    """How the widths of weights were chosen."""

    text: str
    """What mixes were judged on."""
    text_sha256: str
    tokens: int
    unseen: bool
    """The quality of the package was measured on other text."""
    max_perplexity_ratio: float | None
    max_weight_size: int | None
    """Bytes."""
    steps: int
    """Of all, from the width of the package to float32."""
    taken: int
    costs: tuple[UnitCost, ...]
    """The largest first."""
    tried: tuple[TriedMix, ...]
    missed: tuple[float, ...] = ()
    """Ratios of packages that were written before this one, and not published."""


class PackedWeights(Record):
    """What became of the weights of an int8 or int4 package."""

    kinds: tuple[PackedKind, ...]
    accuracy_level: int
    """Of MatMulNBits, as the graph asks for it: 4 lets products be computed with 8-bit activations."""
    form: str = "matmul_nbits"
    """How they are written: a name of `export/quantise/forms/`."""
    reads: str = "MatMulNBits and GatherBlockQuantized"
    """The operators that read them, in words."""
    activations: str = "fp32"
    """What they are multiplied with: fp32, fp16, or int8 where the graph itself rounds activations."""
    kept: tuple[str, ...] = ()
    """What was asked for of single modules, as MODULE=PRECISION."""
    not_packed: tuple[str, ...] = ()
    """What stayed in the type of the activations without having been asked to, and what reads it."""
    calibration: Calibration | None = None
    """null: no text was looked at."""
    mix: Mix | None = None
    """null: widths were not chosen by measuring them."""


class PrefillChoice(Record):
    """Whether prompts have a graph of their own, which computes in another precision, and why."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # packages of earlier versions have times of products

    asked: str
    """What was asked for: int8."""
    written: bool
    """False, in packages of earlier versions: one graph reads prompts and goes on."""
    reason: str
    packed: PackedWeights | None = None
    """The weights that the prefill graph alone reads; the others are those of `Manifest.packed`."""


class NarrowWeights(Record):
    """Matrices that lie in the file in 16 bits and are computed with in float32."""

    dtype: str
    """Of the matrices in the file."""
    weights: int
    rounded: int
    """How many of them have numbers that need more bits; none: nothing is lost."""
    compared: Literal["model", "rounded"] = "model"
    """What the graph was compared with: the model as it is, or with these weights as they are rounded, within the
    tolerance of float32.
    """


class RoundedCache(Record):
    """Keys and values that are cached as integers, with a scale for each channel of each KV head."""

    dtype: str
    states: int
    """How many are kept so."""
    kept: tuple[str, ...] = ()
    """Past inputs of the others, which stay what they were."""
    float_bytes: int
    """What all state buffers would take without it."""
    text: str
    """What the scales were found on: name of the file."""
    text_sha256: str
    tokens: int


class PhaseQuality(Record):
    """The figures of what one graph of a pair read."""

    phase: str
    """prefill or decode."""
    tokens: int
    perplexity_ratio: float
    top1_agreement: float
    kl_mean: float


class LikelyDivergence(Record):
    """The divergence over the tokens that the original thinks most likely, all others taken as one: at most that of the
    whole distributions. The package keeps what it takes, so any provider can be asked for it again.
    """

    tokens: int
    """How many tokens of a position are told apart. With all of the vocabulary it is the whole divergence."""
    share: float
    """What they have of the original's probability, mean over the positions."""
    kl_mean: float
    kl_p99: float


class Quality(Record):
    """What the precision costs: the package beside the original model, on the same text."""

    text: str
    """Name of the file; `random tokens` for a checkpoint without a tokenizer, whose perplexity says nothing."""
    text_sha256: str
    tokens: int
    """Tokens that were predicted."""
    window_tokens: int
    """Tokens that are read at a time, each window from the beginning of an empty cache."""
    provider: str
    """What the package ran on."""
    twin: str | None = None
    """What was run in place of the package's own graphs, where the provider has no kernels for those."""
    original_perplexity: float
    """Of the original model in float32."""
    perplexity: float
    perplexity_ratio: float
    """perplexity / original_perplexity; 1 is no loss."""
    top1_agreement: float
    """Share of the positions at which both think the same token most likely."""
    kl_mean: float
    """Kullback-Leibler divergence of the package from the original in nats, mean over the positions."""
    kl_p99: float
    """Its 99th percentile."""
    likely: LikelyDivergence | None = None
    """As far as an evaluation can repeat it; null in a package that was written without."""
    phases: tuple[PhaseQuality, ...] = ()
    """Where prompts have a graph in another precision: it read the first half of each window, and the decode graph the
    other over its cache, as in a generation. Empty otherwise.
    """


class Evaluation(Record):
    """The quality of a package on a provider, against the original model's figures in the package."""

    provider: str
    tokens: int
    """Tokens that were predicted."""
    perplexity: float
    original_perplexity: float
    perplexity_ratio: float
    """perplexity / original_perplexity; 1 is no loss."""
    top1_agreement: float
    """Share of the tokens with the same most likely prediction, from 0 to 1."""
    kl_mean_at_least: float | None = None
    """Lower bound of the mean Kullback-Leibler divergence from the original in nats, with all but the original's
    likeliest tokens as one. None where the package has no likeliest tokens; so are the next fields.
    """
    kl_p99_at_least: float | None = None
    """Its 99th percentile."""
    kl_tokens: int | None = None
    """Number of likeliest tokens."""
    kl_share: float | None = None
    """Their mean share of the original's probability."""


class AskedLowering(Record):
    """What a provider said of the graph in one lowering, before its weights were written."""

    attention: str
    form: Literal["contrib", "standard"] | None = None
    """How experts and recurrences were written, in ONNX Runtime's own operators or in standard ones, where that is not
    what goes with the lowering as a rule; null otherwise.
    """
    nodes: int
    left: dict[str, int]
    """Nodes that it does not take, by operator."""
    fails: str
    """What was said when the whole graph was opened or run there and failed; empty otherwise."""
    unasked: int
    """Nodes for which there was no answer."""
    disagrees: str
    """Where the known answer, replayed on the provider, was another than the model's; empty otherwise."""


class TargetRecord(Record):
    """The provider that the package was made for, what it was asked, and what it answered."""

    provider: str
    source: str
    """Who chose it: --target, or why it is the default."""
    how: str
    """How it was asked: itself, over stub libraries, or not at all and why."""
    asked: tuple[AskedLowering, ...]
    """In the order of the questions; once a provider takes a graph whole and rightly, no other is asked about."""
    unfit: dict[str, str]
    """Lowerings that the model does not fit, and why: they were not asked about."""
    verification: Literal["verified", "unverified", "not_run"]
    """The known answer, replayed on this very provider."""
    detail: str


class SmokeRecord(Record):
    """Whether the written package opens, reads a chunk of a prompt and then one token, and gives finite logits."""

    chain: str
    """The providers, as --provider takes them."""
    status: Literal["ran", "failed", "not_run"]
    detail: str
    """What was run, or what failed, or why nothing could be run here."""
    replayed: bool = False
    """It was the replay of the known answer on the package itself, which reads a prompt and tokens, too."""


class PortSource(Record):
    """Where the meaning of an input or output of a foreign graph came from."""

    name: str
    meaning: str
    """Its role, or for a state its kind and layer."""
    source: str
    """What says so: its name, genai_config.json, the file given with --contract, …"""


class ForeignRecord(Record):
    """How a folder that Partita did not write was understood."""

    layout: str
    """Whose folder it looks like: optimum, transformers.js, onnxruntime-genai, or onnx for any other."""
    variant: str
    """Of several files of one model the one that was chosen: q4, fp16, …; empty for the plain one."""
    candidates: tuple[str, ...] = ()
    """The other variants in the folder."""
    producer: str = ""
    """What the graph says of who wrote it."""
    adapters: tuple[str, ...] = ()
    """Files in ONNX Runtime's adapter format, which a run can switch on."""
    adapter_inputs: int = 0
    """Inputs that they may give values for, and that have defaults."""
    ports: tuple[PortSource, ...] = ()
    notes: tuple[str, ...] = ()
    """What was decided and could have been otherwise, a sentence each."""
