"""Checks the inferred contract of a foreign graph before the user's first token.

A graph does not state whether a step may append several tokens, or whether its mask has 1 for visible or hidden tokens.
So a short text is run as a whole and in parts, and its logits must match. A graph without a cache is an encoder if the
logits of a token depend on later tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError, PackageError
from partita.observations.text_format import listing
from partita.package.contract import Contract
from partita.remedies import DECODERS_ONLY, Remedy
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.feeds import logit_positions, port_by_role
from partita.runtime.generate.loop import serve
from partita.runtime.generate.request import Request
from partita.runtime.verify.comparison import OUTLIERS, RULED_OUT, Logits

TEXT_TOKENS, PART_TOKENS = 6, 3
"""Length of the text and of its first part, in tokens."""
CLOSE = 1e-3
"""Maximum difference of equal logits, relative to their spread."""
WORSE = 10
"""Factor by which the difference of chunks must exceed the difference of single tokens to count as wrong."""
FAR, FAR_WHERE_ROUNDED = 0.05, 0.5
"""Minimum difference that rounding does not explain, in float32 graphs and in others."""
OF_WHOLE_TENSORS = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})
"""Operators that scale every token by the maximum over all tokens."""
LOOK = Remedy(
    "check with inspect how its inputs were interpreted, and correct wrong ones in a contract file",
    options=("--contract", "FILE.toml"),
)
OTHER_MASK = Remedy("export it with a mask that has 1 for every token of the text")


def rehearse(folder: str, runner: Runner, *, rounds: bool) -> bool:
    """Compare the logits of a text run as a whole and in parts; return whether a step may append several tokens.

    `folder`: for messages; `rounds`: the graph computes parts below float32. Raises PackageError if logits
    of single tokens differ, for an inverted mask, and for an encoder.
    """
    contract = runner.contract
    text = _text(contract)
    if len(text) <= PART_TOKENS:
        return contract.appends_chunks
    try:
        return _rehearse(folder, runner, text, rounds=rounds)
    except GenerationError as error:
        raise PackageError(
            f"{folder}: the test run of {len(text)} tokens before the first prompt failed: {error.problem}",
            remedy=LOOK,
        ) from error
    finally:
        runner.cache.clear()


def _rehearse(folder: str, runner: Runner, text: Sequence[int], *, rounds: bool) -> bool:
    contract = runner.contract
    lengths = len(text) - 1, len(text)
    whole = [_logits(runner, text[:length], length, first=length)[-1] for length in lengths]
    if np.isnan(whole).any() or not all(np.isfinite(logits.max()) for logits in whole):
        return contract.appends_chunks  # the error is raised for the user's own text
    single = runner.graph("prefill").graph.sequence_length == 1 and not contract.cacheless
    if single or any(state.growing_axis is None and not state.in_place for state in contract.states):
        # Runs in parts also agree if every row but the last is hidden or overwritten.
        found = _logits(runner, [*text[:-2], text[-2] + 1, text[-1]], len(text), first=len(text))[-1]
        if np.array_equal(found, whole[-1]):
            raise PackageError(
                f"{folder}: two texts of {len(text)} tokens that differ in one have the same logits, so "
                f"{_suspects(contract)} interpreted wrongly",
                remedy=LOOK,
            )
    with contextlib.suppress(GenerationError):  # some operators support no mask with gaps
        _check_mask(folder, runner, text)
    if contract.cacheless:
        _check_causal(folder, runner, text, rounds=rounds)
        return contract.appends_chunks
    far = FAR_WHERE_ROUNDED if rounds else FAR
    several = contract.appends_chunks and runner.capacity.chunk is None
    apart = _furthest(whole, _logits(runner, text, PART_TOKENS, first=len(text) - 1)) if several else None
    if apart is not None and apart <= CLOSE:
        return True
    singly = _furthest(whole, _logits(runner, text, len(text), first=PART_TOKENS))
    if singly > far:
        raise PackageError(
            f"{folder}: the logits of {len(text)} tokens run at once and one by one differ by "
            f"{singly:.0%} of their spread, so {_suspects(contract)} interpreted wrongly",
            remedy=LOOK,
        )
    if apart is None or apart <= WORSE * singly:
        return contract.appends_chunks
    return False


def _suspects(contract: Contract) -> str:
    """The parts of the contract that may be wrong, for a message."""
    files = [file.file for file in contract.files]
    models = f"the models in {listing(files)}, " if len(files) > 1 else ""
    return f"{models}its cache, positions or mask are"


def _text(contract: Contract) -> list[int]:
    """Tokens spread over the vocabulary, without its first and last, where special tokens are."""
    count = min(TEXT_TOKENS, contract.max_length - 1)
    return [contract.vocab_size * (place + 1) // (count + 2) for place in range(count)]


def _furthest(whole: Sequence[Logits], parts: Sequence[Logits]) -> float:
    """The larger difference of the last two tokens."""
    return max(_differ(one, other) for one, other in zip(whole, parts[-len(whole) :], strict=True))


def _differ(one: Logits, other: Logits) -> float:
    """The largest difference relative to the spread of `one`, without masked and padding tokens."""
    there = one[one >= RULED_OUT]
    if not len(there) or not np.isfinite(other).any():
        return float("inf")
    best = float(there.max())
    written = one >= best - 2 * OUTLIERS * (best - float(np.median(there)))
    if not np.isfinite(other[written]).all():
        return float("inf")
    return float(np.abs(one[written] - other[written]).max() / max(float(np.ptp(one[written])), 1e-9))


def _logits(runner: Runner, text: Sequence[int], chunk: int, *, first: int) -> list[Logits]:
    """The logits [vocab] of each new token, of the first row of the batch.

    The `first` tokens of the text are a prompt, prefilled in chunks; the others follow one by one. Every row has this
    text.
    """

    def request(seen: list[Logits]) -> Request:
        def follow(logits: Logits, history: npt.NDArray[np.int64]) -> int:
            seen.append(logits.copy())
            return text[len(history)] if len(history) < len(text) else 0

        return Request(text[:first], follow, len(text) - first + 1, any_logits=True)

    rows: list[list[Logits]] = [[] for _ in range(runner.rows)]
    runner.cache.clear()
    for _ in serve(runner, [request(row) for row in rows], prefill_chunk=chunk):
        pass
    return rows[0]


def _check_causal(folder: str, runner: Runner, text: Sequence[int], *, rounds: bool) -> None:
    """Raise PackageError for an encoder: the logits of a token depend on later tokens.

    A graph with logits of the last token only is not checked. Both texts have the same length, so logits of a decoder
    can differ only by rounding of whole tensors.
    """
    loaded = runner.graph("prefill")
    size, before = loaded.graph.sequence_length or len(text), (loaded.graph.sequence_length or len(text)) // 2
    if logit_positions(loaded.graph) not in ("all", "kept") or before < 1:
        return
    one = [text[place % len(text)] for place in range(size)]
    other = [*one[:before], *(text[(place + 1) % len(text)] for place in range(before, size))]
    pairs = list(zip(*(_read(runner, tokens, range(before)) for tokens in (one, other)), strict=True))
    if not all(np.isfinite(logits).all() for pair in pairs for logits in pair):
        return
    together = any(node.op_type in OF_WHOLE_TENSORS for node in (*loaded.model.nodes, *loaded.model.subgraph_nodes))
    far = FAR_WHERE_ROUNDED if together else FAR if rounds else CLOSE
    furthest = max(_differ(*pair) for pair in pairs)
    if furthest > far:
        raise PackageError(
            f"{folder}/{loaded.graph.file}: logits of a token change by {furthest:.1%} of their spread with later "
            "tokens; the model is an encoder and cannot generate text",
            remedy=DECODERS_ONLY,
        )


def _check_mask(folder: str, runner: Runner, text: Sequence[int]) -> None:
    """Raise PackageError for a mask that has 1 for hidden tokens.

    With an inverted mask that is 1 for the first token only, the first token does not affect the last logits; with a
    mask of zeros it does.
    """
    if any(state.in_place for state in runner.contract.states):
        return  # its attention counts the ones of a mask and supports no other mask
    graph = runner.graph("prefill").graph
    mask, size = port_by_role(graph, "mask"), graph.sequence_length or 2
    if mask is None or size < 2:
        return
    texts = [[first, *[text[1]] * (size - 1)] for first in (text[0], text[2])]
    only_first = [1] + [0] * (size - 1)
    one, other = (_read(runner, tokens, [size - 1], only_first)[0] for tokens in texts)
    if not np.isfinite(one).all() or not np.isfinite(other).all() or not np.array_equal(one, other):
        return
    one, other = (_read(runner, tokens, [size - 1], [0] * size)[0] for tokens in texts)
    if np.isfinite(one).all() and np.isfinite(other).all() and _differ(one, other) > CLOSE:
        raise PackageError(
            f"{folder}/{graph.file}: the input {mask.name!r} hides tokens where it is 1; Partita needs a mask "
            "that is 1 for visible tokens",
            remedy=OTHER_MASK,
        )


def _read(
    runner: Runner, tokens: Sequence[int], places: Sequence[int], mask: Sequence[int] | None = None
) -> list[Logits]:
    """Logits [vocab] at `places` (ascending) of tokens at the beginning of a text. `mask`: mask values to use."""
    graph = runner.bound("prefill", len(tokens), len(tokens) - places[0])
    graph.choose(places)
    graph.tokens[...] = tokens
    runner.cache.begin(range(runner.rows))
    graph.place(np.zeros(runner.rows, np.int64), len(tokens))
    if mask is not None:
        graph.masked(mask)
    graph.run()
    found = [graph.logits(0, place).copy() for place in places]
    runner.cache.clear()
    return found
