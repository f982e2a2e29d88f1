"""Whether a package can verify several tokens in one step, and whether a package can draft; else why not."""

from __future__ import annotations

from partita.observations.text_format import listing, name_families
from partita.runtime.engine.cache.in_place import KINDS
from partita.runtime.engine.executor import Runner
from partita.runtime.engine.planner import RowView, plan_step

NAMED = 6
SEVERAL = 2
ANY = 512
CHANGING_ROPE = "its rotary frequencies depend on the length of the text"


def why_not(runner: Runner) -> str | None:
    """Why no step of this package can verify draft tokens; None if one can."""
    roped = CHANGING_ROPE if runner.takes_rope_length else None
    return _cannot_go_back(runner) or roped or _takes_no_several(runner)


def why_no_draft(runner: Runner) -> str | None:
    """Why this package cannot draft for another; None where it can."""
    if runner.contract.batch_size != 1:
        return f"its batch size is {runner.contract.batch_size}, and a draft has one row"
    if runner.takes_rope_length:
        return CHANGING_ROPE
    return _cannot_go_back(runner)


def _cannot_go_back(runner: Runner) -> str | None:
    """Why a rejected draft token cannot be rewound."""
    contract = runner.contract
    if contract.rereads:
        return "its graph keeps no cache, so every step reads the whole text"
    if contract.rereads_at is not None:
        return f"cached keys do not hold beyond {contract.rereads_at} tokens, so none can be taken back"
    if runner.cache.can_rewind(1):
        return None
    recurrent = [state for state in contract.states if state.kind not in KINDS]
    if recurrent:
        kinds = listing(sorted({str(state.kind) for state in recurrent}))
        names = name_families([state.past for state in recurrent], NAMED)
        return f"its {kinds} states ({names}) take in every token that they are fed, and it cannot be taken out again"
    if any(state.rolls for state in contract.states):
        return (
            "its cache holds the window of some layers alone, and a token that it dropped cannot be put back; export "
            "with `cache=fixed`"
        )
    return "its cache grows, and here it cannot be shortened: bfloat16, or memory of a device"


def _takes_no_several(runner: Runner) -> str | None:
    """Why no step takes several tokens after others and gives the logits of each: of all rows, or of one alone where
    that is how several are taken.
    """
    contract, graphs = runner.contract, runner.capacity
    live = runner.rows if graphs.appends(runner.rows) else 1
    rows = [RowView(1, SEVERAL, every_logit=True)] * live
    rows += [RowView(0, 0, live=False)] * (runner.rows - live)
    plan = plan_step(rows, graphs, ANY)
    if plan is not None and plan.take[:live] == (SEVERAL,) * live and len(plan.positions) >= SEVERAL:
        return None
    if graphs.chunk is not None:
        return "its graphs take a fixed number of tokens; export without `static_shapes`"
    if not graphs.appends(live):
        return (
            f"at batch size {contract.batch_size} its attention takes one token at a time, and no row has a step of "
            "its own; export with `batch_size=1`, or with `attention=onnx24`"
        )
    return "its graph gives the logits of the last token alone"
