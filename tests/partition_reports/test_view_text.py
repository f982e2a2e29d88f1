"""The text view: the verdict first, readable at 80 columns, harmless whatever a node is called."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from partita.partition_reports.verdict import give_verdict
from partita.partition_reports.views import text
from partita.partition_reports.wording import clean, decimals, human_bytes, plural, tally
from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    MIXED_PLAN,
    NO_GPU_CHAIN,
    PACKAGE,
    event,
    mixed_facts,
    recorded_facts,
    report_of,
    run_facts,
    session_facts,
    windows,
)


def rendered(report, width=80, encoding="utf-8"):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    text.render(report, Console(file=stream, width=width, force_terminal=False, color_system=None))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_the_verdict_comes_first():
    report = report_of(recorded_facts())
    assert give_verdict(report) == (
        "113 of 113 nodes on CPUExecutionProvider in prefill and decode; 1 partition, 0 Memcpy nodes; "
        "cache in place (64 KiB on Cpu)"
    )
    lines = rendered(report, 200).splitlines()
    assert lines[0] == give_verdict(report)


def test_the_verdict_tells_what_went_wrong():
    facts = replace(mixed_facts(plan=((*(name for name, _, _ in MIXED_PLAN), "ghost"),)), finish_reason="interrupted")
    verdict = give_verdict(report_of(facts, GPU_CHAIN))
    assert verdict.startswith(f"9 of 14 nodes on {GPU}, 4 on {CPU}, 1 on an unknown provider in prefill and decode")
    assert "3 Memcpy nodes, 1 copy at the session border" in verdict
    assert "sources disagree on 1 node" in verdict
    assert "3 checks FAILED" in verdict
    assert verdict.endswith("run ended early: interrupted")
    assert f"{GPU} unavailable (not_in_build)" in give_verdict(report_of(recorded_facts(), NO_GPU_CHAIN))


def test_a_cache_that_moved_is_in_the_verdict_and_named():
    facts = recorded_facts()
    moved = replace(facts.states[1], same_address=False, address_changes=2)
    report = report_of(replace(facts, states=(facts.states[0], moved, *facts.states[2:])))
    assert "cache NOT in place: 1 of 4 states copied (64 KiB on Cpu)" in give_verdict(report)
    assert "NOT in place: past_key_values.0.value" in rendered(report)


def test_phases_that_differ_are_told_apart():
    events = tuple(event(run, 0, "a", "Add", CPU) for run in range(2))
    one = session_facts(file="a.onnx", phases=("prefill",), plan=(("a",),), events=events[:1], runs=windows("prefill"))
    names = (("a", "b"),)
    two = session_facts(file="b.onnx", phases=("decode",), plan=names, events=events[:1], runs=windows("decode"))
    verdict = give_verdict(report_of(run_facts(one, two)))
    assert verdict.startswith(
        "1 of 1 node on CPUExecutionProvider in prefill; 1 partition, 0 Memcpy nodes; 1 of 2 nodes"
    )


def test_an_unverified_package_says_so_at_the_top():
    package = PACKAGE.model_copy(update={"verification": "unverified", "verification_detail": "--no-verify"})
    assert rendered(report_of(recorded_facts(), package=package)).startswith("UNVERIFIED PACKAGE: --no-verify\n")
    assert "UNVERIFIED" not in rendered(report_of(recorded_facts()))


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(
    "report", [report_of(recorded_facts()), report_of(mixed_facts(), GPU_CHAIN)], ids=["cpu", "gpu"]
)
def test_no_line_is_wider_than_the_console(report, width):
    assert max(len(line) for line in rendered(report, width).splitlines()) <= width


@pytest.mark.parametrize(
    "report", [report_of(recorded_facts()), report_of(mixed_facts(), GPU_CHAIN)], ids=["cpu", "gpu"]
)
def test_at_80_columns_no_table_heading_or_number_is_cut(report):
    out = rendered(report)
    for heading in ("outside ms", "prefill ms", "decode ms", "tensors out", "share"):
        assert heading in out
    assert "…" not in out


def test_it_has_every_section():
    out = rendered(report_of(recorded_facts()))
    sections = ("Request", "Phases", "Placement", "Partitions in", "Copies", "Fallbacks", "KV cache", "Memory")
    positions = [out.index(f"\n{title}") for title in (*sections, "Environment", "Checks", "Sources")]
    assert positions == sorted(positions)
    assert "36 of 36 checks passed" in out


def test_failed_checks_are_shown_one_by_one():
    out = rendered(report_of(replace(recorded_facts(), prompt_tokens=6)), 200)
    assert "35 of 36 checks passed" in out
    assert "FAILED prefill: steps add up to the prompt: 5 tokens in steps, 6 in the prompt" in out


def test_fallbacks_are_grouped_by_reason_with_node_evidence_and_remedy():
    out = rendered(report_of(mixed_facts(), GPU_CHAIN), 300)
    assert "Fallbacks: 4 nodes not on WebGpuExecutionProvider" in out
    assert "no_kernel_op: 1 node in prefill and decode, on CPUExecutionProvider (evidence: logged)" in out
    assert "nodes: model.rotary_emb/Gather (modeling_llama.py:88)" in out
    assert "unexplained: 1 node in prefill and decode" in out


HOSTILE = "[bold]a[/nope]\x1b[31m\x07\r\n\u202eevil\u2028é漢/Mul"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_hostile_names_reach_the_terminal_as_harmless_text(encoding):
    names = (HOSTILE, "x" * 500)
    events = tuple(event(0, order, name, HOSTILE, HOSTILE) for order, name in enumerate(names))
    session = session_facts(plan=(names,), events=events, runs=windows("decode"), phases=("decode",), file=HOSTILE)
    facts = run_facts(session, notes=(HOSTILE,), finish_detail=HOSTILE)
    package = PACKAGE.model_copy(update={"name": HOSTILE})
    out = rendered(report_of(facts, package=package), encoding=encoding)
    assert not set(out) & set("\x1b\x07\r\u202e\u2028")
    assert "[bold]a[/nope]?[31m" in out


def test_a_long_model_keeps_its_tables_short():
    names = tuple(f"model.layers.{layer}.block{layer}/Op{layer}" for layer in range(40)) + ("head/MatMul",)
    events = tuple(event(0, order, name, f"Op{order}", CPU) for order, name in enumerate(names))
    report = report_of(
        run_facts(session_facts(plan=(names,), events=events, runs=windows("decode"), phases=("decode",)))
    )
    out = rendered(report)
    assert "and 29 more op types: 29 nodes, 70.7 % of the time in decode" in out
    assert len([line for line in out.splitlines() if line.startswith("  Op")]) == 12
    assert "nothing is known of session inputs and outputs" in out


def test_the_view_for_a_file_has_no_escape_codes_and_ends_in_a_newline():
    out = text.VIEW.to_text(report_of(recorded_facts()))
    assert "\x1b" not in out
    assert out.endswith("\n")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (65536, "64 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 50, "5,120 TiB"),
    ],
)
def test_bytes_in_words(size, words):
    assert human_bytes(size) == words


@pytest.mark.parametrize(
    ("value", "words"), [(None, "-"), (0, "0"), (0.0123, "0.012"), (1.5, "1.50"), (12.34, "12.3"), (2302.6, "2,303")]
)
def test_numbers_in_words(value, words):
    assert decimals(value) == words


def test_small_words():
    assert (plural(1, "node"), plural(2, "copy"), plural(1500, "node")) == ("1 node", "2 copies", "1,500 nodes")
    assert tally({"A": 1, "B": 3, "C": 2, "D": 1}, most=2) == "B 3, C 2, 2 more kinds 2"
    assert tally({"A": 1, "B": 3, "C": 2}, most=2) == "B 3, C 2, A 1"
    assert clean("a\tb\x00c") == "a?b?c"
