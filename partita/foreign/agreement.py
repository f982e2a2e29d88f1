"""Whether a configuration says the same of a model as its graph. Pure; a contradiction is an error that names both."""

from __future__ import annotations

from collections.abc import Sequence

from partita.contract import State
from partita.errors import PackageError
from partita.foreign.evidence import Evidence
from partita.foreign.states import Pair
from partita.remedies import Remedy

BELONGS = Remedy("check that both are of one model")


def check_agreement(
    where: str, evidence: Evidence, file: str, pairs: Sequence[Pair], states: Sequence[State], vocab: int
) -> None:
    """Raise PackageError for the first thing that the configuration and the graph say differently."""
    said = _contradiction(evidence, file, pairs, states, vocab)
    if said:
        raise PackageError(f"{where}: {evidence.source} contradicts the graph: {said}", remedy=BELONGS)


def _contradiction(evidence: Evidence, file: str, pairs: Sequence[Pair], states: Sequence[State], vocab: int) -> str:
    """What is said differently; empty when nothing is."""
    layers = len({pair.layer for pair in pairs})
    more, fewer = layers > evidence.layers, layers < evidence.layers and evidence.even
    if evidence.layers and layers and (more or fewer):
        return f"it says {evidence.layers} layers, and {file} has a cache of {layers}"
    if evidence.vocab_size and vocab != evidence.vocab_size:
        return f"it says a vocabulary of {evidence.vocab_size:,}, and the logits of {file} have {vocab:,}"
    for pair, state in zip(pairs, states, strict=True):
        if state.kind in ("key", "value") and len(state.shape) == 4:
            said = _head_contradiction(evidence, pair, state)
            if said:
                return said
    return ""


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
