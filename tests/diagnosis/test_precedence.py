"""The table that decides between reasons: complete, and followed."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from partita.diagnosis import precedence
from partita.diagnosis.precedence import PRECEDENCE, explain, ranks
from partita.diagnosis.probe_verdict import Code
from partita.diagnosis.reasons.base import load_reasons
from partita.observations.codes import NODE_CODES, PROVIDER_CODES
from partita.observations.facts import NodeProbe, Trial
from tests.diagnosis.test_reasons import GATHER, context
from tests.partition_reports.samples import NO_KERNEL

TAKEN_ALONE = NodeProbe(GATHER, (Trial("as_is", "", "taken", ""),))
TAKEN_AS_INT32 = NodeProbe(
    GATHER, (Trial("as_is", "", "left", ""), Trial("type", "int32 in place of int64", "taken", ""))
)


def test_the_codes_are_the_files_of_the_folder() -> None:
    levels = {"provider": set(PROVIDER_CODES), "node": set(NODE_CODES)}
    for level, codes in levels.items():
        assert {reason.code for reason in load_reasons() if reason.level == level} == codes


def test_whatever_a_log_or_an_experiment_can_show_has_a_rank() -> None:
    for code in set(NODE_CODES) - {"unexplained"}:
        assert {(code, "line"), (code, "blank_line")} <= set(ranks())
    assert {(code, "alone") for code in get_args(Code)} <= set(ranks())
    assert {(code, "entry") for code in (*PROVIDER_CODES, "dynamic_shape")} <= set(ranks())


def test_every_row_says_why_it_stands_where_it_stands() -> None:
    assert all(rank.because and rank.codes for rank in PRECEDENCE)


def test_a_finding_without_a_rank_is_an_error_that_names_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precedence, "ranks", dict)
    with pytest.raises(LookupError, match=r"no_kernel_op by line has no rank in .*precedence\.PRECEDENCE"):
        explain(context(log=(NO_KERNEL,)))


def test_a_code_has_one_rank_for_one_ground(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precedence, "PRECEDENCE", (PRECEDENCE[0], PRECEDENCE[0]))
    ranks.cache_clear()
    try:
        with pytest.raises(ValueError, match="pinned_by_user by pin has two ranks"):
            ranks()
    finally:
        ranks.cache_clear()


# Each case is one node for which several reasons apply, and the one that goes first.
CASES = {
    "an experiment that isolates the cause, before a line that does not": (
        context(log=(NO_KERNEL,), probe=TAKEN_AS_INT32),
        "no_kernel_type",
    ),
    "a line about the node, before an experiment in which it is taken": (
        context(log=(NO_KERNEL,), probe=TAKEN_ALONE),
        "no_kernel_op",
    ),
    "a budget, before what stands around the node": (
        context(probe=TAKEN_ALONE, budget="cuda.memory_budget_kb=1"),
        "over_budget",
    ),
    "a pin, before all that the provider says": (context(log=(NO_KERNEL,), pin="cpu:Gather"), "pinned_by_user"),
    "that ONNX Runtime added it, before what is said of its operator": (
        context(exported=False, beside=("a",), log=(NO_KERNEL,), probe=TAKEN_ALONE),
        "runtime_inserted",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_row_that_applies_decides(case: str) -> None:
    given, code = CASES[case]
    assert explain(given)[0].code == code


def test_the_table_decides_and_not_the_alphabet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same findings, under the table turned round."""
    given, code = CASES["an experiment that isolates the cause, before a line that does not"]
    monkeypatch.setattr(precedence, "PRECEDENCE", PRECEDENCE[:-1][::-1] + PRECEDENCE[-1:])
    ranks.cache_clear()
    try:
        assert explain(given)[0].code == "no_kernel_op" != code
    finally:
        ranks.cache_clear()


def test_only_a_line_with_its_name_speaks_for_a_node_against_an_experiment() -> None:
    """A line with a blank in place of the name may be about another node of the same operator."""
    blank = NO_KERNEL.replace(GATHER, "")
    nameless = context(nameless=True, log=(blank,))
    assert explain(nameless)[0].code == "no_kernel_op"
    assert explain(replace(nameless, probe=TAKEN_ALONE))[0].code == "not_claimed"
