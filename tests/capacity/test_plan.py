"""`partita plan`: memory and speed estimates from the exported graph, largest settings, error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import partita
from partita import dtypes
from partita.capacity.costs import graph_costs
from partita.capacity.memory import Requirements
from partita.capacity.records import FormRates, MachineRates, Plan
from partita.capacity.speed import with_bounds
from partita.cli import run
from partita.errors import ResourceError
from partita.library import planning
from partita.library.planning import here_rates
from partita.package.folder import read_manifest
from partita.partition_reports.phase_records import Subgraphs
from partita.partition_reports.render.show import load_view
from partita.runtime.generate.loop import GenerationLoop
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint

MIB = 1 << 20
FORM = FormRates(
    gemv_bytes_per_second={4 * MIB: 60e9, 128 * MIB: 20e9},
    product_bytes=(MIB, 16 * MIB),
    large_gemv_bytes_per_second=40e9,
    gemm_flops=2e11,
    product_seconds=2e-6,
)
RATES = MachineRates(
    threads=2,
    onnxruntime="1.31.1",
    read_bytes_per_second=20e9,
    elementwise_bytes_per_second=1e11,
    forms=dict.fromkeys(("float32", "int8", "int4"), FORM),
    attention_decode_flops=3e10,
    attention_prefill_flops=3e10,
    node_seconds=3e-7,
    process_bytes=90 * MIB,
)


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for this machine use rates that were not measured here."""
    monkeypatch.setattr(planning, "here_rates", lambda *_, **__: RATES)


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"))


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_planned_weight_and_cache_sizes_match_export(
    precision: str, tiny_checkpoint: TinyCheckpoint, exported: Exported, known_rates: None
) -> None:
    checkpoint = tiny_checkpoint("gemma2", vocab_size=512)
    written = read_manifest(exported(checkpoint, precision=precision)).graph
    found = partita.plan(checkpoint, precision=precision, context=64)  # type: ignore[arg-type]
    sizes = {part.name: part.size_bytes for part in found.memory}
    assert sizes["cache"] == sum(dtypes.size_bytes(state.dtype, state.shape) for state in written.states)
    assert found.cache_bytes_per_token == sizes["cache"] // 64
    of_package = partita.plan(exported(checkpoint, precision=precision))
    assert of_package.memory == found.memory
    models = planning.read_graphs(exported(checkpoint, precision=precision), written)
    stored = planning.requirements(written, models, None).weight_bytes(64)
    rows = graph_costs(models[0], written, written.files[0]).tables
    shared = sum(rows.values()) if precision == "int4" else 0  # the same bytes of the file, as another initializer
    assert stored == pytest.approx(written.weight_bytes + shared, rel=0.1)  # the file has padding


def test_plan_of_config_file_equals_plan_of_checkpoint(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, known_rates: None
) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    whole, alone = (partita.plan(each) for each in (checkpoint, tmp_path / "config.json"))
    assert (whole.kind, alone.kind) == ("checkpoint", "config")
    assert alone.memory == whole.memory and alone.parameters == whole.parameters
    assert alone.phases == whole.phases and alone.largest_batch == whole.largest_batch


def test_rolling_state_does_not_scale_with_context(tiny_checkpoint: TinyCheckpoint, exported: Exported):
    contract = read_manifest(exported(tiny_checkpoint("llama"))).graph
    whole = Requirements(contract, ()).cache(64, 1)
    assert Requirements(contract, ()).cache(128, 3) == 6 * whole
    rolling = tuple(state.model_copy(update={"rolling": True}) for state in contract.states)
    contract = contract.model_copy(update={"states": rolling})
    assert Requirements(contract, ()).cache(128, 3) == 3 * whole


def test_largest_batch_and_context_are_maximal(package: Path) -> None:
    contract = read_manifest(package).graph
    model = planning.requirements(contract, planning.read_graphs(package, contract), RATES)
    available = model.total(32, 1) + 5 * MIB
    batch = model.largest_batch(32, available, None)
    assert batch > 1
    assert model.total(32, batch) <= available < model.total(32, batch + 1)
    context = model.largest_context(1, available, None)
    assert model.total(context, 1) <= available < model.total(context + 1, 1)
    assert model.largest_context(1, available, 48) == 48 and model.largest_context(1, 1, None) == 0


def test_oversized_plan_exits_5_and_names_largest_settings(tiny_checkpoint, capsys) -> None:
    code = run(["plan", str(tiny_checkpoint("llama")), "--device", "t4", "--batch", "16000000", "--json", "-q"])
    out, err = capsys.readouterr()
    assert code == 5 and "does not fit: needs" in err and "largest that fit: " in err
    found = json.loads(out)
    jsonschema.validate(found, json.loads((REPOSITORY / "docs" / "plan.schema.json").read_text()))
    plan = Plan.model_validate(found)
    assert not plan.fits and 0 < plan.largest_batch < 16_000_000
    assert plan.required_bytes > plan.device.available_bytes == 16 << 30
    page = load_view("html", "partita.capacity.records").to_text(plan)
    assert page.count("<rect ") == len(plan.memory) and "line: available memory 2e+10" in page


def test_device_speed_is_interval_from_data_sheet(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(package), "--device", "H100"]) == 0
    out = capsys.readouterr().out
    assert "data sheet" in out and "not measured" in out and "tokens/s" in out
    plan = partita.plan(package, device="h100")
    assert plan.decode_tokens_per_second is not None and plan.first_token_seconds is not None
    for found in (plan.decode_tokens_per_second, plan.first_token_seconds):
        assert 0 < found.low < found.value < found.high


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["PACKAGE", "--device", "h10"], 2, "unknown device 'h10'; did you mean 'h100'? known devices: here, t4, "),
        (["PACKAGE", "--context", "-5"], 2, "--context is -5; it must be between 2 and "),
        (["PACKAGE", "--context", "65"], 2, "--context 65: PACKAGE is written for at most 64"),
        (["PACKAGE", "--batch", "2"], 2, "--batch 2: PACKAGE is written for at most 1"),
        (["PACKAGE", "--precision", "int8"], 2, "--precision int8: PACKAGE is a package in fp32"),
        (["PACKAGE", "--context", "8", "--prompt-tokens", "8"], 2, "--prompt-tokens 8 leaves no room for output"),
        (["FOLDER"], 1, "not a Partita package"),
        (["FOLDER/none"], 1, "no such file or folder, and not a hub id"),
        (["SIZELESS"], 1, "config.json: hidden_size is missing; without it the size of the model is unknown"),
        (["BROKEN"], 1, "config.json: damaged: not JSON"),
        (["NOTE"], 1, "neither a checkpoint nor a package"),
        (["OTHER"], 1, "OTHER: neither a checkpoint nor a package"),
        (["UNKNOWN"], 1, "cannot read config.json of model type 'no_such'"),
        (["GGUF"], 1, "m.gguf: weights and config.json do not match"),
        (["CHECKPOINT", "--context", "4096"], 2, "--context 4096: the model supports at most 256 positions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_input_fails_with_single_line(
    arguments, code, message, package, tiny_checkpoint, tmp_path, known_rates, capsys
):
    import gguf

    files = {
        "SIZELESS/config.json": '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
        "BROKEN/config.json": "{",
        "NOTE": "a note",
        "other.json": (unknown := '{"architectures": ["LlamaForCausalLM"], "model_type": "no_such"}'),
        "UNKNOWN/config.json": unknown,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    (tmp_path / "FOLDER").mkdir()
    names = {name: name for name in ("FOLDER", "FOLDER/none", "SIZELESS", "BROKEN", "NOTE")}
    names |= {"OTHER": "other.json", "UNKNOWN": "UNKNOWN/config.json", "GGUF": "m.gguf"}
    places = {name: tmp_path / path for name, path in names.items()}
    places |= {"PACKAGE": package, "CHECKPOINT": tiny_checkpoint("llama")}
    words = [str(places.get(word, word)) for word in arguments]
    assert run(["plan", *words, "-q"]) == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1, err
    for name in ("PACKAGE", "OTHER"):
        message = message.replace(name, str(places[name]))
    assert message in err


@pytest.mark.parametrize(
    ("changes", "bound", "text"),
    [
        ({"node_seconds": 1.0}, "launches", "is bound by launches: 100 % of a step is starting nodes"),
        ({"attention_decode_flops": 1.0, "attention_prefill_flops": 1.0}, "compute", "is bound by compute: 100 % of"),
        ({"forms": {"float32": FORM.model_copy(update={"product_seconds": 1.0})}}, "memory", "is bound by memory: 100"),
        ({"threads": 64}, "indeterminate", "is indeterminate: the rates are of 64 threads"),
        (None, "indeterminate", "is indeterminate: the rates of this machine are not measured"),
    ],
)
def test_report_names_bound_of_each_phase(
    changes: dict[str, Any] | None, bound: str, text: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = None if changes is None else RATES.model_copy(update=changes)
    monkeypatch.setattr(planning, "stored_rates", lambda: rates)
    with partita.load(package, providers="cpu", threads=2) as model:
        model.generate([[5, 6, 7]], max_new_tokens=20, stop_token_ids=()).run()
        report = model.report()
    assert all(phase.bound is not None for phase in report.phases)
    phases = [phase.model_copy(update={"overhead_p50_ms": 0.0}) for phase in report.phases]  # a tiny model mostly waits
    report = partita.Report.of(report.model_copy(update={"phases": tuple(phases)}))
    known = planning.measured_requirements(package, read_manifest(package), on_cpu=True)
    report = partita.Report.of(with_bounds(report, *known, 1))
    found = [phase.bound for phase in report.phases]
    assert [each.bound_by for each in found if each is not None] == [bound, bound]
    assert all(each is not None and text in each.sentence for each in found)
    assert text in " ".join(report.to_text().split())
    assert "ceiling share: " in " ".join(report.to_text().split()) and "flops" in report.to_html()
    for phase in report.phases:
        assert phase.bound is not None and phase.bound.read_bytes and phase.bound.flops
        for groups in (phase.by_op_type, phase.by_layer, phase.by_module):
            assert sum(entry.read_bytes or 0 for entry in groups) == phase.bound.read_bytes
            assert sum(entry.flops or 0 for entry in groups) == phase.bound.flops
            # The profile counts whole microseconds: a group of a tiny model may have 0.
            timed = [entry.ceiling_share for entry in groups if entry.flops and entry.host_us_per_run]
            assert all(timed) if rates is not None and rates.threads == 2 else timed == [None] * len(timed)
    inner = {"subgraphs": Subgraphs(nodes=1, copies=0), "by_layer": ()}
    report = report.model_copy(update={"phases": tuple(phase.model_copy(update=inner) for phase in report.phases)})
    for phase in with_bounds(report, known[0], RATES, 1).phases:  # the work of control flow is unknown
        assert phase.bound is not None and phase.bound.read_bytes is phase.bound.flops is None
        assert phase.bound.bound_by in ("waiting", "indeterminate") and phase.by_layer == ()


@pytest.mark.parametrize("method", ["step", "add_request"])
def test_out_of_memory_during_run_names_largest_settings(
    method: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(GenerationLoop, method, fail)
    with partita.load(package, providers="cpu", process="this") as model:
        text = r"out of memory; largest that fit .*: context 64 with batch 1 \(see partita plan\); close other models"
        with pytest.raises(ResourceError, match=text):
            model.generate([[5, 6, 7]], max_new_tokens=2).run()


# The shapes of three real decoders with few layers, the memory of a process that runs them, and their speed


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "25M": (
        "llama",
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
        | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32000},
    ),
    "135M": (
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152},
    ),
    "0.5B": (
        "qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 6, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "vocab_size": 151936},
    ),
}
"""Model type and config by size; 0.5B has 6 of its 24 layers."""
COMMON = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
RUN = """
import json, sys, time
import partita
from partita import process
from partita.process import peak_rss_bytes
process.own_process = True
package, prompt, new, rows = sys.argv[1], *map(int, sys.argv[2:])
model = partita.load(package, providers="cpu", observe=False, process="this")
texts = [[1 + (at * 7919) % 20000 for at in range(prompt)]] * rows
generation = model.generate(texts, max_new_tokens=new, stop_token_ids=())
times = [time.perf_counter()]
for step in generation:
    times.append(time.perf_counter())
steps = [after - before for before, after in zip(times[1:], times[2:])]
print(json.dumps({"peak": peak_rss_bytes(), "step": min(steps), "median": sorted(steps)[len(steps) // 2]}))
"""


def run_package(package: Path, prompt: int, new: int, rows: int = 1) -> dict[str, float]:
    """Peak memory of a generation in a process of its own, and the fastest and the median decode step in seconds."""
    command = [sys.executable, "-c", RUN, str(package), *map(str, (prompt, new, rows))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def shape(size: str, tiny_checkpoint: TinyCheckpoint) -> Path:
    """The checkpoint of a shape, with random weights."""
    model_type, settings = SHAPES[size]
    return tiny_checkpoint(model_type, tokenizer=False, dtype="bfloat16", **{**settings, **COMMON})


@pytest.mark.slow
@pytest.mark.parametrize("size", ["25M", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("135M", "0.5B"))])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("int4", marks=pytest.mark.heavy)])
def test_planned_peak_memory_is_within_5_percent(
    size: str, precision: str, tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    made = exported(shape(size, tiny_checkpoint), precision=precision, max_length=1024, verify=precision != "fp32")
    found = partita.plan(made, context=1024)
    measured = run_package(made, 1000, 24)["peak"]
    assert found.required_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("size", list(SHAPES))
def test_planned_decode_speed_is_within_20_percent(
    size: str, tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    """Needs an idle machine: rates and decode steps are measured alternately."""
    made = exported(shape(size, tiny_checkpoint), precision="int4", max_length=512)
    ratios = []
    for _ in range(3):
        here_rates(again=True)
        planned = partita.plan(made, prompt_tokens=128).decode_tokens_per_second
        assert planned is not None
        ratios.append(planned.value * run_package(made, 128, 64)["step"])
    assert sorted(ratios)[1] == pytest.approx(1, abs=0.2), ratios
