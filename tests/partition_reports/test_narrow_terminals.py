"""Every view of a terminal at every width: no number is cut or gone, no line is too wide, none ends in blanks."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
from rich.cells import cell_len
from rich.console import Console

from partita.bench.records import Bench
from partita.bench.verdict import judge, sentences
from partita.check import gate
from partita.check.limits import Limits
from partita.commands.refusal import render_refusal
from partita.diagnosis.refusal import refused_nodes
from partita.diff.compare import compare
from partita.explain.node_explanation import Explanation, Matches, find
from partita.machine.records import Device, Gpu, MachineReport, OnnxRuntime, ProviderEntry
from partita.partition_reports.render.show import print_text
from partita.partition_reports.views import brief, text
from partita.runtime.chain.advice import rows_of
from tests.bench import test_contenders
from tests.diagnosis import test_refusal
from tests.partition_reports import changed, pages
from tests.partition_reports.reports import REPORTS, recorded
from tests.partition_reports.samples import ENVIRONMENT, PACKAGE

WIDTHS = (*range(20, 42), 44, 48, 52, 56, 60, 66, 72, 79, 80, 90, 100, 120, 160, 200)
WIDE = 400
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
Render = Callable[[Console], None]

DIFF = "partita.diff.document"


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
        verdict=sentences(judge(contenders, "cpu"), contenders),
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


def checked(limits: Limits) -> Render:
    result = gate.check(recorded("webgpu"), gate.Gate(limits=limits), "webgpu.json", None)
    return lambda console: print_text(result, "partita.check.document", console)


def made_machine() -> MachineReport:
    runtime = OnnxRuntime(
        packages=("onnxruntime-gpu 1.31.1",),
        version="1.31.1",
        build="Release",
        cuda="13.0",
        cudnn="9.1",
        available=("cuda",),
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


def of_report(module: ModuleType, name: str) -> Callable[[], Render]:
    def make() -> Render:
        report = REPORTS[name]()
        return lambda console: module.render(report, console)

    return make


VIEWS: dict[str, Callable[[], Render]] = {
    **{f"show {name}": of_report(text, name) for name in REPORTS},
    **{f"brief {name}": of_report(brief, name) for name in REPORTS},
    "explain a fallback": lambda: explained("recorded webgpu", "model.layers.0.self_attn/Attention"),
    "explain a copy": lambda: explained("recorded webgpu", "Memcpy"),
    "explain a fused node": lambda: explained("recorded torch export", "node_div"),
    "explain a compiled node": lambda: explained("recorded openvino", "lm_head/MatMul"),
    "explain a part of many names": lambda: matches("recorded webgpu", "self_attn"),
    "diff": lambda: (
        lambda console: print_text(
            compare(changed.mixed(), changed.moved("lm_head/MatMul", "model.layers.0.mlp/Mul")), DIFF, console
        )
    ),
    "diff of two runs": lambda: (
        lambda console: print_text(compare(recorded("cuda_dry_run"), recorded("cuda_dry_run")), DIFF, console)
    ),
    "check": lambda: checked(Limits(max_cpu_nodes=0, max_copies=1, max_copy_bytes_per_token=10)),
    "check that passes": lambda: checked(Limits(max_copies=100)),
    "bench": bench,
    "providers": machine,
    "refusal": lambda: (
        lambda console: console.out(
            render_refusal(rows_of(refused_nodes(test_refusal.opened(), test_refusal.GPU_ALONE), ()), console.width),
            end="",
            highlight=False,
        )
    ),
    "refusal of many": lambda: (
        lambda console: console.out(
            render_refusal(
                rows_of(refused_nodes(test_refusal.many(90, 45), test_refusal.GPU_ALONE), ()), console.width
            ),
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


def numbers(lines: str) -> Counter[str]:
    return Counter(found[0] for found in NUMBER.finditer(lines))


def too_wide(line: str, width: int) -> bool:
    """A command's words are not broken, nor is a line of a view that is too long for ten."""
    return cell_len(line) > width and not line.lstrip().startswith("$ ") and not line.startswith("      ")


@pytest.mark.parametrize("name", VIEWS)
def test_no_number_is_cut_at_any_width(name: str) -> None:
    whole = numbers(shown(name, WIDE))
    for width in WIDTHS:
        printed = shown(name, width)
        missing = whole - numbers(printed)
        assert not missing, (width, missing)
        lines = printed.splitlines()
        assert [line for line in lines if line != line.rstrip()] == [], width
        if not name.startswith(("brief", "check")):  # for logs, which are searched by line
            assert [line for line in lines if too_wide(line, width)] == [], width


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_brief_report_has_at_most_ten_lines(name: str, width: int) -> None:
    lines = shown(f"brief {name}", width).splitlines()
    assert 2 <= len(lines) <= 10
