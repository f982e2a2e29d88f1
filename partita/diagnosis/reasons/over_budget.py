"""The user's memory budget for the provider was used up before this node."""

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
    """A log line that names the node at which the budget ended, or a budget without another cause.

    There is no other cause when the provider supports the node without a budget, in isolation and with every tested
    neighbour.
    """
    yield from lines(context, "over_budget")
    supported = next((shown for shown in conclusions(context.probe) if shown.accepted), None)
    with_neighbours = [trial for trial in context.probe.variants if trial.factor == NEIGHBOURS] if context.probe else []
    rejected_together = any(trial.outcome == "rejected" for trial in with_neighbours)
    if context.budget and context.started and supported is not None and not rejected_together:
        evidence = f"{context.budget}{_estimate(context)}; {supported.evidence} without a budget"
        yield Finding("probed", "budget", evidence)


def _estimate(context: Context) -> str:
    """ONNX Runtime's memory estimate for the nodes assigned to the provider; empty if the log has none."""
    for line in context.session_log:
        match = ESTIMATE.search(line)
        if match is not None and match["provider"] == context.skipped.provider:
            return f"; ONNX Runtime's estimate for the nodes assigned to it: {int(match['bytes']):,} bytes"
    return ""


REASON = Reason(
    code="over_budget",
    level="node",
    title="Over the memory budget",
    sentence="the memory budget of {provider} was used up before {op}",
    condition="the provider's device memory budget was used up before this node",
    needs="the budget in the request and an experiment without it; or a log line with the node at which the budget "
    "ended",
    remedy="raise or remove the budget",
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
