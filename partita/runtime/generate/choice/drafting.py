"""Speculative decoding: one step verifies several draft tokens of a row.

A step with a row's last token and k draft tokens gives the logits after each. The sampler chooses a token from the
first logits and continues while it chooses the draft token. The output is that of decoding without draft tokens, also
for sampling; only the number of steps changes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.observations.text_format import name_some
from partita.runtime.generate.bound_graph import SMALL_STEP_TOKENS
from partita.runtime.generate.cache import UNBOUNDED_TOKENS
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.planner import RowView, StepPlan, plan_step
from partita.runtime.generate.request import Row


class VerifiedDraft(NamedTuple):
    """The draft tokens of one row in one step."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft tokens of the next step."""

    decoding_rows: int = 0
    """Rows in a decode step if the control counts this step, else 0."""
    plan: StepPlan | None = None
    """The step that verifies the draft tokens; None without draft tokens."""
    seconds: float = 0.0
    """Wall time of drafting."""


NO_DRAFTS = Drafts()


def draft(
    rows: Sequence[Row | None], runner: Runner, control: DraftLengths | None, plan: Callable[[], StepPlan | None]
) -> Drafts:
    """Run the rows' drafters, and plan the step that verifies their draft tokens.

    No draft tokens during prefill or profiled runs, if the cache cannot be rewound, or if no graph gives logits of
    several tokens for these rows. `plan` makes the step of the current rows. Without `control`, each row gets as many
    draft tokens as fit.
    """
    began, filled = time.perf_counter(), runner.cache.lengths
    going = [(row, count) for row, count in zip(rows, filled, strict=True) if row is not None and row.finish is None]
    drafting = [(row, room) for row, count in going if (room := row.max_drafts(count))]
    if not drafting or not runner.can_remove_last or runner.graph("decode").window.open:
        return NO_DRAFTS
    live = sum(count >= row.read_until for row, count in going)
    if not runner.capacity.appends(live):
        return NO_DRAFTS
    if live < len(going) and (unchanged := plan()) is not None and unchanged.is_prefill:
        return NO_DRAFTS
    most = None if control is None else control[live].count()
    if most == 0:
        return Drafts(live)
    for row, room in drafting:
        row.draft(room if most is None else min(room, most))
    made = plan() if any(row.drafted for row, _ in drafting) else None
    if made is None or not all(row is None or _is_verified(made, index, row) for index, row in enumerate(rows)):
        for row, _ in drafting:
            row.drafted = 0
        made = None
    return Drafts(live, made, time.perf_counter() - began)


def get_ready(rows: Sequence[Row | None], runner: Runner, plan: StepPlan) -> None:
    """Prefill drafters with the prompts that a step completed, for rows that can draft after it."""
    if not plan.is_prefill or not runner.capacity.appends(sum(row is not None and row.finish is None for row in rows)):
        return
    for index, _ in plan.ends:
        row = rows[index]
        if row is not None and row.request.drafter is not None and row.finish is None:
            row.draft(0)


def _is_verified(plan: StepPlan, index: int, row: Row) -> bool:
    """Whether a plan feeds all draft tokens of a row and gives the logits before each."""
    wanted = row.drafted + 1
    return wanted == 1 or (plan.counts[index] == wanted and set(range(wanted)) <= set(plan.positions))


COUNTS = (0, 2, 4, 8)
OFF_STEPS = 32
"""Steps without drafting after draft tokens did not pay off."""
EMPTY_STEPS = 8
"""Steps without drafting after a step without proposals."""
REFRESH_STEPS = 64
"""Steps with draft tokens after which a step without is measured again."""
PRIOR, PRIOR_WEIGHT = 0.8, 1.0
"""Prior of the acceptance rate, and the number of tokens that it counts for."""
FADE = 0.95
"""Decay of the weight of earlier draft tokens per new token."""
NEWEST = 0.2
"""Weight of the newest time in the average."""
OUTLIER = 3.0
"""Maximum time of a step relative to the average; longer steps waited for another process."""
SLOPE = 0.2
"""Assumed cost of a draft token before a measurement, in steps without draft tokens."""
MARGIN = 1.02
"""Minimum gain for drafting."""


class DraftLength:
    """Chooses 0, 2, 4 or 8 draft tokens for a number of rows of one package, by expected tokens per measured time.

    With acceptance rate a, a step with k draft tokens gives E(k) = 1 + a + ... + a^k tokens per row (Leviathan et al.,
    arXiv 2211.17192). The best k maximises E(k) / t(k), where t(k) is the measured time of the step, drafting included.
    If k = 0 is best, drafting is off for 32 steps and then tried with two tokens.
    """

    def __init__(self) -> None:
        self._accepted = self._judged = 0.0
        self._seconds: dict[int, float] = {}
        """Average time of a step, by number of draft tokens."""
        self._warm_counts: set[int] = set()
        """Numbers of draft tokens whose first step, which allocates buffers, has run."""
        self._off = 0
        """Steps for which drafting stays off."""
        self._since_plain = 0
        self._drafting = False
        """Whether the current step has draft tokens."""

    def count(self) -> int:
        """Draft tokens per row for the next step; 0 for none."""
        self._drafting = False
        if self._off:
            self._off -= 1
            return 0
        if 0 not in self._seconds or self._since_plain >= REFRESH_STEPS:
            return 0
        counts = COUNTS if self._judged else COUNTS[:2]
        best = max(counts, key=self._tokens_per_second)
        if best and self._tokens_per_second(best) > MARGIN * self._tokens_per_second(0):
            self._drafting = True
            return best
        self._off = OFF_STEPS
        self._accepted = self._judged = 0.0
        self._seconds = {0: self._seconds[0]}
        return 0

    def record(self, drafted: int, seconds: float, verified: Sequence[VerifiedDraft]) -> None:
        """A decode step with `drafted` tokens per row took `seconds`, drafting included."""
        for row in verified:
            # Tokens after the first rejected token were not verified.
            judged = min(row.accepted + 1, row.drafted)
            fade = FADE**judged
            self._accepted = self._accepted * fade + row.accepted
            self._judged = self._judged * fade + judged
        if self._drafting and not drafted:
            self._off = EMPTY_STEPS
        self._since_plain = self._since_plain + 1 if drafted else 0
        if drafted in COUNTS and drafted in self._warm_counts:
            average = self._seconds.get(drafted, seconds)
            self._seconds[drafted] = average + NEWEST * (min(seconds, OUTLIER * average) - average)
        self._warm_counts.add(drafted)

    def _tokens_per_second(self, count: int) -> float:
        rate = (self._accepted + PRIOR * PRIOR_WEIGHT) / (self._judged + PRIOR_WEIGHT)
        return sum(rate**place for place in range(count + 1)) / self._time(count)

    def _time(self, count: int) -> float:
        """Seconds of a step. An unmeasured number of draft tokens is extrapolated from those without and with fewer."""
        if count in self._seconds:
            return self._seconds[count]
        plain, fewer = self._seconds[0], max(known for known in self._seconds if known < count)
        slope = (self._seconds[fewer] - plain) / fewer if fewer else SLOPE * plain
        return plain + max(slope, 0.0) * count


DraftLengths = defaultdict[int, DraftLength]
"""By number of decoding rows."""

NAMED = 6
"""Maximum number of states in a message."""


def no_speculation_reason(runner: Runner) -> str | None:
    """The reason why no step of this package can verify draft tokens; None if one can."""
    capacity = runner.capacity
    live = runner.rows if capacity.appends(runner.rows) else 1
    rows = [RowView(1, 2, every_logit=True)] * live
    rows += [RowView(0, 0, needs_cache=False)] * (runner.rows - live)
    plan = plan_step(rows, capacity, SMALL_STEP_TOKENS)
    verifies = plan is not None and plan.counts[:live] == (2,) * live and len(plan.positions) >= 2
    lacking = (
        "no step of its graphs gives the logits of several tokens; export without `static_shapes`, with `batch_size=1` "
        "or `attention=onnx24`"
    )
    return _no_rewind_reason(runner) or (None if verifies else lacking)


def no_draft_reason(runner: Runner) -> str | None:
    """The reason why this package cannot be a draft package; None if it can."""
    if runner.contract.batch_size != 1:
        return f"its batch size is {runner.contract.batch_size}, but a draft package needs 1"
    if not runner.capacity.appends(1):
        return "it cannot add tokens to a filled cache, so it would read the whole text for every draft"
    return _no_rewind_reason(runner)


def _no_rewind_reason(runner: Runner) -> str | None:
    """The reason why rejected draft tokens cannot be removed from the cache."""
    if runner.has_rope_length:
        return "its rotary frequencies depend on the length of the text"
    if runner.contract.cacheless:
        return "its graph has no KV cache, so every step runs on the whole text"
    lasting = [store.state.past for store in runner.cache.stores if not store.rewinds(1, UNBOUNDED_TOKENS)]
    return f"its states cannot be rewound: {name_some(lasting, NAMED)}" if lasting else None


LONGEST = 20
"""Number of tokens before a match that are compared."""
PLACES = 24
"""Number of latest matches that are compared."""


def ngram_draft(history: npt.NDArray[np.int64], most: int) -> list[int]:
    """A drafter that looks up n-grams in the row's own text.

    Among the latest earlier occurrences of the last two tokens, it chooses the occurrence with the longest common past,
    the latest of equal ones. The tokens after it are the draft tokens, and may overlap the end of the text:

        history   ... a b c d e ... a b c          draft  d e ...
    """
    if len(history) < 3 or not most:
        return []
    matches = (history[:-2] == history[-2]) & (history[1:-1] == history[-1])
    places = np.flatnonzero(matches)[-PLACES:] + 2
    if not len(places):
        return []
    past = np.arange(1, min(LONGEST, len(history)) + 1)
    earlier = places[:, None] - past
    same = (earlier >= 0) & (history[earlier] == history[len(history) - past])
    longest = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    place = int(places[len(places) - 1 - int(longest[::-1].argmax())])
    found: list[int] = history[place : place + most].tolist()
    period = len(found)
    while len(found) < most:
        found.append(found[-period])
    return found
