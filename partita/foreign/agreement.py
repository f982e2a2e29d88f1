"""Whether a configuration says the same of a model as its graph. Pure; who asks makes an error of a contradiction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.contract import State
from partita.foreign.evidence import Evidence
from partita.foreign.states import Pair


def contradiction(
    evidence: Evidence,
    file: str,
    pairs: Sequence[Pair],
    states: Sequence[State],
    vocab: int,
    rows: Mapping[str, int | None],
) -> str:
    """The first thing that the configuration and the graph say differently; empty when there is none.

    `rows`: the axis of each past that has an entry for every token.
    """
    layers = _layers(evidence, pairs)
    more, fewer = layers > evidence.layers, layers < evidence.layers and evidence.even
    if evidence.layers and layers and (more or fewer):
        return f"it says {evidence.layers} layers, and {file} has a cache of {layers}"
    if evidence.vocab_size and vocab != evidence.vocab_size:
        return f"it says a vocabulary of {evidence.vocab_size:,}, and the logits of {file} have {vocab:,}"
    for pair, state in zip(pairs, states, strict=True):
        if state.kind in ("key", "value") and len(state.shape) == 4 and rows[pair.past.name] in (None, 2):
            said = _head_contradiction(evidence, pair, state)
            if said:
                return said
    return ""


def _layers(evidence: Evidence, pairs: Sequence[Pair]) -> int:
    """The layers of a cache, as far as its numbers tell; those that the configuration says where they do not.

    Keys and values may be counted through, so that every layer has two numbers, and all layers may be in one tensor.
    """
    found = len({pair.layer for pair in pairs})
    counted_through = found == len(pairs) == 2 * evidence.layers and all(pair.kind == "key" for pair in pairs)
    in_one = found == 1 and any(evidence.layers in (pair.past.shape or ())[:2] for pair in pairs)
    stacked = found == 1 and any(2 * evidence.layers in (pair.past.shape or ())[:1] for pair in pairs)
    deep = all(len(pair.past.shape or ()) > 4 for pair in pairs)
    return evidence.layers if counted_through or (deep and (in_one or stacked)) else found


def _head_contradiction(evidence: Evidence, pair: Pair, state: State) -> str:
    """The same of the heads of keys and values [B, KV heads, N, head size], or any order of the last three."""
    sizes = {size for size in (pair.past.shape or ()) if isinstance(size, int)}
    heads = {evidence.kv_heads, evidence.heads} - {0}
    widths = {evidence.head_size, *evidence.head_sizes} - {0}
    if state.grows not in (None, 2) or not sizes:
        return ""
    declared = pair.past.shape or ()
    if isinstance(declared[1], int) and evidence.kv_heads and declared[1] not in heads:
        return f"it says {evidence.kv_heads} heads of keys and values, and {pair.past.declared} has {declared[1]}"
    if isinstance(declared[3], int) and widths and declared[3] not in widths:
        return f"it says heads of {evidence.head_size}, and {pair.past.declared} has {declared[3]}"
    return ""
