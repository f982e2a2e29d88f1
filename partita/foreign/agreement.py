"""Whether a configuration says the same of a model as its graph. Pure; who asks makes an error of a contradiction."""

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
    """The first thing that the configuration and the graph say differently; empty when there is none.

    `rows`: the axis of each past that has an entry for every token.
    """
    layers = _layers(evidence, pairs)
    more, fewer = layers > evidence.layers, layers < evidence.layers and evidence.even
    if evidence.layers and layers and (more or fewer):
        return f"it says {evidence.layers} layers, and {file} has a cache of {layers}"
    if evidence.vocab_size and vocab != evidence.vocab_size:
        return f"it says a vocabulary of {evidence.vocab_size:,}, and the logits of {file} have {vocab:,}"
    kept = [
        pair
        for pair, state in zip(pairs, states, strict=True)
        if len(pair.past.shape or ()) == 4 and rows[pair.past.name] in (None, 2) and state.grows in (None, 2)
    ]
    of_each = ([pair for pair in kept if pair.kind == kind] for kind in ("key", "value"))
    return next(filter(None, (_head_contradiction(evidence, pairs) for pairs in of_each)), "")


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


def _head_contradiction(evidence: Evidence, pairs: Sequence[Pair]) -> str:
    """The same of the heads of all keys, or of all values, [B, KV heads, N, head size].

    Layers may have different ones, and a configuration numbers of one kind of layer alone.
    """
    heads = {evidence.kv_heads, evidence.heads, *evidence.kv_heads_of_others} if evidence.kv_heads else set[int]()
    widths = {evidence.head_size, *evidence.head_sizes}
    if (odd := _other_than(heads - {0}, pairs, 1)) is not None:
        pair, size = odd
        return f"it says {evidence.kv_heads} heads of keys and values, and {pair.past.declared} has {size}"
    if (odd := _other_than(widths - {0}, pairs, 3)) is not None:
        pair, size = odd
        return f"it says heads of {evidence.head_size}, and {pair.past.declared} has {size}"
    return ""


def _other_than(said: Set[int], pairs: Sequence[Pair], axis: int) -> tuple[Pair, int] | None:
    """The first state with its size along an axis, where the sizes are known and that of no state is one of `said`."""
    found = [(pair, size) for pair in pairs if isinstance(size := (pair.past.shape or ())[axis], int)]
    return found[0] if said and found and all(size not in said for _, size in found) else None
