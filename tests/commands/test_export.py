"""`partita export --target`: probes of the installed provider, here CUDA over stub libraries and the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import partita
from partita import cli
from tests.adapters import save_adapter
from tests.conftest import TinyCheckpoint

Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def exporting(tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Run the verb on the tiny llama; gives exit code, stdout and stderr."""

    def run(*options: str) -> tuple[int, str, str]:
        code = cli.run(["export", str(tiny_checkpoint("llama")), str(tmp_path / "out"), "--max-length", "64", *options])
        return code, *capsys.readouterr()

    return run


def as_json(done: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = done
    assert code == 0, err
    content: dict[str, Any] = json.loads(out)
    return content


def refused(done: tuple[int, str, str], code: int, *words: str) -> None:
    """One line on stderr with all of `words`, nothing on stdout."""
    assert (done[0], done[1]) == (code, ""), done
    (line,) = [line for line in done[2].splitlines() if line.startswith("partita: ")]
    assert all(word in line for word in words), line


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("precision", "attention"), [("fp32", "onnx24"), pytest.param("fp16", "gqa", marks=pytest.mark.heavy)]
)
def test_cuda_target_is_probed_over_stub_libraries(exporting: Export, precision: str, attention: str) -> None:
    """CUDA has no float32 kernel for GroupQueryAttention, so fp32 selects the onnx24 attention."""
    content = as_json(exporting("--target", "cuda", "--precision", precision, "--json"))
    graph, target = content["manifest"]["graph"], content["manifest"]["target"]
    assert graph["attention"] == attention
    assert target["provider"] == "cuda" and target["source"] == "--target" and target["verification"] == "not_run"
    assert "over stub libraries" in target["probe_method"]
    asked = {entry["attention"]: entry["unsupported"] for entry in target["probed"]}
    assert asked == ({"gqa": {"GroupQueryAttention": 2}, "onnx24": {}} if precision == "fp32" else {"gqa": {}})


def test_openvino_target_rejects_adapters(exporting, tiny_checkpoint, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", tiny_checkpoint("llama"))
    done = exporting("--target", "openvino", "--target-default", "--with-adapters", f"own={adapter}")
    refused(done, 2, "--with-adapters: openvino treats inputs with defaults as constants", "--static-shapes")


def test_export_reports_smoke_run_on_target(exporting: Export) -> None:
    code, out, _ = exporting("--no-verify", "--target", "cpu")
    assert code == 0 and "  smoke run   cpu: ran, opened; prefill of 5 tokens and one decode step" in out
    (line,) = [line for line in out.splitlines() if line.startswith("  target ")]
    assert line.endswith("; opened and ran there, not verified")


def test_explicit_attention_with_target_is_the_only_probe(exporting: Export) -> None:
    target = as_json(exporting("--attention", "primitives", "--target", "cpu", "--json"))["manifest"]["target"]
    assert [entry["attention"] for entry in target["probed"]] == ["primitives"]
    assert target["verification"] == "verified"


def test_unavailable_target_requires_target_default(exporting: Export) -> None:
    refused(exporting("--target", "directml"), 3, "directml", "not_in_build", "--target-default", "--attention gqa")
    code, out, _ = exporting("--target", "directml", "--target-default")
    assert code == 0 and "the default for directml, which could not be probed: not_in_build" in out


def test_several_targets_write_variants_and_force_replaces_package(exporting: Export, tmp_path: Path) -> None:
    """One variant per target, with shared weights and no leftover temporary folder."""
    options = ("--format", "ort-package", "--target", "cpu,directml", "--target-default")
    refused(exporting(*options[:4]), 3, "directml", "not_in_build")
    assert not list(tmp_path.glob(".out*"))
    found = as_json(exporting(*options, "--json"))
    assert [each["target"]["provider"] for each in found["variants"]] == ["cpu", "directml"]
    assert found["manifest"] == found["variants"][0]
    out = Path(found["package"])
    inspected = partita.inspect(out)
    assert [graph.variant for graph in inspected.graphs] == [
        "decoder/cpu (CPUExecutionProvider)",
        "decoder/directml (DmlExecutionProvider)",
    ]
    assert inspected.findings == () and len({graph.data_files for graph in inspected.graphs}) == 1
    assert inspected.weights.size_bytes < 2 * found["manifest"]["graph"]["weight_bytes"]
    for variant in ("cpu", "directml"):
        placed = partita.place(out, providers="cpu", variant=variant)
        assert f"variant decoder/{variant}" in placed.notes[0] and not placed.fallbacks
    refused(exporting(*options), 1, "exists already")
    code, text, _ = exporting(*options, "--force", "--explain")
    assert code == 0 and text.count("verified") >= 2 and f"partita place {out} --provider directml" in text
    assert not list(tmp_path.glob(".out*"))
    (out / "decoder" / "mine").touch()
    refused(exporting(*options, "--force"), 1, "files that do not belong to the package (decoder/mine)")


def test_invalid_plugin_library_is_rejected(exporting: Export, tmp_path: Path) -> None:
    """The file is not a provider plugin; the error names it."""
    library = tmp_path / "libmine.so"
    library.write_bytes(b"\x7fELF" + b"\0" * 60 + b"CreateEpFactories")
    refused(exporting("--target", "mine", "--provider-library", f"mine={library}"), 3, "--target mine", "libmine.so")
    refused(
        exporting("--target", "cpu", "--provider-library", f"mine={library}"), 2, "--provider-library", "mine", "cpu"
    )


@pytest.mark.usefixtures("stand_ins")
def test_provider_options_reach_probes_over_stub_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.library.place import target

    monkeypatch.setattr("partita.providers.cuda_dry_run.stub_build.dry_environment", lambda: ({}, "a GPU"))
    found = target.find_target("cuda", {"cuda": {"device_id": "1"}}, default_allowed=False, libraries={})
    for probe in (found.ask, found.supports):
        runs: Any = getattr(probe, "__self__", None)
        assert dict(runs.resolution.options) == {"device_id": "1"}
