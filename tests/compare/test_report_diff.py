"""Comparison of two placement reports: headline, node moves, reasons, copies and context changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.compare.reports import compare
from partita.observations.records import InstalledWheel
from partita.partition_reports.phase_records import Subgraphs
from partita.partition_reports.render.show import load_view
from tests.partition_reports.report_changes import compiled, each_node, each_phase, mixed, moved, renamed, with_cost
from tests.partition_reports.samples import CPU, GPU, MISSING_FIRST_CHAIN, PACKAGE, recorded_facts, report_of

QUERY, MUL = "model.layers.0.self_attn.q_proj/MatMul", "model.layers.0.mlp/Mul"
HEAD = "lm_head/MatMul"
OTHER_PACKAGE = PACKAGE.model_copy(update={"manifest_sha256": "cd" * 32})


def ways(found, section="nodes", group="decode"):
    """The changes of a section and phase: name and both values."""
    return {(each.name, each.before, each.after) for each in found.of(section) if each.group == group}


def rendered(found):
    """The text view without line breaks."""
    return " ".join(load_view("text", "partita.compare.document").to_text(found).split())


def having(report, **changes):
    return report.model_copy(update=changes)


def with_copies(*first):
    """The report with these changes of the first copy of each phase in its place."""

    def change(phase):
        copy, *rest = phase.copies
        return {"copies": (*(having(copy, **changes) for changes in first), *rest)}

    return each_phase(mixed(), change)


def inside(copies, *phases):
    """The report with a control-flow subgraph with this many copies."""
    bodies = Subgraphs(nodes=5, copies=copies)
    return each_phase(mixed(), lambda phase: {"subgraphs": bodies if phase.name in phases else None})


def on(provider, names):
    """The report with some nodes on another provider."""
    return each_node(mixed(), lambda node: having(node, provider=provider) if names in node.name else node)


FEWER = each_phase(mixed(), lambda phase: {"nodes": phase.nodes[:-1]})


def test_moved_nodes_are_listed_per_phase_with_reason():
    found = compare(mixed(), moved(QUERY, MUL))
    assert found.headline == "2 nodes moved from WebGpu to CPU in prefill and decode; onnxruntime 1.31.1 -> 1.40.0"
    assert rendered(found).startswith(found.headline) and not found.same
    for phase in ("prefill", "decode"):
        assert ways(found, group=phase) == {(QUERY, GPU, CPU), (MUL, GPU, CPU)}
    assert {(change.details["reason"], change.effect) for change in found.of("nodes")} == {("unexplained", "worse")}
    assert {change.kind for change in found.of("reasons")} == {"added"}
    assert "WebGpu -> CPU: unexplained, 2 nodes in prefill and decode" in rendered(found)
    assert f"nodes: {QUERY}, {MUL}" in rendered(found) and "operators: MatMul 1, Mul 1" in rendered(found)


def test_move_to_preferred_provider_is_an_improvement():
    found = compare(moved(QUERY), mixed())
    assert found.headline.startswith("1 node moved from CPU to WebGpu in prefill and decode")
    kinds = {(change.kind, change.effect) for change in (*found.of("nodes"), *found.of("reasons"))}
    assert kinds == {("changed", "better"), ("removed", "better")}


def test_provider_that_never_started_is_in_no_reason():
    before, after = mixed(MISSING_FIRST_CHAIN), moved(QUERY, chain=MISSING_FIRST_CHAIN)
    for one, other, kind in ((before, after, "added"), (after, before, "removed")):
        assert {(change.name, change.kind) for change in compare(one, other).of("reasons")} == {(QUERY, kind)}
    assert "WebGpu -> CPU: unexplained, 1 node in prefill and decode" in rendered(compare(before, after))
    found = compare(before, mixed())
    assert not found.of("reasons") and ways(found, "context", "chain")


ONE_NAME = {"Memcpy_token_0": "Memcpy", "Memcpy": "Memcpy_token_7", "Memcpy_token_1": "Memcpy_token_12"}
BOTH = ("prefill", "decode")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (mixed(), mixed()),
        (mixed(), renamed(mixed(), {**ONE_NAME, "Transpose_token_4": "Transpose_token_9"})),
        (mixed(), renamed(mixed(), {MUL: f"{MUL}_2"})),
        (compiled(1, QUERY, MUL)(mixed()), compiled(3, QUERY, MUL)(mixed())),
        (mixed(), compiled(1, QUERY, MUL)(mixed())),
        *((inside(copies, *BOTH), inside(copies, *BOTH)) for copies in (3, None)),
    ],
    ids=["equal", "counters", "number suffix", "compiled", "fused", "subgraph", "unknown subgraph"],
)
def test_names_of_the_runtime_are_no_difference(before, after):
    found = compare(before, after)
    assert found.same and not found.of("nodes", "copies", "reasons")
    assert found.headline.startswith("no difference in placement, reasons and copies")


@pytest.mark.parametrize(
    ("before", "after", "changes", "text"),
    [
        (mixed(), FEWER, {(HEAD, GPU, None)}, "1 node removed in prefill and decode"),
        (FEWER, mixed(), {(HEAD, None, GPU)}, "1 node added in prefill and decode"),
        (
            mixed(),
            on(None, QUERY),
            {(QUERY, GPU, None)},
            "1 node moved from WebGpu to an unknown provider in prefill and decode",
        ),
        (
            on(GPU, "Transpose"),
            renamed(moved("Transpose_token_4"), {"Transpose_token_4": "Transpose_token_6"}),
            {("Transpose_token_6", GPU, CPU)},
            "1 node moved from WebGpu to CPU in prefill and decode",
        ),
        (
            mixed(),
            renamed(moved(MUL), {MUL: f"{MUL}_2"}),
            {(f"{MUL}_2", GPU, CPU)},
            f"nodes: {MUL}_2 (was {MUL})",
        ),
        (
            mixed(),
            compiled(1, "model.rotary_emb/Gather", "model.rotary_emb/Concat")(mixed()),
            {("model.rotary_emb/Gather", CPU, GPU), ("model.rotary_emb/Concat", CPU, GPU)},
            "as part of: EP_subgraph_1_0 2",
        ),
    ],
    ids=["removed", "added", "unknown", "added by the runtime", "renamed", "compiled"],
)
def test_changed_nodes_are_matched_by_name(before, after, changes, text):
    found = compare(before, after)
    assert ways(found) == changes and text in rendered(found)


def test_changed_reason_shows_evidence():
    before = mixed()
    first, *rest = before.fallbacks
    update = {"reason": "no_kernel_type", "evidence": "float16 is taken", "evidence_kind": "probed"}
    found = compare(before, having(before, fallbacks=(having(first, **update), *rest)))
    (change,) = found.of("reasons")
    assert (change.kind, change.before, change.after) == ("changed", "no_kernel_op", "no_kernel_type")
    assert "no_kernel_op -> no_kernel_type" in rendered(found) and "float16 is taken" in rendered(found)
    assert "no node moved, 1 reason changed in prefill" in found.headline


def test_copies_are_matched_by_tensor_in_order():
    tensor = mixed().phases[1].copies[0].tensor
    found = compare(mixed(), with_copies({"tensor": "elsewhere", "caused_by": (HEAD,)}))
    assert ways(found, "copies") == {(tensor, 512, None), ("elsewhere", None, 512)} and not found.same
    two, three = (
        with_copies(*({"name": f"m{at}", "bytes_per_run": size} for at, size in enumerate(sizes)))
        for sizes in ((512, 512), (4096, 9, 8))
    )
    found = compare(two, three)
    assert ways(found, "copies") == {(tensor, 512, 4096), (tensor, 512, 9), (tensor, None, 8)}


def test_copy_bytes_are_compared_only_for_equal_token_counts():
    after = with_copies({"bytes_per_run": 4096})
    assert {change[1:] for change in ways(compare(mixed(), after), "copies")} == {(512, 4096)}
    tokens = {"prefill": 5, "decode": 1}
    other_prompt = each_phase(after, lambda phase: {"cost": with_cost(phase, tokens_per_run=tokens[phase.name] + 1)})
    found = compare(mixed(), other_prompt)
    assert found.same and "decode: the number of new tokens per run differs" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (inside(40, *BOTH), "no node moved, copies 4 -> 44 in decode"),
        (inside(40, "prefill"), "copies 4 -> 44 in prefill"),
        (inside(None, *BOTH), "copies 4 -> unknown in decode"),
    ],
)
def test_subgraph_copies_are_a_difference(after, text):
    found = compare(inside(0, *BOTH), after)
    assert not found.same and text in found.headline


def test_changed_versions_options_and_checks_are_listed():
    before, after = mixed(), moved()
    wheels = [tuple(InstalledWheel(name=name, version="1.31") for name in names) for names in (["a"], ["a", "b"])]
    before = having(before, environment=having(before.environment, onnxruntime_wheels=wheels[0]))
    env = having(after.environment, packages={"numpy": "2.4.0", "onnx": "1.30"}, onnxruntime_wheels=wheels[1])
    request = having(after.request, threads=2, options={"temperature": "1"})
    checks = (having(after.checks[0], passed=False), *after.checks[1:])
    found = compare(before, having(after, environment=env, package=OTHER_PACKAGE, request=request, checks=checks))
    assert found.same and "package manifest sha256 abababababab -> cdcdcdcdcdcd" in found.headline
    assert {(change.name, change.before, change.after) for change in found.of("context")} >= {
        ("onnxruntime", "1.31.1", "1.40.0"),
        ("onnxruntime package", "a", "a, b"),
        ("numpy", "2.3.0", "2.4.0"),
        ("onnx", None, "1.30"),
        ("manifest sha256", "ab" * 6, "cd" * 6),
        ("threads", None, "2"),
        ("option temperature", "0", "1"),
        ("checks failed", None, after.checks[0].name),
    }


def test_times_are_shown_with_ratio_and_excluded_from_headline():
    speed = {"tokens_per_second": 50.0, "step_p50_ms": 20.0, "step_p95_ms": 30.0, "steps": 9}
    before = each_phase(mixed(), lambda _: speed)
    after = each_phase(mixed(), lambda _: {**speed, "step_p50_ms": 25.0, "tokens_per_second": 40.0})
    found = compare(before, after)
    assert found.same and "tokens" not in found.headline
    assert "decode tokens/s 50.0 40.0 0.800 ~" in rendered(found)  # 25 ms is within the 30 ms that slower steps take
    assert "repeat both runs before you rely on a ratio" in rendered(found)
    apart = rendered(compare(before, each_phase(after, lambda phase: {"step_p50_ms": 99.0})))
    assert "decode p50 ms per step 20.0 99.0 4.95 note:" in apart  # no mark of the spread


OTHER = report_of(recorded_facts(), package=OTHER_PACKAGE)
EMPTY = each_phase(mixed(), lambda phase: {"nodes": ()})
ONLY_RUN = having(mixed(), phases=(having(mixed().phases[0], name="run"),))
ELSEWHERE = each_node(mixed(), lambda node: having(node, name=f"other/{node.name}"))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (OTHER, mixed(), "of different models"),
        (mixed(), EMPTY, "b has no node in any phase"),
        (mixed(), ONLY_RUN, "no phase in common: prefill and decode in a, run in b"),
        (mixed(), having(ELSEWHERE, package=OTHER_PACKAGE), "of different models"),
        (mixed(), ELSEWHERE, ""),  # of the same package
    ],
)
def test_unrelated_reports_give_reason(before, after, reason):
    found = compare(before, after, names=("a", "b"))
    assert reason in found.unrelated_reason and bool(reason) is bool(found.unrelated_reason)
    assert found.headline.startswith("not comparable: ") is bool(reason) and not found.same


def test_missing_phase_is_a_difference():
    found = compare(mixed(), having(mixed(), phases=mixed().phases[:1]))
    assert not found.same
    assert ways(found, "phases", "request") == {("phases", "prefill, decode", "prefill")}


def test_cache_in_place_change_is_in_headline_but_size_is_not():
    report = report_of(recorded_facts())
    for change, effect in (({"address_changes": 2}, "worse"), ({"size_bytes": 1}, "neutral")):
        found = compare(report, having(report, cache=having(report.cache, **change)))
        assert [change.effect for change in found.of("cache")] == [effect] and found.same
        assert ("cache in place" in found.headline) is (effect == "worse")


def test_failed_run_is_a_difference_and_starts_the_headline():
    facts = recorded_facts()
    good, bad = report_of(facts), report_of(replace(facts, failure="no kernel"))
    found = compare(good, bad, names=("a.json", "b.json"))
    assert found.headline.startswith("the run of b.json FAILED; no node moved") and not found.same
    assert found.notes[0] == "the run of B failed, so it does not show that its nodes run: no kernel"
    assert compare(bad, bad).headline.startswith("the run of A and B FAILED; ")
