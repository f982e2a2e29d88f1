"""Compare a configuration with the graph of a model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from partita.foreign.evidence import Evidence
from partita.foreign.states import Pair
from partita.package.contract import State


def contradiction(
    evidence: Evidence,
    file: str,
    pairs: Sequence[Pair],
    states: Sequence[State],
    vocab: int,
    rows: Mapping[str, int | None],
) -> str:
    """The first contradiction between configuration and graph; empty where there is none.

    `rows`: the axis of each past with one entry per token.
    """
    layers = _layers(evidence, pairs)
    more, fewer = layers > evidence.layers, layers < evidence.layers and evidence.even
    if evidence.layers and layers and (more or fewer):
        return f"it has {evidence.layers} layers, but {file} has a cache of {layers}"
    if evidence.vocab_size and vocab != evidence.vocab_size:
        return f"its vocabulary has {evidence.vocab_size:,} tokens, but the logits of {file} have {vocab:,}"
    kept = [
        pair
        for pair, state in zip(pairs, states, strict=True)
        if len(pair.past.shape or ()) == 4 and rows[pair.past.name] in (None, 2) and state.grows in (None, 2)
    ]
    of_each = ([pair for pair in kept if pair.kind == kind] for kind in ("key", "value"))
    return next(filter(None, (_head_contradiction(evidence, pairs) for pairs in of_each)), "")


def _layers(evidence: Evidence, pairs: Sequence[Pair]) -> int:
    """Number of layers in a cache, or in the configuration where the cache does not show it.

    Keys and values may be numbered consecutively, so that every layer has two numbers, and all layers may be in one
    tensor.
    """
    found = len({pair.layer for pair in pairs})
    counted_through = found == len(pairs) == 2 * evidence.layers and all(pair.kind == "key" for pair in pairs)
    in_one = found == 1 and any(evidence.layers in (pair.past.shape or ())[:2] for pair in pairs)
    stacked = found == 1 and any(2 * evidence.layers in (pair.past.shape or ())[:1] for pair in pairs)
    deep = all(len(pair.past.shape or ()) > 4 for pair in pairs)
    return evidence.layers if counted_through or (deep and (in_one or stacked)) else found


def _head_contradiction(evidence: Evidence, pairs: Sequence[Pair]) -> str:
    """The first contradiction in the heads of all keys, or of all values, [B, KV heads, N, head size].

    Layers may differ, and the configuration may have the numbers of one kind of layer.
    """
    heads = {evidence.kv_heads, evidence.heads, *evidence.kv_heads_of_others} if evidence.kv_heads else set[int]()
    widths = {evidence.head_size, *evidence.head_sizes}
    if (odd := _other_than(heads - {0}, pairs, 1)) is not None:
        pair, size = odd
        return f"it has {evidence.kv_heads} heads of keys and values, but {pair.past.declared} has {size}"
    if (odd := _other_than(widths - {0}, pairs, 3)) is not None:
        pair, size = odd
        return f"its head size is {evidence.head_size}, but {pair.past.declared} has {size}"
    return ""


def _other_than(sizes: Set[int], pairs: Sequence[Pair], axis: int) -> tuple[Pair, int] | None:
    """The first state with its size along an axis, where all sizes are known and none is in `sizes`."""
    found = [(pair, size) for pair in pairs if isinstance(size := (pair.past.shape or ())[axis], int)]
    return found[0] if sizes and found and all(size not in sizes for _, size in found) else None
