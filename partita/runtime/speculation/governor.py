"""How many guesses are worth a step, from what steps of each width cost here and how often guesses prove right.

With chances a1, a2, ... of guesses that each hold where those before it do, a step of k guesses gives a row

    E(k) = 1 + a1 + a1 a2 + ... + a1 a2 .. ak      tokens, and takes t(k + 1) seconds,

where one without takes t(1) (Leviathan et al., arXiv 2211.17192, have the formula with one chance for all). The best k
is that of the most tokens per second. Estimates are wrong at times, so there is an account beside them: what
guesses have won and lost so far against steps without. It may go below zero by a small share of the time and half a
step only, or two steps where guesses of this package have won of late, and a step that could lose more than what is
left is not made. So speculation that does not pay ends by itself, and is tried again when the time has grown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from operator import mul

from partita.runtime.engine.guesses import Heard
from partita.runtime.speculation.acceptance import Acceptance
from partita.runtime.speculation.asking import CAUGHT_UP, Asking
from partita.runtime.speculation.costs import StepCosts

MOST_GUESSES = 10
"""Per step."""
STAKE = 0.5
"""Steps of one token that may be lost at the beginning."""
PROVEN_STAKE = 2.0
"""The same where the last guesses of this package have won more than they took."""
DEAR_STAKE = 1.0
"""The same where guesses take their time to be made: less buys nothing there."""
SHARE = 0.02
"""Part of the time that may be lost after that, the time in which guesses were looked for included."""
LENT = 0.5
"""Part of what a draft promises for the rest of a row that may be spent on reading the text before, once its guesses
are known to be good.
"""
OUTLIER = 3.0
"""A guess that took so many times what others did was kept waiting."""
PROVEN = 0.02
"""Steps of one token that a step with guesses has to win to be worth a larger stake."""
RECENT = 0.03
"""What the last step in which guesses were made counts for in what they win."""
USUAL = 0.15
"""What the last time to guess counts for in what is usual."""
PURSE = 4.0
"""Steps of one token of what was won that may be lost again."""
HOARD = 40.0
"""Steps of one token of what was won that are kept at most: after a text that is guessed well for long there may be one
that is not.
"""
MARGIN = 1.03
"""How much more tokens per second a guess has to promise."""
LONGEST_REST = 4
"""Steps: after guesses that were not worth it, or not to be afforded, nobody looks for any for 1, 2 and then so many
steps, because looking takes its time, too, and so does weighing what a step took.
"""
LONGEST_IN_VAIN = 16
"""The same while no guess of a generation was right."""
LONGEST_UNFOUND = 8
"""The same after steps in which nobody found any: a look that finds none takes a twentieth of a step of half a
millisecond, and what begins to repeat itself goes on for longer than a rest.
"""
REFRESH = 48
"""Steps with guesses after which one is made without, so that what they are compared with stays true."""


class Governor:
    """Chooses the number of guesses for the rows of one executor. It may be kept for the next generation."""

    def __init__(self, priors: Sequence[float], most: int = MOST_GUESSES, *, asking: Asking | None = None) -> None:
        """`priors`: what share of each class of guesses is thought to be right. `most`: guesses per row and step.
        `asking`: every guess takes its time to be made, as with a draft; None: they are found together.
        """
        self.acceptance = Acceptance(priors)
        self._costs: dict[int, StepCosts] = {}
        """By the rows that go on: each makes a step longer."""
        self._most, self._asking = most, asking
        self._lent = 0.0
        """Steps of one token that this generation may lose beyond the account, for what a draft had to read."""
        self._resting, self._rest = 0, 0
        """Steps in which nobody looks for guesses: those still to come, and of the last time."""
        self._rest_seconds = 0.0
        """That such a step is taken to take."""
        self._right = False
        """A guess of this generation was right."""
        self._declined = 0
        """Steps without guesses that there were."""
        self._spent = 0.0
        """Seconds of decode steps."""
        self._won = 0.0
        """Seconds that guesses have saved; below zero what they have cost."""
        self._worth = 0.0
        """What a step in which guesses were made has won of late, whatever generation it was of, in steps of one token;
        those in which they were not worth it have lost what it took to make them.
        """
        self._usual = 0.0
        """Seconds in which guesses are made, looked for, or decided about, of the last such steps."""

    def begin(self) -> None:
        """A generation begins: what is known stays, and no other's time or gain may be lost in it."""
        self._spent = self._won = self._lent = 0.0
        self._resting = self._rest = 0
        self._right = False

    # --- engine.guesses.Governor --------------------------------------------------------------------------------------

    def costs(self, live: int) -> StepCosts:
        """What steps cost while so many rows go on."""
        return self._costs.setdefault(live, StepCosts())

    def rests(self) -> bool:
        """Whether nobody is to look for guesses in the next step, and nobody weighs it."""
        if not self._resting:
            return False
        self._resting -= 1
        self._spent += self._rest_seconds
        return True

    def measuring(self, live: int) -> bool:
        """Whether a step without guesses is wanted now, because there is none, or none of late, to compare with."""
        costs = self.costs(live)
        return not costs.known or costs.since_plain >= REFRESH

    def most(self, live: int, behind: int = 0, room: int = 0) -> int:
        """Guesses per row that it is worth asking for. `behind`: tokens that have to be read before; `room`: tokens
        that a row may still get.
        """
        costs = self.costs(live)
        if self._asking is not None:
            best = self._worth_asking(self._asking, costs, behind, room)
        elif self._left(costs) >= costs.of(2) / costs.of(1) - 1:
            return self._most  # their evidence tells more than what is typical
        else:
            best = 0
        if not best:
            self.acceptance.decline_all(1 if self._asking is None else max(self._rest, 1))
            self._begin_rest(costs)
        return best

    def choose(self, offers: Sequence[tuple[int, ...]], live: int) -> int:
        """How many of these guesses are fed in each row; of none, none, and nobody looks for some steps."""
        costs = self.costs(live)
        if not offers:
            self._begin_rest(costs, LONGEST_UNFOUND)
            return 0
        best, _ = self._best(offers, self.acceptance.of, live, costs, self._left(costs))
        if not best:
            self.acceptance.decline({offer[0] for offer in offers if offer})
            self._declined += 1
            if self._declined % REFRESH == 0:
                costs.forget_worst()
            self._begin_rest(costs)
        else:
            self._rest = 0
        return best

    def heard(self, step: Heard) -> None:
        """A decode step was made."""
        costs, live = self.costs(step.live), max(step.live, 1)
        expected = costs.of(step.width) if costs.known else step.seconds
        costs.add(step.width, step.seconds)
        asking = self._asked_seconds(step)
        for row in step.tested:
            right = row.confirmed + row.ended
            self.acceptance.judge(row.evidence[:right] if row.ended else row.evidence, right)
            self._right = self._right or row.confirmed > 0
        if not costs.known:
            return
        taken = costs.of(step.width)
        if not costs.settled(step.width):
            taken = max(taken, step.seconds)
        taken = min(taken, OUTLIER * expected) + asking
        self._spent += taken
        won = step.tokens / live * costs.of(1) - taken
        self._won = min(self._won + won, HOARD * costs.of(1))
        if step.asked:
            self._worth += (won / costs.of(1) - self._worth) * RECENT

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin_rest(self, costs: StepCosts, longest: int | None = None) -> None:
        most = longest or (LONGEST_REST if self._right else LONGEST_IN_VAIN)
        self._resting = self._rest = min(2 * self._rest or 1, most)
        self._rest_seconds = costs.of(1)

    def _worth_asking(self, asking: Asking, costs: StepCosts, behind: int, room: int) -> int:
        """How many guesses of a draft are worth being made: the most tokens per second while it is in step, if what it
        has to read to get there can be afforded.
        """
        one, step = costs.of(1), asking.step
        if step is None:  # nobody knows yet what one takes
            return int(self._left(costs) >= costs.of(2) / one - 1)
        reading, typical = asking.reading(behind) / one, self.acceptance.typical
        wide, left = [range(min(self._most, max(room, 1)))], self._left(costs, reading)
        best, rate = self._best(wide, lambda _: typical, 1, costs, max(left, 0.0) + reading, step / one)
        if not best:
            return 0
        lent = 0.0
        if behind > CAUGHT_UP and reading:
            promised = LENT * self.acceptance.known * room * (1 - 1 / rate)
            lent = reading if reading <= promised else 0.0
        best, _ = self._best([range(best)], lambda _: typical, 1, costs, left + lent, step / one)
        if best:
            self._lent += lent
        return best

    def _asked_seconds(self, step: Heard) -> float:
        """What looking for guesses took in a step; what a process that had to wait took is not charged."""
        if not step.asked:
            return min(step.guess_seconds, OUTLIER * self._usual) if self._usual else step.guess_seconds
        asking, usual = self._asking, self._usual or step.guess_seconds
        if asking is not None and asking.step is not None:
            usual = step.asked * asking.step + asking.reading(step.read)
        charged = min(step.guess_seconds, OUTLIER * usual)
        self._usual = usual + (charged - usual) * USUAL
        if asking is not None:
            asking.add(step.guess_seconds, step.asked, step.read)
        return charged

    def _left(self, costs: StepCosts, reading: float = 0.0) -> float:
        """What the next step may lose, in steps of one token, beside a draft's `reading` before it."""
        stake = DEAR_STAKE if self._asking is not None else PROVEN_STAKE if self._worth > PROVEN else STAKE
        return min(stake + self._lent + (SHARE * self._spent + self._won) / costs.of(1) - reading, PURSE + self._lent)

    def _best(
        self,
        offers: Sequence[Sequence[int]],
        chance: Callable[[int], float],
        live: int,
        costs: StepCosts,
        left: float,
        asking: float = 0.0,
    ) -> tuple[int, float]:
        """The number of guesses with the most tokens per second, and how many times more these are than without; 0 for
        none. `chance`: that a guess of an offer is right where those before it are; `left`: what may be lost, and
        `asking`: what each still costs to be made, in steps of one token.
        """
        one, best, rate = costs.of(1), 0, MARGIN
        holds = [accumulate(map(chance, offer), mul) for offer in offers]
        gains = [*holds[0]] if len(holds) == 1 else [*map(sum, zip_longest(*holds, fillvalue=0.0))]
        tokens, longest = float(live), len(gains)
        for count, more in enumerate(gains, 1):
            tokens += more
            cost = costs.of(count + 1) / one + asking * count
            if cost - 1 <= left and tokens / live / cost > rate:
                best, rate = count, tokens / live / cost
            # Wider steps take no less, and each further guess is right no more often than the one before it.
            if cost - 1 > left or (tokens + more * (longest - count)) / live / cost <= rate:
                break
        return best, rate
