"""Quality loss of rounded weights, 16-bit packages included, and its repetition without the source model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import partita
from partita import cli
from partita.commands.export import quality_texts
from partita.demo import heldout_path
from partita.errors import GenerationError, PackageError, ResourceError, UnsupportedModelError
from partita.export.options import ExportOptions
from partita.export.pipeline import export
from partita.export.verify import quality
from partita.library.exporting import replay, scorer
from partita.package.folder import QUALITY, check_files, read_manifest
from partita.package.records import Verification
from partita.providers.resolve import parse_chain
from partita.runtime.chain.advice import package_facts
from partita.runtime.generate.runner import load_runner
from partita.runtime.verify.quality import divergence_at_least, evaluate, read_figures
from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture
def half(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="fp16")


def compared(ours: torch.Tensor, theirs: torch.Tensor) -> quality.Measured:
    """What is noted of logits [1, L, vocab] of a package beside those of its original."""
    _, positions, vocabulary = ours.shape
    found = quality.Measured(np.zeros((1, positions + 1), np.int64), vocabulary)
    for place in range(positions):
        found.note(0, place, ours[0, place].numpy(), theirs[0, place])
    found.flush()
    return found


def test_fp16_package_records_quality(half: Path) -> None:
    """In the manifest, the files, reports and `inspect`."""
    manifest = read_manifest(half)
    check_files(half, manifest, hashes=True)
    found = manifest.quality
    assert found is not None and manifest.file(QUALITY) is not None and found.text == "heldout.txt"
    assert 256 <= found.tokens <= 512 and abs(found.perplexity_ratio - 1) < 1e-3
    assert 0 < found.kl_mean < found.kl_p99 < 1e-3 and found.top1_agreement > 0.98 and found.converted_copy is None
    reported = package_facts(half, manifest).quality
    assert reported is not None and reported.kl_mean == found.kl_mean
    (line,) = quality_texts(manifest)
    assert "ratio 1.000" in line or "ratio 0.999" in line
    assert f"KL divergence {found.kl_mean:.1e}" in line, "and not 0.0000"
    assert "KL divergence" in str(partita.inspect(half).provenance.quality)


def test_bf16_quality_is_measured_on_converted_copy(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """The CPU provider has no bfloat16 kernels."""
    package = exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="bf16")
    manifest = read_manifest(package)
    found = manifest.quality
    assert found is not None and found.converted_copy == manifest.verification.converted_copy and found.kl_mean > 0
    assert "float32 arithmetic" in quality_texts(manifest)[0]
    assert not list(package.parent.glob("*-copy-*"))


def test_fp32_package_has_no_quality(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    package = exported(tiny_checkpoint("llama", num_hidden_layers=1))
    manifest = read_manifest(package)
    assert manifest.quality is None and quality_texts(manifest) == [] and not (package / QUALITY).exists()
    with pytest.raises(PackageError, match="quality is not measured for fp32 packages"):
        read_figures(package, manifest)


def test_unmeasured_package_reports_missing_quality(half: Path, own_copy: Callable[[Path], Path]) -> None:
    manifest = read_manifest(half).model_copy(
        update={
            "quality": None,
            "verification": Verification(status="unverified", detail="exported with `verify=False`"),
        }
    )
    assert quality_texts(manifest) == ["not measured: the source model was not run"]
    package = own_copy(half)
    (package / QUALITY).unlink()
    with pytest.raises(PackageError, match=r"no quality\.safetensors: it was exported without its source model"):
        read_figures(package, manifest)


def test_quality_is_repeatable_without_source_model(half: Path) -> None:
    manifest = read_manifest(half)
    with load_runner(half, parse_chain("cpu")) as runner:
        stored, now = manifest.quality, evaluate(runner, read_figures(half, manifest))
    assert stored is not None and stored.likely is not None
    assert math.isclose(now.perplexity_ratio, stored.perplexity_ratio, rel_tol=1e-5)
    assert (now.tokens, now.kl_tokens) == (stored.tokens, stored.likely.tokens)
    assert now.kl_mean_at_least == pytest.approx(stored.likely.kl_mean, rel=1e-3)
    assert now.kl_p99_at_least == pytest.approx(stored.likely.kl_p99, rel=1e-3)
    assert now.kl_share == pytest.approx(stored.likely.share, rel=1e-5)
    assert 0.3 * stored.kl_mean < stored.likely.kl_mean <= stored.kl_mean


def test_evaluate_prints_divergence_as_text_and_json(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["evaluate", str(half), "--provider", "cpu"]) == 0
    text = capsys.readouterr().out
    stored = read_manifest(half).quality
    assert stored is not None and stored.likely is not None
    assert f">= {stored.likely.kl_mean:.1e}" in text and f"{stored.kl_mean:.1e}" in text
    assert "lower bound" in text and f"{stored.likely.share:.1%}" in text
    assert cli.run(["evaluate", str(half), "--provider", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl_mean_at_least"] == pytest.approx(stored.likely.kl_mean, rel=1e-3)
    assert found["kl_tokens"] == stored.likely.tokens and found["at_export"]["likely"]["share"] == stored.likely.share


@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1.0])
def test_stored_divergence_is_a_lower_bound_matched_by_evaluate(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """With the whole vocabulary stored, it equals the exact divergence."""
    random = torch.Generator().manual_seed(1)
    theirs = torch.randn(1, 9, 300, generator=random) * 4
    ours = theirs + spread * torch.randn(1, 9, 300, generator=random)
    theirs[0, 2, 5] = ours[0, 2, 5] = -torch.inf
    mine, other = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    exact = torch.nan_to_num(other.exp() * (other - mine)).sum(-1).numpy()
    before = np.zeros_like(exact)
    for count in (4, 64, 300):
        monkeypatch.setattr(quality, "MOST_LIKELY", count)
        found = compared(ours, theirs)
        np.testing.assert_allclose(found.divergence, exact, rtol=1e-6, atol=1e-14)
        assert found.likely.shape == (1, 9, count)
        assert (found.likely_divergence <= exact * (1 + 1e-6)).all()
        assert (found.likely_divergence >= before * (1 - 1e-6)).all(), "the more tokens, the closer"
        before = found.likely_divergence
        shares = np.exp(
            np.concatenate([found.likely_logprobs, found.rest_logprobs[..., None]], axis=-1, dtype=np.float64)
        )
        shares /= shares.sum(-1, keepdims=True)
        again = [divergence_at_least(ours[0, n].numpy(), found.likely[0, n], shares[0, n]) for n in range(9)]
        np.testing.assert_allclose(again, found.likely_divergence[0], rtol=1e-2, atol=1e-13)
    np.testing.assert_allclose(before, exact, rtol=1e-6, atol=1e-14)


def test_divergence_below_float32_error_is_accurate() -> None:
    """As of lossless weights: logits differ by a few float32 steps, and no divergence is negative."""
    random = torch.Generator().manual_seed(2)
    theirs = torch.randn(1, 4, 20_000, generator=random) * 3
    ours = theirs * (1 + 1e-6 * torch.randn(1, 4, 20_000, generator=random))
    mine, other = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    exact = (other.exp() * (other - mine)).sum(-1).numpy()
    found = compared(ours, theirs)
    assert (exact < 1e-10).all()
    np.testing.assert_allclose(found.divergence, exact, rtol=1e-3)


def test_measured_token_count_depends_on_options_and_model_size() -> None:
    options = ExportOptions("a", Path("b"), precision="int4")
    judged = replace(options, max_perplexity_ratio=1.01)
    assert quality.measured_tokens(options, 10**6) == quality.measured_tokens(options, 10**10) == 512
    assert quality.measured_tokens(judged, 10**6) == 8192 and quality.measured_tokens(judged, 10**10) == 1024
    assert quality.measured_tokens(replace(judged, quality_tokens=40), 10**6) == 40


def test_non_finite_logits_during_scoring_reject_package(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 overflows on the text, but not in the verification."""

    def measure(*_: object) -> None:
        raise GenerationError("the logits after token 3 of a window are not finite")

    monkeypatch.setattr(quality, "measure", measure)
    options = ExportOptions(
        str(tiny_checkpoint("llama", num_hidden_layers=1)), tmp_path / "out", precision="fp16", max_length=64
    )
    said = r"fp16 fails on heldout\.txt.*not finite; nothing was written; choose another `precision`, e\.g\. bf16"
    with pytest.raises(UnsupportedModelError, match=said):
        export(replace(options, quality_text=heldout_path()), replay=replay, scorer=scorer)
    assert list(tmp_path.iterdir()) == []


def test_disk_too_small_for_logits_of_source_model_raises_resource_error(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality.SourceLogits, "size_bytes", 1 << 60)
    with pytest.raises(ResourceError, match="no space left: the package needs 1,048,576 TiB"):
        exported(tiny_checkpoint("llama", num_hidden_layers=1), precision="fp16", opset=22)
