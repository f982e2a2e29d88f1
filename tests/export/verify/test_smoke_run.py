"""Packages are opened and run before publishing; a lowering that does not run is rejected."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita import cli
from partita.errors import GenerationError, ParityError, PartitaError, ProviderError
from partita.export.pipeline import ExportOptions, export
from partita.export.publish import ExportResult
from partita.export.target import ProbeResult, Target
from partita.export.verify import known_answer
from partita.library.exporting import replay as replay_on_cpu
from partita.library.exporting import smoke as smoke_on_cpu
from partita.library.place.target import find_target
from partita.package.folder import Manifest, read_manifest
from partita.package.records import SmokeRecord, Verification
from tests.checkpoints import edit_tensors
from tests.conftest import TinyCheckpoint

ODD = 6
"""No multiple of 8, which GroupQueryAttention wants of a head on the CPU provider."""
Exporting = Callable[..., ExportResult]


@pytest.fixture
def exporting(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Exporting:
    """Export a tiny llama of one layer, as the verb does."""

    def run(target: Target | None = None, head_dim: int = 16, **options: Any) -> ExportResult:
        checkpoint = tiny_checkpoint("llama", num_hidden_layers=1, head_dim=head_dim)
        wanted = ExportOptions(str(checkpoint), tmp_path / "out", max_length=64, **options)
        return export(wanted, replay=replay_on_cpu, smoke=smoke_on_cpu, target=target)

    return run


class There:
    """A provider that takes every node and raises what it is told to for some lowerings."""

    def __init__(self, raises: Mapping[str, Exception], alone: Exception | None = None) -> None:
        self.raises, self.alone = raises, alone
        self.ran: list[str] = []

    def ask(self, model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> ProbeResult:
        return ProbeResult(1, {}, "")

    def smoke(self, folder: Path, manifest: Manifest) -> SmokeRecord:
        name = manifest.graph.attention
        self.ran.append(name)
        if name in self.raises:
            raise self.raises[name]
        return SmokeRecord(chain="there,cpu", status="ran", detail="opened")

    def replay(self, folder: Path, manifest: Manifest) -> Verification:
        if self.alone is not None:
            raise self.alone
        if manifest.graph.attention in self.raises:
            raise self.raises[manifest.graph.attention]
        return Verification(status="verified", detail="10 steps match")

    def target(self) -> Target:
        return Target("there", "--target", "gqa", "directly", self.ask, self.replay, self.smoke)


def beyond(*lowerings: str) -> Callable[[Path, Manifest], Verification]:
    """A replay that finds more difference than is allowed in these lowerings."""

    def replay(folder: Path, manifest: Manifest) -> Verification:
        if manifest.graph.attention in lowerings:
            return Verification(status="unverified", detail="first difference in decode 5")
        return replay_on_cpu(folder, manifest)

    return replay


@pytest.mark.heavy
def test_lowering_beyond_tolerance_is_replaced_with_the_next(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """As gpt_neo in float16, whose scores are unscaled and computed in float32."""
    checkpoint, target = tiny_checkpoint("llama", num_hidden_layers=1), There({}).target()
    options = ExportOptions(str(checkpoint), tmp_path / "out", max_length=64, precision="fp16")
    summary = export(options, replay=beyond("gqa"), target=target)
    assert read_manifest(summary.path).graph.attention == "onnx24"
    assert "`attention=gqa` was tried and rejected: first difference in decode 5" in summary.notes
    assert "gqa does not match: first difference in decode 5" in summary.attention_reason
    asked, exact = replace(options, attention="gqa"), replace(options, precision="fp32")
    for other, words in ((asked, "`attention=auto` tries the other lowerings"), (exact, "report this model")):
        with pytest.raises(ParityError, match=f"first difference in decode 5.*{words}"):
            export(replace(other, out=tmp_path / "other"), replay=beyond("gqa"), target=target)
    with pytest.raises(ParityError, match="first difference in decode 5"):
        export(replace(options, out=tmp_path / "other"), replay=beyond("gqa", "onnx24", "primitives"), target=target)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("verify", [pytest.param(True, marks=pytest.mark.heavy), False])
@pytest.mark.parametrize("asked", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_auto_selects_lowering_able_to_run(exporting: Exporting, asked: bool, verify: bool) -> None:
    target = find_target("cpu", {}, default_allowed=False, libraries={}) if asked else None
    summary = exporting(target, ODD, verify=verify)
    manifest = read_manifest(summary.path)
    assert manifest.graph.attention == "onnx24"
    assert [(entry.chain, entry.status) for entry in manifest.smoke] == [("cpu", "ran")]
    assert smoke_on_cpu(summary.path, manifest).status == "ran", "what was published runs"
    (note,) = [note for note in summary.notes if "gqa` was tried and rejected" in note]
    assert "does not run on cpu" in note and "head_size" in note and ".partial" not in note
    assert "gqa does not run on cpu" in summary.attention_reason
    if asked:
        assert manifest.target is not None
        assert [(entry.attention, bool(entry.error)) for entry in manifest.target.probed] == [
            ("gqa", True),
            ("onnx24", False),
        ]


@pytest.mark.parametrize("verify", [pytest.param(True, marks=pytest.mark.heavy), False])
def test_requested_lowering_unable_to_run_is_rejected(exporting: Exporting, tmp_path: Path, verify: bool) -> None:
    target = find_target("cpu", {}, default_allowed=False, libraries={})
    with pytest.raises(
        PartitaError, match=r"head_size.*nothing was written; `attention=auto` tries the other"
    ) as caught:
        exporting(target, ODD, attention="gqa", verify=verify)
    assert "please report" not in str(caught.value) and "export the checkpoint again" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("nobody has seen this"), GenerationError("model.onnx: a run failed")])
def test_any_smoke_run_failure_selects_next_lowering(exporting: Exporting, error: Exception) -> None:
    there = There({"gqa": error})
    summary = exporting(there.target(), verify=False)
    assert there.ran == ["gqa", "onnx24"] and summary.manifest.graph.attention == "onnx24"
    assert str(error) in summary.attention_reason
    assert summary.manifest.smoke[-1] == SmokeRecord(chain="there,cpu", status="ran", detail="opened")


def test_failed_cpu_verification_selects_next_lowering(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    def replay(folder: Path, manifest: Manifest) -> Verification:
        if manifest.graph.attention == "gqa":
            raise ValueError("nobody has seen this")
        return replay_on_cpu(folder, manifest)

    options = ExportOptions(str(tiny_checkpoint("llama", num_hidden_layers=1)), tmp_path / "out", max_length=64)
    summary = export(options, replay=replay)
    assert summary.manifest.graph.attention == "onnx24" and summary.manifest.verification.status == "verified"
    assert "ValueError: nobody has seen this" in summary.attention_reason


def test_error_lists_failure_of_every_lowering(exporting: Exporting, tmp_path: Path) -> None:
    there = There({name: RuntimeError(f"trouble with {name}") for name in ("gqa", "onnx24", "primitives")})
    with pytest.raises(GenerationError) as caught:
        exporting(there.target(), verify=False)
    assert all(f"trouble with {name}" in str(caught.value) for name in there.raises)
    assert "nothing was written; choose another `target`" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_partially_supporting_target_runs_with_cpu_fallback(exporting: Exporting) -> None:
    """Its rejection without fallback is not a failure of the lowering: the chain there,cpu runs."""
    there = There({}, alone=ProviderError("there does not take Softmax"))
    summary = exporting(there.target())
    assert "not verified on there: there does not take Softmax" in summary.notes
    assert [entry.chain for entry in summary.manifest.smoke] == ["cpu", "there,cpu"]


def test_unavailable_target_is_recorded_with_reason(exporting: Exporting) -> None:
    target = replace(There({}).target(), replay=None, smoke=None, not_here="device_missing: no such device")
    for verify in (True, False):
        summary = exporting(target, verify=verify, force=True)
        cpu, there = summary.manifest.smoke
        assert (cpu.chain, cpu.status) == ("cpu", "ran")
        assert (there.chain, there.status) == ("there", "not_run")
        assert there.detail == "not run here: device_missing: no such device"


@pytest.fixture
def overflowing(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """A checkpoint whose logits are not finite in float16."""
    folder = shutil.copytree(
        tiny_checkpoint("llama", num_hidden_layers=1, tie_word_embeddings=False), tmp_path / "checkpoint"
    )
    # within float16, and nothing that it is multiplied with is
    return edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(60000.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "first difference in prefill, output logits.*float16 may be too coarse.*choose another `precision`"),
        pytest.param({"batch_size": 2}, "first difference in prefill, output logits", marks=pytest.mark.heavy),
        ({"verify": False}, "not finite.*nothing was written"),
    ],
)
def test_non_finite_logits_prevent_publishing(
    overflowing: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    """Every row is compared; a non-finite row does not end the comparison."""
    asked = ExportOptions(str(overflowing), tmp_path / "out", max_length=64, precision="fp16", **options)
    with pytest.raises(PartitaError, match=words) as caught:
        export(asked, replay=replay_on_cpu, smoke=smoke_on_cpu)
    assert isinstance(caught.value, ParityError) == asked.verify
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.heavy
def test_smoke_run_is_skipped_with_note_if_memory_is_short(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_answer, "free_bytes", lambda: 1000.0)
    summary = exporting(find_target("cpu", {}, default_allowed=False, libraries={}), verify=False)
    (entry,) = summary.manifest.smoke
    assert entry.status == "not_run" and "are free" in entry.detail
    assert any(note.startswith("not run on cpu here") for note in summary.notes)


def test_bf16_activations_with_cpu_target_are_rejected(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(tiny_checkpoint("llama", num_hidden_layers=1)), str(tmp_path / "out"), "--no-verify"]
    arguments += ["--max-length", "64", "--precision", "bf16", "--activations", "bf16", "--target", "cpu"]
    assert cli.run(arguments) == 3
    assert "--precision" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_bf16_activations_without_kernels_warn_with_alternatives(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(tiny_checkpoint("llama", num_hidden_layers=1)), str(tmp_path / "out")]
    arguments += ["--max-length", "64", "--precision", "bf16", "--activations", "bf16"]
    assert cli.run(arguments) == 0
    manifest, (out, err) = read_manifest(tmp_path / "out"), capsys.readouterr()
    assert manifest.target is not None and manifest.target.verification == "not_run"
    assert "verified there" not in out.replace("NOT verified there", "")
    assert manifest.verification.converted_copy is not None
    if manifest.target.provider == "cpu":
        assert "does not run on cpu" in err and "--precision fp16 or fp32" in err
        assert [entry.status for entry in manifest.smoke] == ["ran", "failed"]
