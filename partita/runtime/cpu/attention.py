"""Which of GroupQueryAttention's two CPU paths a session is to take: what it is decided from, and the decision. Pure.

Flash goes through a prompt in tiles, naive multiplies the whole matrix of scores. ONNX Runtime prefers flash; which is
faster depends on the processor, the build and the form (1.31.1, AVX-512: naive in 60 % of the time at a head size of
64, flash at 256 and 512 tokens). A token alone takes about as long on both. Sources: group_query_attention.cc and
gqa_attention_base.h in onnxruntime/contrib_ops/cpu/bert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from partita.observations.cpu import AttentionChoice, AttentionTiming
from partita.observations.text_format import decimals, human_bytes, plural

if TYPE_CHECKING:
    import onnx

VARIABLE = "ORT_GQA_DISABLE_FLASH_ATTENTION"
"""Of the environment, 1: naive. Read when a session builds its kernels."""
OPERATOR = "GroupQueryAttention"
PREFILL_TOKENS = 512
"""Longest part of a prompt that is timed: what a run gets at once unless the user says otherwise."""
SHORT_TOKENS = 128
NEW_TOKENS = 128
"""Tokens that are reckoned to follow a prompt, one at a time after as many as the prompt has."""
CLEARLY = 0.9
"""Naive is taken when it needs less than this part of flash's time for a prompt and what follows, …"""
NOT_SLOWER = 1.05
"""… and not more than this for a short prompt."""
STEADY = 1.15
"""The two lowest times of a path are this close, or something disturbed them."""
LEAST_WORK = 5e7
"""Multiplications of a prompt below which a choice cannot matter: a millisecond at most."""
MOST_SCRATCH = 256 * 2**20
"""Bytes that the matrix of scores may take."""
PAST_KEY, SINK, BIAS = 3, 11, 10
FLOAT32 = 1
"""Number of the element type in ONNX."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of the operator, as far as the time of its two paths depends on it."""

    heads: int
    kv_heads: int
    head_size: int
    window: int | None
    rolls: bool = False
    """The cache holds the window alone."""

    def rows(self, length: int) -> int:
        """Of the cache, where others have `length`."""
        return self.window if self.rolls and self.window else length

    @property
    def key(self) -> str:
        """Its name where timings are kept."""
        return (
            f"{self.heads}/{self.kv_heads}x{self.head_size}"
            + (f"w{self.window}" if self.window else "")
            + ("r" if self.rolls else "")
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one graph that has two paths on the CPU."""

    forms: Mapping[Form, int]
    """How many nodes have each."""
    batch: int
    tokens: int
    """The longest part of a prompt that a run is given."""
    length: int
    """Tokens that the cache holds."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens to time at once: one, after a whole prompt, and prompts."""
        return tuple(sorted({1, min(SHORT_TOKENS, self.tokens), self.tokens}))

    @property
    def scratch_bytes(self) -> int:
        """What the matrix of scores takes: of every head, as wide as the cache is long."""
        return max((4 * self.batch * form.heads * self.tokens * self.length for form in self.forms), default=0)

    @property
    def matters(self) -> bool:
        """Whether a prompt has enough work for the choice to be felt."""
        return any(2 * self.batch * form.heads * form.head_size * self.tokens**2 >= LEAST_WORK for form in self.forms)


@dataclass(frozen=True, slots=True)
class Times:
    """Measured CPU times of one form in seconds, in the order of `lengths`."""

    lengths: tuple[int, ...]
    flash: tuple[tuple[float, ...], ...]
    """Per length, every round."""
    naive: tuple[tuple[float, ...], ...]

    @property
    def steady(self) -> bool:
        """Whether the lowest times of each path and length agree."""
        return all(
            len(rounds) > 1 and sorted(rounds)[1] <= STEADY * min(rounds) for rounds in (*self.flash, *self.naive)
        )


def find_attention(model: onnx.ModelProto) -> Attention | None:
    """The attention of a graph for which ONNX Runtime's CPU provider has both paths; None without.

    Flash takes float32 without soft cap, smooth softmax, sink, bias and output of scores; other nodes are naive anyway.
    """
    shapes = {port.name: port.type.tensor_type for port in model.graph.input}
    found: Counter[Form] = Counter()
    sizes: set[tuple[int, int]] = set()
    for node in model.graph.node:
        if node.op_type != OPERATOR or len(node.input) <= PAST_KEY:
            continue
        past, given = shapes.get(node.input[PAST_KEY]), _attributes(node)
        if past is None or past.elem_type != FLOAT32 or _naive_anyway(node, given):
            continue
        dims = [size.dim_value for size in past.shape.dim]
        if len(dims) != 4 or not all(dims) or not given.get("num_heads"):
            continue  # a cache that grows, or one of unknown size
        window = int(given.get("local_window_size", -1))
        rolls = bool(given.get("sliding_window_cache"))
        found[Form(int(given["num_heads"]), dims[1], dims[3], window if window > 0 else None, rolls)] += 1
        sizes.add((dims[0], dims[2]))
    if not found:
        return None
    batch, length = (max(column) for column in zip(*sizes, strict=True))
    return Attention(dict(found), batch, min(PREFILL_TOKENS, length), length)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Numbers among the attributes."""
    return {entry.name: entry.f if entry.type == entry.FLOAT else entry.i for entry in node.attribute}


def _naive_anyway(node: onnx.NodeProto, given: Mapping[str, Any]) -> bool:
    """Whether the flash path does not take the node."""
    inputs = list(node.input)
    beside = any(len(inputs) > place and inputs[place] for place in (BIAS, SINK))
    said = any(given.get(name, 0) > 0 for name in ("softcap", "smooth_softmax", "qk_output"))
    return beside or said


def within(attention: Attention | None, tokens: int | None) -> Attention | None:
    """The attention of a graph that takes so many tokens in a run, None: any number."""
    if attention is None or tokens is None:
        return attention
    return replace(attention, tokens=min(attention.tokens, tokens))


def by_word(option: str, variable: str) -> AttentionChoice | None:
    """The choice of whoever made one: with the option of the provider, or in the environment; None for neither."""
    if option in ("flash", "naive"):
        path: Literal["flash", "naive"] = "flash" if option == "flash" else "naive"
        return AttentionChoice(path=path, reason="option", detail=f"cpu.attention={path}")
    if not variable:
        return None
    off = variable != "0"
    return AttentionChoice(
        path="naive" if off else "flash", reason="environment", detail=f"the environment has {VARIABLE}={variable}"
    )


def too_large(attention: Attention) -> AttentionChoice | None:
    """The choice where naive would need too much memory; None where it would not."""
    if attention.scratch_bytes <= MOST_SCRATCH:
        return None
    need = human_bytes(attention.scratch_bytes)
    return AttentionChoice(
        path="flash",
        reason="memory",
        detail=f"the naive path would need {need} for {attention.tokens} tokens, more than {human_bytes(MOST_SCRATCH)}",
    )


def choose(attention: Attention, times: Mapping[Form, Times], threads: int, *, kept: bool) -> AttentionChoice:
    """The path for all nodes of a graph, from the times of each of its forms on one thread.

    Naive gives each thread whole heads, flash parts of heads, so naive's time counts for more where heads do not divide
    evenly. Any doubt is for flash, ONNX Runtime's own choice.
    """
    timings = tuple(_timing(form, count, times[form]) for form, count in attention.forms.items())
    if not all(times[form].steady for form in attention.forms):
        detail = "the timings varied too much to go by, so ONNX Runtime's default stays"
        return AttentionChoice(path="flash", reason="unclear", detail=detail, timings=timings)
    flash, naive = _totals(attention, timings, threads)
    flash_whole, naive_whole = (path[-1] + NEW_TOKENS * path[0] for path in (flash, naive))
    better = naive_whole < CLEARLY * flash_whole and naive[1] <= NOT_SLOWER * flash[1]
    shown = f"{decimals(naive_whole, 1e-3)} ms on the naive path and {decimals(flash_whole, 1e-3)} ms on flash"
    prompt = f"a prompt of {plural(attention.tokens, 'token')} and {NEW_TOKENS} after it"
    return AttentionChoice(
        path="naive" if better else "flash",
        reason="faster" if better else "not_faster",
        detail=f"{prompt} take {shown}, by timings on one thread and reckoned for {threads}",
        timings=timings,
        kept=kept,
    )


def _timing(form: Form, count: int, times: Times) -> AttentionTiming:
    """The lowest times of a form as a report has them."""
    flash, naive = (tuple(round(1e6 * min(rounds), 1) for rounds in path) for path in (times.flash, times.naive))
    return AttentionTiming.taken_from(form, nodes=count, tokens=times.lengths, flash_us=flash, naive_us=naive)


def _totals(
    attention: Attention, timings: Iterable[AttentionTiming], threads: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Microseconds of both paths per length over all nodes and `threads` threads."""
    flash, naive = ([0.0] * len(attention.lengths) for _ in range(2))
    for timing in timings:
        heads = attention.batch * timing.heads
        share = math.ceil(heads / threads) / heads
        for place in range(len(attention.lengths)):
            flash[place] += timing.nodes * attention.batch * timing.flash_us[place] / threads
            naive[place] += timing.nodes * attention.batch * timing.naive_us[place] * share
    return flash, naive
