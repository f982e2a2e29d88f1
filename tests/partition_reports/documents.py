"""A record of every kind that has a document, with the module of its views."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from partita.bench.contenders import sentences
from partita.bench.records import Bench
from partita.check.gate import check
from partita.compare.reports import compare
from partita.explain import find
from partita.machine import Device, Gpu, MachineReport, OnnxRuntime, ProviderEntry
from partita.observations.records import Record
from partita.options.reports import CheckOptions
from partita.partition_reports.render.show import REPORT_VIEWS
from partita.partition_reports.sections.model import Document
from tests.bench.test_contenders import FAST, SLOW, built, lane
from tests.partition_reports.pages import cpu_report
from tests.partition_reports.report_changes import mixed, moved
from tests.partition_reports.reports import recorded
from tests.partition_reports.samples import ENVIRONMENT, PACKAGE
from tests.support.tables import answer, table

MATMUL = "model.layers.0.self_attn.q_proj/MatMul"


def made_bench() -> Bench:
    """Two contenders, and one that failed."""
    lanes = [
        lane("webgpu,cpu", SLOW, observed=recorded("webgpu")),
        lane("cpu", FAST, observed=cpu_report()),
        lane("openvino", [1234.5, 2345.6, 1.1, 1.2], error="its process was killed by SIGSEGV"),
    ]
    contenders = built(*lanes)
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


def made_machine() -> MachineReport:
    """A machine whose providers have a device and do not start."""
    build = {"version": "1.31.1", "build": "Release", "cuda": "13.0", "cudnn": "9.1", "providers_in_build": ("cuda",)}
    device: dict[str, Any] = {
        "ort_name": "CUDAExecutionProvider",
        "ep_vendor": "NVIDIA",
        "kind": "GPU",
        "vendor": "NVIDIA",
    }
    device |= {"vendor_id": 4318, "device_id": 9, "metadata": {"description": "card 17 of 24"}}
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
            devices=(Device.model_validate(device),),
            options=(),
        )
        for name, seconds in (("cuda", 1.28), ("tensorrt", None), ("cpu", 12.5))
    )
    return MachineReport(
        partita_version="0.1.0",
        findings=(),
        plugins={"x": "1.2.3"},
        seconds=2.5,
        onnxruntime=OnnxRuntime.model_validate({"packages": ("onnxruntime-gpu 1.31.1",), **build}),
        gpus=(Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, driver="580.65", cuda_driver="13.0"),),
        default_chain=("cuda", "cpu"),
        default_reason="cuda is the best of 2",
        providers=entries,
    )


@cache
def records() -> dict[str, tuple[str, Record]]:
    """Name -> module of its views, and a record."""
    explained, limits = "model.layers.0.self_attn/Attention", CheckOptions(max_cpu_nodes=0, max_copies=9)
    return {
        "mixed": (REPORT_VIEWS, mixed()),
        "diff": ("partita.compare.document", compare(mixed(), moved(MATMUL, "lm_head/MatMul"))),
        "diff of two runs": ("partita.compare.document", compare(recorded("cuda_dry_run"), recorded("cuda_dry_run"))),
        "explain a fallback": ("partita.explain", find(recorded("webgpu"), explained)),
        "explain a copy": ("partita.explain", find(recorded("webgpu"), "Memcpy")),
        "explain a fused node": ("partita.explain", find(recorded("vit_cpu"), "node_div")),
        "explain a compiled node": ("partita.explain", find(recorded("openvino"), "lm_head/MatMul")),
        "explain a part of many names": ("partita.explain", find(recorded("webgpu"), "self_attn")),
        "check": ("partita.check.gate", check(mixed(), limits, "run.json")),
        "bench": ("partita.bench.sections", made_bench()),
        "providers": ("partita.machine", made_machine()),
        "support": ("partita.support.sections", table(answer("Cast", "supported", "T=tensor(float)"))),
    }


def document_of(where: str, record: Record) -> Document:
    """The document of a record."""
    found: Document = import_module(where).VIEWS.document(record)
    return found
