"""The memory budget that the user gave the provider was spent before it came to this node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from partita.diagnosis.evidence import Context, Finding, lines
from partita.diagnosis.probe_conclusions import conclusions
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import WITHOUT_OPTIONS
from partita.observations.facts import NEIGHBOURS, NodeProbe, ProbeRun
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry

ESTIMATE = re.compile(r"Resource estimation for EP '(?P<provider>[^']+)'.*total estimated memory: (?P<bytes>\d+) bytes")


def find(context: Context) -> Iterator[Finding]:
    """A log line that shows where the budget ended, or a budget and no other cause.

    There is no other cause when the provider supports the node without a budget, in isolation and with every
    neighbour that was tried.
    """
    yield from lines(context, "over_budget")
    taken = next((shown for shown in conclusions(context.probe) if shown.accepted), None)
    with_neighbours = [trial for trial in context.probe.variants if trial.factor == NEIGHBOURS] if context.probe else []
    rejected_together = any(trial.outcome == "rejected" for trial in with_neighbours)
    if context.budget and context.started and taken is not None and not rejected_together:
        evidence = f"{context.budget}{_estimate(context)}; {taken.evidence} when there is no budget"
        yield Finding("probed", "budget", evidence)


def _estimate(context: Context) -> str:
    """What ONNX Runtime reckons with for the nodes that the provider did take, where the log has it."""
    for line in context.session_log:
        told = ESTIMATE.search(line)
        if told is not None and told["provider"] == context.skipped.provider:
            return f", of which the nodes assigned to it need {int(told['bytes']):,} bytes by ONNX Runtime's estimate"
    return ""


REASON = Reason(
    code="over_budget",
    level="node",
    title="Over the memory budget",
    sentence="the memory budget of {provider} was used up before {op}",
    condition="the provider's device memory budget was used up before this node",
    needs="the budget of the request, and an experiment without it; or a log line that names the node at "
    "which the budget ended",
    remedy="raise the budget, or remove it",
    example=Context(
        node="model.layers.7.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        budget="cuda.memory_budget_kb=1000",
        probe=NodeProbe("model.layers.7.mlp.up_proj/MatMul", (ProbeRun("as_is", "", "supported", ""),)),
        session_log=(
            "[I:onnxruntime:, graph_partitioner.cc:2466 Partition] Resource estimation for EP 'CUDAExecutionProvider': "
            "non-workspace memory: 526336 bytes, workspace memory: 263168 bytes, persistent prepack memory: 0 bytes, "
            "peak initialization scratch memory (not included in budget): 0 bytes, total estimated memory: 789504 "
            "bytes",
        ),
        patterns=(LogPattern("over_budget", r"(?P<why>Resource estimation for EP '[^']+': .*)"),),
    ),
    find=find,
    found_on=("line", "blank_line", "budget"),
    steps=(WITHOUT_OPTIONS,),
)
