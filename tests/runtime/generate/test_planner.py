"""Step planning: choice of graph, rows and tokens. No session is opened, ONNX Runtime is not imported."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from partita.runtime.generate.planner import Capacity, RowView, StepPlan, plan_step, prompts_first

ANY = Capacity(max_length=64)
PAIR = Capacity(max_length=64, chunk=8, logits_rows=4)
SUMS = Capacity(max_length=64, padding_is_safe=False)
SUMS_PAIR = Capacity(max_length=64, chunk=8, padding_is_safe=False)
WHOLE = Capacity(max_length=64, appends_chunks=False)
FEWER = replace(WHOLE, symbolic_batch=True)
SUMS_FEWER = replace(SUMS, appends_chunks=False, symbolic_batch=True)
SUMS_PAIR_FEWER = replace(SUMS_PAIR, logits_rows=1, symbolic_batch=True)

GRAPHS = (ANY, PAIR, SUMS, SUMS_PAIR, WHOLE, FEWER, SUMS_FEWER, SUMS_PAIR_FEWER)


def planned(rows: list[RowView], capacity: Capacity = ANY, most: int = 512) -> StepPlan:
    plan = plan_step(prompts_first(rows, capacity), capacity, most)
    assert plan is not None
    return plan


def shape(plan: StepPlan) -> tuple[str, int, tuple[int, ...]]:
    return plan.graph, plan.new_tokens, plan.counts


def read_all(lengths: list[int], capacity: Capacity, most: int = 512, *, policy=prompts_first) -> list[StepPlan]:
    """Plans until every prompt is read."""
    filled = [0] * len(lengths)
    plans: list[StepPlan] = []
    while True:
        rows = [RowView(done, length - done, in_prompt=True) for done, length in zip(filled, lengths, strict=True)]
        plan = plan_step(policy(rows, capacity), capacity, most)
        if plan is None:
            return plans
        plans.append(plan)
        filled = [done + took for done, took in zip(filled, plan.counts, strict=True)]


@pytest.mark.parametrize(
    ("lengths", "spans"),
    [
        ([5, 3, 4], [None]),  # so short that three steps would read the weights three times for nothing
        ([40, 3, 40], [(0, 1), (1, 2), (2, 3)]),  # padding would be most of it
        ([20, 20, 3], [(0, 2), (2, 3)]),
        ([20, 40, 40], [(0, 1), (1, 3)]),
        ([50, 50], [None]),
    ],
)
def test_neighbouring_rows_share_prefill_if_not_slower(lengths, spans):
    assert [plan.span for plan in read_all(lengths, FEWER)] == spans


def test_decode_step_spans_first_to_last_active_row():
    rows = [
        RowView(0, 0, needs_cache=False),
        RowView(9, 1),
        RowView(30, 0, needs_cache=False),
        RowView(20, 1),
        RowView(0, 0),
    ]
    plan = planned(rows, FEWER)
    assert (shape(plan), plan.span) == (("decode", 1, (0, 1, 0, 1, 0)), (1, 4))
    assert plan.ends == ((1, 0), (3, 0)) and plan.starts[1:4] == (9, 30, 20)


@pytest.mark.parametrize("seed", range(8))
def test_random_rows_run_each_token_once_without_cache_corruption(seed):
    """Padding never overwrites a started row that needs its cache, and no write exceeds the cache length."""
    rng = random.Random(seed)
    for capacity, batch in itertools.product(GRAPHS, (1, 2, 3)):
        lengths = [rng.randint(1, 60) for _ in range(batch)]
        filled = [0] * batch
        for _ in range(400):
            rows = [RowView(done, size - done, in_prompt=True) for done, size in zip(filled, lengths, strict=True)]
            plan = plan_step(prompts_first(rows, capacity), capacity, rng.choice((1, 5, 512)))
            if plan is None:
                break
            first, end = plan.span or (0, batch)
            assert capacity.symbolic_batch or plan.span is None
            assert not any(plan.counts[:first]) and not any(plan.counts[end:])
            begun = any(row.cache_length for row in rows[first:end])
            assert (
                capacity.appends_chunks
                or not begun
                or plan.new_tokens == 1
                or (end - first == 1 and capacity.symbolic_batch)
            )
            for row, took in list(zip(rows, plan.counts, strict=True))[first:end]:
                assert took <= row.pending
                assert capacity.padding_is_safe or took == plan.new_tokens or not row.cache_length or not row.pending
                assert row.cache_length + plan.new_tokens <= capacity.max_length or not row.needs_cache
            assert {row for row, _ in plan.ends} == {
                index for index, row in enumerate(rows) if row.pending and row.pending == plan.counts[index]
            }
            filled = [done + took for done, took in zip(filled, plan.counts, strict=True)]
        assert filled == lengths, (capacity, lengths)


def test_prefill_moves_idle_row_start_only_if_graph_requires_it() -> None:
    rows = [RowView(20, 0, needs_cache=False), RowView(0, 8, in_prompt=True)]
    assert (planned(rows, WHOLE).new_tokens, planned(rows, WHOLE).starts) == (8, (0, 0))
    assert planned(rows, ANY).starts == (20, 0), "and stays where it is where any may begin"
