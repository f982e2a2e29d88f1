"""Comparison of two placement reports: headline, node moves, reasons, copies and context changes."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from partita.compare.reports import compare
from partita.observations.records import InstalledWheel
from partita.partition_reports.records import Subgraphs
from tests.partition_reports.report_changes import (
    compiled,
    each_node,
    each_phase,
    mixed,
    moved,
    renamed,
    with_cost,
)
from tests.partition_reports.samples import CPU, GPU, MISSING_FIRST_CHAIN, PACKAGE, recorded_facts, report_of
from tests.views import print_text

QUERY, MUL = "model.layers.0.self_attn.q_proj/MatMul", "model.layers.0.mlp/Mul"


def ways(found, section="nodes", kind=None):
    """The changes of a section: phase, name and both values."""
    return {
        (change.group, change.name, change.before, change.after)
        for change in found.of(section)
        if kind in (None, change.kind)
    }


def rendered(found, width=80):
    stream = io.StringIO()
    print_text(
        found, "partita.compare.document", Console(file=stream, width=width, force_terminal=False, color_system=None)
    )
    return stream.getvalue()


def test_first_line_is_the_headline():
    found = compare(mixed(), moved(QUERY, MUL))
    assert found.headline == ("2 nodes moved from WebGpu to CPU in prefill and decode; onnxruntime 1.31.1 -> 1.40.0")
    assert rendered(found, 200).splitlines()[0] == found.headline
    assert not found.same


def test_moved_nodes_are_listed_per_phase_with_reason():
    found = compare(mixed(), moved(QUERY))
    assert ways(found) == {("prefill", QUERY, GPU, CPU), ("decode", QUERY, GPU, CPU)}
    assert {(change.details["reason"], change.effect) for change in found.of("nodes")} == {("unexplained", "worse")}
    assert [change.kind for change in found.of("reasons")] == ["added", "added"]
    out = rendered(found)
    assert "WebGpu -> CPU: unexplained, 1 node in prefill and decode" in out
    assert f"nodes: {QUERY}" in out and "operators: MatMul 1" in out


def test_move_down_the_chain_has_reason_of_the_skipped_provider():
    found = compare(mixed(MISSING_FIRST_CHAIN), moved(QUERY, chain=MISSING_FIRST_CHAIN))
    assert {change.details["reason"] for change in found.of("nodes")} == {"unexplained"}, "TensorRT was missing before"
    assert reasons(found) == {(QUERY, "added", GPU)}
    assert "WebGpu -> CPU: unexplained, 1 node in prefill and decode" in rendered(found)
    back = compare(moved(QUERY, chain=MISSING_FIRST_CHAIN), mixed(MISSING_FIRST_CHAIN))
    assert reasons(back) == {(QUERY, "removed", GPU)}


def reasons(found):
    return {(change.name, change.kind, change.details["skipped"]) for change in found.of("reasons")}


def test_provider_missing_from_a_chain_is_a_context_change():
    found = compare(mixed(MISSING_FIRST_CHAIN), mixed())
    assert not found.of("reasons") and any(change.group == "chain" for change in found.of("context"))


def test_move_to_preferred_provider_is_an_improvement():
    found = compare(moved(QUERY), mixed())
    assert found.headline.startswith("1 node moved from CPU to WebGpu in prefill and decode")
    assert {(change.kind, change.effect) for change in found.changes if change.section in ("nodes", "reasons")} == {
        ("changed", "better"),
        ("removed", "better"),
    }


def test_identical_reports_have_no_difference():
    found = compare(mixed(), mixed())
    assert found.same and not found.changes
    assert found.headline == "no difference in placement, reasons and copies (9 nodes in prefill and decode)"


def test_counter_suffixes_in_names_are_ignored():
    names = {"Memcpy_token_0": "Memcpy", "Memcpy": "Memcpy_token_7", "Memcpy_token_1": "Memcpy_token_12"}
    found = compare(mixed(), renamed(mixed(), {**names, "Transpose_token_4": "Transpose_token_9"}))
    assert found.same, found
    one, other = compiled(1, QUERY, MUL)(mixed()), compiled(3, QUERY, MUL)(mixed())
    found = compare(one, other)
    assert found.same, found


def test_copy_of_another_tensor_is_a_difference():
    """Copies are matched by tensor, not by name."""
    before = mixed()

    def other_tensor(phase):
        first, *rest = phase.copies
        update = {"tensor": "elsewhere", "caused_by": ("lm_head/MatMul",)}
        return {"copies": (first.model_copy(update=update), *rest)}

    found = compare(before, each_phase(before, other_tensor))
    assert [(change.kind, change.name) for change in found.of("copies") if change.group == "decode"] == [
        ("removed", before.phases[1].copies[0].tensor),
        ("added", "elsewhere"),
    ]
    assert not found.same


def test_compiled_node_on_another_provider_moves_its_nodes():
    found = compare(mixed(), compiled(1, "model.rotary_emb/Gather", "model.rotary_emb/Concat")(mixed()))
    decode = [change for change in found.of("nodes") if change.group == "decode"]
    assert [(change.name, change.details["operator"], change.before, change.after) for change in decode] == [
        ("model.rotary_emb/Gather", "Gather", CPU, GPU),
        ("model.rotary_emb/Concat", "Concat", CPU, GPU),
    ]
    assert {change.details["part_of"] for change in decode} == {"EP_subgraph_1_0"}


def test_fusion_on_same_provider_is_no_difference():
    found = compare(mixed(), compiled(1, QUERY, MUL)(mixed()))
    assert not found.of("nodes") and found.same


def test_renamed_number_suffix_is_matched_and_reported():
    assert compare(mixed(), renamed(mixed(), {MUL: f"{MUL}_2"})).same
    found = compare(mixed(), renamed(moved(MUL), {MUL: f"{MUL}_2"}))
    assert {(change.kind, change.name) for change in found.of("nodes")} == {("changed", f"{MUL}_2")}
    assert f"{MUL}_2 (was {MUL})" in " ".join(rendered(found).split())


def test_runtime_inserted_node_on_other_provider_has_moved():
    elsewhere = renamed(moved("Transpose_token_4"), {"Transpose_token_4": "Transpose_token_6"})
    there = each_node(mixed(), lambda n: n.model_copy(update={"provider": GPU}) if "Transpose" in n.name else n)
    found = compare(there, elsewhere)
    assert {change[1:] for change in ways(found)} == {("Transpose_token_6", GPU, CPU)}


def test_node_with_unknown_provider_has_moved():
    lost = each_node(mixed(), lambda n: n.model_copy(update={"provider": None}) if n.name == QUERY else n)
    found = compare(mixed(), lost)
    assert "1 node moved from WebGpu to an unknown provider in prefill and decode" in found.headline
    assert "WebGpu -> an unknown provider, 1 node" in rendered(found)


def test_added_and_removed_nodes_are_listed():
    fewer = each_phase(mixed(), lambda phase: {"nodes": phase.nodes[:-1]})
    assert {change[1:] for change in ways(compare(mixed(), fewer))} == {("lm_head/MatMul", GPU, None)}
    assert {change[1:] for change in ways(compare(fewer, mixed()))} == {("lm_head/MatMul", None, GPU)}
    assert "1 node removed in prefill and decode" in compare(mixed(), fewer).headline


def test_changed_reason_shows_evidence():
    before = mixed()
    first, *rest = before.fallbacks
    update = {"reason": "no_kernel_type", "evidence": "float16 is taken", "evidence_kind": "probed"}
    after = before.model_copy(update={"fallbacks": (first.model_copy(update=update), *rest)})
    found = compare(before, after)
    (change,) = found.of("reasons")
    assert (change.kind, change.before, change.after) == ("changed", "no_kernel_op", "no_kernel_type")
    assert "no_kernel_op -> no_kernel_type" in rendered(found) and "float16 is taken" in rendered(found)
    assert "no node moved, 1 reason changed in prefill" in found.headline


def test_copy_bytes_are_compared_only_for_equal_token_counts():
    before = mixed()

    def larger(phase):
        first, *rest = phase.copies
        return {"copies": (first.model_copy(update={"bytes_per_run": 4096}), *rest)}

    after = each_phase(before, larger)
    assert {change[2:] for change in ways(compare(before, after), "copies")} == {(512, 4096)}
    tokens = {"prefill": 5, "decode": 1}
    other_prompt = each_phase(after, lambda phase: {"cost": with_cost(phase, tokens_per_run=tokens[phase.name] + 1)})
    found = compare(before, other_prompt)
    assert found.same
    assert "decode: the number of new tokens per run differs" in " ".join(found.notes)


def test_copies_of_same_tensor_are_paired_in_order():
    def copies(*sizes):
        def change(phase):
            first, *rest = phase.copies
            named = [first.model_copy(update={"name": f"m{n}", "bytes_per_run": size}) for n, size in enumerate(sizes)]
            return {"copies": (*named, *rest)}

        return each_phase(mixed(), change)

    tensor = mixed().phases[0].copies[0].tensor
    found = compare(copies(512, 512), copies(4096, 1024, 512))
    decode = [(change.name, change.before, change.after) for change in found.of("copies") if change.group == "decode"]
    assert decode == [(tensor, 512, 4096), (tensor, 512, 1024), (tensor, None, 512)]


def test_subgraph_copies_are_a_difference():
    def inside(copies, *phases):
        bodies = Subgraphs(nodes=5, copies=copies)
        return each_phase(mixed(), lambda phase: {"subgraphs": bodies if phase.name in phases else None})

    both = ("prefill", "decode")
    found = compare(inside(0, *both), inside(40, *both))
    assert not found.same and found.headline == "no node moved, copies 4 -> 44 in decode"
    assert ways(found, "copy_count") == {("prefill", "copies", 4, 44), ("decode", "copies", 4, 44)}
    found = compare(inside(0, *both), inside(40, "prefill"))
    assert not found.same and "copies 4 -> 44 in prefill" in found.headline
    found = compare(inside(0, *both), inside(None, *both))
    assert not found.same and "copies 4 -> unknown in decode" in found.headline
    for copies in (3, None):
        assert compare(inside(copies, *both), inside(copies, *both)).same


def test_additional_runtime_wheel_is_a_context_change():
    def installed(**wheels: str):
        env = mixed().environment
        named = tuple(InstalledWheel(name=name, version=version) for name, version in wheels.items())
        return mixed().model_copy(update={"environment": env.model_copy(update={"onnxruntime_wheels": named})})

    one, newer = installed(onnxruntime="1.31.1"), installed(onnxruntime="1.32.0")
    two = installed(onnxruntime="1.31.1", onnxruntime_gpu="1.30.0")
    assert compare(one, newer).changes == ()
    assert ways(compare(one, two), "context") == {
        ("environment", "onnxruntime_package", "onnxruntime", "onnxruntime, onnxruntime_gpu")
    }


def test_changed_versions_and_options_are_listed():
    before, after = mixed(), moved()
    env = after.environment.model_copy(update={"packages": {"numpy": "2.4.0", "onnx": "1.30"}})
    package = PACKAGE.model_copy(update={"manifest_sha256": "cd" * 32})
    request = after.request.model_copy(update={"threads": 2, "options": {"temperature": "1"}})
    after = after.model_copy(update={"environment": env, "package": package, "request": request})
    found = compare(before, after)
    assert found.same and "package manifest sha256 abababababab -> cdcdcdcdcdcd" in found.headline
    assert {change[1:] for change in ways(found, "context")} >= {
        ("onnxruntime", "1.31.1", "1.40.0"),
        ("numpy", "2.3.0", "2.4.0"),
        ("onnx", None, "1.30"),
        ("manifest_sha256", "ab" * 6, "cd" * 6),
        ("threads", None, "2"),
        ("option temperature", "0", "1"),
    }


def test_times_are_shown_with_ratio_and_excluded_from_headline():
    before = mixed()
    speed = {"tokens_per_second": 50.0, "step_p50_ms": 20.0, "step_p95_ms": 30.0, "steps": 9}
    after = each_phase(before, lambda phase: {**speed, "step_p50_ms": 25.0, "tokens_per_second": 40.0})
    before = each_phase(before, lambda phase: speed)
    found = compare(before, after)
    assert found.same and "tokens" not in found.headline
    out = " ".join(rendered(found).split())
    assert "decode tokens/s 50.0 40.0 0.800 ~" in out  # 25 ms is within the 30 ms that slower steps take
    assert "repeat both runs before you rely on a ratio" in out
    apart = rendered(compare(before, each_phase(after, lambda phase: {"step_p50_ms": 99.0})))
    assert "decode p50 ms per step 20.0 99.0 4.95 note:" in " ".join(apart.split())  # no mark of the spread


def test_reports_of_same_package_are_never_unrelated():
    elsewhere = each_node(mixed(), lambda node: node.model_copy(update={"name": f"other/{node.name}"}))
    assert compare(mixed(), elsewhere).unrelated_reason == ""
    package = PACKAGE.model_copy(update={"manifest_sha256": "cd" * 32})
    assert compare(mixed(), elsewhere.model_copy(update={"package": package})).unrelated_reason


def test_unrelated_reports_give_reason():
    other = report_of(recorded_facts(), package=PACKAGE.model_copy(update={"manifest_sha256": "cd" * 32}))
    found = compare(other, mixed(), names=("old.json", "new.json"))
    assert found.unrelated_reason.startswith("only ") and "of different models" in found.unrelated_reason
    assert found.headline.startswith("not comparable: ") and not found.same
    empty = each_phase(mixed(), lambda phase: {"nodes": ()})
    assert compare(mixed(), empty, names=("a", "b")).unrelated_reason == "b has no node in any phase"
    other = mixed().model_copy(update={"phases": (mixed().phases[0].model_copy(update={"name": "run"}),)})
    assert (
        "no phase in common: prefill and decode in a, run in b"
        in compare(mixed(), other, names=("a", "b")).unrelated_reason
    )


def test_missing_phase_is_a_difference():
    found = compare(mixed(), mixed().model_copy(update={"phases": mixed().phases[:1]}))
    assert not found.same
    assert ways(found, "phases") == {("request", "phases", "prefill, decode", "prefill")}


def test_long_node_list_is_truncated():
    more = each_phase(
        mixed(),
        lambda phase: {
            "nodes": (
                *phase.nodes,
                *(phase.nodes[0].model_copy(update={"name": f"x/Op_{'x' * n}"}) for n in range(500)),
            )
        },
    )
    found = compare(more, each_node(more, lambda n: n.model_copy(update={"provider": CPU})))
    assert " and 494 more" in " ".join(rendered(found).split())
    assert len(rendered(found).splitlines()) < 120


def test_failed_checks_are_a_context_change():
    first, *rest = mixed().checks
    broken = mixed().model_copy(update={"checks": (first.model_copy(update={"passed": False}), *rest)})
    assert ways(compare(mixed(), broken), "context") == {("checks", "checks_failed", None, first.name)}
    assert not compare(broken, broken).changes


def test_cache_in_place_change_is_in_headline_but_size_is_not():
    report = report_of(recorded_facts())
    assert report.cache is not None
    away = report.model_copy(update={"cache": report.cache.model_copy(update={"address_changes": 2})})
    smaller = report.model_copy(update={"cache": report.cache.model_copy(update={"size_bytes": 1})})
    for other, effect in ((away, "worse"), (smaller, "neutral")):
        found = compare(report, other)
        assert [change.effect for change in found.of("cache")] == [effect] and found.same
        assert ("cache in place" in found.headline) is (effect == "worse")


def test_failed_run_is_a_difference_and_starts_the_headline():
    facts = recorded_facts()
    good, bad = report_of(facts), report_of(replace(facts, failure="no kernel"))
    found = compare(good, bad, names=("a.json", "b.json"))
    assert found.headline.startswith("the run of b.json FAILED; no node moved") and not found.same
    assert found.notes[0] == "the run of B failed, so it does not show that its nodes run: no kernel"
    assert compare(bad, bad).headline.startswith("the run of A and B FAILED; ")
