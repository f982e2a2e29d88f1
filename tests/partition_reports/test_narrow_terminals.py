"""Text views at 60, 80 and 120 columns: nothing is omitted, no line is too wide or ends in spaces."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
from rich.cells import cell_len
from rich.console import Console

from partita.bench.contenders import sentences
from partita.bench.records import Bench
from partita.check import gate
from partita.commands.results import render_refusal
from partita.compare.reports import compare
from partita.diagnosis.explanation import refused_nodes
from partita.explain.node_explanation import Explanation, Matches, find
from partita.machine.records import Device, Gpu, MachineReport, OnnxRuntime, ProviderEntry
from partita.options.reports import CheckOptions
from partita.partition_reports.render.show import REPORT_VIEWS
from partita.partition_reports.render.terminal import Page
from partita.partition_reports.sections.model import Column
from partita.runtime.chain.advice import rows_of
from tests.bench import test_contenders
from tests.diagnosis import test_refusal
from tests.partition_reports import pages, report_changes
from tests.partition_reports.reports import REPORTS, recorded
from tests.partition_reports.samples import ENVIRONMENT, PACKAGE
from tests.views import print_text

WIDTHS = (120, 80, 60)
TABLES = ("recorded webgpu", "recorded cuda dry run", "recorded torch export", "many inputs", "unavailable")
"""Reports whose tables differ in kind."""
GOOD = ("recorded cpu", "recorded torch export")
"""Reports without fallbacks."""
Render = Callable[[Console], None]

DIFF = "partita.compare.document"


def explained(name: str, node: str) -> Render:
    found = find(REPORTS[name](), node)
    assert isinstance(found, Explanation), node
    return lambda console: print_text(found, "partita.explain.document", console)


def matches(name: str, part: str) -> Render:
    found = find(REPORTS[name](), part)
    assert isinstance(found, Matches) and found.matches
    return lambda console: print_text(found, "partita.explain.document", console)


def made_bench() -> Bench:
    lanes = [
        test_contenders.lane("webgpu,cpu", test_contenders.SLOW, observed=recorded("webgpu")),
        test_contenders.lane("cpu", test_contenders.FAST, observed=pages.cpu_report()),
        test_contenders.lane("openvino", [1234.5, 2345.6, 1.1, 1.2], error="its process was killed by SIGSEGV"),
    ]
    contenders = test_contenders.built(*lanes)
    return Bench(
        created="2026-11-21T08:00:00Z",
        partita_version="0.1.0",
        verdict=sentences(contenders, "cpu"),
        environment=ENVIRONMENT,
        package=PACKAGE,
        prompt_tokens=20,
        max_new_tokens=4,
        threads=1,
        rounds=5,
        interrupted=False,
        baseline="cpu",
        contenders=contenders,
        notes=("a note with 3 numbers: 1.5, 2,048",),
    )


def bench() -> Render:
    made = made_bench()
    return lambda console: print_text(made, "partita.bench.sections", console)


def checked(limits: CheckOptions) -> Render:
    result = gate.check(recorded("webgpu"), limits, "webgpu.json", None)
    return lambda console: print_text(result, "partita.check.gate", console)


def made_machine() -> MachineReport:
    runtime = OnnxRuntime(
        packages=("onnxruntime-gpu 1.31.1",),
        version="1.31.1",
        build="Release",
        cuda="13.0",
        cudnn="9.1",
        providers_in_build=("cuda",),
    )
    gpu = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, driver="580.65", cuda_driver="13.0")
    device = Device(
        ort_name="CUDAExecutionProvider",
        ep_vendor="NVIDIA",
        kind="GPU",
        vendor="NVIDIA",
        vendor_id=4318,
        device_id=9,
        metadata={"description": "card 17 of 24"},
    )
    entries = tuple(
        ProviderEntry(
            name=name,
            ort_name=f"{name}ExecutionProvider",
            in_build=True,
            plugin=None,
            library_loads=False,
            device_found=None,
            software_device=False,
            status="unavailable",
            reason="library_missing",
            evidence="libcublasLt.so.13: cannot open shared object file",
            remedy="install CUDA 13",
            seconds=seconds,
            devices=(device,),
            options=(),
        )
        for name, seconds in (("cuda", 1.28), ("tensorrt", None), ("cpu", 12.5))
    )
    return MachineReport(
        partita_version="0.1.0",
        findings=(),
        plugins={"x": "1.2.3"},
        seconds=2.5,
        onnxruntime=runtime,
        gpus=(gpu,),
        default_chain=("cuda", "cpu"),
        default_reason="cuda is the best of 2",
        providers=entries,
    )


def machine() -> Render:
    made = made_machine()
    return lambda console: print_text(made, "partita.machine.document", console)


def of_report(view: str, name: str) -> Callable[[], Render]:
    def make() -> Render:
        report = REPORTS[name]()
        return lambda console: print_text(report, REPORT_VIEWS, console, view)

    return make


VIEWS: dict[str, Callable[[], Render]] = {
    **{f"show {name}": of_report("text", name) for name in TABLES},
    **{f"brief {name}": of_report("brief", name) for name in REPORTS},
    "explain a fallback": lambda: explained("recorded webgpu", "model.layers.0.self_attn/Attention"),
    "explain a copy": lambda: explained("recorded webgpu", "Memcpy"),
    "explain a fused node": lambda: explained("recorded torch export", "node_div"),
    "explain a compiled node": lambda: explained("recorded openvino", "lm_head/MatMul"),
    "explain a part of many names": lambda: matches("recorded webgpu", "self_attn"),
    "diff": lambda: (
        lambda console: print_text(
            compare(report_changes.mixed(), report_changes.moved("lm_head/MatMul", "model.layers.0.mlp/Mul")),
            DIFF,
            console,
        )
    ),
    "diff of two runs": lambda: (
        lambda console: print_text(compare(recorded("cuda_dry_run"), recorded("cuda_dry_run")), DIFF, console)
    ),
    "check": lambda: checked(CheckOptions(max_cpu_nodes=0, max_copies=1, max_copy_bytes_per_token=10)),
    "check that passes": lambda: checked(CheckOptions(max_copies=100)),
    "bench": bench,
    "providers": machine,
    "refusal": lambda: (
        lambda console: console.out(
            render_refusal(rows_of(refused_nodes(test_refusal.opened(), test_refusal.GPU_ALONE), ()), console.width),
            end="",
            highlight=False,
        )
    ),
}


@cache
def view(name: str) -> Render:
    return VIEWS[name]()


def shown(name: str, width: int) -> str:
    stream = io.StringIO()
    view(name)(Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def characters(text: str) -> Counter[str]:
    """Counts of letters, digits and signs, without rules of tables and line ends of commands."""
    return Counter(mark for mark in text if mark not in " \n─\\")


def too_wide(line: str, width: int) -> bool:
    """Words of commands are not broken."""
    return cell_len(line) > width and not line.lstrip().startswith(("$ ", "--"))


@pytest.mark.parametrize("name", [name for name in VIEWS if not name.startswith(("brief", "check"))])
def test_text_views_fit_every_width_without_omissions(name: str) -> None:
    whole = characters(shown(name, WIDTHS[0]))
    for width in WIDTHS:
        printed = shown(name, width)
        assert not whole - characters(printed), width
        assert [line for line in printed.splitlines() if too_wide(line, width) or line != line.rstrip()] == [], width


def test_terminal_below_60_columns_is_rendered_at_60() -> None:
    assert shown("show recorded webgpu", 20) == shown("show recorded webgpu", 60)


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_brief_view_has_at_most_ten_lines_and_a_remedy(name: str, width: int) -> None:
    lines = shown(f"brief {name}", width).splitlines()
    assert 2 <= len(lines) <= 10
    assert max(map(cell_len, lines)) <= width
    assert name in GOOD or any(line.startswith("remedy:") for line in lines)


def test_wide_table_is_split_with_names_repeated() -> None:
    columns = [Column("operator", number=False), Column("nodes"), Column("on", number=False)]
    columns += [Column(title, group=phase) for phase in ("prefill", "decode") for title in (f"{phase} ms", "share")]
    name = "model.layers.11.self_attn/Add_1"
    rows = [(name, "1,024", "WebGpu 1,000, CPU 24", "2,619.75", "100.0 %", "0.013", "under 0.1 %")]
    stream = io.StringIO()
    Page(Console(file=stream, width=60, color_system=None)).table(columns, rows, "and 3 more")
    text = stream.getvalue()
    parts = text.count("  operator")
    assert parts > 1 and text.count(name) == parts
    assert all(number in text for number in ("1,024", "2,619.75", "100.0 %", "0.013"))
    assert all(("share" in part) == (" ms" in part) for part in text.split("  operator")[1:]), "a share of what?"
